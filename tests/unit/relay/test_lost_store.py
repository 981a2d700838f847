"""What the relay says to the hub while the node's own store is being lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from topobus.bus.bus import Bus
from topobus.bus.streams.uplink import Acknowledged, HubEntry, Uplink
from topobus.formats.messages.catalogue import INVENTORY, LEDGER
from topobus.formats.messages.nouns import State
from topobus.formats.messages.relay_messages import NodeRelay
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.relay.hub_copies import HubCopies
from topobus.relay.hub_link import HubLink
from topobus.testing.clock import ManualClock


class _Hub:
    """A hub that has an older value of everything.

    Something happens while it is asked for the first one.
    """

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self.written: list[bytes | None] = []

    async def value_at_hub(self, state: State[Any], **parts: str) -> HubEntry:
        """Answer, after what happens meanwhile."""
        self._meanwhile()
        return HubEntry(sequence=3, data=b"older", is_there=True)

    async def write(
        self, state: State[Any], data: bytes | None, expected: int, /, *, written_by: str, **parts: str
    ) -> Acknowledged:
        """Take every write."""
        self.written.append(data)
        return Acknowledged(sequence=4 + len(self.written))


class _Bus:
    release = "test"


def _copies(meanwhile: Callable[[HubCopies], None]) -> tuple[HubCopies, HubLink, _Hub]:
    runtime = Runtime(
        name="relay",
        node="n1",
        bus=cast(Bus, _Bus()),
        clock=ManualClock(),
        readiness=Readiness(),
        registry=CollectorRegistry(),
    )
    link = HubLink(runtime)
    hub = _Hub(lambda: meanwhile(copies))
    copies = HubCopies((LEDGER, INVENTORY), link, cast(Uplink, hub), runtime, forget_after_s=300.0)
    return copies, link, hub


@pytest.mark.parametrize(("state", "key"), [(LEDGER, "n1"), (INVENTORY, "n1.gpu")], ids=["ledger", "inventory"])
async def test_nothing_is_deleted_at_the_hub_when_the_nodes_store_is_lost_while_the_hub_is_asked(
    state: State[Any], key: str
) -> None:
    """A store that is gone says nothing of a key: a ledger is never deleted because somebody is
    silent, and an inventory not before its time.
    """
    copies, link, hub = _copies(lambda copies: copies.reset(state))
    link.note = NodeRelay(node="n1", keys=(f"inventory/{key}",) if state is INVENTORY else ())
    copies.keep(state, key, b"value", "test")

    await copies.settle()

    assert hub.written == []
    assert link.note.keys == ((f"inventory/{key}",) if state is INVENTORY else ())


async def test_value_is_written_at_the_hub_when_the_nodes_store_has_it() -> None:
    """The same hub and the same key, and nothing is lost meanwhile."""
    copies, _, hub = _copies(lambda _: None)
    copies.keep(LEDGER, "n1", b"value", "test")

    await copies.settle()

    assert hub.written == [b"value"]
