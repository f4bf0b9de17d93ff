"""Compares what two models compute: in one process, across processes by fingerprints, by dumps of other programs."""
