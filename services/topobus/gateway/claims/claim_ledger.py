"""Records claims in the node's ledger by requests to the topology service: that a claim's devices
are taken, and that nothing of it is prepared any more.

Each attempt of a claim is an operation of its own, named in the checkpoint before it is requested.
The answer to an operation is stored, so a refused attempt could never succeed later under its old
name.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from topobus.formats.messages.messages import AdoptRequest
from topobus.gateway.asks import NodeAsks
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_key import ClaimKey, refused
from topobus.gateway.claims.claim_reading import ReadClaim
from topobus.gateway.claims.ledger_release import LedgerRelease
from topobus.gateway.claims.rules.claim_allocation import ClaimAllocation, is_allocated_here
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.node_state import NodeState
from topobus.values.cpu_groups import is_cpu_group
from topobus.values.device_sharing import HeldShare
from topobus.values.dra_names import CPU_CLASS
from topobus.values.errors import ConfigError
from topobus.values.idset import CpuSet
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal

__all__ = ["ClaimLedger"]


class ClaimLedger:
    """Adopts and releases claims in the ledger of this node."""

    def __init__(
        self,
        state: NodeState,
        asks: NodeAsks,
        read_claim: ReadClaim,
        checkpoint: Checkpoint,
        releaser: LedgerRelease | None,
    ) -> None:
        self._state = state
        self._asks = asks
        self._read_claim = read_claim
        self._checkpoint = checkpoint
        self._releaser = releaser

    async def adopt(
        self, entries: Sequence[ClaimEntry], claim: ClaimKey, claim_allocation: ClaimAllocation
    ) -> tuple[ClaimEntry, ...]:
        """Adopt a claim in the ledger. When it refuses, release holders that are claims that are
        over, and try once more.

        The returned entries name the attempt that succeeded.

        Errors: raises ClaimFailed when the ledger refuses (the entries have then left the
        checkpoint), PeerUnavailable when it cannot be reached.
        """
        adopted = await self._try_adopt(entries, claim, claim_allocation)
        if not isinstance(adopted, Refusal):
            return adopted
        # Nothing was taken, so nothing has to be undone. The next try must be a new operation,
        # because this one's answer is stored.
        await self._checkpoint.remove(claim.uid)
        if self._releaser is not None and await self._releaser.settle():
            attempt = uuid.uuid4().hex
            entries = [msgspec.structs.replace(entry, attempt=attempt) for entry in entries]
            await self._checkpoint.put(*entries)
            adopted = await self._try_adopt(entries, claim, claim_allocation)
            if not isinstance(adopted, Refusal):
                return adopted
            await self._checkpoint.remove(claim.uid)
        raise refused(adopted)

    async def _try_adopt(
        self, entries: Sequence[ClaimEntry], claim: ClaimKey, claim_allocation: ClaimAllocation
    ) -> tuple[ClaimEntry, ...] | Refusal:
        """Adopt the claim once: exclusive devices are held, devices with admin access are only
        recorded.

        The returned entries have the CPUs that were chosen out of groups.
        """
        attempt = entries[0].attempt
        looked_at = {
            device_class: tuple(
                sorted({device.device for device in claim_allocation.part(device_class).devices if device.is_shared})
            )
            for device_class in claim_allocation.classes
        }
        if any(looked_at.values()):
            # What holds nothing comes first: if it is refused, nothing has been taken.
            request = AdoptRequest(
                op_id=f"{attempt}-adopt-shared",
                owner=claim.owner,
                devices={device_class: names for device_class, names in looked_at.items() if names},
                is_shared=True,
                pods=claim_allocation.users,
            )
            adopted = await self._asks.adopt(request)
            if isinstance(adopted, Refusal):
                return adopted
        if not claim_allocation.held:
            return tuple(entries)
        request = AdoptRequest(
            op_id=f"{attempt}-adopt",
            owner=claim.owner,
            devices=claim_allocation.held,
            shared=claim_allocation.by_share,
            shares=claim_allocation.shares,
            is_prepared=True,
            pods=claim_allocation.users,
            group_cpus={**self._whole_groups(claim_allocation), **claim_allocation.group_cpus},
        )
        adopted = await self._asks.adopt(request, but_cpus=self._cpus_of_others(claim.uid))
        if isinstance(adopted, Refusal):
            return adopted
        for device_class, names in claim_allocation.held.items():
            parts = dict.fromkeys(claim_allocation.by_share.get(device_class, ()), HeldShare())
            parts |= claim_allocation.shares.get(device_class, {})
            self._state.hand_out(device_class, names, claim.owner, adopted.ledger_sequence, parts)
        return tuple(msgspec.structs.replace(entry, cpus=adopted.cpus) for entry in entries)

    def _whole_groups(self, claim_allocation: ClaimAllocation) -> dict[str, int]:
        """Count the CPUs of groups that a claim has as a whole: where the cluster has no consumable
        capacity, a group is a device like others.
        """
        counts = {}
        for name in claim_allocation.held.get(CPU_CLASS, ()):
            device = self._state.device(CPU_CLASS, name)
            if device is not None and is_cpu_group(device):
                counts[name] = len(device.near_cpus & (self._asks.owned_cpus or device.near_cpus))
        return counts

    def _cpus_of_others(self, uid: ClaimUid) -> CpuSet:
        """Return the CPUs that containers of other claims may run on. A ledger that was lost does
        not have them until it is rebuilt.
        """
        taken = CpuSet()
        for other in self._checkpoint.entries():
            if other.is_running and other.uid != uid:
                taken |= other.own_cpus
        return taken

    async def let_go(self, attempt: str, claim: ClaimKey) -> None:
        """Record in the ledger that nothing of a claim is prepared any more.

        While the claim is allocated its devices stay its own, prepared or not. The component that
        deallocates it releases them. In a cluster that is the releaser, because undoing must not
        wait for the API server. Where no claims can be read (`claim_reading`) it is the
        hub's controller, for claims that were prepared earlier.
        Errors: raises ClaimFailed when the ledger refuses, PeerUnavailable when the ledger or the
        claim cannot be reached.
        """
        is_kept = self._releaser is not None or await self._is_allocated(claim)
        op_id = f"{attempt}-{'keep' if is_kept else 'release'}"
        refusal = await self._asks.release(op_id, claim.owner, is_undone=True, keeps_devices=is_kept)
        if refusal is not None:
            raise refused(refusal)

    async def _is_allocated(self, claim: ClaimKey) -> bool:
        try:
            return is_allocated_here(await self._read_claim(claim.namespace, claim.name), claim.uid, self._state.node)
        except ConfigError:
            # Claims are read nowhere now. This one was prepared when they were, and this node must
            # assume that it is allocated.
            return True

    @property
    def is_settled(self) -> bool:
        """Return whether a releaser releases claims that are no longer prepared here. The
        checkpoint remembers them for it.
        """
        return self._releaser is not None
