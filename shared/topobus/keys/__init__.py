"""NATS' users and certificates as Secrets of a cluster."""
