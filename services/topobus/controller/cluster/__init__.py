"""The controller beside a Kubernetes API server: gated pods, intents, the choice of a node."""
