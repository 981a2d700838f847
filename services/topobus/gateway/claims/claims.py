"""Prepares and unprepares claims when kubelet asks, and undoes what was left or is not known.

`claim_steps` decides the order of the effects. This module decides for how long a claim is tried. A
claim that cannot be undone now is left, and undone when that is possible.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
from msgspec import Struct

from topobus.gateway.asks import StillAtWork
from topobus.gateway.claims.attempts import Attempts
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_files import ClaimFiles, why_unwritable
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey
from topobus.gateway.claims.claim_ledger import ClaimLedger
from topobus.gateway.claims.claim_reports import ClaimReports
from topobus.gateway.claims.claim_steps import ClaimSteps
from topobus.gateway.claims.rules.claim_cdi import CDI_VENDOR, cdi_class, cdi_names, cdi_whole_names
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.claims.rules.device_metadata import metadata_device_name
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.containers.live_containers import StillRuns
from topobus.gateway.key_locks import KeyLocks
from topobus.gateway.metrics import ClaimMetrics
from topobus.gateway.node_state import NodeState
from topobus.process.backoff import full_jitter
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.names import ClaimUid

__all__ = ["WHOLE_CLAIM", "ClaimPreparer", "PreparedDevice", "answer_of"]


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
        state: NodeState,
        checkpoint: Checkpoint,
        deadlines: DeadlineSettings,
        ledger: ClaimLedger,
        steps: ClaimSteps,
        files: ClaimFiles,
        reports: ClaimReports,
        metrics: ClaimMetrics,
    ) -> None:
        self.attempts = Attempts()
        self._state = state
        self._containers = state.containers
        self._checkpoint = checkpoint
        self._deadlines = deadlines
        self._ledger = ledger
        self._steps = steps
        self._files = files
        self._reports = reports
        self._metrics = metrics
        self._locks = KeyLocks()
        self._has_left = asyncio.Event()
        """Set when a claim was left to be undone later."""

    async def restore(self, *, is_offered: bool) -> None:
        """Write CDI files that a reboot removed, and remove those that belong to no claim.

        Runs before kubelet is served.

        Errors: raises ConfigError when there is something to write and the folder cannot be
        written. With nothing to write, the failure is only logged: device plugins work without the
        folder, and it may be repaired before the first claim comes.
        """
        await self._steps.restore()
        self._count_prepared()
        if is_offered:
            await self._files.check()

    async def finish(self) -> None:
        """Wait until all writes have ended. Another process may then use the files."""
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
                    get_logger().warning("claim.undone-unknown", claim_uid=owner.uid, claim=str(claim))
        return is_done

    async def prepare(self, claim: ClaimKey) -> tuple[PreparedDevice, ...] | str:
        """Prepare a claim's devices. A text is the claim's error."""
        with self.attempts.running(claim.uid):
            try:
                with self._metrics.preparing():
                    prepared = await self._patiently(claim, lambda: self._prepare(claim))
            except StillRuns as err:
                error, code = f"{err}{await self._containers.openers_of(err.nodes)}", ""
            except (ClaimFailed, TopobusError) as err:
                error, code = str(err), err.code if isinstance(err, ClaimFailed) else ""
            except TimeoutError:
                error, code = f"not prepared within {self._deadlines.claim_s} s", ""
            except OSError as err:
                error, code = why_unwritable(err), ""
            else:
                self.attempts.ended(claim.uid)
                return prepared
            get_logger().warning("claim.prepare-failed", claim_uid=claim.uid, claim=str(claim), error=error, code=code)
            error = f"claim {claim}: {error}"
            self.attempts.failed(claim.uid, error, asyncio.get_running_loop().time(), code)
            return error

    async def unprepare(self, claim: ClaimKey) -> str:
        """Undo a claim. Returns its error, empty when done. An unknown claim was undone before."""
        try:
            with self._metrics.unpreparing():
                await self._wait_for_containers(claim)
                await self._patiently(claim, lambda: self._unprepare(claim))
            self.attempts.ended(claim.uid)
            return ""
        except PeerUnavailable as err:
            evidence = await self._containers.openers_of(err.nodes) if isinstance(err, StillRuns) else ""
            if await self._leave(claim, f"{err}{evidence}"):
                return ""
            error = str(err)
        except (ClaimFailed, TopobusError) as err:
            error = str(err)
        except TimeoutError:
            error = f"not undone within {self._deadlines.claim_s} s"
        except OSError as err:
            error = why_unwritable(err)
        get_logger().warning("claim.unprepare-failed", claim_uid=claim.uid, claim=str(claim), error=error)
        return f"claim {claim}: {error}"

    async def _leave(self, claim: ClaimKey, why: str) -> bool:
        """Let kubelet end the pod of a claim that cannot be undone now, because a peer is away,
        perhaps permanently, or a container that kubelet has forgotten still runs.

        Its entries stay, and the devices stay held, until it is undone. False when not even that
        could be stored.
        """
        async with self._locks.of(claim.uid):
            entries = self._checkpoint.of_claim(claim.uid)
            if not all(entry.is_undoing for entry in entries):
                return False
            if not entries:
                return True
            try:
                await self._checkpoint.change_claim(claim.uid, self._left)
            except OSError as err:
                get_logger().error("claim.unleft", claim_uid=claim.uid, error=why_unwritable(err))
                return False
        self._has_left.set()
        get_logger().warning(
            "claim.left",
            claim_uid=claim.uid,
            claim=str(claim),
            why=why,
            held="until it is undone",
        )
        self.attempts.ended(claim.uid)
        return True

    def _left(self, entry: ClaimEntry) -> ClaimEntry:
        left_for = tuple(sorted(container.id for container in self._containers.of_claim(entry)))
        return msgspec.structs.replace(entry, is_left=True, left_for=left_for)

    async def undo_left(self) -> None:
        """Undo claims that were left, as soon as the missing peer is back or their containers have
        ended, until cancelled.
        """
        while True:
            self._has_left.clear()
            ticket = self._containers.changed.ticket()
            left = dict.fromkeys(entry.claim for entry in self._checkpoint.entries() if entry.is_left)
            if not left:
                await self._has_left.wait()
                continue
            for claim in left:
                try:
                    async with self._locks.of(claim.uid), asyncio.timeout(self._deadlines.claim_s):
                        await self._unprepare(claim)
                except (ClaimFailed, TopobusError, OSError, TimeoutError) as err:
                    get_logger().debug("claim.still-left", claim_uid=claim.uid, error=str(err))
            await is_set_within(ticket, asyncio.timeout(self._deadlines.retry_s))

    async def _wait_for_containers(self, claim: ClaimKey) -> None:
        """Wait a moment for the end of containers that have a claim's devices."""
        await self._containers.changed.until(
            lambda: not any(map(self._containers.why_held, self._checkpoint.of_claim(claim.uid))),
            asyncio.timeout(_ENDING_S),
        )

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
                except (PeerUnavailable, ClaimFailed) as err:
                    # The device service of a shape's parts may not have reported yet.
                    if isinstance(err, ClaimFailed) and err.code != "shape-unknown":
                        raise
                    wait_s = pause_s
                    if now() + wait_s > until:
                        raise
                    get_logger().info("claim.waits", claim_uid=claim.uid, pause_s=wait_s, error=str(err))
                    attempt += 1
                await asyncio.sleep(wait_s)

    async def _prepare(self, claim: ClaimKey) -> tuple[PreparedDevice, ...]:
        entries = self._checkpoint.of_claim(claim.uid)
        if entries and all(map(self._checkpoint.is_ready, entries)):
            for entry in entries:
                await self._steps.mend(entry)
            return answer_of(entries)
        allocation = await self._steps.read(claim)
        if entries and (
            {entry.device_class: entry.devices for entry in entries}
            != {device_class: allocation.part(device_class).devices for device_class in allocation.classes}
            or any(entry.is_undoing for entry in entries)
        ):
            # The claim was allocated again between two tries, or is partly undone. The earlier
            # operation is undone completely, and a new one begins.
            await self._unprepare(claim)
        entries = await self._steps.prepare(claim, allocation)
        self._count_prepared()
        for entry in entries:
            self._reports.prepared(entry)
        devices = sorted({device.device for entry in entries for device in entry.devices})
        get_logger().info(
            "claim.prepared", claim_uid=claim.uid, claim=str(claim), classes=list(allocation.classes), devices=devices
        )
        return answer_of(entries)

    async def _unprepare(self, claim: ClaimKey) -> None:
        entries = self._checkpoint.of_claim(claim.uid)
        if not entries:
            return
        names = await self._steps.undo(entries, claim)
        self._count_prepared()
        classes = [entry.device_class for entry in entries]
        for device_class in classes:
            self._reports.unprepared(claim, device_class)
        get_logger().info(
            "claim.unprepared", claim_uid=claim.uid, claim=str(claim), classes=classes, devices=list(names)
        )

    def _count_prepared(self) -> None:
        self._metrics.set_prepared(
            entry.device_class for entry in self._checkpoint.entries() if self._checkpoint.is_ready(entry)
        )


