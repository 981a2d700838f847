"""Gives containers their CPUs through the container runtime, and all others the shared pool.

The pool shrinks while a claim is being prepared, before any container of its pod exists. Kubelet
gets its answer only when the runtime has changed every running container, so that no other
container has a CPU of the claim by then. The pool grows as soon as the claim is unprepared. The
wanted state is computed from checkpoint, ledger and inventory each time and compared with what each
container was given. So a restart of the gateway or of the runtime begins with the same result.

A container counts as having what was confirmed last. For a container that is being started, a
runtime changes only its own records. Such a container is changed when it runs, and a claim waits
for it. After an error or a missing answer, a container may have either its previous CPUs or those
that were sent, until an update is confirmed. The kernel's cpusets are read every few seconds. A
difference there is corrected, reported and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from msgspec import Struct, structs

from topobus.gateway.claims.rules.claim_cdi import cdi_device_name
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.cpuset_reports import CpusetReports
from topobus.gateway.containers.kernel_cpusets import KernelCpusets
from topobus.gateway.containers.rules.cpusets import (
    ContainerCpuset,
    CpuDifference,
    CpuOwnership,
    cpuset_of,
    refuse_demand,
)
from topobus.gateway.containers.rules.exclusive import CPU_RESOURCE, ExclusiveUse
from topobus.gateway.containers.values import CpusetUpdate, RunningContainer
from topobus.gateway.node_state import NodeState
from topobus.process.broadcast import Broadcast, first_of
from topobus.process.clock import Clock, is_set_within
from topobus.process.logging import get_logger
from topobus.values.cpu_groups import cpus_of
from topobus.values.edits import Cpuset
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal
from topobus.values.request import OwnerKind
from topobus.values.sandbox import Sandbox

__all__ = ["CpuPinning"]

# Seconds before a container that could not be changed is tried again, doubled each time: an update
# that hangs prevents containerd from creating any container meanwhile.
_RETRY_S, _LONGEST_RETRY_S = 1.0, 10.0
# In seconds. A container is created and started within a second. For one that cannot be started the
# runtime sends no event before it is removed.
_START_S = 20.0
# In seconds. The runtime answers within milliseconds. kubelet's unprepare must not wait for one
# that hangs.
_GROWTH_S = 0.5
# Timeouts in seconds of a call for all containers, and of a call for a single one, which finds the
# container that hangs. The runtime creates no container meanwhile. A single one gets the time that
# containerd waits for a plugin (plugin_request_timeout, 2 s as shipped). Together, a hundred
# containers need some tens of milliseconds each.
_TOGETHER_S, _ALONE_S = 5.0, 2.0
# After this many calls without an answer, the runtime itself counts as hanging.
_MOST_SILENT = 3
# Seconds between two reads of the kernel's cpusets, and until a difference is read a second time
# before it counts: the gateway gets kubelet's updates before the runtime has applied them.
_LOOK_S, _SECOND_LOOK_S = 3.0, 0.5
_NONE = CpuSet()


class _Pinned(Struct, kw_only=True):
    """A container that exists."""

    container: RunningContainer
    sandbox: Sandbox
    given: CpuSet | None
    """The CPUs that kubelet requested. None: it requested none, or they are no longer known."""
    found: CpuSet | None = None
    """The CPUs of a container that was there before this gateway."""
    applied: CpuSet | None
    """The CPUs that it was created with or that were confirmed last. None: it has those of its
    parent, which are all."""
    sent: CpuSet = CpuSet()
    """The CPUs that were sent since and not confirmed. It may have these instead."""
    is_confirmed: bool = True
    is_started: bool = True
    """False: no update takes effect yet."""
    made_s: float = 0.0
    """When its creation began, by the clock."""
    is_overdue: bool = False
    """Its start took so long that claims do not wait for it any more."""
    trouble: str = ""
    """Why it could not be changed the last time. It is then changed alone, so that it does not
    delay the others."""
    pause_s: float = 0.0
    next_try_s: float = 0.0

    def confirm(self, cpus: CpuSet) -> None:
        """Note that the runtime has confirmed these CPUs."""
        self.applied, self.sent, self.is_confirmed = cpus, CpuSet(), True
        self.trouble, self.pause_s, self.next_try_s = "", 0.0, 0.0

    def doubt(self, cpus: CpuSet) -> None:
        """Note that it may have these CPUs as well from now on."""
        self.sent |= cpus
        self.is_confirmed = False

    def put_off(self, now_s: float) -> None:
        """Double its pause before the next try."""
        self.pause_s = min(2 * self.pause_s or _RETRY_S, _LONGEST_RETRY_S)
        self.next_try_s = now_s + self.pause_s

    def may_have(self, online: CpuSet) -> CpuSet:
        """Return the CPUs that it may run on."""
        return (online if self.applied is None else self.applied) | self.sent

    def __str__(self) -> str:
        return f"container {self.container.name} of pod {self.sandbox} ({self.container.id[:12]})"


class RunningContainers(Protocol):
    """Changes existing containers when the runtime is connected."""

    @property
    def is_ready(self) -> bool:
        """Return whether the runtime reports every container before it starts."""
        ...

    @property
    def why_not(self) -> str:
        """Return why no call can be made. Empty while one can."""
        ...

    async def update(self, updates: Sequence[CpusetUpdate], within_s: float) -> tuple[str, ...]:
        """Change containers. Returns the ids of those that could not be changed.

        Errors: raises PeerUnavailable when there is no connection or no answer, ContractError for a
        refusal. In each case all or a part of it may have been done. Must not be called from a
        handler of events.
        """
        ...


class CpuPinning:
    """Keeps the cpusets of all containers as they should be."""

    def __init__(
        self,
        runtime: RunningContainers,
        owned: CpuSet | None,
        state: NodeState,
        entries: Callable[[], Iterable[ClaimEntry]],
        clock: Clock,
        kubelet_cpus: Callable[[], Awaitable[CpuSet]],
        kernel: KernelCpusets,
        reports: CpusetReports,
    ) -> None:
        """Keep the collaborators.

        `owned` has the CPUs that may be given (None: all), `entries` returns the prepared claims,
        `kubelet_cpus` returns the CPUs that kubelet's CPU manager may give, and `kernel` reads the
        cpusets.
        """
        self._kernel = kernel
        self.reports = reports
        """Reports differences, and why the cpusets cannot be read."""
        self._kubelet_cpus = kubelet_cpus
        self._owned = owned
        self._state = state
        self._entries = entries
        self._clock = clock
        self._runtime = runtime
        self._containers: dict[str, _Pinned] = {}
        self._promised: dict[str, Mapping[str, Cpuset]] = {}
        """CPUs of claims that are being prepared, by the claim's key."""
        self._changed = asyncio.Event()
        self._started = Broadcast()
        """Announced when a container runs or is gone."""
        self._settled = Broadcast()
        """Announced when the wanted changes have been tried."""
        self._look_now = asyncio.Event()
        self._found: dict[str, CpuDifference] = {}
        """By container: differences to be reported as soon as a correction was tried."""
        self._turn = asyncio.Lock()
        self._trouble = ""
        """Why the runtime did not accept the last update, as it was logged."""

    async def run(self) -> None:
        """Keep the cpusets as they should be, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_state())
            group.create_task(self._keep_looking())
            while True:
                self._changed.clear()
                # Without a connection nothing is done: `synchronize` begins with what is wanted
                # then.
                pause_s = await self._catch_up() if self._runtime.is_ready else None
                self._settled.announce()
                await is_set_within(self._changed, self._clock.timeout(pause_s))

    async def _catch_up(self) -> float | None:
        """Correct what differs. Returns the seconds until the next try, None: wait for a change."""
        error = ""
        try:
            await self._apply()
        except (PeerUnavailable, ContractError) as err:
            error = str(err)
            self._troubled(error)
        differences, self._found = self._found, {}
        for container_id, difference in sorted(differences.items()):
            pinned = self._containers.get(container_id)
            is_right = pinned is None or (pinned.is_confirmed and pinned.applied == difference.wanted)
            self.reports.differed(
                structs.replace(difference, error="" if is_right else error or "tried again each few seconds")
            )
        waiting = [self._containers[update.container_id].next_try_s for update in self._updates()]
        return max(0.0, min(waiting) - self._clock.monotonic()) if waiting else None

    @asynccontextmanager
    async def promising(self, entry: ClaimEntry) -> AsyncIterator[Refusal | None]:
        """Take a claim's CPUs from all running containers, and hold them until the checkpoint has
        the claim.

        For a claim without CPUs the runtime is not called.

        Errors: raises PeerUnavailable when the runtime cannot be reached, so that a claim that
        needs it must wait or fail. Raises ContractError when a container may still run on these
        CPUs, with its name.
        """
        brought = _brought(entry)
        refusal: Refusal | None = None
        if brought:
            may_give = await self._kubelet_cpus()
            refusal = refuse_demand(
                brought.values(), structs.replace(self._ownership(without=entry.key), kubelet_may_give=may_give)
            )
        if refusal is not None or not brought:
            yield refusal
            return
        if not self._runtime.is_ready:
            raise PeerUnavailable(
                f"claim {entry.namespace}/{entry.name} needs the container runtime's plugin interface (NRI) "
                f"for its CPUs: {self._runtime.why_not}",
                next_step="switch NRI on in the container runtime, and mount its socket into the gateway's container",
            )
        self._promised[entry.key] = brought
        try:
            await self._take(CpuSet.of(cpu for cpuset in brought.values() for cpu in cpuset.cpus))
            yield None
        finally:
            del self._promised[entry.key]
            self._changed.set()

    def pins(self, entry: ClaimEntry) -> bool:
        """Return whether a claim has exclusive CPUs for its containers."""
        return bool(_brought(entry))

    async def released(self) -> None:
        """Have the runtime give an unprepared claim's CPUs to all containers before kubelet has its
        answer. If that takes long, it continues in the background.
        """
        self._changed.set()
        if not self._runtime.is_ready:
            return
        if not await self._settled.until(lambda: not self._due(), asyncio.timeout(_GROWTH_S)):
            # The call continues, and this is no failure: it is only promised that the CPUs return.
            get_logger().debug("cpusets.growing", waited_s=_GROWTH_S)

    async def _take(self, cpus: CpuSet) -> None:
        """Move all other containers away from CPUs that were promised.

        Errors: as `promising`.
        """
        while True:
            trouble: PeerUnavailable | ContractError | None = None
            try:
                await self._apply(urgent=cpus)
            except (PeerUnavailable, ContractError) as err:
                trouble = err
            in_the_way = [pinned for pinned in self._others_on(cpus) if pinned.is_started]
            if trouble is not None and (not self._runtime.is_ready or any(pinned.trouble for pinned in in_the_way)):
                raise trouble
            if in_the_way:
                changing = {update.container_id for update in self._updates()}
                kept = [str(pinned) for pinned in in_the_way if pinned.container.id not in changing]
                if kept:
                    raise ContractError(
                        f"CPUs {cpus} are not free: {', '.join(kept)} may run on them, and would have none "
                        "without those of claims"
                    )
                # It has started meanwhile.
                continue
            if trouble is not None:
                self._troubled(str(trouble))
                self._changed.set()
            if not await self._wait_for_starts(cpus):
                return

    async def _wait_for_starts(self, cpus: CpuSet) -> bool:
        """Wait until containers run whose creation or start began with CPUs that have been promised
        since.

        False: there was none. A start that does not end in time is not waited for any longer: it
        may have failed, which the runtime does not report. If the container runs after all, it is
        changed then.
        """
        has_waited = False
        while True:
            ticket, now_s = self._started.ticket(), self._clock.monotonic()
            left_s: list[float] = []
            for pinned in self._others_on(cpus):
                if pinned.is_started or pinned.is_overdue:
                    continue
                left_s.append(pinned.made_s + _START_S - now_s)
                if left_s[-1] <= 0:
                    left_s.pop()
                    pinned.is_overdue = True
                    get_logger().warning(
                        "container.start-overdue",
                        container=str(pinned),
                        cpus=str(cpus),
                        waited_s=_START_S,
                        next_step="look into kubelet's events of that pod; claims are prepared without waiting for it",
                    )
            if not left_s:
                return has_waited
            has_waited = True
            await is_set_within(ticket, self._clock.timeout(min(left_s)))

    def _others_on(self, cpus: CpuSet) -> list[_Pinned]:
        """Return the containers that may run on CPUs that are not for them, by id."""
        ownership = self._ownership()
        others: list[_Pinned] = []
        for _, pinned in sorted(self._containers.items()):
            wanted = cpuset_of(pinned.container.cdi_devices, self._given(pinned), ownership)
            is_its_own = wanted is not None and not wanted.cpus.isdisjoint(cpus)
            if not is_its_own and not pinned.may_have(ownership.online).isdisjoint(cpus):
                others.append(pinned)
        return others

    # Called for the runtime's events.

    def synchronize(
        self, sandboxes: Sequence[Sandbox], containers: Sequence[RunningContainer]
    ) -> Sequence[CpusetUpdate]:
        """Replace what is known by the containers that exist."""
        former_containers, by_id = self._containers, {sandbox.id: sandbox for sandbox in sandboxes}
        self._containers = {}
        for container in containers:
            former = former_containers.get(container.id)
            sandbox = by_id.get(container.sandbox_id, _nobodys(container.sandbox_id))
            pinned = _Pinned(
                container=container,
                sandbox=sandbox,
                given=former.given if former is not None else None,
                found=former.found if former is not None else container.cpus,
                applied=container.cpus,
                made_s=self._clock.monotonic(),
            )
            if not container.is_started:
                # Its start may have read older CPUs than the runtime shows.
                pinned.applied, pinned.is_confirmed, pinned.is_started = None, False, False
            self._containers[container.id] = pinned
        self._started.announce()
        updates = self._updates()
        for update in updates:
            pinned = self._containers[update.container_id]
            # A container that started while no gateway ran has all CPUs, including those of claims.
            self._note_difference(pinned, pinned.may_have(self._ownership().online), only_shared=True)
            # The runtime does not report updates of this answer that fail, so each is sent again.
            pinned.doubt(update.cpus)
        self._changed.set()
        self._look_now.set()
        return updates

    def create_container(self, sandbox: Sandbox, container: RunningContainer) -> ContainerCpuset | None:
        """Return the CPUs of a new container."""
        ownership = self._ownership()
        cpuset = cpuset_of(container.cdi_devices, container.cpus, ownership)
        if (
            cpuset is not None
            and not cpuset.is_exclusive
            and cpuset.cpus == (ownership.online if container.cpus is None else container.cpus)
        ):
            # It gets what it would have without us.
            cpuset = None
        applied = cpuset.cpus if cpuset is not None else container.cpus
        for former_id, former in tuple(self._containers.items()):
            # Kubelet creates a container again when it has ended or could not be started.
            if not former.is_started and (former.sandbox.id, former.container.name) == (sandbox.id, container.name):
                self.container_ended(former_id)
        self._containers[container.id] = _Pinned(
            container=container,
            sandbox=sandbox,
            given=container.cpus,
            applied=applied,
            is_started=False,
            made_s=self._clock.monotonic(),
        )
        if cpuset is not None and cpuset.is_exclusive:
            get_logger().info(
                "container.pinned",
                pod=str(sandbox),
                container=container.name,
                cpus=str(cpuset.cpus),
                mems=str(cpuset.mems),
            )
        return cpuset

    def container_started(self, container: RunningContainer) -> None:
        """Update it from now on. Changes since its creation began are made now."""
        pinned = self._containers.get(container.id)
        if pinned is None:
            return
        pinned.is_started = True
        pinned.container = structs.replace(
            pinned.container, control_group=container.control_group or pinned.container.control_group
        )
        if pinned.is_confirmed:
            self._note_difference(pinned, pinned.may_have(self._ownership().online), only_shared=True)
        self._changed.set()
        self._started.announce()

    def update_container(self, container: RunningContainer, asked: CpuSet | None) -> ContainerCpuset | None:
        """Keep a container's CPUs when kubelet updates it."""
        pinned = self._containers.get(container.id)
        if pinned is None:
            return None
        if asked is not None:
            pinned.given = asked
        cpuset = cpuset_of(container.cdi_devices, self._given(pinned), self._ownership())
        if cpuset is not None:
            # The runtime does not report whether this worked, so it is sent again.
            pinned.doubt(cpuset.cpus)
            self._changed.set()
        return cpuset

    def container_ended(self, container_id: str) -> None:
        """Forget a container."""
        self._containers.pop(container_id, None)
        self._started.announce()

    def sandbox_stopped(self, sandbox_id: str) -> None:
        """Forget a sandbox's containers, because one that never started has no end event."""
        for container_id, pinned in tuple(self._containers.items()):
            if pinned.sandbox.id == sandbox_id:
                self.container_ended(container_id)

    # The wanted state, and how it is reached.

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
        online = (
            CpuSet.of(cpu for device in inventory.devices for cpu in cpus_of(device))
            if inventory is not None
            else CpuSet()
        )
        return CpuOwnership(
            online=online, owned=self._owned, claims=claims, running=running, kubelet=CpuSet.of(kubelet)
        )

    def _given(self, pinned: _Pinned) -> CpuSet | None:
        """Return the CPUs that kubelet gave to a container. None when it has its CPUs from the
        shared pool.

        A container that was there before this gateway has what kubelet's CPU manager gave it as
        soon as the ledger shows that. For one that kubelet started while no gateway ran, that is
        after the next look at kubelet's list.
        """
        if pinned.given is None and pinned.found and pinned.found <= self._kubelet_gave(pinned):
            pinned.given = pinned.found
        return pinned.given

    def _kubelet_gave(self, pinned: _Pinned) -> CpuSet:
        """Return the exclusive CPUs of a container, or of its pod as a whole, by the ledger."""
        allocations = self._state.ledger.allocations if self._state.ledger is not None else {}
        sandbox, gave = pinned.sandbox, CpuSet()
        for name in (pinned.container.name, ""):
            owner = ExclusiveUse(namespace=sandbox.namespace, pod=sandbox.name, container=name).owner
            allocation = allocations.get(owner.key)
            for holding in allocation.holdings if allocation is not None else ():
                gave |= holding.cpus
        return gave

    def _updates(self) -> tuple[CpusetUpdate, ...]:
        """Return updates for the containers that have other CPUs than they should, or may have."""
        ownership = self._ownership()
        updates: list[CpusetUpdate] = []
        for container_id, pinned in sorted(self._containers.items()):
            wanted = cpuset_of(pinned.container.cdi_devices, self._given(pinned), ownership)
            if not pinned.is_started or wanted is None:
                continue
            if not pinned.is_confirmed or pinned.may_have(ownership.online) != wanted.cpus:
                updates.append(CpusetUpdate(container_id=container_id, cpus=wanted.cpus, mems=wanted.mems))
        return tuple(updates)

    def _due(self, urgent: CpuSet = _NONE) -> tuple[CpusetUpdate, ...]:
        """Return the updates that are due. A container that could not be changed waits, unless it
        may run on CPUs that are needed now.
        """
        now_s, online = self._clock.monotonic(), self._ownership().online
        return tuple(
            update
            for update in self._updates()
            for pinned in [self._containers[update.container_id]]
            if pinned.next_try_s <= now_s or not pinned.may_have(online).isdisjoint(urgent)
        )

    async def _apply(self, urgent: CpuSet = _NONE) -> None:
        """Have the runtime change what differs.

        Errors: raises PeerUnavailable when it does not answer, ContractError that names each
        container that still runs and could not be changed.
        """
        async with self._turn:
            updates = self._due(urgent)
            failed = await self._send(updates) if updates else {}
            if len(failed) < len(updates):
                get_logger().info(
                    "cpusets.updated", containers=len(updates) - len(failed), shared=str(self._ownership().shared)
                )
            still = [(self._containers[name], why) for name, why in sorted(failed.items()) if name in self._containers]
            if still:
                raise ContractError(
                    "; ".join(
                        f"the container runtime could not change the CPUs of {pinned}: {why}" for pinned, why in still
                    )
                )
            if not self._updates():
                self._trouble = ""

    async def _send(self, updates: Sequence[CpusetUpdate]) -> dict[str, str]:
        """Have containers changed, together and, where that fails, one by one.

        Returns the reason of each failure, by container.

        Errors: raises PeerUnavailable when the connection ends.
        """
        by_id = {update.container_id: self._containers[update.container_id] for update in updates}
        for update in updates:
            by_id[update.container_id].doubt(update.cpus)
        failed: dict[str, str] = {}
        together = [update for update in updates if not by_id[update.container_id].trouble]
        alone = [update for update in updates if by_id[update.container_id].trouble]
        try:
            refused = await self._runtime.update(together, _TOGETHER_S) if together else ()
        except (PeerUnavailable, ContractError) as err:
            if not self._runtime.is_ready:
                raise
            if len(together) == 1:
                failed[together[0].container_id] = str(err)
            else:
                alone = [*together, *alone]
        else:
            failed |= dict.fromkeys(refused, "it refuses")
            for update in together:
                if update.container_id not in failed:
                    by_id[update.container_id].confirm(update.cpus)
        silent = 0
        for update in alone:
            pinned = by_id[update.container_id]
            if silent >= _MOST_SILENT:
                failed[update.container_id] = "the container runtime does not answer"
                continue
            try:
                refused = await self._runtime.update([update], _ALONE_S)
            except (PeerUnavailable, ContractError) as err:
                if not self._runtime.is_ready:
                    raise
                failed[update.container_id] = str(err)
                silent += isinstance(err, PeerUnavailable)
                continue
            silent = 0
            if refused:
                failed[update.container_id] = "it refuses"
            else:
                pinned.confirm(update.cpus)
        for container_id, why in failed.items():
            if container_id in by_id:
                by_id[container_id].trouble = why
                by_id[container_id].put_off(self._clock.monotonic())
        return failed

    # Reading the kernel's cpusets.

    async def _keep_looking(self) -> None:
        """Compare the promised CPUs with the kernel's cpusets until cancelled: every few seconds,
        and at once after either side was restarted.
        """
        while True:
            await is_set_within(self._look_now, self._clock.timeout(_LOOK_S))
            self._look_now.clear()
            if self._runtime.is_ready:
                await self._look()

    async def _look(self) -> None:
        """Compare once.

        From then on a differing container counts as having the kernel's CPUs, so that it is
        corrected.
        """
        # The lock ensures that no update is running meanwhile.
        async with self._turn:
            suspects = await self._differing(self._containers)
            if suspects:
                await self._clock.sleep(_SECOND_LOOK_S)
            for container_id, cpus in (await self._differing(suspects) if suspects else {}).items():
                pinned = self._containers[container_id]
                self._note_difference(pinned, cpus)
                pinned.confirm(cpus)
                self._changed.set()

    async def _differing(self, containers: Iterable[str]) -> dict[str, CpuSet]:
        """Read from the kernel the CPUs of running containers that were promised some.

        Returns, by container, the CPUs of those that have others.
        """
        groups = {
            container_id: pinned.container.control_group
            for container_id in containers
            if (pinned := self._containers.get(container_id)) is not None
            and pinned.is_started
            and pinned.container.control_group
        }
        seen = await self._kernel.read(groups) if groups else {}
        self.reports.note_unseen(
            ""
            if seen or not groups
            else f"none of {len(groups)} containers has its control group below {self._kernel.where}"
        )
        ownership = self._ownership()
        differing: dict[str, CpuSet] = {}
        for container_id, cpus in seen.items():
            pinned = self._containers.get(container_id)
            if pinned is None or not pinned.is_confirmed:
                continue
            # CPUs outside the inventory do not matter, nor does a parent that narrows a cpuset that
            # was never set.
            here = cpus & ownership.online
            if pinned.applied is not None and here != pinned.may_have(ownership.online) & ownership.online:
                differing[container_id] = here
        return differing

    def _note_difference(self, pinned: _Pinned, has: CpuSet, *, only_shared: bool = False) -> None:
        """Remember that a container has other CPUs than it should, until a correction was tried."""
        ownership = self._ownership()
        wanted = cpuset_of(pinned.container.cdi_devices, self._given(pinned), ownership)
        if wanted is None:
            return
        claims: list[ClaimEntry] = []
        shared = CpuSet()
        for entry in self._entries():
            common = entry.own_cpus & (has - wanted.cpus)
            if entry.is_running and common:
                claims.append(entry)
                shared |= common
        if only_shared and not claims:
            return
        names = {name for entry in claims for name in _brought(entry)}
        owners = {
            other.sandbox.id: other.sandbox
            for other in self._containers.values()
            if names & {*other.container.cdi_devices}
        }
        self._found[pinned.container.id] = CpuDifference(
            sandbox=pinned.sandbox,
            container=pinned.container.name,
            has=has,
            wanted=wanted.cpus,
            claims=tuple(entry.claim.owner for entry in claims),
            sandboxes=tuple(owners.values()),
            shared=shared,
        )

    def _troubled(self, why: str) -> None:
        """Log once why containers lack their CPUs, until the failure ends or changes."""
        if why != self._trouble:
            self._trouble = why
            get_logger().warning(
                "cpusets.not-updated",
                error=why,
                next_step="look into the container runtime's log; it is tried again each few seconds",
            )

    async def _follow_state(self) -> None:
        """Check again whenever inventory or ledger has changed: a CPU went offline, or kubelet's
        manager gave one away.
        """
        while True:
            tickets = (self._state.changed.ticket(), self._state.ledger_changed.ticket())
            self._changed.set()
            await first_of(tickets)


def _nobodys(sandbox_id: str) -> Sandbox:
    """Return a stand-in for a sandbox that the runtime did not list."""
    return Sandbox(id=sandbox_id, uid="", namespace="?", name=sandbox_id[:12])


def _brought(entry: ClaimEntry) -> Mapping[str, Cpuset]:
    """Return a claim's exclusive CPUs, by CDI device.

    Devices with admin access are left out, because they take no CPUs from other containers.
    """
    if entry.cdi is None:
        return {}
    own = {cdi_device_name(entry.uid, device.device) for device in entry.devices if not device.is_shared}
    return {
        device.name: device.edits.cpuset
        for device in entry.cdi.devices
        if device.name in own and device.edits.cpuset is not None
    }
