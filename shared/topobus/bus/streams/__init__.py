"""JetStream: state in buckets, events in streams, and their provisioning."""