WHOLE_CLAIM = "_whole"
"""The request name under which the edits common to all requests are listed. No container can
name it (it is no DNS label), and kubelet gives it to those that name none:
pkg/kubelet/cm/dra/claiminfo.go, cdiDevicesAsList."""


class PreparedDevice(Struct, frozen=True, kw_only=True):
    """One device in kubelet's answer."""

    request: str
    pool: str
    device: str
    cdi_devices: tuple[str, ...]
    share_id: str = ""


def answer_of(entries: Iterable[ClaimEntry]) -> tuple[PreparedDevice, ...]:
    """List the devices of a prepared claim of all classes in the form that kubelet gets. The parts
    of a shape are one device to it.
    """
    joined: dict[tuple[str, str, str, str], PreparedDevice] = {}
    for prepared in itertools.chain.from_iterable(map(_answer_of_class, entries)):
        key = (prepared.request, prepared.pool, prepared.device, prepared.share_id)
        earlier = joined[key].cdi_devices if key in joined else ()
        # The parts of a class have the name of their request in common.
        names = tuple(dict.fromkeys((*earlier, *prepared.cdi_devices)))
        joined[key] = msgspec.structs.replace(prepared, cdi_devices=names)
    # The lists of the whole claim override those of its requests, which may have come later.
    return tuple(sorted(joined.values(), key=lambda prepared: prepared.request == WHOLE_CLAIM))


def _answer_of_class(entry: ClaimEntry) -> list[PreparedDevice]:
    # The file of a request comes with its first device, which every container that names the
    # request gets.
    firsts = {device.request: device for device in reversed(entry.devices)} if entry.has_metadata else {}
    devices = [
        PreparedDevice(
            request=device.request,
            pool=device.pool,
            device=device.allocated,
            cdi_devices=(
                *cdi_names(entry.cdi, entry.uid, device.device, device.request),
                *([_metadata_name(entry, device.request)] if firsts.get(device.request) is device else []),
            ),
            share_id=device.share_id,
        )
        for device in entry.devices
    ]
    whole = cdi_whole_names(entry.cdi, entry.uid)
    if whole:
        devices.append(msgspec.structs.replace(devices[-1], request=WHOLE_CLAIM, cdi_devices=whole))
    return devices


def _metadata_name(entry: ClaimEntry, request: str) -> str:
    return f"{CDI_VENDOR}/{cdi_class(entry.device_class)}={metadata_device_name(entry.uid, request)}"
