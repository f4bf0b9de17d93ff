"""The commands `regard demo`, `regard examine` and `regard compare`."""
