"""What a NATS server is configured with, from the catalogue: accounts, users, permissions, streams,
TLS. Pure.
"""
