"""Frozen values and their algebra, the terms that all rooms share: no clock, no I/O, no randomness,
no logging.
"""
