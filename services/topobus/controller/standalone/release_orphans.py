"""Releases holdings of claims and pods that were deleted in spite of their finalizers.

Their devices are quarantined until the node has released them. An owner is an orphan only on
evidence: it was seen here and deleted, the store's history has it, or its name belongs to another
object now. Owners that were never stored here (pods of `topobus place`, a cluster's claims) are
left alone. The node decides: it refuses while a container may be using the devices.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from topobus.controller.commit.allocator import Allocator
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.commit.ledger_releases import UnderWay
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.inventory_slices import holders_from_ledger
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.objects import metadata_of, placed_uid
from topobus.formats.messages import catalogue
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Again, Done, Result, WorkQueue
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.outcome import refuse
from topobus.values.request import Owner, OwnerKind

__all__ = ["OrphanedAllocations"]

# Deleted owners remembered besides those that a ledger names: a ledger's copy may be behind. For
# older ones the store's own history has the answer.
_MOST_REMEMBERED = 4096

_SHOWN = 16

_KINDS = {OwnerKind.CLAIM: "resourceclaim", OwnerKind.POD: "pod"}
_OWNER_KINDS = {"ResourceClaim": OwnerKind.CLAIM, "Pod": OwnerKind.POD}


class OrphanedAllocations:
    """Finds holdings without an object, and releases them at their nodes."""

    def __init__(
        self,
        settings: ControllerSettings,
        runtime: Runtime,
        state: StandaloneState,
        allocator: Allocator,
        metrics: ControllerMetrics,
        ledgers: NodeLedgers,
        queue: WorkQueue,
    ) -> None:
        self._ledgers = ledgers
        self._queue = queue
        self._settings = settings
        self._runtime = runtime
        self._bus = runtime.bus
        self._state = state
        self._allocator = allocator
        self._metrics = metrics
        self._evidence = 0
        """Grows with each event that may make an orphan of any holding: then each ledger is
        searched again."""
        self._gone: set[str] = set()
        self._foreign: dict[str, Owner] = {}
        self._found: dict[str, dict[str, Owner]] = {}
        self._reported: dict[str, str] = {}
        self._decisions = DecisionPublisher(runtime.bus, runtime.clock)
        self._log = get_logger()

    def note(self, gone: Stored) -> None:
        """Record that an object was deleted: the ledgers are searched again for its holdings."""
        kind = _OWNER_KINDS.get(gone.value.kind)
        if kind is not None:
            metadata = metadata_of(gone.value)
            self._gone.add(gone.uid)
            # It was stored here: an object that the store lost has been restored since, and
            # deleted.
            owner = Owner(kind=kind, namespace=metadata.namespace or "default", name=metadata.name, uid=gone.uid)
            self._foreign.pop(owner.key, None)
            self._evidence += 1

    def clear_conclusions(self) -> None:
        """Drop all conclusions from the store: it was lost, so a missing object proves
        nothing now.
        """
        self._evidence += 1
        self._gone.clear()
        self._foreign.clear()

    async def reconcile_all(self) -> None:
        """Search the ledgers that changed, and release orphans."""
        self._doubt_replaced()
        for node, ledger in sorted(self._state.ledgers.items()):
            version = (ledger.epoch, ledger.sequence, self._evidence)
            if self._queue.is_ready(node, version):  # most are not: the work is created only for those that are
                await self._queue.run(
                    node, version, partial(self._find_in_ledger, node, ledger, Done(version)), name=f"ledger {node}"
                )
        self._found = {node: owners for node, owners in self._found.items() if owners and node in self._state.ledgers}
        self._show()
        for node, owners in sorted(self._found.items()):
            for owner in tuple(owners.values()):
                key = (node, owner.key)
                await self._queue.run(
                    key, self._state.ledgers[node].sequence, partial(self._release, node, owner), name=owner.key
                )
        held = {key for owners in self._found.values() for key in owners}
        self._reported = {key: why for key, why in self._reported.items() if key in held}
        self._metrics.quarantined.set(len(held))
        self._queue.keep(
            {*self._state.ledgers, *((node, key) for node, owners in self._found.items() for key in owners)}
        )
        self._drop_unnamed()

    async def _find_in_ledger(self, node: str, ledger: Ledger, done: Done) -> Done:
        """Find the orphans of one ledger."""
        foreign_before = set(self._foreign)
        self._found[node] = await self._orphans_in(ledger)
        self._report_foreign(node, ledger, self._foreign.keys() - foreign_before)
        return done

    def _doubt_replaced(self) -> None:
        """Search again for holders whose name belongs to an object now: one that the store lost was
        applied again. A pod of `topobus place` is no object, whatever has its name.
        """
        replaced = [
            key
            for key, owner in self._foreign.items()
            if ObjectKey(_KINDS[owner.kind], owner.namespace, owner.name) in self._state.objects
            and owner.uid != placed_uid(owner.namespace, owner.name)
        ]
        for key in replaced:
            del self._foreign[key]
        self._evidence += bool(replaced)

    def _report_foreign(self, node: str, ledger: Ledger, keys: Collection[str]) -> None:
        """Warn of newly found holders that have no object here. If an older copy of the store was
        restored, objects applied since are missing, and their devices stay held.
        """
        owners = [ledger.allocations[key].owner for key in sorted(keys) if key in ledger.allocations]
        lost = [
            str(owner)
            for owner in owners
            if owner.kind is not OwnerKind.POD or owner.uid != placed_uid(owner.namespace, owner.name)
        ]
        if lost:
            step = (
                "`topobus apply -f` their manifests restores them, `topobus release claim|pod NAMESPACE/NAME` "
                "frees what they hold"
            )
            self._log.warning("holders.without-object", of=node, count=len(lost), owners=lost[:_SHOWN], next_step=step)

    @property
    def conclusion_count(self) -> int:
        """Count the owners with a conclusion."""
        return len(self._gone) + len(self._foreign)

    def _drop_unnamed(self) -> None:
        """Drop the conclusions on owners that no ledger names, for objects come and go for
        years.
        """
        if self.conclusion_count > _MOST_REMEMBERED:
            named = [
                allocation.owner
                for ledger in self._state.ledgers.values()
                for allocation in ledger.allocations.values()
            ]
            self._gone &= {owner.uid for owner in named}
            keys = {owner.key for owner in named}
            self._foreign = {key: owner for key, owner in self._foreign.items() if key in keys}

    def _show(self) -> None:
        """Set the reason for which each quarantined device is not allocated."""
        shown = {}
        for node, owners in self._found.items():
            ledger = self._state.ledgers[node]
            for device, owner in holders_from_ledger(ledger, self._state.cpu_devices(node)).items():
                if owner.key in owners:
                    shown[device] = f"quarantined: {owner} was deleted by force, and node {node} has not released it"
        self._allocator.quarantined = shown

    async def _orphans_in(self, ledger: Ledger) -> dict[str, Owner]:
        """List the owners in a ledger that are known to be gone.

        Errors: raises PeerUnavailable.
        """
        owners: dict[str, Owner] = {}
        for key, allocation in sorted(ledger.allocations.items()):
            owner = allocation.owner
            if owner.kind in _KINDS and key not in self._foreign and await self._is_gone(owner):
                owners[key] = owner
        if not owners:
            return {}
        # An object is deleted after its devices are released. A copy of the ledger that is behind
        # would show the opposite order.
        newest = await self._ledgers.read(ledger.node)
        return {key: owner for key, owner in owners.items() if newest is not None and key in newest.allocations}

    async def _is_gone(self, owner: Owner) -> bool:
        place = ObjectKey(_KINDS[owner.kind], owner.namespace, owner.name)
        stored = self._state.objects.get(place)
        if stored is not None and stored.uid == owner.uid:
            return False
        try:
            entry = await self._bus.get(catalogue.OBJECT, **place._asdict())
        except ContractError:
            return False  # the store has an object there that cannot be read: no evidence
        if entry is not None:
            return metadata_of(entry.value).uid != owner.uid
        if owner.uid in self._gone:
            return True
        past = await self._bus.history(catalogue.OBJECT, has_deleted=True, **place._asdict())
        if any(metadata_of(each_entry.value).uid == owner.uid for each_entry in past):
            self._gone.add(owner.uid)
            return True
        self._foreign[owner.key] = owner
        return False

    async def _release(self, node: str, owner: Owner) -> Result:
        """Ask the node to release the owner's holdings."""
        ledger = self._state.ledgers[node]
        held = ledger.allocations.get(owner.key)
        if held is None:
            return None
        if held.is_prepared:
            await self._report_quarantine(
                node, owner, "prepared", "a container may be using its devices: they are released when it is unprepared"
            )
            return None
        try:
            answer = await self._ledgers.release_on(node, owner, f"release-{owner.uid}-gone-{ledger.sequence}")
        except PeerUnavailable as err:
            await self._report_quarantine(node, owner, "node-silent", f"the node does not answer: {err}")
            return Again()
        if isinstance(answer, UnderWay):
            return None
        if answer is not None:
            await self._report_quarantine(node, owner, "prepared", summarize(answer.reasons))
            return None
        self._found[node].pop(owner.key, None)
        self._log.info("orphan.released", owner=owner.key, node=node)
        return None

    async def _report_quarantine(self, node: str, owner: Owner, code: str, why: str) -> None:
        """Log and publish that devices are in quarantine, once for each reason."""
        if self._reported.get(owner.key) == code:
            return
        self._reported[owner.key] = code
        self._log.warning("orphan.quarantined", owner=owner.key, node=node, why=why)
        op_id = f"quarantine-{owner.uid}-{code}"
        message = f"node {node}: {owner} was deleted by force, its devices are quarantined: {why}"
        refusal = refuse(code, message, node=node, owner=owner.key)
        await self._decisions.publish("quarantine", owner, refusal, op_id=op_id, node=node)
