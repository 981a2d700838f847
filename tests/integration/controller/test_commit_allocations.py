"""One suite for the write protocol of an allocation over both stores: what a rival, a node and a
lost answer do to a group of claims.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from support.object_stores import Place, api_server_place, nats_place
from topobus.bus.bus import Bus
from topobus.controller.commit.allocator import Member
from topobus.controller.commit.commit_allocations import AllocationCommitter, Attempted, Progress, next_attempts
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster_state import ClusterState
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.reservations import PodRef, with_bound_allocation
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import AllocationResult, ClaimSpec, DevicesAllocated, GrantedDevice
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject, PlaceReply, PlaceRequest
from topobus.process.clock import SystemClock
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Placement, Reason, Refusal

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

NOW = "2026-01-01T00:00:00Z"
POD = PodRef("default", "p", "uid-p")
FIRST, SECOND = (ObjectKey("resourceclaim", "default", name) for name in ("first", "second"))


class _Rules:
    """A home's rules: goes on at once, and notes what had to give way."""

    def __init__(self, *, is_bound: bool) -> None:
        self.log_fields: dict[str, str] = {}
        self._is_bound = is_bound
        self.progress: Progress | None = None
        """How the look before ends; None goes on."""
        self.gave_way: list[str] = []

    async def revalidate(self, group: Sequence[Attempted]) -> Sequence[AllocationResult] | Progress:
        return self.progress or [attempted.attempt.allocation for attempted in group]

    async def refusal_of(self, attempted: Attempted, error: PeerUnavailable) -> Refusal:
        raise error

    def allocated(self, claim: ApiObject, allocation: AllocationResult, now: datetime) -> ApiObject | Reason:
        if self._is_bound:
            return with_bound_allocation(claim, allocation, POD, now=NOW)
        return lifecycle.with_allocation(claim, allocation, now=NOW)

    async def on_refused(self, attempted: Attempted, refusal: Refusal) -> None:
        self.gave_way.append(attempted.key.name)


