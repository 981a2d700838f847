"""Pods that come through one of the three interfaces, hold devices for a while and go again, under
any faults.

The interface and the sizes come from a seed. The observer gets the client's answers. A client is
patient: it repeats its request with the same operation id, or as kubelet and kubectl do, until it
has an answer. One that gets none within minutes counts the system as stuck.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import TypeVar

from msgspec import structs

from lab.chaos.observer import Grant, NodeObserver
from topobus.bus.bus import Bus, Conflict
from topobus.engine.alignment.planning.node_view import cpu_name
from topobus.formats.kubernetes.built_in_classes import built_in_class_object
from topobus.formats.kubernetes.objects import admit, ask_deletion, object_parts
from topobus.formats.messages.catalogue import OBJECT, PLACE, RELEASE
from topobus.formats.messages.messages import ApiObject, PlaceRequest, ReleaseRequest
from topobus.simulation.kubelet.simulator import Admission, ClaimReference, Container, KubeletSimulator, Pod
from topobus.values.dra_names import group_of_class
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.outcome import Placement
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

__all__ = ["CLASSES", "Door", "Life", "Lives", "Plan", "Stuck", "claim_object", "draw_lives", "leaves"]

T = TypeVar("T")

# For any number of faults one after the other. It only ends a run that makes no progress.
_PATIENCE_S = 180.0
_PAUSE_S = 0.2
_ASK_S = 3.0
_TIME = "2026-01-01T00:00:00Z"
_CLASSES = ("gpu", "nic", "fpga", "cpu")


class Door(StrEnum):
    """The interface by which devices are requested."""

    PLACE = "place"
    PLUGIN = "device-plugin"
    CLAIM = "claim"
    OCI = "oci"
    """A claim without kubelet, by `topobus oci`."""


class Life(StrEnum):
    """How a pod's life ended."""

    LIVED = "lived"
    REFUSED = "refused"


class Stuck(Exception):
    """A client has waited for minutes for what must come by itself."""


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it."""
    for err in group.exceptions:
        if isinstance(err, BaseExceptionGroup):
            yield from leaves(err)
        else:
            yield err


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One pod's life: its name, its interface, what it wants, how long it holds it."""

    name: str
    door: Door
    gpus: int
    nics: int
    cpus: int
    holds_s: float
    fpgas: int = 0

    @property
    def devices(self) -> tuple[tuple[str, int], ...]:
        """Pair each wanted class with a number."""
        return tuple(
            (name, size) for name, size in (("gpu", self.gpus), ("nic", self.nics), ("fpga", self.fpgas)) if size
        )


def draw_lives(seed: int, worker: int) -> Iterator[Plan]:
    """Yield the lives that one worker runs one after the other, without an end.

    The same seed gives the same lives.
    """
    chance = random.Random(f"{seed}/lives/{worker}")
    for number in count(1):
        door = chance.choice((Door.PLACE, Door.PLUGIN, Door.CLAIM))
        yield Plan(
            name=f"{door}-{worker}-{number}",
            door=door,
            gpus=chance.choice((1, 1, 2)),
            nics=chance.choice((0, 0, 1)),
            cpus=chance.choice((0, 1, 4)),
            holds_s=chance.random() * 2,
            fpgas=chance.choice((0, 0, 0, 1)),
        )


CLASSES = tuple(structs.replace(built_in_class_object(device_class), status={}) for device_class in _CLASSES)
"""The DeviceClasses of all classes."""


def claim_object(name: str, devices: Iterable[tuple[str, int]]) -> ApiObject:
    """Make a claim for so many devices of each class."""
    requests = [
        {
            "name": device_class,
            "exactly": {"deviceClassName": group_of_class(device_class), "allocationMode": "ExactCount", "count": size},
        }
        for device_class, size in devices
    ]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name},
        spec={"devices": {"requests": requests}},
    )


