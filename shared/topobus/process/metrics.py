"""What every service counts, for Prometheus: its build, and its bus.

Labels are bounded: nouns, streams and outcomes, never a name of a pod or a device.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor, HistogramDescriptor

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["BusMetrics", "register_build_info"]

# Seconds; from the 0.3 ms of a round trip on one machine up to the
# longest timeout of the catalogue.
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NOUN = "a noun of the catalogue"
_STREAM = "a stream of the catalogue"

BUILD_INFO = GaugeDescriptor(
    name="topobus_build_info",
    meaning="Always 1; the labels have the service and its release.",
    labels={"service": "the service's name", "version": "its release"},
)
CONNECTED = GaugeDescriptor(name="topobus_bus_connected", meaning="1 while the canary comes back.")
CONNECTS = CounterDescriptor(name="topobus_bus_connects_total", meaning="Clients made, the first one included.")
LOSSES = CounterDescriptor(
    name="topobus_bus_losses_total",
    meaning="Clients given up.",
    labels={"reason": "why: `closed`, `canary`, or a name of the code's"},
)
CERTIFICATE_EXPIRY = GaugeDescriptor(
    name="topobus_bus_certificate_expiry_timestamp_seconds",
    meaning="When the server's certificate ends, since 1970; 0: no TLS.",
)
CHANGEOVERS = CounterDescriptor(
    name="topobus_bus_changeovers_total",
    meaning="Clients made beside one that lives, for another password or another authority.",
    labels={"outcome": ("changed", "refused")},
)
ERRORS = CounterDescriptor(
    name="topobus_bus_errors_total",
    meaning="Errors that the client reported aside.",
    labels={"kind": "the error's class in the client library"},
)
ECHO_SECONDS = HistogramDescriptor(
    name="topobus_bus_echo_seconds", meaning="Round trip of the canary.", buckets=_BUCKETS
)
ASK_SECONDS = HistogramDescriptor(
    name="topobus_bus_ask_seconds",
    meaning="Asks that we made.",
    labels={"noun": _NOUN, "outcome": ("answered", "timeout", "nobody", "lost", "contract", "failed")},
    buckets=_BUCKETS,
)
ANSWER_SECONDS = HistogramDescriptor(
    name="topobus_bus_answer_seconds",
    meaning="Asks that we answered.",
    labels={
        "noun": _NOUN,
        "outcome": (
            "answered",
            "busy",
            "expired",
            "contract",
            "under-way",
            "unavailable",
            "hardware",
            "config",
            "internal",
        ),
    },
    buckets=_BUCKETS,
)
WRITES = CounterDescriptor(
    name="topobus_bus_writes_total",
    meaning="Writes to buckets and streams, and notices, which are not acknowledged.",
    labels={"noun": _NOUN, "outcome": ("written", "conflict", "failed", "sent")},
)
RESYNCS = CounterDescriptor(
    name="topobus_bus_resyncs_total",
    meaning="Feeds that were opened again.",
    labels={"stream": _STREAM, "reason": "a constant of the code"},
)
FEED_PENDING = GaugeDescriptor(
    name="topobus_bus_feed_pending_messages", meaning="Stored and not yet read.", labels={"stream": _STREAM}
)
REJECTS = CounterDescriptor(
    name="topobus_bus_rejects_total", meaning="Messages that no contract accepts.", labels={"noun": _NOUN}
)
STRAYS = CounterDescriptor(
    name="topobus_bus_strays_total",
    meaning="Messages at an ask's subject that are no request for it, or deliveries of another's consumer; dropped.",
    labels={"noun": "a noun or a stream of the catalogue", "why": ("subject", "reply", "consumer")},
)


class BusMetrics:
    """All metrics of one bus, in the given registry. Without one nothing is counted.

    Errors: raises ValueError when the registry has those of another bus already (prometheus_client
    takes a name once).
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.is_connected = CONNECTED.register(registry)
        self.connects = CONNECTS.register(registry)
        self.losses = LOSSES.register(registry)
        self.certificate_expires_s = CERTIFICATE_EXPIRY.register(registry)
        self.changeovers = CHANGEOVERS.register(registry)
        self.errors = ERRORS.register(registry)
        self.echo_s = ECHO_SECONDS.register(registry)
        self.asks_s = ASK_SECONDS.register(registry)
        self.answers_s = ANSWER_SECONDS.register(registry)
        self.writes = WRITES.register(registry)
        self.resyncs = RESYNCS.register(registry)
        self.pending = FEED_PENDING.register(registry)
        self.rejects = REJECTS.register(registry)
        self.strays = STRAYS.register(registry)


def register_build_info(registry: CollectorRegistry, service: str) -> None:
    """Make a registry name this service and its build."""
    BUILD_INFO.register(registry).labels(service, importlib.metadata.version("topobus")).set(1)
