"""Attaching by a chain of unmodified CNI plugins: configuration, execution, cached results, and the
values that plugins get of a sandbox.
"""
