"""The museum: public bugs of attention on tiny models, each with a sound twin; run `python -m museum`."""
