"""The commands `regard demo`, `regard examine`, `regard compare` and `regard timeline`."""
