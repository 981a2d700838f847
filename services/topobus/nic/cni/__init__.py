"""Attaching by a chain of unmodified CNI plugins: configuration, execution, cached results, and
what a sandbox gets of it.
"""
