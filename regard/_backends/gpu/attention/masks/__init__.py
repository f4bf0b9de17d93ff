"""Dense masks as bits, tiles and intervals; the keys that a bias hides."""
