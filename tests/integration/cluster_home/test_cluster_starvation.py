"""The controller in a cluster: pods that cost a long search keep nobody else waiting.

Shown by the order of what happens, not by time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from support.cluster_home import CLASS, ClusterHome, claim, pod, slice_of
from topobus.controller.commit import node_search
from topobus.engine.allocation.values import AllocationInput, Outcome

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
HEAVY = f"{TEN}.all(a, {TEN}.all(b, {TEN}.all(c, a > 0)))"
# Only so that a test that fails ends.
LONGEST_S = 60.0


class LongSearches:
    """Counts the long searches for each pod's first claim, and keeps them from going on until they
    may.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.may_go_on = threading.Event()
        self._begun = threading.Event()
        self._real = node_search.allocate

    async def until_begun(self) -> None:
        """Wait until a long search is under way."""
        assert await asyncio.to_thread(self._begun.wait, LONGEST_S)

    def allocate(self, given: AllocationInput, *arguments: Any, **named: Any) -> Outcome:
        """Search as the service does, when it may."""
        if "is_abandoned" in named:
            self.counts[given.claims[0].name] += 1
            self._begun.set()
            self.may_go_on.wait(LONGEST_S)
        return self._real(given, *arguments, **named)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[LongSearches]:
    """Long searches that begin, and do not go on before the test lets them."""
    made = LongSearches()
    monkeypatch.setattr(node_search, "allocate", made.allocate)
    yield made
    made.may_go_on.set()


@pytest.fixture
def home(home: ClusterHome) -> ClusterHome:
    """The same with a controller of short searches."""
    home.settings = msgspec.structs.replace(home.settings, step_budget=3_000)
    return home


def costly(name: str, *, count: int) -> dict[str, Any]:
    """Make a claim with alternatives whose selectors take so long that no short search begins with
    them.
    """
    made = claim(name, count=count)
    asked = {
        "deviceClassName": CLASS,
        "allocationMode": "ExactCount",
        "count": count,
        "selectors": [{"cel": {"expression": HEAVY}}],
    }
    made["spec"]["devices"]["requests"] = [
        {"name": "r", "firstAvailable": [{"name": "a", **asked}, {"name": "b", **asked}]}
    ]
    return made


async def test_a_plain_pod_is_served_while_costly_ones_are_searched(home: ClusterHome, searches: LongSearches) -> None:
    """Six costly pods are older, and the search for the first does not end before the plain pod's
    gate is open: with one slot for all, it waits for none of them.
    """
    cluster = msgspec.structs.replace(home.settings.cluster, parallel_pods=1)
    for number in range(6):
        home.put(costly(f"costly-{number}", count=20), pod(f"p-{number}", f"costly-{number}"))

    async with home.controller(settings=msgspec.structs.replace(home.settings, cluster=cluster)):
        await searches.until_begun()
        home.put(claim("plain"), pod("p-plain", "plain"))
        await home.until(lambda: not home.gates("p-plain"), "the plain pod served")
        assert len(searches.counts) == 1
        searches.may_go_on.set()
        await home.until(lambda: all(home.events(f"p-{number}") for number in range(6)), "each costly pod told")

    assert home.devices("plain") == ["n1-gpu-0"]
    assert {home.events(f"p-{number}")[0][0] for number in range(6)} == {"DoesNotFit"}


async def test_a_costly_pod_gets_other_devices_when_its_own_were_taken_meanwhile(
    home: ClusterHome, searches: LongSearches
) -> None:
    """What a long search chose may be gone when it ends: nothing is given twice, and the pod is
    served.
    """
    home.put(costly("costly", count=2), pod("p-costly", "costly"))

    async with home.controller():
        await searches.until_begun()
        home.put(claim("early", count=2), pod("p-early", "early"))
        await home.until(lambda: not home.gates("p-early"), "a plain pod served while the search is under way")
        searches.may_go_on.set()
        await home.until(lambda: not home.gates("p-costly"), "the costly pod served")

    assert (home.devices("early"), home.devices("costly")) == (["n1-gpu-0", "n1-gpu-1"], ["n2-gpu-0", "n2-gpu-1"])


async def test_a_vain_long_search_is_not_repeated_with_each_device_that_is_freed(
    home: ClusterHome, searches: LongSearches
) -> None:
    """A pod that was just searched for in vain pauses: with devices freed, a pod that was never
    searched for is, and the others are not.
    """
    searches.may_go_on.set()
    cluster = msgspec.structs.replace(home.settings.cluster, retry_s=60.0)
    for number in range(4):
        home.put(costly(f"costly-{number}", count=20), pod(f"p-{number}", f"costly-{number}"))

    async with home.controller(settings=msgspec.structs.replace(home.settings, cluster=cluster)):
        await home.until(lambda: all(home.events(f"costly-{number}") for number in range(4)), "each costly pod told")
        before = dict(searches.counts)
        home.put(slice_of("n1", 3), claim("big", count=3))
        home.put(pod("p-big", "big"))
        await home.until(lambda: not home.gates("p-big"), "the freed device seen")
        home.put(costly("costly-new", count=20))
        home.put(pod("p-new", "costly-new"))
        await home.until(lambda: home.events("costly-new"), "the new costly pod told")
        after = dict(searches.counts)

    assert after.pop("default/costly-new") > 0
    assert after == before
