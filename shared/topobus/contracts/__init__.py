"""Everything that crosses NATS, in one catalogue."""
