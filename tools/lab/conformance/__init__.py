"""Compares recorded answers of Kubernetes' own code with ours: `python -m lab.conformance
FILE...`.
"""
