"""Shipped test kit: recorded machines, NATS server, kubelet simulator, driver contract suite."""
