"""Has a device service prepare and undo a claim's devices, and serializes claims that share a
device.

A preparation returns the edits for the claim's containers, or raises ClaimFailed with the service's
reason. A claim that only shares a device, or only has admin access to it, is undone without calling
the device service while other claims use the device. This module writes nothing. The caller decides
the order of writes on disk and in the ledger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.gateway.asks import NodeAsks, configured
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey, refused
from topobus.gateway.claims.rules.claim_allocation import ClaimAllocation
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.live_containers import StillRuns, nodes_of
from topobus.gateway.key_locks import KeyLocks
from topobus.values.device import Device
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Refusal

__all__ = ["ClaimDevices", "DeviceAnswers"]


@dataclass(frozen=True, kw_only=True)
class DeviceAnswers:
    """The device service's answers to one preparation of a claim."""

    prepared: Prepared
    """The answer for all devices together."""
    by_request: dict[str, Prepared]
    """The answer for the devices of each request, if the claim has several requests. Else empty."""


class ClaimDevices:
    """Prepares and undoes the devices of claims on this node."""

    def __init__(
        self,
        asks: NodeAsks,
        checkpoint: Checkpoint,
        find_device: Callable[[str, str], Device | None],
        why_held: Callable[[ClaimEntry], str],
    ) -> None:
        """`find_device` returns the inventory's device by class and name, `why_held` the reason why
        a claim's containers may still have its devices.
        """
        self._why_held = why_held
        self._asks = asks
        self._find = find_device
        self._checkpoint = checkpoint
        self._locks = KeyLocks()
        self._undone: set[str] = set()
        """Keys of entries whose devices are undone and that are still in the checkpoint."""

    async def prepare(
        self,
        op_id: str,
        claim: ClaimKey,
        device_class: str,
        claim_allocation: ClaimAllocation,
        *,
        is_again: bool,
    ) -> DeviceAnswers:
        """Have all devices of a claim's class made ready. `is_again`: it had them before a reboot.

        Errors: raises ClaimFailed when the service refuses or leaves a device out, PeerUnavailable
        when it is away.
        """
        async with self._alone_with(device_class, claim_allocation.names):
            prepared = await self._ask(
                op_id, claim, device_class, claim_allocation, claim_allocation.names, is_again=is_again
            )
            by_request: dict[str, Prepared] = {}
            if len(claim_allocation.requests) > 1:
                # Containers that name one request get what its devices have in common, which only
                # their driver knows.
                for request, names in claim_allocation.requests.items():
                    by_request[request] = await self._ask(
                        f"{op_id}-of-{request}", claim, device_class, claim_allocation, names, is_again=is_again
                    )
        return DeviceAnswers(prepared=prepared, by_request=by_request)

    async def _ask(
        self,
        op_id: str,
        claim: ClaimKey,
        device_class: str,
        claim_allocation: ClaimAllocation,
        names: tuple[str, ...],
        *,
        is_again: bool,
    ) -> Prepared:
        """Have some of the claim's devices made ready together."""
        looked_at = sorted(
            {allocated.device for allocated in claim_allocation.devices if allocated.is_shared} & set(names)
        )
        tolerated = sorted({*claim_allocation.tolerated} & set(names))
        common, by_device = configured(names, claim_allocation.config)
        shares = claim_allocation.shares.get(device_class, {})
        request = PrepareRequest(
            op_id=op_id,
            owner=claim.owner,
            devices=names,
            config=common,
            device_config=by_device,
            looked_at=tuple(looked_at),
            tolerated=tuple(tolerated),
            cpus={name: cpus for name, cpus in claim_allocation.cpus.items() if name in names},
            shares={name: share.amounts for name, share in shares.items() if name in names},
            is_again=is_again,
        )
        prepared = await self._asks.prepare(device_class, request)
        if isinstance(prepared, Refusal):
            raise refused(prepared)
        missing = sorted(set(names) - prepared.edits.keys())
        if missing:
            raise ClaimFailed(f"the {device_class} service prepared nothing for {', '.join(missing)}")
        return prepared

    async def forbidden(self, entry: ClaimEntry) -> Refusal | None:
        """Say what a prepared claim would bring that its class may not bring any more: rights may be
        fewer than when it was prepared.
        """
        if entry.cdi is None:
            return None
        edits = {device.name: device.edits for device in entry.cdi.devices}
        return await self._asks.refuse_forbidden(entry.device_class, Prepared(edits=edits, common=entry.cdi.common))

    async def undo(self, entry: ClaimEntry, claim: ClaimKey) -> tuple[str, ...]:
        """Have the device service undo the devices that no other claim uses, and the claim's share
        of each device that its operator shares.

        Returns the devices that were undone.

        Errors: raises ClaimFailed when the service refuses, PeerUnavailable when it is away.
        """
        names = tuple(sorted({device.device for device in entry.devices}))
        async with self._alone_with(entry.device_class, names):
            used = self._used_by_others(entry) - self._shared_by_operator(entry)
            names = tuple(name for name in names if name not in used)
            if names:
                refusal = await self._asks.unprepare(
                    f"{entry.attempt}-unprepare", claim.owner, entry.device_class, names
                )
                if refusal is not None:
                    raise refused(refusal)
            self._undone.add(entry.key)
        return names

    def forget(self, entry: ClaimEntry) -> None:
        """Forget an undone entry, because it has left the checkpoint."""
        self._undone.discard(entry.key)

    def check_rivals(self, claim: ClaimKey, device_class: str, claim_allocation: ClaimAllocation) -> None:
        """Refuse devices with which another claim is prepared, even when the ledger allows them:
        containers run with what is in the checkpoint.

        Errors: raises ClaimFailed. Raises StillRuns while a container has them whose claim kubelet
        has forgotten, and PeerUnavailable while the other claim is being undone.
        """
        whole = {device.device for device in claim_allocation.devices if not device.is_shared and not device.is_share}
        shared = {device.device for device in claim_allocation.devices if not device.is_shared and device.is_share}
        for entry in self._checkpoint.entries():
            if entry.uid == claim.uid or entry.device_class != device_class or not entry.is_prepared:
                continue
            devices = [device for device in entry.devices if not device.is_shared]
            clash = {
                allocated_device.device
                for allocated_device in devices
                if allocated_device.device in whole
                or (allocated_device.device in shared and not allocated_device.is_share)
            }
            if clash:
                holds = f"claim {entry.claim} holds {', '.join(sorted(clash))}"
                why = "" if entry.is_running else self._why_held(entry)
                if why:
                    raise StillRuns(f"{holds}: {why}", nodes=nodes_of(entry))
                if entry.is_undoing and (entry.left_for or not entry.is_left):
                    raise PeerUnavailable(f"{holds}: it is being undone")
                raise ClaimFailed(f"{holds}: it is prepared on this node")

    def _used_by_others(self, entry: ClaimEntry) -> set[str]:
        """Return the devices that other claims are prepared with, or begin to be.

        A claim with only admin access does not count as a user.
        """
        looked_at = {device.device for device in entry.devices if device.is_shared}
        others = [
            claim_entry
            for claim_entry in self._checkpoint.entries()
            if claim_entry.device_class == entry.device_class and claim_entry.key != entry.key
        ]
        users = [device for other in others if other.key not in self._undone for device in other.devices]
        return {user.device for user in users if not user.is_shared or user.device in looked_at}

    def _shared_by_operator(self, entry: ClaimEntry) -> set[str]:
        """Return the devices whose driver tracks its owners, so that each is undone separately."""
        shared: set[str] = set()
        for allocated in entry.devices:
            device = (
                self._find(entry.device_class, allocated.device)
                if allocated.share_id and not allocated.is_shared
                else None
            )
            if device is not None and device.sharing is not None:
                shared.add(allocated.device)
        return shared

    @asynccontextmanager
    async def _alone_with(self, device_class: str, names: Iterable[str]) -> AsyncIterator[None]:
        """Serialize what a device service does to devices that claims share.

        Locks are taken in the order of the names, which prevents a deadlock.
        """
        async with AsyncExitStack() as stack:
            for name in sorted(names):
                await stack.enter_async_context(self._locks.of(f"{device_class}/{name}"))
            yield
