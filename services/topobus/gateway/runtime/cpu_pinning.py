"""Gives containers their CPUs through the container runtime, and all others the shared pool.

The pool shrinks while a claim is being prepared, before any container of its pod exists, and kubelet gets its answer only when the runtime has changed every container that runs: a CPU is
nobody else's by then. It grows as soon as the claim is unprepared. What is wanted is worked out anew from checkpoint, ledger and inventory each time and compared with what each container was
given, so a restart of the gateway or of the runtime begins with the same answer.

Flows in: events of the runtime, prepared claims, the ledger, the cpu inventory. Flows out: cpusets of new containers, updates of those that run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from msgspec import Struct, structs

from topobus.domain.cpu_groups import cpus_of
from topobus.domain.edits import Cpuset
from topobus.domain.errors import ContractError, PeerUnavailable
from topobus.domain.idset import CpuSet
from topobus.domain.outcome import Refusal
from topobus.domain.request import OwnerKind
from topobus.domain.sandbox import Sandbox
from topobus.gateway.core.claim_allocation import cdi_device_name
from topobus.gateway.core.cpusets import ContainerCpuset, CpuOwnership, cpuset_of, refuse_demand
from topobus.gateway.core.exclusive import CPU_RESOURCE
from topobus.gateway.dra.checkpoint import ClaimEntry
from topobus.gateway.node_state import Broadcast, NodeState
from topobus.gateway.runtime.values import CpusetUpdate, RunningContainer
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["CpuPinning"]

_RETRY_S = 1.0
# A container is made within a second; the runtime tells of one that could not be made, too.
_CREATION_S = 10.0
# The runtime answers within milliseconds; kubelet's unprepare must not wait for one that hangs.
_GROWTH_S = 0.5


class _Pinned(Struct, kw_only=True):
    """A container that is there."""

    container: RunningContainer
    given: CpuSet | None
    """What kubelet asked for; None: nothing, or it is not known any more."""
    applied: CpuSet | None
    """What it was given last; None: nothing, it has those of its parent, which are all."""
    can_update: bool = True
    """False: it is being created, and the runtime does not know it yet."""


class RunningContainers(Protocol):
    """Changes containers that exist, when the runtime is there."""

    @property
    def is_ready(self) -> bool:
        """Say whether every container that starts is shown to us first."""
        ...

    @property
    def why_not(self) -> str:
        """Say why no call can be made; empty while one can."""
        ...

    async def update(self, updates: Sequence[CpusetUpdate]) -> tuple[str, ...]:
        """Change containers; gives the ids of those that could not be changed.

        Errors: raises PeerUnavailable when there is no connection, or it ends. Must not be called from a handler of events.
        """
        ...


class CpuPinning:
    """Keeps the cpusets of all containers right."""

    def __init__(
        self,
        runtime: RunningContainers,
        owned: CpuSet | None,
        state: NodeState,
        entries: Callable[[], Iterable[ClaimEntry]],
        clock: Clock,
        kubelet_cpus: Callable[[], Awaitable[CpuSet]],
    ) -> None:
        """Take the runtime, the CPUs that may be given (None: all), where claims stand that are prepared, and who tells what kubelet's CPU manager may give."""
        self._kubelet_cpus = kubelet_cpus
        self._owned = owned
        self._state = state
        self._entries = entries
        self._clock = clock
        self._runtime = runtime
        self._containers: dict[str, _Pinned] = {}
        self._promised: dict[str, Mapping[str, Cpuset]] = {}
        """What claims bring that are being prepared, by the claim's key."""
        self._changed = asyncio.Event()
        self._made = Broadcast()
        """A container can be updated, or is gone."""
        self._turn = asyncio.Lock()
        self._trouble = ""
        """Why the runtime did not take the last update, as it was said."""

    async def run(self) -> None:
        """Keep the sets right, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_state())
            while True:
                await self._changed.wait()
                self._changed.clear()
                if not self._runtime.is_ready:
                    # `synchronize` begins anew with what is wanted then.
                    continue
                try:
                    await self._apply()
                except (PeerUnavailable, ContractError) as err:
                    self._troubled(str(err))
                    # Refused or unanswered: the next try says what is different still.
                    await self._clock.sleep(_RETRY_S)
                    self._changed.set()

    @asynccontextmanager
    async def promising(self, entry: ClaimEntry) -> AsyncIterator[Refusal | None]:
        """Take a claim's CPUs from all containers that run, and hold them until the checkpoint has the claim; none of the runtime's doing for a claim without CPUs.

        Errors: raises PeerUnavailable when the runtime cannot be told: a claim that needs it must wait or fail; ContractError when it could not change a container.
        """
        brought = _brought(entry)
        refusal: Refusal | None = None
        if brought:
            may_give = await self._kubelet_cpus()
            refusal = refuse_demand(brought.values(), structs.replace(self._ownership(without=entry.key), kubelet_may_give=may_give))
        if refusal is not None or not brought:
            yield refusal
            return
        if not self._runtime.is_ready:
            raise PeerUnavailable(
                f"claim {entry.namespace}/{entry.name} needs the container runtime's plugin interface (NRI) for its CPUs: {self._runtime.why_not}",
                next_step="switch NRI on in the container runtime, and mount its socket into the gateway's container",
            )
        self._promised[entry.key] = brought
        try:
            await self._apply()
            await self._wait_for_creations()
            yield None
        finally:
            del self._promised[entry.key]
            self._changed.set()

    def pins(self, entry: ClaimEntry) -> bool:
        """Say whether a claim brings CPUs for its containers alone."""
        return bool(_brought(entry))

    async def released(self) -> None:
        """Hear that a claim was unprepared, and have the runtime give its CPUs to everybody before kubelet has its answer; what cannot be changed at once is tried again."""
        if not self._runtime.is_ready:
            return
        try:
            async with asyncio.timeout(_GROWTH_S):
                await self._apply()
        except (PeerUnavailable, ContractError, TimeoutError) as err:
            self._troubled(str(err) or f"the container runtime took longer than {_GROWTH_S:g} s")
        finally:
            self._changed.set()

    async def _wait_for_creations(self) -> None:
        """Wait until containers that were being made with the larger pool can be changed, and are.

        Errors: raises PeerUnavailable when one is still being made after a while.
        """
        half_made = {container_id for container_id, pinned in self._containers.items() if not pinned.can_update}
        try:
            async with asyncio.timeout(_CREATION_S):
                while half_made & {container_id for container_id, pinned in self._containers.items() if not pinned.can_update}:
                    await self._made.ticket().wait()
        except TimeoutError as err:
            raise PeerUnavailable(
                f"a container is still being made after {_CREATION_S:g} s, with CPUs that a claim is to have for itself"
            ) from err
        if half_made:
            await self._apply()

    # What the runtime tells.

    def synchronize(self, containers: Sequence[RunningContainer]) -> Sequence[CpusetUpdate]:
        """Begin anew with what is there."""
        former_containers = self._containers
        self._containers = {}
        for container in containers:
            former = former_containers.get(container.id)
            given = former.given if former is not None else self._of_kubelet(container)
            self._containers[container.id] = _Pinned(container=container, given=given, applied=container.cpus)
        self._made.announce()
        updates = self._updates()
        self._note(updates)
        return updates

    def create_container(self, sandbox: Sandbox, container: RunningContainer) -> ContainerCpuset | None:
        """Give a new container its CPUs."""
        ownership = self._ownership()
        cpuset = cpuset_of(container.cdi_devices, container.cpus, ownership)
        if (
            cpuset is not None
            and not cpuset.is_exclusive
            and cpuset.cpus == (ownership.online if container.cpus is None else container.cpus)
        ):
            # As it would be without us.
            cpuset = None
        applied = cpuset.cpus if cpuset is not None else container.cpus
        self._containers[container.id] = _Pinned(container=container, given=container.cpus, applied=applied, can_update=False)
        if cpuset is not None and cpuset.is_exclusive:
            get_logger().info("container.pinned", pod=str(sandbox), container=container.name, cpus=str(cpuset.cpus), mems=str(cpuset.mems))
        return cpuset

    def container_created(self, container: RunningContainer) -> None:
        """Update it from now on: what changed while it was being made is made up for."""
        pinned = self._containers.get(container.id)
        if pinned is not None:
            pinned.can_update = True
            self._changed.set()
            self._made.announce()

    def update_container(self, container: RunningContainer, asked: CpuSet | None) -> ContainerCpuset | None:
        """Keep a container's CPUs when kubelet changes something of it."""
        pinned = self._containers.get(container.id)
        if pinned is None:
            return None
        if asked is not None:
            pinned.given = asked
        cpuset = cpuset_of(container.cdi_devices, pinned.given, self._ownership())
        if cpuset is not None:
            pinned.applied = cpuset.cpus
        return cpuset

    def container_ended(self, container_id: str) -> None:
        """Forget it."""
        self._containers.pop(container_id, None)
        self._made.announce()

    # What is wanted, and how it comes about.

    def _ownership(self, *, without: str = "") -> CpuOwnership:
        inventory = self._state.inventories().get(CPU_RESOURCE)
        claims: dict[str, Cpuset] = {}
        running = CpuSet()
        for entry in self._entries():
            if entry.is_prepared and entry.key != without:
                claims.update(_brought(entry))
                running |= entry.own_cpus if entry.is_running else CpuSet()
        for key, brought in self._promised.items():
            claims.update(brought)
            for cpuset in brought.values() if key != without else ():
                running |= cpuset.cpus
        ledger = self._state.ledger
        kubelet = [
            cpu
            for allocation in (ledger.allocations.values() if ledger is not None else ())
            if allocation.owner.kind is OwnerKind.CONTAINER
            for holding in allocation.holdings
            for cpu in holding.cpus
        ]
        online = CpuSet.of(cpu for device in inventory.devices for cpu in cpus_of(device)) if inventory is not None else CpuSet()
        return CpuOwnership(online=online, owned=self._owned, claims=claims, running=running, kubelet=CpuSet.of(kubelet))

    def _of_kubelet(self, container: RunningContainer) -> CpuSet | None:
        """Say what kubelet's CPU manager gave to a container that was there before us; None when it had its CPUs from the shared pool."""
        if container.cpus is not None and container.cpus <= self._ownership().kubelet:
            return container.cpus
        return None

    def _updates(self) -> tuple[CpusetUpdate, ...]:
        """List the containers that have other CPUs than they should."""
        ownership = self._ownership()
        updates: list[CpusetUpdate] = []
        for container_id, pinned in sorted(self._containers.items()):
            wanted = cpuset_of(pinned.container.cdi_devices, pinned.given, ownership)
            has = ownership.online if pinned.applied is None else pinned.applied
            if pinned.can_update and wanted is not None and has != wanted.cpus:
                updates.append(CpusetUpdate(container_id=container_id, cpus=wanted.cpus, mems=wanted.mems))
        return tuple(updates)

    async def _apply(self) -> None:
        """Have the runtime change what is different.

        Errors: raises PeerUnavailable when it does not answer, ContractError when it refuses, or could not change a container that still runs.
        """
        async with self._turn:
            updates = self._updates()
            if not updates:
                self._trouble = ""
                return
            failed = set(await self._runtime.update(updates))
            done = [update for update in updates if update.container_id not in failed]
            self._note(done)
            if done:
                get_logger().info("cpusets.updated", containers=len(done), shared=str(self._ownership().shared))
            still = sorted(failed & self._containers.keys())
            if still:
                raise ContractError(
                    f"the container runtime could not change the CPUs of containers {', '.join(name[:12] for name in still)}"
                )
            self._trouble = ""

    def _troubled(self, why: str) -> None:
        """Say once why containers have not the CPUs that they should have, until it is over or something else."""
        if why != self._trouble:
            self._trouble = why
            get_logger().warning(
                "cpusets.not-updated", error=why, next_step="look into the container runtime's log; it is tried again each second"
            )

    def _note(self, updates: Iterable[CpusetUpdate]) -> None:
        for update in updates:
            pinned = self._containers.get(update.container_id)
            if pinned is not None:
                pinned.applied = update.cpus

    async def _follow_state(self) -> None:
        """Look again whenever inventory or ledger has changed: a CPU went offline, or kubelet's manager gave one away."""
        while True:
            tickets = (self._state.changed.ticket(), self._state.ledger_changed.ticket())
            self._changed.set()
            waiting = [asyncio.ensure_future(ticket.wait()) for ticket in tickets]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiter in waiting:
                    waiter.cancel()


def _brought(entry: ClaimEntry) -> Mapping[str, Cpuset]:
    """Name what a claim brings for itself by CDI device; what it only looks at (admin access) it does not take from anybody."""
    if entry.cdi is None:
        return {}
    own = {cdi_device_name(entry.uid, device.device) for device in entry.devices if not device.is_shared}
    return {device.name: device.edits.cpuset for device in entry.cdi.devices if device.name in own and device.edits.cpuset is not None}
