"""Measures of the allocator: `python -m topobus.testing.bench allocate`."""
