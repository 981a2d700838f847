"""Decisions as pure functions over frozen values: no clock, no I/O, no randomness, no logging."""
