"""The contract of attention: runs the checks, groups what they find under causes, and gives a verdict."""
