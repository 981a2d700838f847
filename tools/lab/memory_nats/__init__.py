"""The bus without a server: a nats-server in memory, and what befalls its operations."""
