"""Parsers of /sys and /proc over a configurable root."""
