"""Frozen values and their algebra: no clock, no I/O, no randomness, no logging."""
