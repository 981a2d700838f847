"""Gives containers their CPUs through the container runtime, and all others the shared pool.

The pool shrinks while a claim is being prepared, before any container of its pod exists, and
kubelet gets its answer only when the runtime has changed every container that runs: a CPU is nobody
else's by then. It grows as soon as the claim is unprepared. What is wanted is worked out anew from
checkpoint, ledger and inventory each time and compared with what each container was given, so a
restart of the gateway or of the runtime begins with the same answer.

What a container has is what was confirmed last. A runtime changes nothing but its own notes of
a container that is being started, so such a container is changed when it runs, and a claim
waits for it; after an error or no answer a container may have what it had, or what was sent,
until an update of it is confirmed. And the kernel is asked every few seconds: what differs
there is put right, told and counted.

Flows in: events of the runtime, prepared claims, the ledger, the cpu inventory, the kernel's
cpusets. Flows out: cpusets of new containers, updates of those that run, differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from msgspec import Struct, structs

from topobus.gateway.claims.checkpoint import ClaimEntry
from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.claims.rules.claim_cdi import cdi_device_name
from topobus.gateway.containers.kernel_cpusets import KernelCpusets
from topobus.gateway.containers.rules.cpusets import (
    ContainerCpuset,
    CpuDifference,
    CpuOwnership,
    cpuset_of,
    refuse_demand,
)
from topobus.gateway.containers.rules.exclusive import CPU_RESOURCE
from topobus.gateway.containers.values import CpusetUpdate, RunningContainer
from topobus.gateway.metrics import CpusetMetrics
from topobus.gateway.node_state import Broadcast, NodeState
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.cpu_groups import cpus_of
from topobus.values.edits import Cpuset
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal
from topobus.values.request import OwnerKind
from topobus.values.sandbox import Sandbox

__all__ = ["CpuPinning", "CpuReports"]

# Of a container that could not be changed, doubled each time: an update that hangs keeps containerd
# from making any container meanwhile.
_RETRY_S, _LONGEST_RETRY_S = 1.0, 10.0
# A container is made and started within a second; of one that cannot be started the runtime
# tells nothing before it is removed.
_START_S = 20.0
# The runtime answers within milliseconds; kubelet's unprepare must not wait for one that hangs.
_GROWTH_S = 0.5
# Of a call for all containers, and of one for a container alone, to find the one that hangs.
# The runtime makes no container meanwhile: alone as long as containerd lets all wait for a
# plugin (plugin_request_timeout, 2 s as shipped), together what a hundred containers need at
# some tens of milliseconds each.
_TOGETHER_S, _ALONE_S = 5.0, 2.0
# After so many without an answer it is the runtime that hangs.
_MOST_SILENT = 3
# Between two looks at the kernel; and until a difference is believed, for kubelet's updates are
# heard of before the runtime has done them.
_LOOK_S, _SECOND_LOOK_S = 3.0, 0.5
_NONE = CpuSet()


class _Pinned(Struct, kw_only=True):
    """A container that is there."""

    container: RunningContainer
    sandbox: Sandbox
    given: CpuSet | None
    """What kubelet asked for; None: nothing, or it is not known any more."""
    applied: CpuSet | None
    """What it was made with, or was confirmed last; None: nothing, it has those of its parent,
    which are all."""
    sent: CpuSet = CpuSet()
    """What it was sent since, and nobody has confirmed: it may have that instead."""
    is_confirmed: bool = True
    is_started: bool = True
    """False: no update counts yet."""
    made_s: float = 0.0
    """When it began to be made, by the clock."""
    is_overdue: bool = False
    """Its start took so long that claims do not wait for it any more."""
    trouble: str = ""
    """Why it could not be changed the last time; it is changed alone then, so that it stands in
    nobody's way."""
    pause_s: float = 0.0
    next_try_s: float = 0.0

    def confirm(self, cpus: CpuSet) -> None:
        """Note what it has."""
        self.applied, self.sent, self.is_confirmed = cpus, CpuSet(), True
        self.trouble, self.pause_s, self.next_try_s = "", 0.0, 0.0

    def doubt(self, cpus: CpuSet) -> None:
        """Note that it may have other CPUs soon."""
        self.sent |= cpus
        self.is_confirmed = False

    def put_off(self, now_s: float) -> None:
        """Have it wait for its next try."""
        self.pause_s = min(2 * self.pause_s or _RETRY_S, _LONGEST_RETRY_S)
        self.next_try_s = now_s + self.pause_s

    def may_have(self, online: CpuSet) -> CpuSet:
        """List the CPUs that it may run on."""
        return (online if self.applied is None else self.applied) | self.sent

    def __str__(self) -> str:
        return f"container {self.container.name} of pod {self.sandbox} ({self.container.id[:12]})"


