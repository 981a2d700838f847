"""Measures of the allocator: `python -m lab.bench allocate`."""
