"""Nodes of a fleet without their servers: connections with nats-server's leaf protocol, hundreds in
one process, for benchmarks of the hub.
"""
