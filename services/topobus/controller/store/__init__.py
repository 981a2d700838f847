"""The store of objects: reads, watches and compare-and-set writes over NATS or an API server."""
