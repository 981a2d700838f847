"""Nodes of a fleet without their servers: connections that speak nats-server's leaf protocol,
hundreds in one process, for benchmarks of the hub.
"""