class Lives:
    """Runs the lives of pods."""

    def __init__(self, bus: Bus, kubelet: KubeletSimulator, observer: NodeObserver, node: str) -> None:
        self._bus = bus
        self._kubelet = kubelet
        self._observer = observer
        self._node = node
        self.outcomes: Counter[str] = Counter()
        self.live_claims: set[str] = set()
        """Names of claims whose deletion has not begun."""
        self.store_losses = 0
        """How often the store was emptied or restored to an earlier time."""
        self.ended: list[Callable[[str], Awaitable[None]]] = []
        """For each placed pod and claim that has ended, in that order: a function that ends it
        again, with an operation id of this prefix."""
        self._rest = asyncio.Event()
        self._rest.set()
        self._begins = asyncio.Event()
        self._begins.set()
        self._waiting = 0

    def hold_all(self) -> None:
        """From now on keep what is held until `release_all`."""
        self._rest.clear()

    def release_all(self) -> None:
        """Allow holders to give back what they hold."""
        self._rest.set()

    async def stand_still(self, workers: int) -> None:
        """Let no life begin or give back until `go_on`.

        Returns when each of so many workers waits.

        Errors: raises Stuck when they do not come to rest in time.
        """
        self._begins.clear()
        self._rest.clear()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while self._waiting < workers:  # noqa: ASYNC110 - each of them waits for an event of its own
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError as err:
            raise Stuck(f"{workers - self._waiting} of {workers} do not come to rest") from err

    def go_on(self) -> None:
        """Let all lives continue."""
        self._begins.set()
        self._rest.set()

    async def place(self, owner: Owner, op_id: str, devices: Iterable[tuple[str, int]], cpus: int) -> frozenset[str]:
        """Place a pod, and name its devices and CPUs. Empty when the node refuses it."""
        container = ContainerRequest(
            name="main",
            cpus=cpus,
            devices=tuple(DeviceRequest(device_class=name, count=size) for name, size in devices),
        )
        request = PlaceRequest(op_id=op_id, pod=PodRequest(owner=owner, containers=(container,)))
        reply = await self._until(
            f"{owner.name}: place", lambda: self._bus.ask(PLACE, request, timeout_s=_ASK_S, node=self._node)
        )
        if not isinstance(reply.result, Placement):
            return frozenset()
        (placed,) = reply.result.containers
        names = {name for of_class in placed.devices.values() for name in of_class}
        return frozenset(names | {cpu_name(cpu) for cpu in placed.cpus})

    async def release_place(self, owner: Owner, op_id: str) -> None:
        """Release what a placed pod holds."""
        release = ReleaseRequest(op_id=op_id, owner=owner)
        await self._until(
            f"{owner.name}: release", lambda: self._bus.ask(RELEASE, release, timeout_s=_ASK_S, node=self._node)
        )

    async def _wait(self, event: asyncio.Event) -> None:
        self._waiting += 1
        try:
            await event.wait()
        finally:
            self._waiting -= 1

    async def lead(self, plan: Plan) -> None:
        """Run one life to its end.

        Errors: raises Stuck when it does not end in time.
        """
        await self._wait(self._begins)
        lead = {Door.PLACE: self._place, Door.PLUGIN: self._by_plugin, Door.CLAIM: self._by_claim}[plan.door]
        try:
            async with asyncio.timeout(_PATIENCE_S * 2):
                outcome = await lead(plan)
        except TimeoutError as err:
            raise Stuck(f"{plan.name} did not come to its end") from err
        self.outcomes[f"{plan.door} {outcome}"] += 1

    async def _hold(self, plan: Plan, grant: Grant) -> None:
        await self._observer.grant(grant)
        await asyncio.sleep(plan.holds_s)
        await self._wait(self._rest)
        self._observer.give_back(grant)

    async def _place(self, plan: Plan) -> Life:
        owner = Owner(kind=OwnerKind.POD, name=plan.name, uid=f"uid-{plan.name}")
        names = await self.place(owner, f"place-{plan.name}", plan.devices, plan.cpus)
        outcome = Life.REFUSED
        if names:
            outcome = Life.LIVED
            await self._hold(plan, Grant(plan.name, OwnerKind.POD, owner.key, names))
        await self.release_place(owner, f"release-{plan.name}")
        self.ended.append(lambda again: self.release_place(owner, f"{again}-{plan.name}"))
        return outcome

    async def _by_plugin(self, plan: Plan) -> Life:
        wanted = {f"topobus.dev/{name}": size for name, size in plan.devices}
        pod = Pod(name=plan.name, uid=f"uid-{plan.name}", containers=(Container(name="main", resources=wanted),))
        answer = await self._kubelet.admit(pod)
        outcome = Life.REFUSED
        if isinstance(answer, Admission):
            outcome = Life.LIVED
            names = frozenset(name for each in answer.containers for ids in each.devices.values() for name in ids)
            await self._hold(plan, Grant(plan.name, OwnerKind.DEVICE_PLUGIN, "", names))
        await self._remove(plan, pod)
        return outcome

    async def _by_claim(self, plan: Plan) -> Life:
        claim = claim_object(plan.name, plan.devices)
        uid = f"uid-{plan.name}"
        losses_before = self.store_losses
        self.live_claims.add(plan.name)
        await self.apply(claim, uid)
        results = await self.allocated(claim)
        outcome = Life.REFUSED
        pod: Pod | None = None
        if results:
            drivers = tuple(sorted({str(result["driver"]) for result in results}))
            reference = ClaimReference(name=plan.name, uid=uid, drivers=drivers)
            pod = Pod(name=plan.name, uid=f"pod-{plan.name}", containers=(Container(name="main"),), claims=(reference,))
            answer = await self._kubelet.admit(pod)
            for _ in range(20):
                if isinstance(answer, Admission) or answer.is_final:
                    break
                await asyncio.sleep(1.0)
                answer = await self._kubelet.admit(pod)
            if isinstance(answer, Admission):
                outcome = Life.LIVED
                key = Owner(kind=OwnerKind.CLAIM, name=plan.name, uid=uid).key
                names = frozenset(device.device for each in answer.claims for device in each.devices)
                await self._hold(plan, Grant(plan.name, OwnerKind.CLAIM, key, names))
        if pod is not None:
            await self._remove(plan, pod)
        self.live_claims.discard(plan.name)
        owner = Owner(kind=OwnerKind.CLAIM, name=plan.name, uid=uid)
        await self._end_claim(claim, owner, losses_before)
        self.ended.append(lambda _again: self._end_again(claim, owner))
        return outcome

    async def _end_again(self, claim: ApiObject, owner: Owner) -> None:
        """Restore and delete a claim that an older ledger holds again, until it no longer does.

        A deletion at once may come before the controller has seen the claim.
        """
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while owner.key in (await self._observer.read()).allocations:
                    await self.apply(claim, owner.uid)
                    await asyncio.sleep(1.0)
                    await self.delete(claim)
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError as err:
            raise Stuck(
                f"{owner.key}, which an older ledger holds again, is not released {_PATIENCE_S:g} s after it "
                "was restored and deleted"
            ) from err

    async def _end_claim(self, claim: ApiObject, owner: Owner, losses_before: int) -> None:
        """Delete a claim, and check that its devices are released.

        An object that was lost with the store is no evidence that its devices are unused, so they
        stay held. Its owner restores it, under its uid, and deletes it.
        """
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                await self.delete(claim)
                if await self._observer.is_gone(owner.key):
                    return
                await asyncio.sleep(1.0)
                if self.store_losses > losses_before and not await self._observer.is_gone(owner.key):
                    self.outcomes["claim restored"] += 1
                    await self.apply(claim, owner.uid)

    async def allocated(self, claim: ApiObject) -> list[dict[str, object]]:
        """Wait a while for the controller. Empty when the node is full."""
        for _ in range(40):
            await asyncio.sleep(_PAUSE_S)
            entry = await self._until("claim: read", lambda: self._bus.get(OBJECT, **object_parts(claim)))
            if entry is None:
                # The store was restored to a time before the claim: its creator writes it again.
                await self.apply(claim, f"uid-{claim.metadata['name']}")
                continue
            results: list[dict[str, object]] = (
                entry.value.status.get("allocation", {}).get("devices", {}).get("results", [])
            )
            if results:
                return results
        return []

    async def _remove(self, plan: Plan, pod: Pod) -> None:
        """Remove a pod as kubelet does: a failed unprepare is tried again."""
        async with asyncio.timeout(_PATIENCE_S):
            while await self._kubelet.remove(pod):
                self.outcomes["unprepare tried again"] += 1
                await asyncio.sleep(1.0)

    async def apply(self, wanted: ApiObject, uid: str) -> None:
        """Write an object, if there is none of its name."""

        async def write() -> None:
            if await self._bus.get(OBJECT, **object_parts(wanted)) is None:
                stored = admit(wanted, uid=uid, now=_TIME)
                await self._bus.compare_and_set(OBJECT, stored, 0, **object_parts(wanted))

        await self._until(f"{wanted.kind} {wanted.metadata['name']}: write", write)

    async def delete(self, wanted: ApiObject) -> None:
        """Delete an object, and wait until it is gone."""
        what = f"{wanted.metadata['name']}: delete"
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                if await self._until(what, lambda: self.ask_end(wanted)):
                    return
                await asyncio.sleep(_PAUSE_S)

    async def ask_end(self, wanted: ApiObject) -> bool:
        """Ask once for an object's deletion. True: it is gone."""
        parts = object_parts(wanted)
        entry = await self._bus.get(OBJECT, **parts)
        if entry is None:
            return True
        marked = ask_deletion(entry.value, now=_TIME)
        if marked is None:
            return not isinstance(await self._bus.compare_and_delete(OBJECT, entry.revision, **parts), Conflict)
        if marked != entry.value:
            await self._bus.compare_and_set(OBJECT, marked, entry.revision, **parts)
        return False

    async def _until(self, what: str, act: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call until its peer answers."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while True:
                    try:
                        return await act()
                    except PeerUnavailable:
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError as err:
            raise Stuck(f"{what} had no answer for {_PATIENCE_S:g} s") from err
        except ContractError as err:
            raise Stuck(f"{what} was answered by {err}") from err
