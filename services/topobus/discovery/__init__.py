"""Topology discovery: owns the machine."""
