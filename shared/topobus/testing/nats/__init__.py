"""Several real nats-servers that form one cluster."""
