"""Devices: the hints for them, their distance from each other, and which of them are chosen."""
