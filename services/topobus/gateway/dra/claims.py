"""Prepares and unprepares claims, with ledger, device service, CDI file and checkpoint in an order that survives a crash at any point.

Flows in: claims by namespace, name and uid. Flows out: devices with CDI names, or an error text for kubelet. Prepare: write "begun" to the checkpoint, adopt in the
ledger, prepare the devices, write the CDI file, write "done" to the checkpoint, answer. Unprepare goes the other way. Both are idempotent.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from topobus.contracts.messages import Prepared, PrepareReply
from topobus.devicekit.cdi import file_name, render
from topobus.devicekit.cdi_files import check_writable, delete, restore_files, write, write_missing
from topobus.domain.device import driver_name
from topobus.domain.errors import ConfigError, PeerUnavailable, TopobusError
from topobus.domain.names import ClaimUid
from topobus.domain.outcome import Refusal
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway.asks import NodeAsks, contradicted
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.core.claim_allocation import (
    CDI_VENDOR,
    ClaimAllocation,
    allocation_of,
    cdi_spec,
    is_allocated_here,
)
from topobus.gateway.disk import DiskWork
from topobus.gateway.dra.attempts import Attempts
from topobus.gateway.dra.checkpoint import Checkpoint, ClaimEntry
from topobus.gateway.dra.claim_answers import PreparedDevice, answer_of
from topobus.gateway.dra.claim_reading import ClaimReader
from topobus.gateway.key_locks import KeyLocks
from topobus.gateway.node_state import NodeState
from topobus.runtime.bus import Held
from topobus.runtime.logging import get_logger

__all__ = ["ClaimKey", "ClaimPreparer", "Settler"]


T = TypeVar("T")

# Pauses between the tries of a claim whose peer is not there.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


class ClaimKey(Struct, frozen=True, kw_only=True):
    """A claim as kubelet names it."""

    namespace: str
    name: str
    uid: ClaimUid

    @property
    def owner(self) -> Owner:
        """Who holds the claim's devices."""
        return Owner(kind=OwnerKind.CLAIM, namespace=self.namespace, name=self.name, uid=self.uid)


class Settler(Protocol):
    """Lets go of claims that are over, where nobody else does: a cluster's scheduler writes no ledger."""

    def leave(self, owner: Owner) -> None:
        """Take over a claim that is no longer prepared here."""
        ...

    async def settle(self) -> bool:
        """Release what is over; True when something was."""
        ...


class _ClaimFailed(Exception):
    """Raised inside for what becomes the claim's own error text."""


