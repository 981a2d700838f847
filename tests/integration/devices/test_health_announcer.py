"""Health events of one class: each change is published once, whatever is asked of the stream
meanwhile.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.node_plane import device
from topobus.bus.bus import Bus
from topobus.bus.streams.events import Span
from topobus.bus.streams.jetstream import JetStream
from topobus.devicekit.host.announcer import HealthAnnouncer
from topobus.formats.messages.catalogue import HEALTH

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

_WHERE = {"node": "n1", "device_class": "gpu"}


async def _announce(announcer: HealthAnnouncer) -> bool:
    return await announcer.announce(
        device("gpu-0", 0), affected=(), inventory_generation=1, time="2026-01-01T00:00:00Z"
    )


async def test_event_is_not_lost_when_it_is_published_while_the_stream_is_looked_at(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's description is older than the event then: what stands beyond it is no loss, and
    nothing is told twice.
    """
    announcer, span = HealthAnnouncer(bus, **_WHERE), Bus.span

    async def overtaken(self: Bus, event: Any) -> Span:
        described = await span(self, event)
        assert await _announce(announcer)
        return described

    monkeypatch.setattr(Bus, "span", overtaken)
    is_lost = await announcer.check()
    is_told_again = await _announce(announcer)

    assert (is_lost, is_told_again) == (False, False)
    assert len(await bus.last(HEALTH, limit=8, device="gpu-0", **_WHERE)) == 1


async def test_start_asks_the_stream_once_for_each_device(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has thousands of devices, and a start reads what was last said of each."""
    announcer = HealthAnnouncer(bus, **_WHERE)
    assert await _announce(announcer)
    verbs: list[str] = []
    call = JetStream.call

    async def note(self: JetStream, verb: str, payload: dict[str, object] | None = None) -> dict[str, object]:
        verbs.append(verb)
        return await call(self, verb, payload)

    monkeypatch.setattr(JetStream, "call", note)
    started = HealthAnnouncer(bus, **_WHERE)
    await started.load(["gpu-0", "gpu-1"])

    assert (started.is_news(device("gpu-0", 0)), started.is_news(device("gpu-1", 0))) == (False, True)
    assert verbs == ["STREAM.MSG.GET.TOPOBUS_HEALTH"] * 2
