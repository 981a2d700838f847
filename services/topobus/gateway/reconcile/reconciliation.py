"""Keeps the ledger equal to kubelet's PodResources: releases what no pod uses any more, adopts what
is in use and not in the ledger.

It also adopts exclusive CPUs and aligned memory that kubelet's own managers gave, and publishes an
event with both sides where the two disagree. The device plugin API has no deallocate call, so
releases are derived: an allocation is released when two listings, one period apart, show none of
its devices in use and the ledger had it at both. Two are needed because kubelet lists a pod only
some time after it has allocated for it. Without an answer nothing is released, and the list of a
kubelet that has just started is not used. What kubelet has not listed since its start stays held as
long as the cluster has its pod on this node: kubelet gives it the same devices from its checkpoint,
without a call, as soon as it hears of the pod. The list also does not count for a pod with a container
that has not ended (`live_containers`), because kubelet lists only active pods, and a pod that was
deleted by force is not active.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack

from prometheus_client import Gauge

from topobus.formats.messages.messages import Adopted, AdoptRequest, Disagreement
from topobus.gateway.asks import NodeAsks
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.containers.live_containers import why_lingering
from topobus.gateway.containers.rules.exclusive import CPU_RESOURCE, ExclusiveUse, idle_containers
from topobus.gateway.device_plugins.device_plugin import plugin_owner
from topobus.gateway.device_plugins.pod_resources import Listing
from topobus.gateway.device_plugins.rules.holdings import idle_allocations
from topobus.gateway.device_plugins.rules.replicas import chosen_of
from topobus.gateway.device_plugins.sockets import identity
from topobus.gateway.node_state import NodeState
from topobus.gateway.reconcile.pod_usage import PodLook
from topobus.gateway.reconcile.rules.pods import Lacking
from topobus.gateway.reconcile.user_naming import UserNaming
from topobus.process.broadcast import first_of
from topobus.process.heartbeat import Heartbeat
from topobus.process.logging import get_logger
from topobus.values.device_sharing import HeldShare
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["Reconciler"]

# Seconds between two checks while a claim waits: two checks and a retry of kubelet should fit into
# three seconds.
_AWAITED_S = 0.5

_Mark = tuple[str, str, int]
"""Distinguishes an allocation from a later one of the same devices."""


class Reconciler:
    """Compares PodResources with the ledger, period after period."""

    def __init__(
        self,
        usage: PodLook,
        state: NodeState,
        asks: NodeAsks,
        deadlines: DeadlineSettings,
        users: UserNaming,
        count: Gauge,
        may_run: Callable[[Owner], Awaitable[bool]] | None = None,
    ) -> None:
        """`count` has the number of disagreements. `may_run` returns whether the cluster has a pod on
        this node that has not ended; None: there is no cluster.
        """
        self._may_run = may_run
        self._usage = usage
        self._users = users
        self._count = count
        self._socket = usage.socket
        self._doubted: frozenset[Disagreement] = frozenset()
        self._disagreed: frozenset[Disagreement] = frozenset()
        self._failed: dict[str, str] = {}
        self._state = state
        self._asks = asks
        self._deadlines = deadlines
        self._kubelet: tuple[int, int, int] | None = None
        self._appeared_at = 0.0
        self._used: set[_Mark] = set()
        """Allocations that this kubelet has listed."""
        users.on_listing = self._note_listed

    async def run(self, beat: Heartbeat) -> None:
        """Check until cancelled. Nothing happens where kubelet has no such socket."""
        self._kubelet, self._appeared_at = identity(self._socket), asyncio.get_running_loop().time()
        idle_before: frozenset[_Mark] = frozenset()
        lacking_before: list[Lacking | ExclusiveUse] = []
        while True:
            beat.rest()
            await self._pause()
            beat.turn()
            self._detect_kubelet_restart()
            seen = await self._usage.compare_with_ledger()
            if isinstance(seen, str) or self._state.ledger is None or not self._state.is_connected:
                idle_before, lacking_before = frozenset(), []
                continue
            listing, comparison = seen
            await self._users.name(listing)
            await self._report(frozenset(comparison.disagreements))
            lacking: list[Lacking | ExclusiveUse] = [*comparison.lacking, *comparison.exclusive]
            for lack in sorted((lack for lack in lacking if lack in lacking_before), key=lambda lack: lack.where):
                await (self._adopt(lack) if isinstance(lack, Lacking) else self._adopt_exclusive(lack))
            lacking_before = lacking
            idle = (
                *idle_allocations(self._state.ledger, listing.in_use),
                *idle_containers(self._state.ledger, listing.exclusive),
            )
            for allocation in idle:
                mark = self._mark(allocation)
                if mark in idle_before and await self._is_believed(mark, allocation, listing):
                    await self._release(allocation, mark)
            self._linger(idle)
            idle_before = frozenset(map(self._mark, idle))
            self._used = {
                mark
                for mark in map(self._mark, self._state.ledger.allocations.values())
                if mark in self._used or mark not in idle_before
            }

    async def _pause(self) -> None:
        """Wait for the next check.

        While a claim waits for what a pod has by kubelet's allocation, check frequently whether
        that pod is gone.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._deadlines.reconcile_s
        gone_before: frozenset[_Mark] = frozenset()
        while (left_s := until - loop.time()) > 0:
            awaited, ended = self._state.awaited_changed.ticket(), self._state.containers.changed.ticket()
            if self._state.awaited or self._state.lingering:
                await first_of([ended], min(left_s, _AWAITED_S))
                gone_before = await self._release_gone(gone_before)
                continue
            gone_before = frozenset()
            await first_of([awaited, self._state.lingering_changed.ticket()], left_s)

    async def _release_gone(self, gone_before: frozenset[_Mark]) -> frozenset[_Mark]:
        """Release awaited allocations whose pod kubelet has listed and no longer lists, in two
        checks in a row, and whose containers have ended.

        Returns the allocations that this check found gone. An allocation without a named pod may
        belong to a pod that is not listed yet, so it is left to the ordinary checks.
        """
        self._detect_kubelet_restart()
        listing = await self._usage.listing()
        ledger = self._state.ledger
        if isinstance(listing, str) or ledger is None or not self._state.is_connected:
            return frozenset()
        idle = {
            self._mark(idle_allocation): idle_allocation for idle_allocation in idle_allocations(ledger, listing.in_use)
        }
        gone = {
            mark: allocation
            for mark, allocation in idle.items()
            if allocation.user is not None
            and allocation.owner.key in self._state.awaited | self._state.lingering.keys()
        }
        self._note_listed(listing)
        for mark in sorted(gone.keys() & gone_before):
            if await self._is_believed(mark, gone[mark], listing):
                await self._release(gone[mark], mark)
        self._linger(idle.values())
        return frozenset(gone)

    def _linger(self, idle: Iterable[Allocation]) -> None:
        """Record which idle allocations have a container that has not ended."""
        self._state.linger(
            {
                allocation.owner.key: why
                for allocation in idle
                if (why := why_lingering(allocation, self._state.containers))
            }
        )

    def _detect_kubelet_restart(self) -> None:
        """Detect whether kubelet was started again."""
        if identity(self._socket) != self._kubelet:
            self._kubelet, self._appeared_at = identity(self._socket), asyncio.get_running_loop().time()
            self._used.clear()

    def _note_listed(self, listing: Listing) -> None:
        """Remember what kubelet lists, also when another part asked for it: a pod may have ended
        before the next check here, and its devices are free in spite of that.
        """
        self._detect_kubelet_restart()
        ledger = self._state.ledger
        if ledger is None or listing.kubelet != self._kubelet:
            return
        # By key: comparing each allocation with each idle one would grow with the square of a
        # node's pods.
        idle = {allocation.owner.key for allocation in idle_allocations(ledger, listing.in_use)}
        plugins = (
            (key, allocation)
            for key, allocation in ledger.allocations.items()
            if allocation.owner.kind is OwnerKind.DEVICE_PLUGIN
        )
        self._used |= {self._mark(allocation) for key, allocation in plugins if key not in idle}

    async def _is_believed(self, mark: _Mark, allocation: Allocation, listing: Listing) -> bool:
        """Return whether kubelet's list counts for an allocation. A kubelet that has just started
        lists no pods yet, so it must have listed this allocation before, or have run for a while and
        list its pod without it, or the cluster must not have that pod here.
        """
        if mark in self._used:
            return True
        if asyncio.get_running_loop().time() - self._appeared_at < self._deadlines.kubelet_grace_s:
            return False
        pod = allocation.user
        if self._may_run is None or pod is None or (pod.namespace, pod.name) in listing.pods:
            return True
        try:
            return not await self._may_run(pod)
        except TopobusError as err:
            self._note_failure(allocation.owner.key, "release.failed", str(err))
            return False

    def _mark(self, allocation: Allocation) -> _Mark:
        return (allocation.owner.key, allocation.decision_id, self._state.times_handed_out(allocation.owner))

    async def _adopt(self, lack: Lacking) -> None:
        """Record in the ledger what a container has without an owner, so that it stays taken."""
        claim, device_class = lack.claim, lack.device_class
        if claim is not None:
            owner, devices, shared, shares = claim.owner, claim.held, claim.by_share, claim.shares
        else:
            # Kubelet lists replicas, the ledger has devices.
            chosen = chosen_of(lack.devices, self._state.inventories().get(device_class))
            owner, devices = plugin_owner(lack.resource, lack.devices), {device_class: chosen.devices}
            shared = {device_class: tuple(chosen.shares)} if chosen.shares else {}
            shares = {device_class: chosen.shares} if chosen.shares else {}
        group_cpus = claim.group_cpus if claim is not None else {}
        request = AdoptRequest(
            op_id=f"reconcile-{uuid.uuid4().hex}",
            owner=owner,
            devices=devices,
            shared=shared,
            shares=shares,
            is_prepared=claim is not None,
            group_cpus={group: len(cpus) for group, cpus in group_cpus.items()},
            # CPUs are chosen only from those that the claim has, so it gets the CPUs again on which
            # its containers run.
            owned_cpus=CpuSet.of(cpu for cpus in group_cpus.values() for cpu in cpus),
        )
        adopted = await self._ask_to_adopt(request, lack.where)
        if adopted is None:
            return
        for name, names in devices.items():
            parts = dict.fromkeys(shared.get(name, ()), HeldShare()) | shares.get(name, {})
            self._state.hand_out(name, names, owner, adopted.ledger_sequence, parts)
        get_logger().warning(
            "holding.adopted",
            owner=owner.key,
            device_class=device_class,
            devices=list(lack.devices),
            kubelet=lack.where,
            ledger="free",
        )

    async def _adopt_exclusive(self, use: ExclusiveUse) -> None:
        """Record what kubelet's CPU and memory managers gave, so that alignment counts it."""
        devices = {CPU_RESOURCE: tuple(f"cpu-{cpu}" for cpu in use.cpus)} if use.cpus else {}
        request = AdoptRequest(
            op_id=f"reconcile-{uuid.uuid4().hex}",
            owner=use.owner,
            devices=devices,
            memory=use.memory,
            container=use.container,
        )
        adopted = await self._ask_to_adopt(request, use.where)
        if adopted is None:
            return
        if devices:
            self._state.hand_out(CPU_RESOURCE, devices[CPU_RESOURCE], use.owner, adopted.ledger_sequence)
        get_logger().info(
            "container.adopted",
            owner=use.owner.key,
            cpus=str(use.cpus),
            memory_bytes=sum(memory_block.size_bytes for memory_block in use.memory),
        )

    async def _ask_to_adopt(self, request: AdoptRequest, where: str) -> Adopted | None:
        """Adopt. None when it failed, which is logged once. It is tried again at each check."""
        try:
            adopted = await self._asks.adopt(request)
        except TopobusError as err:
            why = str(err)
        else:
            if not isinstance(adopted, Refusal):
                return adopted
            why = adopted.why
        self._note_failure(request.owner.key, "holding.adopt-failed", why, kubelet=where)
        return None

    def _note_failure(self, owner: str, event: str, why: str, **facts: str) -> None:
        """Log what failed for an owner, once until it is another reason."""
        if self._failed.get(owner) != why:
            self._failed[owner] = why
            get_logger().warning(event, owner=owner, error=why, **facts)

    async def _report(self, disagreements: frozenset[Disagreement]) -> None:
        """Report each disagreement once, when it is seen at a second check.

        One that ends and comes again is reported again.
        """
        self._disagreed = disagreements & (self._doubted | self._disagreed)
        self._doubted = disagreements
        self._count.set(len(self._disagreed))
        await self._asks.disagreements.publish(self._disagreed, disagreements)

    async def _release(self, allocation: Allocation, mark: _Mark) -> None:
        """Have the devices cleaned, and then release them. In this order a crash in between leaves
        them held, and the next check does it again.
        """
        async with AsyncExitStack() as turns:
            for device_class in sorted({name for holding in allocation.holdings for name in holding.devices}):
                await turns.enter_async_context(self._state.hand_overs.of(device_class))
            # Kubelet may have allocated the same devices again meanwhile, for the same owner. Only
            # the allocation that was checked may be released.
            if self._mark(allocation) != mark or why_lingering(allocation, self._state.containers):
                return
            try:
                refusal = await self._undo(allocation)
                if refusal is not None:
                    get_logger().warning("release.refused", owner=allocation.owner.key, error=refusal.why)
                    return
                await self._asks.release(f"reconcile-{uuid.uuid4().hex}", allocation.owner, only=allocation.decision_id)
            except TopobusError as err:
                get_logger().warning("release.failed", owner=allocation.owner.key, error=str(err))
            else:
                get_logger().info(
                    "allocation.released", owner=allocation.owner.key, why="kubelet lists no pod that has it"
                )

    async def _undo(self, allocation: Allocation) -> Refusal | None:
        """Report to device services which of their devices and replicas are no longer held.

        Devices of which others have a share in another way are left unchanged.
        Errors: raises PeerUnavailable.
        """
        ledger = self._state.ledger
        if allocation.owner.kind is not OwnerKind.DEVICE_PLUGIN or ledger is None:
            return None
        others = [other for key, other in ledger.allocations.items() if key != allocation.owner.key]
        for device_class in sorted(
            self._state.inventories().keys() & {name for holding in allocation.holdings for name in holding.devices}
        ):
            names = _devices(allocation, device_class) - set().union(
                *(_devices(other, device_class) for other in others)
            )
            names |= {name for holding in allocation.holdings for name in holding.shares.get(device_class, {})}
            if names and self._state.silent_since(device_class):
                raise PeerUnavailable(
                    f"the {device_class} service has not answered since {self._state.silent_since(device_class)}"
                )
            if names:
                op_id = f"reconcile-{uuid.uuid4().hex}"
                refusal = await self._asks.unprepare(op_id, allocation.owner, device_class, sorted(names))
                if refusal is not None:
                    return refusal
        return None


def _devices(allocation: Allocation, device_class: str) -> set[str]:
    return {name for holding in allocation.holdings for name in holding.devices.get(device_class, ())}
