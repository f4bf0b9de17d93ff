"""Intercepts every attention call of a model and describes it in the terms of `regard.attention`."""
