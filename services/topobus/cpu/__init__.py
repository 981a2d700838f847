"""The CPU device service."""
