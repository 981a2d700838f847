"""Repair by policy: which faults are repaired, step by step, and when a person is called."""
