"""Several real nats-servers that are one cluster."""
