"""Devices: the hints for them, how close they are to each other, and which of them are chosen."""
