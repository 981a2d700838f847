"""The GPU device service."""
