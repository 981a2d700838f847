"""The steps by which a claim's devices are prepared and undone, in an order that survives a crash at
any point.

To prepare: write "begun" to the checkpoint, adopt in the ledger (`claim_ledger`), have the service
of each class prepare its devices (`claim_devices`), then write the CDI files (`claim_files`) and
"done" to the checkpoint. To undo: the same in the opposite order. Both may be repeated. The classes
of a claim go side by side, and begin and end together. Only this module decides the order. The
caller holds the claim's lock.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

import msgspec

from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_devices import ClaimDevices
from topobus.gateway.claims.claim_files import ClaimFiles
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey, refused
from topobus.gateway.claims.claim_ledger import ClaimLedger
from topobus.gateway.claims.claim_reading import ReadClaim
from topobus.gateway.claims.rules.claim_allocation import ClaimAllocation, allocation_of
from topobus.gateway.claims.rules.claim_cdi import cdi_spec
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.claims.sandbox_attachments import SandboxAttachments
from topobus.gateway.containers.live_containers import StillRuns, nodes_of
from topobus.gateway.node_state import NodeState
from topobus.process.tracing import span
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Refusal

if TYPE_CHECKING:
    from topobus.gateway.containers.cpu_pinning import CpuPinning

__all__ = ["ClaimSteps"]

T = TypeVar("T")


class ClaimSteps:
    """Prepares and undoes claims, one claim at a time."""

    def __init__(
        self,
        state: NodeState,
        read_claim: ReadClaim,
        checkpoint: Checkpoint,
        ledger: ClaimLedger,
        devices: ClaimDevices,
        attachments: SandboxAttachments,
        pinning: CpuPinning | None,
        files: ClaimFiles,
    ) -> None:
        """`pinning` is None where kubelet alone manages CPUs."""
        self._state = state
        self._read_claim = read_claim
        self._checkpoint = checkpoint
        self._ledger = ledger
        self._devices = devices
        self._attachments = attachments
        self._pinning = pinning
        self._files = files

    async def restore(self) -> None:
        """Write files that a reboot removed, and remove those that belong to no claim.

        Errors: raises ConfigError when there is something to write and the folder cannot be
        written.
        """
        entries = self._checkpoint.entries()
        # An earlier gateway process may have prepared a claim that the settings forbid now. It is
        # refused when kubelet asks for it, and the other claims get their files.
        wanted = [
            entry
            for entry in entries
            if entry.is_running and entry.cdi is not None and await self._devices.forbidden(entry) is None
        ]
        await asyncio.to_thread(self._checkpoint.sweep)
        await self._files.restore(self._checkpoint.entries(), wanted)

    async def mend(self, entry: ClaimEntry) -> None:
        """Write the files of a prepared claim that are missing.

        Errors: raises ClaimFailed when the settings forbid by now what it would bring.
        """
        forbidden = await self._devices.forbidden(entry)
        if forbidden is not None:
            raise refused(forbidden)
        await self._files.mend(entry)

    async def read(self, claim: ClaimKey) -> ClaimAllocation:
        """Read which devices a claim is allocated on this node.

        Errors: raises ClaimFailed when it is none that can be prepared, PeerUnavailable while it
        cannot be read.
        """
        with span("read claim", claim=str(claim)):
            api_object = await self._read_claim(claim.namespace, claim.name)
        shapes = self._state.shapes()
        allocation = allocation_of(
            api_object,
            namespace=claim.namespace,
            name=claim.name,
            uid=claim.uid,
            node=self._state.node,
            parts=shapes.parts,
            cpus=shapes.cpus,
        )
        if isinstance(allocation, Refusal):
            raise refused(allocation)
        return allocation

    async def prepare(self, claim: ClaimKey, allocation: ClaimAllocation) -> tuple[ClaimEntry, ...]:
        """Prepare a claim as it is allocated, or continue where an earlier try with the same devices
        ended. Its devices count as prepared when those of all classes are.

        Errors: raises ClaimFailed when it is refused, PeerUnavailable while a service does not
        answer, OSError when a file cannot be written.
        """
        entries = await self._begun(claim, allocation)
        entries = await self._ledger.adopt(entries, claim, allocation)
        entries = await _side_by_side(self._prepare_class(entry, claim, allocation) for entry in entries)
        async with AsyncExitStack() as stack:
            if self._pinning is not None:
                for entry in entries:
                    refusal = await stack.enter_async_context(self._pinning.promising(entry))
                    if refusal is not None:
                        raise refused(refusal)
            # Concurrently: the next start restores each from the other, and kubelet gets no answer
            # before both are on disk.
            await _side_by_side([self._files.write(entries), self._checkpoint.put(*entries)])
        return entries

    async def undo(self, entries: Sequence[ClaimEntry], claim: ClaimKey) -> tuple[str, ...]:
        """Undo a claim, and return the devices that it had.

        Errors: raises ClaimFailed when it is refused, PeerUnavailable while a service does not
        answer or a container has the devices (StillRuns), OSError when a file cannot be removed.
        """
        if not all(entry.is_undoing for entry in entries):
            # From here on the claim must not count as prepared, even if the undoing is interrupted.
            entries = await self._checkpoint.change_claim(
                claim.uid, lambda entry: msgspec.structs.replace(entry, is_undoing=True)
            )
        for entry in entries:
            why_held = self._state.containers.why_held(entry)
            if why_held:
                raise StillRuns(why_held, nodes=nodes_of(entry))
        names = await _side_by_side(self._undo_class(entry, claim) for entry in entries)
        await self._ledger.let_go(entries[0].attempt, claim)
        await self._checkpoint.remove(claim.uid, is_kept=self._ledger.is_settled)
        for entry in entries:
            self._devices.forget(entry)
        if self._pinning is not None:
            await self._pinning.released()
        return tuple(name for of_class in names for name in of_class)

    async def _undo_class(self, entry: ClaimEntry, claim: ClaimKey) -> tuple[str, ...]:
        await self._attachments.detach(entry)
        names = await self._devices.undo(entry, claim)
        await self._files.delete(entry)
        return names

    async def _begun(self, claim: ClaimKey, allocation: ClaimAllocation) -> Sequence[ClaimEntry]:
        """Ensure "begun" in the checkpoint for each class, by this or an earlier try."""
        earlier = {entry.device_class: entry for entry in self._checkpoint.of_claim(claim.uid)}
        attempt = next((entry.attempt for entry in earlier.values()), uuid.uuid4().hex)
        entries: list[ClaimEntry] = []
        for device_class in allocation.classes:
            part = allocation.part(device_class)
            self._devices.check_rivals(claim, device_class, part)
            entry = earlier.get(device_class) or ClaimEntry(
                namespace=claim.namespace,
                name=claim.name,
                uid=claim.uid,
                device_class=device_class,
                attempt=attempt,
            )
            entries.append(entry if entry.is_running else msgspec.structs.replace(entry, devices=part.devices))
        await self._checkpoint.put(*entries)
        return entries

    async def _prepare_class(self, entry: ClaimEntry, claim: ClaimKey, allocation: ClaimAllocation) -> ClaimEntry:
        """Have the device service of a class prepare its devices, and return the entry with its
        results.
        """
        if entry.attachment is not None:
            # The attachment is from an earlier boot, whose sandboxes are gone.
            await self._attachments.detach(entry)
            entry = msgspec.structs.replace(entry, attachment=None, left_sandbox=entry.attachment.sandbox.id)
        device_class = entry.device_class
        part = msgspec.structs.replace(allocation.part(device_class), cpus=entry.cpus)
        # After a reboot the devices are prepared again, with another operation id.
        op_id = f"{entry.attempt}-prepare" + (f"-{self._checkpoint.boot_id[:8]}" if entry.is_running else "")
        answers = await self._devices.prepare(op_id, claim, device_class, part, is_again=entry.is_running)
        to_attach = _own_of(part, "attach", answers.prepared.to_attach)
        to_adjust = _own_of(part, "adjust", answers.prepared.to_adjust)
        entry = msgspec.structs.replace(
            entry,
            is_prepared=True,
            boot_id=self._checkpoint.boot_id,
            to_attach=to_attach,
            to_adjust=to_adjust,
            config={name: part.config[name] for name in {*to_attach, *to_adjust} if name in part.config},
            pods=part.pods,
            generation=part.generation,
            pod_claim_name=part.pod_claim_name,
            cdi=cdi_spec(claim.uid, device_class, answers.prepared, answers.by_request),
        )
        self._attachments.check(entry)
        return msgspec.structs.replace(entry, has_metadata=await self._files.describe(entry))


async def _side_by_side(works: Iterable[Awaitable[T]]) -> tuple[T, ...]:
    """Do what belongs to a claim's classes at once, and wait until all of it has ended.

    Errors: raises one of the errors, a final one before one that may pass.
    """
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, PeerUnavailable))
    return tuple(outcome for outcome in outcomes if not isinstance(outcome, BaseException))


def _own_of(claim_allocation: ClaimAllocation, verb: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the devices of an answer that are to be changed.

    A device with admin access only stays as it is.

    Errors: raises ClaimFailed when the service names a device that the claim does not have.
    """
    strange = sorted(set(names) - set(claim_allocation.names))
    if strange:
        raise ClaimFailed(f"the device service wants to {verb} {', '.join(strange)}, which the claim has not")
    looked_at = {device.device for device in claim_allocation.devices if device.is_shared}
    return tuple(sorted(set(names) - looked_at))
