"""Sends RELEASE requests beside the reconcile rounds, so that a frozen node delays only its own
devices.

If a round awaited the answers, each request to a frozen node would delay all others by its time
limit. Instead a later round takes the answer, for which the loop is woken. A request in flight is
not repeated. Its operation id makes it safe to repeat one that was lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum

from topobus.bus.bus import Bus
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ReleaseReply, ReleaseRequest

__all__ = ["LedgerReleases", "UnderWay"]

# As many as a node answers at once without delaying its other work. A frozen node occupies at most
# so many of our tasks.
_PARALLEL_PER_NODE = 8
# Answers that were not collected: their object is gone or was changed meanwhile.
_KEPT_ANSWERS = 4096

_Place = tuple[str, str, str]
"""Node, operation id, owner."""


class UnderWay(Enum):
    """The node has not answered yet. The loop is woken when it has."""

    UNDER_WAY = "under-way"


class LedgerReleases:
    """Sends RELEASE requests, a bounded number per node.

    Without `run` each request is simply awaited. Args: wake — called when an answer has arrived or
    another request may be sent.
    """

    def __init__(self, bus: Bus, timeout_s: float, wake: Callable[[], None] = lambda: None) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._wake = wake
        self._group: asyncio.TaskGroup | None = None
        self._asked: set[_Place] = set()
        self._busy: Counter[str] = Counter()
        self._answers: OrderedDict[_Place, ReleaseReply | Exception] = OrderedDict()

    async def run(self) -> None:
        """Own the tasks of the requests until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    async def ask(self, node: str, request: ReleaseRequest) -> ReleaseReply | UnderWay:
        """Return the node's answer, or send the request.

        Errors: raises the request's failure once (PeerUnavailable, HardwareError, ContractError);
        the next call sends it again.
        """
        if self._group is None:
            return await self._bus.ask(catalogue.RELEASE, request, timeout_s=self._timeout_s, node=node)
        place = (node, request.op_id, request.owner.key)
        answer = self._answers.pop(place, None)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer
        if place not in self._asked and self._busy[node] < _PARALLEL_PER_NODE:
            self._asked.add(place)
            self._busy[node] += 1
            self._group.create_task(self._ask(place, request), name=f"release-{node}")
        return UnderWay.UNDER_WAY

    async def _ask(self, place: _Place, request: ReleaseRequest) -> None:
        try:
            reply = await self._bus.ask(catalogue.RELEASE, request, timeout_s=self._timeout_s, node=place[0])
            self._answers[place] = reply
        except Exception as err:  # noqa: BLE001 - boundary: one node's answer; the requester gets the error, and other requests continue
            self._answers[place] = err
        finally:
            self._asked.discard(place)
            self._busy[place[0]] -= 1
        while len(self._answers) > _KEPT_ANSWERS:
            self._answers.popitem(last=False)
        self._wake()
