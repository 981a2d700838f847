"""Prepares and unprepares claims, with ledger, device service, CDI file and checkpoint in an order
that survives a crash at any point.

Prepare: write "begun" to the checkpoint, adopt in the ledger (`claim_ledger`), prepare the devices
(`claim_devices`), write the CDI file (`claim_files`), write "done" to the checkpoint, answer with
devices and CDI names, or an error text for kubelet. Unprepare does the reverse. Both are
idempotent. Only this module decides the order, and how long a claim is tried. A claim that cannot
be undone now is left, and undone when that is possible.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from topobus.formats.messages.messages import ApiObject, Prepared
from topobus.gateway.asks import NodeAsks, StillAtWork
from topobus.gateway.claims.attachments import Attachments
from topobus.gateway.claims.attempts import Attempts
from topobus.gateway.claims.checkpoint import Checkpoint, ClaimEntry
from topobus.gateway.claims.claim_answers import PreparedDevice, answer_of
from topobus.gateway.claims.claim_devices import ClaimDevices
from topobus.gateway.claims.claim_files import ClaimFiles, why_unwritable
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey, refused
from topobus.gateway.claims.claim_ledger import ClaimLedger, Releaser
from topobus.gateway.claims.claim_metadata import ClaimMetadata
from topobus.gateway.claims.claim_reading import ClaimReader
from topobus.gateway.claims.claim_reports import ClaimReports
from topobus.gateway.claims.pinning import Pinning
from topobus.gateway.claims.rules.claim_allocation import ClaimAllocation, allocation_of
from topobus.gateway.claims.rules.claim_cdi import cdi_spec
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.containers.live_containers import StillRuns, nodes_of
from topobus.gateway.key_locks import KeyLocks
from topobus.gateway.metrics import ClaimMetrics
from topobus.gateway.node_state import NodeState
from topobus.process.backoff import full_jitter
from topobus.process.logging import get_logger
from topobus.process.tracing import span
from topobus.values.device import driver_name
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal

__all__ = ["ClaimPreparer"]


T = TypeVar("T")

# Pauses in seconds between the tries of a claim whose peer is not reachable.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# Seconds before the end of a claim's time at which the device service's present work is returned as
# the error, instead of a timeout.
_ANSWER_S = 1.0
# Seconds between two tries to undo claims that are in no checkpoint. Topology may be starting.
_UNDO_AGAIN_S = 5.0
# Seconds to wait for containers: kubelet unprepares a claim when its containers have ended, and may
# know that a moment before the gateway does.
_ENDING_S = 1.0


class ClaimPreparer:
    """Prepares and unprepares claims of all classes on this node."""

    def __init__(
        self,
        *,
        state: NodeState,
        asks: NodeAsks,
        reader: ClaimReader,
        checkpoint: Checkpoint,
        deadlines: DeadlineSettings,
        releaser: Releaser | None,
        attachments: Attachments,
        pinning: Pinning,
        reports: ClaimReports,
        metadata: ClaimMetadata,
        files: ClaimFiles,
        metrics: ClaimMetrics,
    ) -> None:
        """`releaser` is None without a cluster."""
        self.attempts = Attempts()
        self._state = state
        self._containers = state.containers
        self._asks = asks
        self._reader = reader
        self._checkpoint = checkpoint
        self._deadlines = deadlines
        self._devices = ClaimDevices(asks, checkpoint, state.device, self._why_held)
        self._attachments = attachments
        self._pinning = pinning
        self._reports = reports
        self._metadata = metadata
        self._files = files
        self._metrics = metrics
        self._ledger = ClaimLedger(state, asks, reader, checkpoint, releaser)
        self._locks = KeyLocks()
        self._has_left = asyncio.Event()
        """Set when a claim was left to be undone later."""

    async def restore(self, *, is_offered: bool = True) -> None:
        """Write CDI files that a reboot removed, and remove those that belong to no claim.

        Runs before kubelet is served.

        Errors: raises ConfigError when there is something to write and the folder cannot be
        written. With nothing to write, the failure is only logged: device plugins work without the
        folder, and it may be repaired before the first claim comes.
        """
        running = [entry for entry in self._checkpoint.entries() if entry.is_running]
        # An earlier gateway process may have written what the settings forbid now. Its claim gets
        # the refusal when kubelet prepares it again, and the others get their files.
        wanted = [entry for entry in running if entry.cdi is not None and await self._refusal(entry) is None]
        await asyncio.to_thread(self._checkpoint.sweep)
        await self._metadata.restore(self._checkpoint.entries())
        await self._files.restore(wanted)
        self._count_prepared()
        if is_offered:
            await self._files.check()

    async def finish(self) -> None:
        """Wait until all writes have ended. Another process may then use the files."""
        await self._metadata.finish()
        await self._files.finish()
        await self._checkpoint.finish()

    async def undo_unknown(self) -> None:
        """Undo claims that the ledger lists as prepared and the checkpoint does not have, at the
        start and whenever an older ledger appears, until cancelled.

        An operator who moved the checkpoint away declared that nothing uses its claims. A ledger
        that was restored from an older copy has claims that were undone since.
        """
        while True:
            ticket = self._state.ledger_went_back.ticket()
            if await self._undo_unknown():
                await ticket.wait()
            else:
                await asyncio.sleep(_UNDO_AGAIN_S)

    async def _undo_unknown(self) -> bool:
        """Check once.

        False: something could not be undone, and its devices stay held until it is.
        """
        is_done = True
        ledger = self._state.ledger
        for allocation in ledger.allocations.values() if ledger is not None else ():
            owner = allocation.owner
            claim = ClaimKey(namespace=owner.namespace, name=owner.name, uid=ClaimUid(owner.uid))
            async with self._locks.of(owner.uid):
                if not allocation.is_prepared or any(entry.uid == owner.uid for entry in self._checkpoint.entries()):
                    continue
                if self._containers.of_unknown_claim(owner.uid):
                    is_done = False
                    continue
                try:
                    await self._ledger.let_go(uuid.uuid4().hex, claim)
                except (ClaimFailed, TopobusError) as err:
                    is_done = False
                    get_logger().warning("claim.undo-failed", claim_uid=owner.uid, error=str(err))
                else:
                    get_logger().warning(
                        "claim.undone-unknown", claim_uid=owner.uid, claim=f"{owner.namespace}/{owner.name}"
                    )
        return is_done

    async def prepare(self, device_class: str, claim: ClaimKey) -> tuple[PreparedDevice, ...] | str:
        """Prepare a claim's devices of one class. A text is the claim's error."""
        with self.attempts.running(claim.uid):
            try:
                with self._metrics.preparing(device_class):
                    prepared = await self._patiently(claim, lambda: self._prepare(device_class, claim))
            except StillRuns as err:
                error, code = f"{err}{await self._containers.openers_of(err.nodes)}", ""
            except (ClaimFailed, TopobusError) as err:
                error, code = str(err), err.code if isinstance(err, ClaimFailed) else ""
            except TimeoutError:
                error, code = f"not prepared within {self._deadlines.claim_s} s", ""
            except OSError as err:
                error, code = why_unwritable(err), ""
            else:
                self.attempts.ended(claim.uid, device_class)
                return prepared
            where = f"{claim.namespace}/{claim.name}"
            get_logger().warning("claim.prepare-failed", claim_uid=claim.uid, claim=where, error=error, code=code)
            error = f"claim {where}: {error}"
            self.attempts.failed(claim.uid, device_class, error, asyncio.get_running_loop().time(), code)
            return error

    async def unprepare(self, device_class: str, claim: ClaimKey) -> str:
        """Undo a claim. Returns its error, empty when done. An unknown claim was undone before."""
        try:
            with self._metrics.unpreparing(device_class):
                await self._wait_for_containers(device_class, claim)
                await self._patiently(claim, lambda: self._unprepare(device_class, claim))
            self.attempts.ended(claim.uid, device_class)
            return ""
        except PeerUnavailable as err:
            evidence = await self._containers.openers_of(err.nodes) if isinstance(err, StillRuns) else ""
            if await self._leave(device_class, claim, f"{err}{evidence}"):
                return ""
            error = str(err)
        except (ClaimFailed, TopobusError) as err:
            error = str(err)
        except TimeoutError:
            error = f"not undone within {self._deadlines.claim_s} s"
        except OSError as err:
            error = why_unwritable(err)
        get_logger().warning(
            "claim.unprepare-failed", claim_uid=claim.uid, claim=f"{claim.namespace}/{claim.name}", error=error
        )
        return f"claim {claim.namespace}/{claim.name}: {error}"

    async def _leave(self, device_class: str, claim: ClaimKey, why: str) -> bool:
        """Let kubelet end the pod of a claim that cannot be undone now, because a peer is away,
        perhaps permanently, or a container that kubelet has forgotten still runs.

        The entry stays, and the devices stay held, until it is undone. False when not even that
        could be stored.
        """
        async with self._locks.of(claim.uid):
            entry = self._checkpoint.get(claim.uid, device_class)
            if entry is None or not entry.is_undoing:
                return entry is None
            try:
                left_for = tuple(sorted(container.id for container in self._containers.of_claim(entry)))
                await self._checkpoint.change(
                    entry.key, lambda claim_entry: msgspec.structs.replace(claim_entry, is_left=True, left_for=left_for)
                )
            except OSError as err:
                get_logger().error("claim.unleft", claim_uid=claim.uid, error=why_unwritable(err))
                return False
        self._has_left.set()
        where = f"{claim.namespace}/{claim.name}"
        get_logger().warning(
            "claim.left",
            claim_uid=claim.uid,
            claim=where,
            device_class=device_class,
            why=why,
            held="until it is undone",
        )
        self.attempts.ended(claim.uid, device_class)
        return True

    async def undo_left(self) -> None:
        """Undo claims that were left, as soon as the missing peer is back or their containers have
        ended, until cancelled.
        """
        while True:
            self._has_left.clear()
            ticket = self._containers.changed.ticket()
            left = [entry for entry in self._checkpoint.entries() if entry.is_left]
            if not left:
                await self._has_left.wait()
                continue
            for entry in left:
                claim = ClaimKey(namespace=entry.namespace, name=entry.name, uid=entry.uid)
                try:
                    async with self._locks.of(entry.uid), asyncio.timeout(self._deadlines.claim_s):
                        await self._unprepare(entry.device_class, claim)
                except (ClaimFailed, TopobusError, OSError, TimeoutError) as err:
                    get_logger().debug("claim.still-left", claim_uid=entry.uid, error=str(err))
            try:
                async with asyncio.timeout(self._deadlines.retry_s):
                    await ticket.wait()
            except TimeoutError:
                continue

    async def _wait_for_containers(self, device_class: str, claim: ClaimKey) -> None:
        """Wait a moment for the end of containers that have a claim's devices."""
        try:
            async with asyncio.timeout(_ENDING_S):
                while True:
                    ticket = self._containers.changed.ticket()
                    entry = self._checkpoint.get(claim.uid, device_class)
                    if entry is None or not self._why_held(entry):
                        return
                    await ticket.wait()
        except TimeoutError:
            return

    def _why_held(self, entry: ClaimEntry) -> str:
        """Describe which container still has a claim's devices.

        Empty: none has them, or no runtime reports containers.
        """
        running = self._containers.of_claim(entry)
        if running:
            return (
                f"{', '.join(map(str, running))} has not ended and has "
                f"{', '.join(sorted({device.device for device in entry.devices}))}"
            )
        why_untold = self._containers.why_untold(is_needed=bool(entry.left_for))
        return f"whether its containers have ended is not known: {why_untold}" if why_untold else ""

    async def _patiently(self, claim: ClaimKey, work: Callable[[], Awaitable[T]]) -> T:
        """Run a claim's work, and repeat it for a while when a peer is away, because kubelet itself
        retries only after more than a minute.

        Errors: raises the error of the last try, and TimeoutError when the claim's whole time is
        over.
        """
        now = asyncio.get_running_loop().time
        start, attempt = now(), 0
        until = start + self._deadlines.claim_retry_s
        async with asyncio.timeout(self._deadlines.claim_s):
            while True:
                pause_s = full_jitter(attempt, least_s=_PAUSE_S, most_s=_LONGEST_PAUSE_S)
                try:
                    async with self._locks.of(claim.uid):
                        return await work()
                except StillRuns:
                    # It may take very long, so kubelet gets the error now.
                    raise
                except StillAtWork as err:
                    # Wait for all of the claim's time. Kubelet's next try continues the same
                    # operation.
                    wait_s = min(max(err.retry_after_s, pause_s), _LONGEST_PAUSE_S)
                    if now() + wait_s > start + self._deadlines.claim_s - _ANSWER_S:
                        raise
                    get_logger().debug("claim.waits", claim_uid=claim.uid, pause_s=wait_s, error=str(err))
                except PeerUnavailable as err:
                    wait_s = pause_s
                    if now() + wait_s > until:
                        raise
                    get_logger().info("claim.waits", claim_uid=claim.uid, pause_s=wait_s, error=str(err))
                    attempt += 1
                await asyncio.sleep(wait_s)

    async def _prepare(self, device_class: str, claim: ClaimKey) -> tuple[PreparedDevice, ...]:
        entry = self._checkpoint.get(claim.uid, device_class)
        if entry is not None and self._checkpoint.is_ready(entry):
            refusal = await self._refusal(entry)
            if refusal is not None:
                raise refused(refusal)
            await self._metadata.mend(entry)
            await self._files.write(entry, only_missing=True)
            return answer_of(entry)
        allocation = allocation_of(
            await self._read(claim),
            namespace=claim.namespace,
            name=claim.name,
            uid=claim.uid,
            driver=driver_name(device_class),
            node=self._state.node,
        )
        if isinstance(allocation, Refusal):
            raise refused(allocation)
        if entry is not None and (entry.devices != allocation.devices or entry.is_undoing):
            # Allocated again between two tries, or half undone: what was begun is undone
            # completely, and this is another operation.
            await self._unprepare(device_class, claim)
            entry = None
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
        entry = await self._ledger.adopt(entry, claim, allocation)
        if entry.attachment is not None:
            # From an earlier boot: none of its sandboxes exists.
            await self._attachments.detach(entry)
            entry = msgspec.structs.replace(entry, attachment=None, left_sandbox=entry.attachment.sandbox.id)
        allocation = msgspec.structs.replace(allocation, cpus=entry.cpus)
        # After a reboot the devices are made ready again by another operation.
        op_id = f"{entry.attempt}-prepare" + (f"-{self._checkpoint.boot_id[:8]}" if entry.is_running else "")
        answers = await self._devices.prepare(op_id, claim, device_class, allocation, is_again=entry.is_running)
        spec = cdi_spec(claim.uid, device_class, answers.prepared, answers.by_request)
        to_attach = _own_of(allocation, "attach", answers.prepared.to_attach)
        to_adjust = _own_of(allocation, "adjust", answers.prepared.to_adjust)
        config = {name: allocation.config[name] for name in {*to_attach, *to_adjust} if name in allocation.config}
        entry = msgspec.structs.replace(
            entry,
            is_prepared=True,
            boot_id=self._checkpoint.boot_id,
            to_attach=to_attach,
            to_adjust=to_adjust,
            config=config,
            pods=allocation.pods,
            generation=allocation.generation,
            pod_claim_name=allocation.pod_claim_name,
            cdi=spec,
        )
        self._attachments.check(entry)
        entry = msgspec.structs.replace(entry, has_metadata=await self._metadata.describe(entry))
        async with self._pinning.promising(entry) as refusal:
            if refusal is not None:
                raise refused(refusal)
            # In parallel: at the next start each file can be rebuilt from the other, and kubelet
            # gets its answer only when both are on disk.
            for outcome in await asyncio.gather(
                self._files.write(entry), self._checkpoint.put(entry), return_exceptions=True
            ):
                if outcome is not None:
                    raise outcome
        self._count_prepared()
        self._reports.prepared(entry)
        where = f"{claim.namespace}/{claim.name}"
        get_logger().info(
            "claim.prepared",
            claim_uid=claim.uid,
            claim=where,
            device_class=device_class,
            devices=list(allocation.names),
        )
        return answer_of(entry)

    async def _unprepare(self, device_class: str, claim: ClaimKey) -> None:
        entry = self._checkpoint.get(claim.uid, device_class)
        if entry is None:
            return
        if not entry.is_undoing:
            # From here on it must not count as prepared, in case this run does not finish.
            entry = (
                await self._checkpoint.change(
                    entry.key, lambda claim_entry: msgspec.structs.replace(claim_entry, is_undoing=True)
                )
                or entry
            )
        why_held = self._why_held(entry)
        if why_held:
            raise StillRuns(why_held, nodes=nodes_of(entry))
        await self._attachments.detach(entry)
        names = await self._devices.undo(entry, claim)
        await self._files.delete(entry)
        await self._metadata.delete(entry)
        if not any(
            claim_entry.uid == claim.uid and claim_entry.device_class != device_class
            for claim_entry in self._checkpoint.entries()
        ):
            await self._ledger.let_go(entry.attempt, claim)
        await self._checkpoint.remove(claim.uid, device_class, is_kept=self._ledger.is_settled)
        self._count_prepared()
        self._devices.forget(entry)
        await self._pinning.released()
        self._reports.unprepared(claim, device_class)
        where = f"{entry.namespace}/{entry.name}"
        get_logger().info(
            "claim.unprepared", claim_uid=claim.uid, claim=where, device_class=device_class, devices=list(names)
        )

    def _count_prepared(self) -> None:
        self._metrics.set_prepared(
            entry.device_class for entry in self._checkpoint.entries() if self._checkpoint.is_ready(entry)
        )

    async def _read(self, claim: ClaimKey) -> ApiObject | None:
        with span("read claim", claim=f"{claim.namespace}/{claim.name}"):
            return await self._reader.read(claim.namespace, claim.name)

    async def _refusal(self, entry: ClaimEntry) -> Refusal | None:
        """Check what the checkpoint's content would have us write, because the settings may allow
        less than when it was prepared.
        """
        if entry.cdi is None:
            return None
        edits = {device.name: device.edits for device in entry.cdi.devices}
        return await self._asks.refuse_forbidden(entry.device_class, Prepared(edits=edits, common=entry.cdi.common))


def _own_of(claim_allocation: ClaimAllocation, verb: str, names: Sequence[str]) -> tuple[str, ...]:
    """Choose those devices of an answer on which the service acts.

    A device with only admin access is left out.

    Errors: raises ClaimFailed when the service names a device that the claim does not have.
    """
    strange = sorted(set(names) - set(claim_allocation.names))
    if strange:
        raise ClaimFailed(f"the device service wants to {verb} {', '.join(strange)}, which the claim has not")
    looked_at = {device.device for device in claim_allocation.devices if device.is_shared}
    return tuple(sorted(set(names) - looked_at))
