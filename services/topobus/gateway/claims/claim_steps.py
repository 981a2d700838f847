"""The steps by which a claim's devices of one class are prepared and undone, in an order that
survives a crash at any point.

To prepare: write "begun" to the checkpoint, adopt in the ledger (`claim_ledger`), prepare the
devices (`claim_devices`), then write the CDI file (`claim_files`) and "done" to the checkpoint. To
undo: the same in the opposite order. Both may be repeated. Only this module decides the order. The
caller holds the claim's lock.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import msgspec

from topobus.gateway.claims.attachments import Attachments
from topobus.gateway.claims.checkpoint import Checkpoint, ClaimEntry
from topobus.gateway.claims.claim_devices import ClaimDevices
from topobus.gateway.claims.claim_files import ClaimFiles
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey, refused
from topobus.gateway.claims.claim_ledger import ClaimLedger
from topobus.gateway.claims.claim_reading import ClaimReader
from topobus.gateway.claims.pinning import Pinning
from topobus.gateway.claims.rules.claim_allocation import ClaimAllocation, allocation_of
from topobus.gateway.claims.rules.claim_cdi import cdi_spec
from topobus.gateway.containers.live_containers import StillRuns, nodes_of
from topobus.gateway.node_state import NodeState
from topobus.process.tracing import span
from topobus.values.device import driver_name
from topobus.values.outcome import Refusal

__all__ = ["ClaimSteps"]


class ClaimSteps:
    """Prepares and undoes claims, one class of one claim at a time."""

    def __init__(
        self,
        state: NodeState,
        reader: ClaimReader,
        checkpoint: Checkpoint,
        ledger: ClaimLedger,
        devices: ClaimDevices,
        attachments: Attachments,
        pinning: Pinning,
        files: ClaimFiles,
    ) -> None:
        self._state = state
        self._reader = reader
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

    async def read(self, device_class: str, claim: ClaimKey) -> ClaimAllocation:
        """Read which devices of a class a claim is allocated on this node.

        Errors: raises ClaimFailed when it is none that can be prepared, PeerUnavailable while it
        cannot be read.
        """
        with span("read claim", claim=f"{claim.namespace}/{claim.name}"):
            api_object = await self._reader.read(claim.namespace, claim.name)
        allocation = allocation_of(
            api_object,
            namespace=claim.namespace,
            name=claim.name,
            uid=claim.uid,
            driver=driver_name(device_class),
            node=self._state.node,
        )
        if isinstance(allocation, Refusal):
            raise refused(allocation)
        return allocation

    async def prepare(self, device_class: str, claim: ClaimKey, allocation: ClaimAllocation) -> ClaimEntry:
        """Prepare a claim as it is allocated, or continue where an earlier try with the same devices
        ended.

        Errors: raises ClaimFailed when it is refused, PeerUnavailable while a service does not
        answer, OSError when a file cannot be written.
        """
        entry = await self._begun(device_class, claim, allocation)
        entry = await self._ledger.adopt(entry, claim, allocation)
        if entry.attachment is not None:
            # The attachment is from an earlier boot, whose sandboxes are gone.
            await self._attachments.detach(entry)
            entry = msgspec.structs.replace(entry, attachment=None, left_sandbox=entry.attachment.sandbox.id)
        allocation = msgspec.structs.replace(allocation, cpus=entry.cpus)
        entry = await self._prepare_devices(entry, claim, allocation)
        self._attachments.check(entry)
        entry = msgspec.structs.replace(entry, has_metadata=await self._files.describe(entry))
        async with self._pinning.promising(entry) as refusal:
            if refusal is not None:
                raise refused(refusal)
            # Concurrently: the next start restores each from the other, and kubelet gets no answer
            # before both are on disk.
            for outcome in await asyncio.gather(
                self._files.write(entry), self._checkpoint.put(entry), return_exceptions=True
            ):
                if outcome is not None:
                    raise outcome
        return entry

    async def undo(self, entry: ClaimEntry, claim: ClaimKey) -> tuple[str, ...]:
        """Undo a claim, and return the devices that it had.

        Errors: raises ClaimFailed when it is refused, PeerUnavailable while a service does not
        answer or a container has the devices (StillRuns), OSError when a file cannot be removed.
        """
        device_class = entry.device_class
        if not entry.is_undoing:
            # From here on the claim must not count as prepared, even if the undoing is interrupted.
            entry = (
                await self._checkpoint.change(
                    entry.key, lambda claim_entry: msgspec.structs.replace(claim_entry, is_undoing=True)
                )
                or entry
            )
        why_held = self._state.containers.why_held(entry)
        if why_held:
            raise StillRuns(why_held, nodes=nodes_of(entry))
        await self._attachments.detach(entry)
        names = await self._devices.undo(entry, claim)
        await self._files.delete(entry)
        if not any(
            claim_entry.uid == claim.uid and claim_entry.device_class != device_class
            for claim_entry in self._checkpoint.entries()
        ):
            await self._ledger.let_go(entry.attempt, claim)
        await self._checkpoint.remove(claim.uid, device_class, is_kept=self._ledger.is_settled)
        self._devices.forget(entry)
        await self._pinning.released()
        return names

    async def _begun(self, device_class: str, claim: ClaimKey, allocation: ClaimAllocation) -> ClaimEntry:
        """Ensure "begun" in the checkpoint, by this or an earlier try."""
        entry = self._checkpoint.get(claim.uid, device_class)
        self._devices.check_rivals(claim, device_class, allocation)
        if entry is None:
            entry = ClaimEntry(
                namespace=claim.namespace,
                name=claim.name,
                uid=claim.uid,
                device_class=device_class,
                attempt=uuid.uuid4().hex,
            )
        if not entry.is_running:
            entry = msgspec.structs.replace(entry, devices=allocation.devices)
            await self._checkpoint.put(entry)
        return entry

    async def _prepare_devices(self, entry: ClaimEntry, claim: ClaimKey, allocation: ClaimAllocation) -> ClaimEntry:
        """Have the device service prepare the devices, and return the entry with its results."""
        device_class = entry.device_class
        # After a reboot the devices are prepared again, with another operation id.
        op_id = f"{entry.attempt}-prepare" + (f"-{self._checkpoint.boot_id[:8]}" if entry.is_running else "")
        answers = await self._devices.prepare(op_id, claim, device_class, allocation, is_again=entry.is_running)
        to_attach = _own_of(allocation, "attach", answers.prepared.to_attach)
        to_adjust = _own_of(allocation, "adjust", answers.prepared.to_adjust)
        return msgspec.structs.replace(
            entry,
            is_prepared=True,
            boot_id=self._checkpoint.boot_id,
            to_attach=to_attach,
            to_adjust=to_adjust,
            config={name: allocation.config[name] for name in {*to_attach, *to_adjust} if name in allocation.config},
            pods=allocation.pods,
            generation=allocation.generation,
            pod_claim_name=allocation.pod_claim_name,
            cdi=cdi_spec(claim.uid, device_class, answers.prepared, answers.by_request),
        )


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
