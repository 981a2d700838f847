"""What the relay counts, for Prometheus."""

from __future__ import annotations

from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor

__all__ = ["JOINED", "JOINS", "LOST_EVENTS", "SAID", "WAITING"]

_NOUN = "a noun of the catalogue"

SAID = CounterDescriptor(
    name="topobus_relay_said_total",
    meaning="What was sent to the hub.",
    labels={"noun": _NOUN, "outcome": ("written", "compared", "duplicate", "overtaken", "refused", "unanswered")},
)
JOINS = CounterDescriptor(
    name="topobus_relay_joins_total", meaning="How often the hub was found again, the first time included."
)
LOST_EVENTS = CounterDescriptor(
    name="topobus_relay_lost_events_total",
    meaning="Events that the node's own server had to drop before they were sent.",
    labels={"noun": _NOUN},
)
JOINED = GaugeDescriptor(name="topobus_relay_joined", meaning="1 while the hub is there.")
WAITING = GaugeDescriptor(
    name="topobus_relay_waiting", meaning="What the hub does not have yet.", labels={"kind": ("state", "event")}
)