class ClaimPreparer:
    """Prepares and unprepares claims of all classes on this node."""

    def __init__(
        self,
        *,
        state: NodeState,
        asks: NodeAsks,
        reader: ClaimReader,
        checkpoint: Checkpoint,
        cdi_dir: Path,
        deadlines: DeadlineSettings,
        settler: Settler | None = None,
        boot_id: str = "",
        tell_cdi: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take what it works with; `tell_cdi` hears what is wrong with the CDI folder, nothing when it is good."""
        self.attempts = Attempts()
        self._tell_cdi = tell_cdi
        self._boot_id = boot_id
        self._state = state
        self._asks = asks
        self._reader = reader
        self._checkpoint = checkpoint
        self._cdi_dir = cdi_dir
        self._deadlines = deadlines
        self._settler = settler
        self._locks = KeyLocks()
        self._undone: set[str] = set()
        self._disk = DiskWork()
        self._has_left = asyncio.Event()
        """Set when a claim was left that is to be undone later."""

    async def restore(self, *, is_offered: bool = True) -> None:
        """Write CDI files that a reboot removed, and remove those that belong to no claim. Runs before kubelet is served.

        Errors: raises ConfigError when there is something to write and the folder cannot be written. With nothing to write it is only
        logged: device plugins work without the folder, and it may be mended before the first claim comes.
        """
        running = [entry for entry in self._checkpoint.entries() if entry.is_running]
        # A gateway of before may have written what is forbidden now; its claim is told so when kubelet asks, and the others have their files.
        wanted = {_file(entry): render(entry.cdi) for entry in running if entry.cdi is not None and await self._refusal(entry) is None}
        await asyncio.to_thread(self._checkpoint.sweep)
        try:
            written, orphans = await asyncio.to_thread(restore_files, self._cdi_dir, CDI_VENDOR, wanted)
        except OSError as err:
            raise ConfigError(f"gateway: cdi_dir: cannot use {self._cdi_dir}: {err}", next_step="set TOPOBUS_GATEWAY__CDI_DIR") from err
        if written or orphans:
            get_logger().info("claims.restored", written=written, orphans_removed=orphans)
        if is_offered:
            try:
                await asyncio.to_thread(check_writable, self._cdi_dir, CDI_VENDOR)
            except OSError as err:
                get_logger().error("cdi.unwritable", folder=str(self._cdi_dir), error=str(err), next_step="set TOPOBUS_GATEWAY__CDI_DIR")
                self._tell_cdi(_unwritable(err))
            else:
                self._tell_cdi("")

    async def finish(self) -> None:
        """Wait until nothing is being written: then the files may be another process's."""
        await self._disk.finish()
        await self._checkpoint.finish()

    async def undo_unknown(self) -> None:
        """Let go of claims that the ledger calls prepared and the checkpoint does not know: who moved the file away said that nothing uses them.

        What fails here is tried again when the gateway starts the next time; the devices stay held until then.
        """
        ledger = self._state.ledger
        for allocation in ledger.allocations.values() if ledger is not None else ():
            owner = allocation.owner
            claim = ClaimKey(namespace=owner.namespace, name=owner.name, uid=ClaimUid(owner.uid))
            async with self._locks.of(owner.uid):
                if not allocation.is_prepared or any(entry.uid == owner.uid for entry in self._checkpoint.entries()):
                    continue
                try:
                    await self._let_go(uuid.uuid4().hex, claim)
                except (_ClaimFailed, TopobusError) as err:
                    get_logger().warning("claim.undo-failed", claim_uid=owner.uid, error=str(err))
                else:
                    get_logger().warning("claim.undone-unknown", claim_uid=owner.uid, claim=f"{owner.namespace}/{owner.name}")

    async def prepare(self, device_class: str, claim: ClaimKey) -> tuple[PreparedDevice, ...] | str:
        """Prepare a claim's devices of one class; the text is the claim's error."""
        with self.attempts.running(claim.uid):
            prepared = await self._try_prepare(device_class, claim)
            if isinstance(prepared, str):
                self.attempts.failed(claim.uid, device_class, prepared, asyncio.get_running_loop().time())
            else:
                self.attempts.ended(claim.uid, device_class)
            return prepared

    async def _try_prepare(self, device_class: str, claim: ClaimKey) -> tuple[PreparedDevice, ...] | str:
        try:
            return await self._patiently(claim, lambda: self._prepare(device_class, claim))
        except (_ClaimFailed, TopobusError) as err:
            error = str(err)
        except TimeoutError:
            error = f"not prepared within {self._deadlines.claim_s} s"
        except OSError as err:
            error = _unwritable(err)
        get_logger().warning("claim.prepare-failed", claim_uid=claim.uid, claim=f"{claim.namespace}/{claim.name}", error=error)
        return f"claim {claim.namespace}/{claim.name}: {error}"

    async def unprepare(self, device_class: str, claim: ClaimKey) -> str:
        """Undo a claim; empty when done. A claim that is not known here was undone before."""
        try:
            await self._patiently(claim, lambda: self._unprepare(device_class, claim))
            self.attempts.ended(claim.uid, device_class)
            return ""
        except PeerUnavailable as err:
            if await self._leave(device_class, claim, str(err)):
                return ""
            error = str(err)
        except (_ClaimFailed, TopobusError) as err:
            error = str(err)
        except TimeoutError:
            error = f"not undone within {self._deadlines.claim_s} s"
        except OSError as err:
            error = _unwritable(err)
        get_logger().warning("claim.unprepare-failed", claim_uid=claim.uid, claim=f"{claim.namespace}/{claim.name}", error=error)
        return f"claim {claim.namespace}/{claim.name}: {error}"

    async def _leave(self, device_class: str, claim: ClaimKey, why: str) -> bool:
        """Let kubelet end the pod of a claim that cannot be undone now, since somebody is away, perhaps for good; its containers have ended.

        The entry stays, and the devices stay held, until it is undone. False when not even that could be written down.
        """
        async with self._locks.of(claim.uid):
            entry = self._checkpoint.get(claim.uid, device_class)
            if entry is None or not entry.is_undoing:
                return entry is None
            try:
                await self._checkpoint.put(msgspec.structs.replace(entry, is_left=True))
            except OSError as err:
                get_logger().error("claim.unleft", claim_uid=claim.uid, error=_unwritable(err))
                return False
        self._has_left.set()
        where = f"{claim.namespace}/{claim.name}"
        get_logger().warning("claim.left", claim_uid=claim.uid, claim=where, device_class=device_class, why=why, held="until it is undone")
        self.attempts.ended(claim.uid, device_class)
        return True

    async def undo_left(self) -> None:
        """Undo what was left, for ever: as soon as whoever was away is back."""
        while True:
            self._has_left.clear()
            left = [entry for entry in self._checkpoint.entries() if entry.is_left]
            if not left:
                await self._has_left.wait()
                continue
            for entry in left:
                claim = ClaimKey(namespace=entry.namespace, name=entry.name, uid=entry.uid)
                try:
                    async with self._locks.of(entry.uid), asyncio.timeout(self._deadlines.claim_s):
                        await self._unprepare(entry.device_class, claim)
                except (_ClaimFailed, TopobusError, OSError, TimeoutError) as err:
                    get_logger().debug("claim.still-left", claim_uid=entry.uid, error=str(err))
            await asyncio.sleep(self._deadlines.retry_s)

    async def _patiently(self, claim: ClaimKey, work: Callable[[], Awaitable[T]]) -> T:
        """Do a claim's work, again for a while when a peer is not there: kubelet itself comes back only after a minute and more.

        Errors: raises what the last try raised, and TimeoutError when the claim's whole time is over.
        """
        now = asyncio.get_running_loop().time
        until, pause_s = now() + self._deadlines.claim_retry_s, _PAUSE_S
        async with asyncio.timeout(self._deadlines.claim_s):
            while True:
                try:
                    async with self._locks.of(claim.uid):
                        return await work()
                except PeerUnavailable as err:
                    if now() + pause_s > until:
                        raise
                    get_logger().info("claim.waits", claim_uid=claim.uid, pause_s=pause_s, error=str(err))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _prepare(self, device_class: str, claim: ClaimKey) -> tuple[PreparedDevice, ...]:
        entry = self._checkpoint.get(claim.uid, device_class)
        if entry is not None and entry.is_running and entry.boot_id == self._boot_id:
            refusal = await self._refusal(entry)
            if refusal is not None:
                raise _ClaimFailed(_text(refusal))
            await self._write_cdi(entry, only_missing=True)
            return answer_of(entry)
        allocation = allocation_of(
            await self._reader.read(claim.namespace, claim.name),
            namespace=claim.namespace,
            name=claim.name,
            uid=claim.uid,
            driver=driver_name(device_class),
            node=self._state.node,
        )
        if isinstance(allocation, Refusal):
            raise _ClaimFailed(_text(allocation))
        if entry is not None and (entry.devices != allocation.devices or entry.is_undoing):
            # Allocated anew between two tries, or half undone: what was begun is undone to its end, and this is another operation.
            await self._unprepare(device_class, claim)
            entry = None
        self._check_rivals(claim, device_class, allocation)
        if entry is None:
            entry = ClaimEntry(
                namespace=claim.namespace, name=claim.name, uid=claim.uid, device_class=device_class, attempt=uuid.uuid4().hex
            )
        if not entry.is_running:
            entry = msgspec.structs.replace(entry, devices=allocation.devices)
            await self._checkpoint.put(entry)
        entry = await self._adopt(entry, claim, allocation)
        async with self._alone_with(device_class, allocation.names):
            # After a reboot the devices are made ready once more, by another operation.
            op_id = f"{entry.attempt}-prepare" + (f"-{self._boot_id[:8]}" if entry.is_running else "")
            answers: list[Held[PrepareReply]] = []
            prepared = await self._ask_to_prepare(op_id, claim, device_class, allocation, allocation.names, answers)
            by_request: dict[str, Prepared] = {}
            if len(allocation.requests) > 1:
                # Containers that name one request get what its devices have in common, which only their driver knows.
                for request, names in allocation.requests.items():
                    by_request[request] = await self._ask_to_prepare(
                        f"{op_id}-of-{request}", claim, device_class, allocation, names, answers
                    )
        spec = cdi_spec(claim.uid, device_class, prepared, by_request)
        entry = msgspec.structs.replace(entry, is_prepared=True, boot_id=self._boot_id, cdi=spec)
        # Side by side: each is made whole from the other at the next start, and kubelet hears of neither before both are on disk.
        for outcome in await asyncio.gather(self._write_cdi(entry), self._checkpoint.put(entry), return_exceptions=True):
            if outcome is not None:
                raise outcome
        refusal = contradicted(device_class, answers)
        if refusal is not None:
            # Taken back from the checkpoint first: a CDI file that no entry stands behind is removed at the next start, should this be the end.
            await self._checkpoint.put(msgspec.structs.replace(entry, is_prepared=False, boot_id="", cdi=None))
            await self._disk.do(lambda: asyncio.to_thread(delete, self._cdi_dir, _file(entry)))
            raise _ClaimFailed(_text(refusal))
        where = f"{claim.namespace}/{claim.name}"
        get_logger().info("claim.prepared", claim_uid=claim.uid, claim=where, device_class=device_class, devices=list(allocation.names))
        return answer_of(entry)

    async def _ask_to_prepare(
        self,
        op_id: str,
        claim: ClaimKey,
        device_class: str,
        claim_allocation: ClaimAllocation,
        names: tuple[str, ...],
        answers: list[Held[PrepareReply]],
    ) -> Prepared:
        """Have some of the claim's devices made ready together; the answer joins those that are looked at once more when all is written."""
        looked_at = sorted({allocated.device for allocated in claim_allocation.devices if allocated.is_shared} & set(names))
        tolerated = sorted({*claim_allocation.tolerated} & set(names))
        prepared = await self._asks.prepare(op_id, claim.owner, device_class, names, claim_allocation.config, looked_at, tolerated, answers)
        if isinstance(prepared, Refusal):
            raise _ClaimFailed(_text(prepared))
        missing = sorted(set(names) - prepared.edits.keys())
        if missing:
            raise _ClaimFailed(f"the {device_class} service prepared nothing for {', '.join(missing)}")
        return prepared

    def _check_rivals(self, claim: ClaimKey, device_class: str, claim_allocation: ClaimAllocation) -> None:
        """Refuse what another claim is prepared with, whatever the ledger says: this file is what containers run on."""
        whole = {device.device for device in claim_allocation.devices if not device.is_shared and not device.share_id}
        shared = {device.device for device in claim_allocation.devices if not device.is_shared and device.share_id}
        for entry in self._checkpoint.entries():
            if entry.uid == claim.uid or entry.device_class != device_class or not entry.is_prepared:
                continue
            devices = [device for device in entry.devices if not device.is_shared]
            clash = {
                allocated_device.device
                for allocated_device in devices
                if allocated_device.device in whole or (allocated_device.device in shared and not allocated_device.share_id)
            }
            if clash:
                raise _ClaimFailed(f"claim {entry.namespace}/{entry.name} holds {', '.join(sorted(clash))}: it is prepared on this node")

    async def _adopt(self, entry: ClaimEntry, claim: ClaimKey, claim_allocation: ClaimAllocation) -> ClaimEntry:
        """Tell the ledger; refused, look once whether the holder is a claim that is over. The entry says which attempt it was."""
        refusal = await self._try_adopt(entry, claim, claim_allocation)
        if refusal is None:
            return entry
        # Nothing was taken, so nothing is left to undo; and the next try must be a new operation, for this one's answer is stored.
        await self._checkpoint.remove(entry.uid, entry.device_class)
        if self._settler is not None and await self._settler.settle():
            entry = msgspec.structs.replace(entry, attempt=uuid.uuid4().hex)
            await self._checkpoint.put(entry)
            refusal = await self._try_adopt(entry, claim, claim_allocation)
            if refusal is None:
                return entry
            await self._checkpoint.remove(entry.uid, entry.device_class)
        raise _ClaimFailed(_text(refusal))

    async def _try_adopt(self, entry: ClaimEntry, claim: ClaimKey, claim_allocation: ClaimAllocation) -> Refusal | None:
        """Exclusive devices are held, those of admin access are only looked at."""
        looked_at = tuple(sorted({device.device for device in claim_allocation.devices if device.is_shared}))
        shared = {entry.device_class: looked_at} if looked_at else {}
        # What holds nothing first: when it is refused, nothing has been taken.
        for is_shared, op_id, devices in (
            (True, f"{entry.attempt}-adopt-shared", shared),
            (False, f"{entry.attempt}-adopt", claim_allocation.held),
        ):
            if not devices:
                continue
            by_share = {} if is_shared else claim_allocation.by_share
            adopted = await self._asks.adopt(op_id, claim.owner, devices, shared=by_share, is_shared=is_shared, is_prepared=not is_shared)
            if isinstance(adopted, Refusal):
                return adopted
            for device_class, names in devices.items() if not is_shared else ():
                self._state.hand_out(device_class, names, claim.owner, adopted.ledger_sequence)
        return None

    async def _unprepare(self, device_class: str, claim: ClaimKey) -> None:
        entry = self._checkpoint.get(claim.uid, device_class)
        if entry is None:
            return
        if not entry.is_undoing:
            # From here on nobody may be told that it is prepared, should we not come to the end.
            entry = msgspec.structs.replace(entry, is_undoing=True)
            await self._checkpoint.put(entry)
        names = await self._undo_devices(entry, claim)
        await self._disk.do(lambda: asyncio.to_thread(delete, self._cdi_dir, _file(entry)))
        if not any(claim_entry.uid == claim.uid and claim_entry.device_class != device_class for claim_entry in self._checkpoint.entries()):
            await self._let_go(entry.attempt, claim)
        if self._settler is not None:
            self._settler.leave(claim.owner)
        await self._checkpoint.remove(claim.uid, device_class)
        self._undone.discard(entry.key)
        where = f"{entry.namespace}/{entry.name}"
        get_logger().info("claim.unprepared", claim_uid=claim.uid, claim=where, device_class=device_class, devices=list(names))

    async def _undo_devices(self, entry: ClaimEntry, claim: ClaimKey) -> tuple[str, ...]:
        """Have the device service undo what nobody else uses: a share, or admin access, ends without a word to the device while others go on."""
        names = tuple(sorted({device.device for device in entry.devices}))
        async with self._alone_with(entry.device_class, names):
            used = self._used_by_others(entry)
            names = tuple(name for name in names if name not in used)
            if names:
                refusal = await self._asks.unprepare(f"{entry.attempt}-unprepare", claim.owner, entry.device_class, names)
                if refusal is not None:
                    raise _ClaimFailed(_text(refusal))
            self._undone.add(entry.key)
        return names

    def _used_by_others(self, entry: ClaimEntry) -> set[str]:
        """Devices that other claims are prepared with, or begin to be; who only looks (admin access) keeps no holder's device up."""
        looked_at = {device.device for device in entry.devices if device.is_shared}
        others = [
            claim_entry
            for claim_entry in self._checkpoint.entries()
            if claim_entry.device_class == entry.device_class and claim_entry.key != entry.key
        ]
        users = [device for other in others if other.key not in self._undone for device in other.devices]
        return {user.device for user in users if not user.is_shared or user.device in looked_at}

    async def _let_go(self, attempt: str, claim: ClaimKey) -> None:
        """Tell the ledger that nothing of a claim is prepared any more.

        While the claim is allocated its devices stay its own, prepared or not; who deallocates it releases them. In a cluster that is the settler: undoing
        must not wait for the API server.
        """
        is_kept = self._settler is not None or is_allocated_here(
            await self._reader.read(claim.namespace, claim.name), claim.uid, self._state.node
        )
        op_id = f"{attempt}-{'keep' if is_kept else 'release'}"
        refusal = await self._asks.release(op_id, claim.owner, is_undone=True, keeps_devices=is_kept)
        if refusal is not None:
            raise _ClaimFailed(_text(refusal))

    async def _refusal(self, entry: ClaimEntry) -> Refusal | None:
        """Look at what the checkpoint would have us write: rights may be fewer than when it was prepared."""
        if entry.cdi is None:
            return None
        edits = {device.name: device.edits for device in entry.cdi.devices}
        return await self._asks.refuse_forbidden(entry.device_class, Prepared(edits=edits, common=entry.cdi.common))

    async def _write_cdi(self, entry: ClaimEntry, *, only_missing: bool = False) -> None:
        if entry.cdi is None:
            return
        wanted = {_file(entry): render(entry.cdi)}
        try:
            if only_missing:
                await self._disk.do(lambda: asyncio.to_thread(write_missing, self._cdi_dir, wanted))
            else:
                await self._disk.do(lambda: asyncio.to_thread(write, self._cdi_dir, *wanted.popitem()))
        except OSError as err:
            self._tell_cdi(_unwritable(err))
            raise
        self._tell_cdi("")

    @asynccontextmanager
    async def _alone_with(self, device_class: str, names: Iterable[str]) -> AsyncIterator[None]:
        """Serialize what a device service does to devices that claims share; in order of the names, so that nobody waits in a circle."""
        async with AsyncExitStack() as stack:
            for name in sorted(names):
                await stack.enter_async_context(self._locks.of(f"{device_class}/{name}"))
            yield


def _file(entry: ClaimEntry) -> str:
    return file_name(CDI_VENDOR, entry.device_class, entry.uid)


def _unwritable(err: OSError) -> str:
    return f"cannot write {err.filename}: {err.strerror}"


def _text(refusal: Refusal) -> str:
    return "; ".join(reason.message for reason in refusal.reasons)
