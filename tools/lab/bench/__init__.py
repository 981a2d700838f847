"""Measures what the architecture gives budgets for: `python -m lab.bench GROUP`, a module for each
group.
"""
