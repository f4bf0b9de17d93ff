"""regard demo | examine | compare."""
