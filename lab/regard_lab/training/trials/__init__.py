"""The models that experiments train, with their data and readings."""