class CpuReports(Protocol):
    """Hears of containers that were found on wrong CPUs."""

    def cpus_differed(self, difference: CpuDifference) -> None:
        """Tell it to whom it concerns; no call waits."""
        ...


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

    async def update(self, updates: Sequence[CpusetUpdate], within_s: float) -> tuple[str, ...]:
        """Change containers; gives the ids of those that could not be changed.

        Errors: raises PeerUnavailable when there is no connection, or no answer,
        ContractError for a refusal: all or a part of it may have been done. Must not be
        called from a handler of events.
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
        kernel: KernelCpusets,
        reports: CpuReports,
        metrics: CpusetMetrics,
        tell_unseen: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the runtime, the CPUs that may be given (None: all), where claims stand that are
        prepared, who tells what kubelet's CPU manager may give, and what the kernel says.

        `tell_unseen` hears why the kernel cannot be asked; nothing when it can.
        """
        self._kernel = kernel
        self._reports = reports
        self._metrics = metrics
        self._tell_unseen = tell_unseen
        self.unseen = ""
        """Why the kernel's cpusets cannot be read; empty while they can, or need not."""
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
        self._started = Broadcast()
        """A container runs, or is gone."""
        self._settled = Broadcast()
        """What was wanted has been tried."""
        self._look_now = asyncio.Event()
        self._found: dict[str, CpuDifference] = {}
        """By container: what is to be told as soon as it was tried to put it right."""
        self._turn = asyncio.Lock()
        self._trouble = ""
        """Why the runtime did not take the last update, as it was said."""

    async def run(self) -> None:
        """Keep the sets right, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_state())
            group.create_task(self._keep_looking())
            while True:
                self._changed.clear()
                # Else `synchronize` begins anew with what is wanted then.
                pause_s = await self._catch_up() if self._runtime.is_ready else None
                self._settled.announce()
                try:
                    async with self._clock.timeout(pause_s):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _catch_up(self) -> float | None:
        """Put right what is different; gives when to try again, None: when something changes."""
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
            self._tell_difference(
                structs.replace(difference, error="" if is_right else error or "tried again each few seconds")
            )
        waiting = [self._containers[update.container_id].next_try_s for update in self._updates()]
        return max(0.0, min(waiting) - self._clock.monotonic()) if waiting else None

    @asynccontextmanager
    async def promising(self, entry: ClaimEntry) -> AsyncIterator[Refusal | None]:
        """Take a claim's CPUs from all containers that run, and hold them until the checkpoint has
        the claim.

        None of the runtime's doing for a claim without CPUs.

        Errors: raises PeerUnavailable when the runtime cannot be told: a claim that needs it must
        wait or fail; ContractError when a container may run on these CPUs still, by name.
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
        """Say whether a claim brings CPUs for its containers alone."""
        return bool(_brought(entry))

    async def released(self) -> None:
        """Hear that a claim was unprepared, and have the runtime give its CPUs to everybody before
        kubelet has its answer, unless that takes long: then a moment later.
        """
        self._changed.set()
        if not self._runtime.is_ready:
            return
        try:
            async with asyncio.timeout(_GROWTH_S):
                while True:
                    ticket = self._settled.ticket()
                    if not self._due():
                        return
                    await ticket.wait()
        except TimeoutError:
            # The call goes on, and nothing is wrong: nobody is promised more than that it comes.
            get_logger().debug("cpusets.growing", waited_s=_GROWTH_S)

    async def _take(self, cpus: CpuSet) -> None:
        """Have no other container run on CPUs that were promised.

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
        """Wait until containers run that are being made or started with CPUs that were promised
        since.

        False: there was none. One whose start does not end is not waited for any
        longer: it may have failed, of which the runtime tells nothing. Should it run
        after all, it is changed then.
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
            try:
                async with self._clock.timeout(min(left_s)):
                    await ticket.wait()
            except TimeoutError:
                continue

    def _others_on(self, cpus: CpuSet) -> list[_Pinned]:
        """List containers that may run on CPUs that are not for them, by their ids."""
        ownership = self._ownership()
        others: list[_Pinned] = []
        for _, pinned in sorted(self._containers.items()):
            wanted = cpuset_of(pinned.container.cdi_devices, pinned.given, ownership)
            is_its_own = wanted is not None and not wanted.cpus.isdisjoint(cpus)
            if not is_its_own and not pinned.may_have(ownership.online).isdisjoint(cpus):
                others.append(pinned)
        return others

    # What the runtime tells.

    def synchronize(
        self, sandboxes: Sequence[Sandbox], containers: Sequence[RunningContainer]
    ) -> Sequence[CpusetUpdate]:
        """Begin anew with what is there."""
        former_containers, by_id = self._containers, {sandbox.id: sandbox for sandbox in sandboxes}
        self._containers = {}
        for container in containers:
            former = former_containers.get(container.id)
            given = former.given if former is not None else self._of_kubelet(container)
            sandbox = by_id.get(container.sandbox_id, _nobodys(container.sandbox_id))
            pinned = _Pinned(
                container=container,
                sandbox=sandbox,
                given=given,
                applied=container.cpus,
                made_s=self._clock.monotonic(),
            )
            if not container.is_started:
                # What its start has read may be older than what is shown.
                pinned.applied, pinned.is_confirmed, pinned.is_started = None, False, False
            self._containers[container.id] = pinned
        self._started.announce()
        updates = self._updates()
        for update in updates:
            pinned = self._containers[update.container_id]
            # What started while nobody was here has all CPUs, a claim's, too.
            self._note_difference(pinned, pinned.may_have(self._ownership().online), only_shared=True)
            # The runtime says nothing of those that fail, so each is sent once more.
            pinned.doubt(update.cpus)
        self._changed.set()
        self._look_now.set()
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
        for former_id, former in tuple(self._containers.items()):
            # Kubelet makes a container anew when it has ended, or could not be started.
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
        """Update it from now on: what changed while it was being made
        and started is made up for.
        """
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
        """Keep a container's CPUs when kubelet changes something of it."""
        pinned = self._containers.get(container.id)
        if pinned is None:
            return None
        if asked is not None:
            pinned.given = asked
        cpuset = cpuset_of(container.cdi_devices, pinned.given, self._ownership())
        if cpuset is not None:
            # Nobody says what became of it, so it is sent once more.
            pinned.doubt(cpuset.cpus)
            self._changed.set()
        return cpuset

    def container_ended(self, container_id: str) -> None:
        """Forget it."""
        self._containers.pop(container_id, None)
        self._started.announce()

    def sandbox_stopped(self, sandbox_id: str) -> None:
        """Forget all that was in it: of a container that could not be started nothing else is told
        for long.
        """
        for container_id, pinned in tuple(self._containers.items()):
            if pinned.sandbox.id == sandbox_id:
                self.container_ended(container_id)

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
        online = (
            CpuSet.of(cpu for device in inventory.devices for cpu in cpus_of(device))
            if inventory is not None
            else CpuSet()
        )
        return CpuOwnership(
            online=online, owned=self._owned, claims=claims, running=running, kubelet=CpuSet.of(kubelet)
        )

    def _of_kubelet(self, container: RunningContainer) -> CpuSet | None:
        """Say what kubelet's CPU manager gave to a container that was there before us.

        None when it had its CPUs from the shared pool.
        """
        if container.cpus is not None and container.cpus <= self._ownership().kubelet:
            return container.cpus
        return None

    def _updates(self) -> tuple[CpusetUpdate, ...]:
        """List the containers that have other CPUs than they should, or may have."""
        ownership = self._ownership()
        updates: list[CpusetUpdate] = []
        for container_id, pinned in sorted(self._containers.items()):
            wanted = cpuset_of(pinned.container.cdi_devices, pinned.given, ownership)
            if not pinned.is_started or wanted is None:
                continue
            if not pinned.is_confirmed or pinned.may_have(ownership.online) != wanted.cpus:
                updates.append(CpusetUpdate(container_id=container_id, cpus=wanted.cpus, mems=wanted.mems))
        return tuple(updates)

    def _due(self, urgent: CpuSet = _NONE) -> tuple[CpusetUpdate, ...]:
        """List those whose time has come: one that could not be changed waits, unless it may be on
        CPUs that are wanted now.
        """
        now_s, online = self._clock.monotonic(), self._ownership().online
        return tuple(
            update
            for update in self._updates()
            for pinned in [self._containers[update.container_id]]
            if pinned.next_try_s <= now_s or not pinned.may_have(online).isdisjoint(urgent)
        )

    async def _apply(self, urgent: CpuSet = _NONE) -> None:
        """Have the runtime change what is different.

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

        Gives why not, by container.

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

    # What the kernel says.

    async def _keep_looking(self) -> None:
        """Compare what was promised with what the kernel says, for ever: every few seconds, and at
        once when one side has begun anew.
        """
        while True:
            try:
                async with self._clock.timeout(_LOOK_S):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()
            if self._runtime.is_ready:
                await self._look()

    async def _look(self) -> None:
        """Look once.

        What differs counts as what the kernel says from then on, so that it is put right.
        """
        # No update of ours is on its way meanwhile.
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
        """Ask the kernel for containers that run and were promised something.

        Gives what those have that have something else.
        """
        groups = {
            container_id: pinned.container.control_group
            for container_id in containers
            if (pinned := self._containers.get(container_id)) is not None
            and pinned.is_started
            and pinned.container.control_group
        }
        seen = await self._kernel.read(groups) if groups else {}
        self._note_unseen(
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
            # What the machine has besides is nobody's business here, nor how a
            # parent narrows what was never set.
            here = cpus & ownership.online
            if pinned.applied is not None and here != pinned.may_have(ownership.online) & ownership.online:
                differing[container_id] = here
        return differing

    def _note_unseen(self, why: str) -> None:
        if why == self.unseen:
            return
        self.unseen = why
        if why:
            step = (
                "mount the node's /sys/fs/cgroup read-only below the gateway's setting hardware.root "
                "(docs/how-to/exclusive-cpus.md)"
            )
            get_logger().warning("cpusets.unseen", why=why, next_step=step)
        self._tell_unseen(why)

    def _note_difference(self, pinned: _Pinned, has: CpuSet, *, only_shared: bool = False) -> None:
        """Remember that a container has other CPUs than it should, until that was put right."""
        ownership = self._ownership()
        wanted = cpuset_of(pinned.container.cdi_devices, pinned.given, ownership)
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
            claims=tuple(ClaimKey(namespace=entry.namespace, name=entry.name, uid=entry.uid).owner for entry in claims),
            sandboxes=tuple(owners.values()),
            shared=shared,
        )

    def _tell_difference(self, difference: CpuDifference) -> None:
        self._metrics.differences.labels("shared" if difference.claims else "own").inc()
        get_logger().warning(
            "cpuset.differed",
            pod=str(difference.sandbox),
            container=difference.container,
            has=str(difference.has),
            wanted=str(difference.wanted),
            claims=[f"{claim.namespace}/{claim.name}" for claim in difference.claims],
            error=difference.error,
            next_step="find out what else changes cpusets on this node, what keeps the gateway away, or why a start "
            "takes so long"
            if not difference.error
            else "look into the container runtime's log",
        )
        self._reports.cpus_differed(difference)

    def _troubled(self, why: str) -> None:
        """Say once why containers have not the CPUs that they should have, until it is over or
        something else.
        """
        if why != self._trouble:
            self._trouble = why
            get_logger().warning(
                "cpusets.not-updated",
                error=why,
                next_step="look into the container runtime's log; it is tried again each few seconds",
            )

    async def _follow_state(self) -> None:
        """Look again whenever inventory or ledger has changed: a CPU went offline, or kubelet's
        manager gave one away.
        """
        while True:
            tickets = (self._state.changed.ticket(), self._state.ledger_changed.ticket())
            self._changed.set()
            waiting = [asyncio.ensure_future(ticket.wait()) for ticket in tickets]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiter in waiting:
                    waiter.cancel()


def _nobodys(sandbox_id: str) -> Sandbox:
    """Stand for a sandbox that the runtime did not show."""
    return Sandbox(id=sandbox_id, uid="", namespace="?", name=sandbox_id[:12])


def _brought(entry: ClaimEntry) -> Mapping[str, Cpuset]:
    """Name what a claim brings for itself by CDI device.

    What it only looks at (admin access) it does not take from anybody.
    """
    if entry.cdi is None:
        return {}
    own = {cdi_device_name(entry.uid, device.device) for device in entry.devices if not device.is_shared}
    return {
        device.name: device.edits.cpuset
        for device in entry.cdi.devices
        if device.name in own and device.edits.cpuset is not None
    }
