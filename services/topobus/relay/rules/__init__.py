"""Decides what is sent to the hub next, as pure functions."""
