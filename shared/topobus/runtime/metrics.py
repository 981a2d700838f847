"""What the bus counts, for Prometheus. Labels are bounded: nouns, streams and outcomes, never a name of a pod or a device."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["BusMetrics"]

# Seconds; from the 0.3 ms of a round trip on one machine up to the longest timeout of the catalogue.
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class BusMetrics:
    """All counters of one bus, in the given registry.

    Errors: raises ValueError when the registry has those of another bus already (prometheus_client takes a name once).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.is_connected = Gauge("topobus_bus_connected", "1 while the canary comes back", registry=registry)
        self.connects = Counter("topobus_bus_connects_total", "Clients made, the first one included", registry=registry)
        self.losses = Counter("topobus_bus_losses_total", "Clients given up", ["reason"], registry=registry)
        self.certificate_expires_s = Gauge(
            "topobus_bus_certificate_expires_seconds", "When the server's certificate ends, since 1970; 0: no TLS", registry=registry
        )
        self.changeovers = Counter(
            "topobus_bus_changeovers_total",
            "Clients made beside one that lives, for another password or other credentials",
            ["outcome"],
            registry=registry,
        )
        self.credentials_expire = Gauge(
            "topobus_bus_credentials_expire_seconds", "When the credentials in use end, since 1970; 0: never", registry=registry
        )
        self.errors = Counter("topobus_bus_errors_total", "Errors that the client reported aside", ["kind"], registry=registry)
        self.echo_s = Histogram("topobus_bus_echo_seconds", "Round trip of the canary", registry=registry, buckets=_BUCKETS)
        self.asks_s = Histogram("topobus_bus_ask_seconds", "Asks that we made", ["noun", "outcome"], registry=registry, buckets=_BUCKETS)
        self.answers_s = Histogram(
            "topobus_bus_answer_seconds", "Asks that we answered", ["noun", "outcome"], registry=registry, buckets=_BUCKETS
        )
        self.writes = Counter("topobus_bus_writes_total", "Writes to buckets and streams", ["noun", "outcome"], registry=registry)
        self.resyncs = Counter("topobus_bus_resyncs_total", "Feeds that were opened anew", ["stream", "reason"], registry=registry)
        self.pending = Gauge("topobus_bus_feed_pending_messages", "Stored and not yet read", ["stream"], registry=registry)
        self.rejects = Counter("topobus_bus_rejects_total", "Messages that no contract accepts", ["noun"], registry=registry)
        self.strays = Counter(
            "topobus_bus_strays_total",
            "Messages at an ask's subject that are no request for it, dropped",
            ["noun", "why"],
            registry=registry,
        )
        self.unproven = Counter(
            "topobus_bus_unproven_answers_total",
            "Answers without the proof that their class has a key for, ignored",
            ["noun"],
            registry=registry,
        )
        self.rivals = Counter(
            "topobus_bus_rival_answers_total", "Asks to which two answers came that say different things", ["noun"], registry=registry
        )
