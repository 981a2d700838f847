"""Frozen values and their algebra, the words that all rooms share: no clock, no I/O, no randomness,
no logging.
"""
