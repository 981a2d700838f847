"""Events on pods and claims: short enough for a person, and they say where the rest stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from topobus.contracts.messages import ApiObject
from topobus.controller.claims.stored import Stored
from topobus.controller.store.api import Api, Kind
from topobus.controller.store.cluster_events import EventRecorder
from topobus.testing.clock import LoopClock

POD = Stored(7, ApiObject(api_version="v1", kind="Pod", metadata={"name": "p", "namespace": "default", "uid": "u-1"}, spec={}))
MORE = "its condition topobus.dev/Allocated"


class _Server:
    """Takes what is created."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    async def create(self, kind: Kind, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note the event's message."""
        self.messages.append(plain["message"])
        return plain


@pytest.mark.parametrize(
    ("message", "more", "expected"),
    [
        pytest.param("x" * 300, MORE, "x" * 300, id="fits"),
        pytest.param("word " * 80, MORE, "word " * 48 + f"word … (all of it: {MORE})", id="cut-between-words"),
        pytest.param("word " * 80, "", "word " * 58 + "word …", id="nothing-more"),
        pytest.param("x" * 301, "", "x" * 298 + " …", id="without-words"),
    ],
)
async def test_event_has_300_characters_at_most_and_says_where_the_rest_is(message: str, more: str, expected: str) -> None:
    """A message that fits is not touched; of a longer one the beginning is kept, which says the nearest miss."""
    server = _Server()
    events = EventRecorder(cast(Api, server), LoopClock(), "controller-1")

    await events.warn(POD, "DoesNotFit", message, more=more)

    assert server.messages == [expected]
    assert len(expected) <= 300
