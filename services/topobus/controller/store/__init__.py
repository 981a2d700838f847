"""Where objects live: reads, watches and compare-and-set writes over NATS or an API server."""
