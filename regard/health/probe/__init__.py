"""Runs a model again and captures, changes or removes parts of its attention: what checks and comparisons share."""
