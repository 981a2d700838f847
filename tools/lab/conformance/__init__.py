"""Holds recorded answers of Kubernetes' own code against ours: `python -m
lab.conformance FILE...`.
"""
