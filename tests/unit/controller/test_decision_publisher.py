"""What the controller decided is published once, and a bus that does not take an event changes
nothing about the decision.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.formats.messages.messages import DecisionEvent
from topobus.process.clock import SystemClock
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.request import Owner, OwnerKind

OWNER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="one", uid="u")


class _Publications:
    """The part of a bus that publishes; `trouble` is raised instead."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.trouble = trouble
        self.events: list[tuple[DecisionEvent, str, str]] = []

    async def publish(self, _what: Any, event: DecisionEvent, *, event_id: str, node: str) -> None:
        """Take an event, or fail."""
        if self.trouble is not None:
            raise self.trouble
        self.events.append((event, event_id, node))


async def test_decision_has_the_operations_id_when_it_is_published() -> None:
    """The event's id is the operation's, so that a decision that is published again after a crash
    is the same event.
    """
    bus: Any = _Publications()

    await DecisionPublisher(bus, SystemClock()).publish("allocate", OWNER, None, op_id="allocate-u-1", node="n1")

    ((event, event_id, node),) = bus.events
    assert (event_id, node) == ("allocate-u-1", "n1")
    assert (event.id, event.op_id, event.verb, event.node) == (
        "allocate-u-1",
        "allocate-u-1",
        "allocate",
        "n1",
    )


@pytest.mark.parametrize(
    "trouble", [PeerUnavailable("silent"), ContractError("too large")], ids=["silent-bus", "event-refused"]
)
async def test_decision_stands_when_its_event_cannot_be_published(trouble: Exception) -> None:
    """A bus that is silent, or an event that it cannot carry, is logged: nobody's decision is
    repeated for it.
    """
    bus: Any = _Publications(trouble)

    await DecisionPublisher(bus, SystemClock()).publish("evict", OWNER, None, op_id="evict-u-1")

    assert bus.events == []
