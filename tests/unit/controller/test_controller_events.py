"""Events on pods and claims: short enough for a person, and they say where the rest stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from topobus.controller.store.cluster_events import EventRecorder
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.engine.claims.stored import Stored
from topobus.formats.messages.messages import ApiObject
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.reading import Kind
from topobus.testing.clock import LoopClock, ManualClock
from topobus.values.errors import PeerUnavailable

POD = Stored(
    7, ApiObject(api_version="v1", kind="Pod", metadata={"name": "p", "namespace": "default", "uid": "u-1"}, spec={})
)
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
async def test_event_has_300_characters_at_most_and_says_where_the_rest_is(
    message: str, more: str, expected: str
) -> None:
    """A message that fits is not touched.

    Of a longer one the beginning is kept, which says the nearest miss.
    """
    server = _Server()
    events = EventRecorder(cast(KubernetesApi, server), LoopClock(), "controller-1")

    await events.warn(POD, "DoesNotFit", message, more=more)

    assert server.messages == [expected]
    assert len(expected) <= 300


class _Store(_Server):
    """Keeps what is created and patched, as an API server does; `forgets` answers patches as one
    whose Events have expired, `is_silent` answers nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[str, dict[str, Any]] = {}
        self.forgets = False
        self.is_silent = False

    async def create(self, kind: Kind, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep an event."""
        if self.is_silent:
            raise PeerUnavailable("no answer")
        self.stored[plain["metadata"]["name"]] = dict(plain)
        return await super().create(kind, plain)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]
    ) -> Mapping[str, Any] | Rejected:
        """Change an event."""
        if self.is_silent:
            raise PeerUnavailable("no answer")
        if self.forgets:
            return Rejected(code=404, reason="NotFound", message="gone")
        self.stored[name] |= patch
        return self.stored[name]


def _pod(number: int, namespace: str = "default") -> Stored:
    metadata = {"name": f"p{number}", "namespace": namespace, "uid": f"u-{number}"}
    return Stored(7, ApiObject(api_version="v1", kind="Pod", metadata=metadata, spec={}))


async def _told_to(count: int) -> tuple[_Store, EventRecorder, ManualClock]:
    """Tell so many pods the same reason at one moment."""
    server, clock = _Store(), ManualClock()
    events = EventRecorder(cast(KubernetesApi, server), clock, "controller-1")
    for number in range(count):
        await events.warn(_pod(number), "DoesNotFit", f"node n{number} is full")
    return server, events, clock


async def test_one_event_counts_all_others_when_many_pods_are_told_one_reason() -> None:
    """Twenty-five pods have an Event of their own.

    One more Event counts all others and has what the last one was told.
    """
    server, events, clock = await _told_to(5_000)
    before, again_s = len(server.messages), await events.write_counts()

    clock.advance(10.0)
    rest_s = await events.write_counts()

    (counted,) = [event for event in server.stored.values() if event["count"] > 1]
    assert (before, len(server.messages), again_s, rest_s) == (26, 26, 10.0, None)
    assert (counted["count"], counted["message"]) == (
        4_975,
        "4975 more of this namespace, the last: Pod p4999: node n4999 is full",
    )
    assert counted["involvedObject"]["name"] == "p25"


async def test_pods_are_told_one_by_one_again_when_time_has_passed() -> None:
    """Each second one more pod has an Event of its own, and another namespace or reason has a
    measure of its own.
    """
    server, events, clock = await _told_to(30)
    clock.advance(1.0)
    before = len(server.messages)

    await events.warn(_pod(100), "DoesNotFit", "full")
    await events.warn(_pod(101, "other"), "DoesNotFit", "full")
    await events.warn(_pod(102), "WaitingForClaims", "not made yet")

    assert server.messages[before:] == ["full", "full", "not made yet"]


async def test_count_begins_anew_when_the_server_has_forgotten_its_event() -> None:
    """A server keeps Events for an hour: the next pod that is counted makes a new one."""
    server, events, clock = await _told_to(27)
    server.forgets = True
    clock.advance(10.0)
    await events.write_counts()
    before = len(server.messages)
    for number in range(200, 230):
        await events.warn(_pod(number), "DoesNotFit", "full")

    assert [message for message in server.messages[before:] if "more of this namespace" in message] == [
        "1 more of this namespace, the last: Pod p210: full"
    ]


async def test_counts_are_dropped_when_the_server_does_not_answer() -> None:
    """No decision depends on an Event: a server that is away is no trouble of whoever tells."""
    server, events, clock = await _told_to(25)
    server.is_silent = True
    await events.warn(_pod(100), "DoesNotFit", "full")
    await events.warn(_pod(101), "DoesNotFit", "full")
    clock.advance(10.0)

    assert await events.write_counts() is None
    assert len(server.messages) == 25
