"""Compiles row templates and tile functions with numba, and caches them on disk."""
