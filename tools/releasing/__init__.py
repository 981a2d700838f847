"""Writes what a release has beside its wheel. In no wheel and no image."""
