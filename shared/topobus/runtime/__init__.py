"""The async shell that every process shares: run, configuration, logging, the supervised bus, metrics, readiness."""