class _Decisions(DecisionPublisher):
    """Notes the operations that are told of."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, SystemClock())
        self.op_ids: list[str] = []

    async def publish(self, verb: str, *arguments: Any, op_id: str, **options: Any) -> None:
        self.op_ids.append(f"{verb}:{op_id}")
        await super().publish(verb, *arguments, op_id=op_id, **options)


class Home:
    """A store with two claims, the committer on it, and the rules of the home."""

    def __init__(self, place: Place, bus: Bus, *, is_bound: bool) -> None:
        self.place = place
        self.bus = bus
        self.pod = POD.uid if is_bound else ""
        self.rules = _Rules(is_bound=is_bound)
        self.decisions = _Decisions(bus)
        ledgers = NodeLedgers(bus, ClusterState(), 1.0)
        self.committer = AllocationCommitter(
            SystemClock(), place.store, ledgers, self.decisions, ControllerMetrics(CollectorRegistry())
        )

    async def claims(self) -> list[Member]:
        """Make both claims."""
        spec = {
            "devices": {
                "requests": [
                    {"name": "r", "exactly": {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1}}
                ]
            }
        }
        members: list[Member] = []
        for key in (FIRST, SECOND):
            metadata = {"name": key.name, "namespace": key.namespace, "uid": f"uid-{key.name}"}
            value = ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, spec=spec)
            stored = await self.place.store.create(key, value)
            assert isinstance(stored, Stored)
            members.append(Member(key, stored, ClaimSpec(), None))
        return members

    async def attempted(self, driver: str = "gpu.example.com") -> list[Attempted]:
        """Make both claims and write an attempt into each."""
        results = [_devices(driver, "gpu-0"), _devices(driver, "gpu-1")]
        return await self.committer.write_attempts(next_attempts("n1", await self.claims(), results, pod=self.pod))

    async def rival_writes(self, key: ObjectKey) -> None:
        """Let somebody else change a claim."""
        newest = await self.place.rival.read(key)
        assert newest is not None
        value = msgspec.structs.replace(
            newest.value, metadata={**newest.value.metadata, "labels": {"written": "meanwhile"}}
        )
        assert isinstance(await self.place.rival.write(key, newest.revision, value), Stored)

    async def are_allocated(self) -> list[bool]:
        """Say which of the claims have their devices, as whoever reads the store finds them."""
        claims = [await self.place.rival.read(key) for key in (FIRST, SECOND)]
        return [claim is not None and claim.claim.is_allocated for claim in claims]


def _devices(driver: str, device: str) -> AllocationResult:
    return AllocationResult(
        devices=DevicesAllocated(results=(GrantedDevice(request="r", driver=driver, pool="n1", device=device),))
    )


@pytest_asyncio.fixture(params=["stand-alone", "cluster"])
async def home(request: pytest.FixtureRequest, bus: Bus, tmp_path: Path) -> AsyncIterator[Home]:
    """Each home in turn."""
    if request.param == "cluster":
        async with api_server_place(tmp_path) as made:
            yield Home(made, bus, is_bound=True)
        return
    yield Home(nats_place(bus), bus, is_bound=False)


async def test_group_is_allocated_and_told_when_nobody_else_writes(home: Home) -> None:
    """Each claim has its devices by the write that follows its attempt, and each decision is told
    under the id of its operation.
    """
    group = await home.attempted()

    assert await home.committer.commit(group, home.rules) is Progress.ON

    uids = [attempted.stored.uid for attempted in group]
    assert await home.are_allocated() == [True, True]
    assert home.decisions.op_ids == [f"allocate:allocate-{uid}-1" for uid in uids]
    first = await home.place.rival.read(FIRST)
    assert first is not None
    assert [consumer.uid for consumer in first.claim.consumers] == ([POD.uid] if home.pod else [])


async def test_attempts_end_with_the_first_that_is_lost(home: Home) -> None:
    """A claim that somebody wrote since has no attempt, and neither have those after it: they are
    decided on anew.
    """
    members = await home.claims()
    await home.rival_writes(FIRST)

    results = [_devices("gpu.example.com", "d0"), _devices("gpu.example.com", "d1")]
    group = await home.committer.write_attempts(next_attempts("n1", members, results))

    assert group == []
    claims = [await home.place.rival.read(key) for key in (FIRST, SECOND)]
    assert [claim is not None and attempts.was_attempted(claim.value) for claim in claims] == [False, False]


@pytest.mark.parametrize(
    ("key", "are_allocated"), [(FIRST, [False, False]), (SECOND, [True, False])], ids=["first", "second"]
)
async def test_claim_is_not_allocated_when_somebody_wrote_it_since_its_attempt(
    home: Home, key: ObjectKey, are_allocated: list[bool]
) -> None:
    """The allocation is written onto the version that has the attempt and no other.

    What was written before that is told of, and those after it wait.
    """
    group = await home.attempted()
    await home.rival_writes(key)

    assert await home.committer.commit(group, home.rules) is Progress.ON

    assert await home.are_allocated() == are_allocated
    assert len(home.decisions.op_ids) == sum(are_allocated)
    assert home.rules.gave_way == []


async def test_nothing_is_written_when_the_rules_say_later(home: Home) -> None:
    """What comes before the attempts is looked at before any node is asked."""
    group = await home.attempted()
    home.rules.progress = Progress.LATER

    assert await home.committer.commit(group, home.rules) is Progress.LATER

    assert await home.are_allocated() == [False, False]


async def test_group_gives_way_when_the_node_refuses_one_of_it(home: Home) -> None:
    """No claim of a group is allocated before the node holds the devices of all.

    A refusal of the second takes the first back as well.
    """

    async def place(request: PlaceRequest) -> PlaceReply:
        owner = request.pod.owner.name
        result = (
            Refusal(reasons=(Reason(code="taken", message="it is held"),))
            if owner == SECOND.name
            else Placement(containers=())
        )
        return PlaceReply(decision_id="d", node="n1", result=result)

    await home.bus.answer(catalogue.PLACE, place, node="n1")
    group = await home.attempted("topobus.dev")

    outcome = await home.committer.commit(group, home.rules)

    assert isinstance(outcome, Refusal)
    assert home.rules.gave_way == [SECOND.name]
    assert await home.are_allocated() == [False, False]
    assert home.decisions.op_ids == []


async def test_commit_goes_on_when_an_answer_was_lost_after_the_write(home: Home) -> None:
    """A write without an answer ends the work.

    Who begins anew with what is there finds the claim allocated and the other one's attempt.
    """
    group = await home.attempted()
    home.place.peer.lost = "answer"

    with pytest.raises(PeerUnavailable):
        await home.committer.commit(group, home.rules)
    home.place.peer.lost = ""
    assert await home.are_allocated() == [True, False]
    second = await home.place.store.read(SECOND)
    assert second is not None
    assert second.claim.attempt is not None
    assert await home.committer.commit([Attempted(SECOND, second, second.claim.attempt)], home.rules) is Progress.ON

    assert await home.are_allocated() == [True, True]


async def test_reservation_is_written_once_and_taken_off_again(home: Home) -> None:
    """A pod is among a claim's users once, however often it is reserved, and not when the claim is
    another by now.
    """
    group = await home.attempted()
    await home.committer.commit(group, home.rules)
    user = PodRef("default", "q", "uid-q")
    stored = await home.place.store.read(FIRST)
    assert stored is not None

    assert await home.committer.reserve(user, [(FIRST, stored)]) is True
    assert await home.committer.reserve(user, [(FIRST, stored)]) is False
    newest = await home.place.store.read(FIRST)
    assert newest is not None
    assert await home.committer.reserve(user, [(FIRST, newest)]) is True
    assert user.uid in [consumer.uid for consumer in newest.claim.consumers]
    await home.committer.unreserve((user.uid,), [(FIRST, newest)])

    freed = await home.place.rival.read(FIRST)
    assert freed is not None
    assert user.uid not in [consumer.uid for consumer in freed.claim.consumers]
