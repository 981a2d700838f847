"""Dry runs: where claims would be allocated, or why not, without any write."""
