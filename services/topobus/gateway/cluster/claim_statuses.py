"""Writes what happened to claims' devices on this node into the claims' `status.devices`, and
removes it when they are undone. News for people also become events (`pod_events`).

The wanted status is on disk (`report_record`) before it is written, by one server-side apply for
each claim and driver, under the driver's name. A write that failed is repeated with growing pauses.
kubelet and the container runtime never wait for it. Nothing is left to write for a claim that is
gone, was replaced, or is no longer allocated: the API server itself drops the entries of devices
that a claim no longer has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from topobus.engine.shapes.shapes import SHAPE_CLASS
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.claims.claim_reports import ClaimReports
from topobus.gateway.claims.rules.claim_allocation import is_allocated_here
from topobus.gateway.claims.rules.claim_cdi import cdi_device_name
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.claims.rules.device_status import ClaimReport, device_statuses, joint_report, text_of
from topobus.gateway.cluster.objects import CLAIMS, Rejected
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.report_record import ReportRecord
from topobus.gateway.cluster.rules.device_faults import HealthNote
from topobus.kubernetes.answers import INVALID
from topobus.process.broadcast import Broadcast
from topobus.process.clock import Clock, is_set_within
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox
from topobus.values.timestamps import in_whole_seconds

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

__all__ = ["ClaimStatuses"]

# Claims that are written in parallel: a burst of pods is reported within a second, without a
# hundred gateways overloading the API server.
_WRITERS = 4
# Pauses in seconds, the first one and the longest: after a write without an answer, and after one
# that was refused and would be refused again.
_AWAY_S = (0.2, 10.0)
_REFUSED_S = (10.0, 300.0)
_MOST_DOUBLINGS = 16


class ClaimStatuses(ClaimReports):
    """Writes the status of the claims of one node."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        record: ReportRecord,
        checkpoint: Checkpoint,
        events: PodEvents,
        clock: Clock,
        node: str,
        *,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` gets why claims are not written, or an empty text when they are."""
        self._cluster = cluster
        self._record = record
        self._checkpoint = checkpoint
        self._events = events
        self._clock = clock
        self._node = node
        self._tell = tell
        self._wanted = dict(record.reports)
        self._health = {key: report.health for key, report in record.reports.items() if report.health}
        self._due: dict[str, float] = {}
        """What has to be written, by key, with the clock's time from which on."""
        self._failures: dict[str, int] = {}
        self._busy: set[str] = set()
        self._troubles: dict[str, str] = {}
        self._changed = Broadcast()

    def restore(self) -> None:
        """Continue where the previous process ended. Every stored report is written again. It is
        removed where the claim was undone since, or the machine was rebooted.
        """
        running = {entry.key: entry for entry in self._checkpoint.entries() if self._checkpoint.is_ready(entry)}
        for key, report in tuple(self._wanted.items()):
            if key not in running and report.devices and report.device_class != SHAPE_CLASS:
                self._wanted[key] = _gone(report)
                self._health.pop(key, None)
            self._due[key] = 0.0
        for entry in running.values():
            attachment = entry.attachment
            if attachment is not None and attachment.is_attached:
                self._report(entry, pod=str(attachment.sandbox), interfaces=attachment.interfaces)
            elif entry.to_attach and (earlier := self._wanted.get(entry.key)) is not None and earlier.is_ready:
                # The devices were detached, and the gateway was killed before that was written.
                self._withdraw(entry.key)
            else:
                self.prepared(entry)
        for uid in {report.uid for report in self._wanted.values()}:
            self._join(uid)

    def prepared(self, entry: ClaimEntry) -> None:
        """Report devices as ready if they need no sandbox.

        Devices that need one are reported when they are in it.
        """
        if not entry.to_attach and entry.devices:
            self._report(entry)

    def attached(self, entry: ClaimEntry, sandbox: Sandbox, interfaces: Mapping[str, AttachedInterface]) -> None:
        """Report what the devices are in a pod. A repetition after a start causes no event."""
        if self._report(entry, pod=str(sandbox), interfaces=interfaces):
            self._events.attached(entry, sandbox, interfaces)

    def failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report why the devices are in no pod.

        The status stays while they are ready in another pod.
        """
        self._events.attach_failed(entry, sandbox, refusal)
        present = self._wanted.get(entry.key)
        if present is not None and present.devices and present.is_ready and present.pod not in ("", str(sandbox)):
            return
        code, text = text_of(refusal)
        self._report(entry, pod=str(sandbox), refused=text, code=code)

    def detached(self, entry: ClaimEntry) -> None:
        """Withdraw the report, because the devices are in no pod any more."""
        self._withdraw(entry.key)

    def detach_failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report why the devices could not be taken out of a sandbox, by events alone."""
        self._events.detach_failed(entry, sandbox, refusal)

    def unprepared(self, claim: ClaimKey, device_class: str) -> None:
        """Withdraw the report, because nothing of the claim is prepared."""
        self._health.pop(f"{claim.uid}/{device_class}", None)
        self._withdraw(f"{claim.uid}/{device_class}")

    def health_of(self, key: str) -> Mapping[str, HealthNote]:
        """Return the reported health of a claim's devices of a class, by device."""
        return self._health.get(key, {})

    def judged(self, key: str, notes: Mapping[str, HealthNote]) -> None:
        """Report this health from now on, or as soon as the devices are in a pod."""
        if notes == self.health_of(key):
            return
        self._health[key] = dict(notes)
        report = self._wanted.get(key)
        if report is not None and report.devices:
            self._want(structs.replace(report, health=self._health[key]))
            self._join(report.uid)

    async def run(self) -> None:
        """Write reports until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_WRITERS):
                group.create_task(self._work())

    async def finish(self) -> None:
        """Wait until all writes to disk have ended."""
        await self._record.finish()

    def _report(
        self,
        entry: ClaimEntry,
        *,
        pod: str = "",
        interfaces: Mapping[str, AttachedInterface] | None = None,
        refused: str = "",
        code: str = "",
    ) -> bool:
        report = ClaimReport(
            namespace=entry.namespace,
            name=entry.name,
            uid=entry.uid,
            device_class=entry.device_class,
            devices=entry.devices,
            is_of_parts=all(device.shape for device in entry.devices),
            interfaces=dict(interfaces or {}),
            cpus=_cpus_of(entry),
            pod=pod,
            refused=refused,
            code=code,
            health=dict(self.health_of(entry.key)),
            generation=entry.generation,
        )
        is_news = self._want(self._dated(report))
        if is_news:
            self._join(entry.uid)
        return is_news

    def _join(self, uid: ClaimUid) -> None:
        """Report the shapes of a claim when all classes of their parts are reported, or one is refused."""
        entries = self._checkpoint.of_claim(uid)
        keys = [entry.key for entry in entries if any(device.shape for device in entry.devices)]
        reports = [report for key in keys if (report := self._wanted.get(key)) is not None and report.devices]
        if reports and (len(reports) == len(keys) or not all(report.is_ready for report in reports)):
            self._want(self._dated(joint_report(reports)))
        elif (joint := self._wanted.get(f"{uid}/{SHAPE_CLASS}")) is not None and joint.devices:
            self._want(_gone(joint))

    def _dated(self, report: ClaimReport) -> ClaimReport:
        """Add since when it has been so."""
        earlier = self._wanted.get(report.key)
        is_as_before = earlier is not None and bool(earlier.devices) and earlier.is_ready == report.is_ready
        since = earlier.since if earlier is not None and is_as_before else in_whole_seconds(self._clock.now())
        return structs.replace(report, since=since)

    def _withdraw(self, key: str) -> None:
        report = self._wanted.get(key)
        if report is not None and report.devices:
            self._want(_gone(report))
            self._join(report.uid)

    def _want(self, report: ClaimReport) -> bool:
        if self._wanted.get(report.key) == report:
            return False
        self._wanted[report.key] = report
        self._failures.pop(report.key, None)
        self._due[report.key] = self._clock.monotonic()
        self._changed.announce()
        return True

    async def _work(self) -> None:
        """Write one claim after the other."""
        while True:
            ticket = self._changed.ticket()
            now_s = self._clock.monotonic()
            waiting = {key: due_s for key, due_s in self._due.items() if key not in self._busy}
            key = min(waiting, key=lambda key: (waiting[key], key), default="")
            if not key or waiting[key] > now_s:
                await is_set_within(ticket, self._clock.timeout(waiting[key] - now_s if key else None))
                continue
            self._busy.add(key)
            del self._due[key]
            try:
                await self._bring(key)
            finally:
                self._busy.discard(key)
                # A newer report may have come for this claim meanwhile, which no other writer took.
                self._changed.announce()

    async def _bring(self, key: str) -> None:
        report = self._wanted[key]
        await self._save()
        pause_s = await self._write(report)
        if pause_s:
            self._due.setdefault(key, self._clock.monotonic() + pause_s)
            return
        self._failures.pop(key, None)
        if not report.devices and self._wanted.get(key) is report:
            del self._wanted[key]
            await self._save()

    async def _save(self) -> None:
        try:
            await self._record.save(self._wanted)
        except OSError as err:
            # It is still written to the claim. If the gateway is killed before that, the next start
            # rebuilds it from the checkpoint and the sandboxes.
            get_logger().warning("claims.reports-unsaved", error=str(err))

    async def _write(self, report: ClaimReport) -> float:
        """Write one claim. Returns the pause in seconds before the next try, 0 when it is done.

        An internal error does not stop the other claims: it is logged, and retried like a refusal.
        """
        if report.is_of_parts:
            return 0.0
        try:
            rejected = await self._cluster.apply_device_status(
                report.name,
                report.namespace,
                uid=report.uid,
                device_class=report.device_class,
                devices=device_statuses(report),
            )
            if rejected is None or await self._is_over(report, rejected):
                self._log(report, "written" if rejected is None else "over")
                return 0.0
        except PeerUnavailable as err:
            return max(self._troubled(report, str(err), *_AWAY_S), min(err.retry_after_s, _AWAY_S[1]))
        except TopobusError as err:
            return self._troubled(report, str(err), *_REFUSED_S)
        except Exception as err:  # noqa: BLE001 - boundary: one claim, the others are written
            return self._troubled(report, f"{type(err).__name__}: {err}", *_REFUSED_S)
        # A conflict with a claim that is still ours: another client wrote at the same moment.
        limits_s = _AWAY_S if rejected.is_conflict else _REFUSED_S
        return self._troubled(report, rejected.message, *limits_s)

    async def _is_over(self, report: ClaimReport, rejected: Rejected) -> bool:
        """Return whether a claim that refused a write needs none any more.

        Errors: raises PeerUnavailable when the claim cannot be read.
        """
        # For a removal the claim is read whatever the answer was: without the right to write, a
        # claim that is gone is refused like any other.
        if report.devices and not rejected.is_conflict and rejected.code != INVALID:
            return False
        claim = await self._cluster.get(CLAIMS, report.name, report.namespace)
        return not is_allocated_here(claim, report.uid, self._node)

    def _troubled(self, report: ClaimReport, why: str, first_s: float, longest_s: float) -> float:
        """Log once why a claim cannot be written. Returns the seconds before the next try."""
        if not self._troubles:
            self._tell(f"status of claims is not written: {why}")
        if self._troubles.get(report.key) != why:
            self._troubles[report.key] = why
            where = f"{report.namespace}/{report.name}"
            next_step = (
                "look at the gateway's right to patch resourceclaims/status and, since Kubernetes 1.36, to "
                "associated-node:patch of resourceclaims/driver"
            )
            get_logger().warning(
                "claim.status-unwritten", claim_uid=report.uid, claim=where, error=why, next_step=next_step
            )
        failures = self._failures.get(report.key, 0)
        self._failures[report.key] = failures + 1
        return min(first_s * 2.0 ** min(failures, _MOST_DOUBLINGS), longest_s)

    def _log(self, report: ClaimReport, outcome: str) -> None:
        if self._troubles.pop(report.key, None) is not None and not self._troubles:
            self._tell("")
        where = f"{report.namespace}/{report.name}"
        is_there = bool(report.devices)
        get_logger().info(
            "claim.status-written",
            claim_uid=report.uid,
            claim=where,
            device_class=report.device_class,
            outcome=outcome,
            is_there=is_there,
        )


def _cpus_of(entry: ClaimEntry) -> dict[str, str]:
    """Return the CPUs that containers have exclusively, by device."""
    names = {cdi_device_name(entry.uid, device.device): device.device for device in entry.devices}
    parts = entry.cdi.devices if entry.cdi is not None else ()
    return {
        names[part.name]: str(part.edits.cpuset.cpus)
        for part in parts
        if part.name in names and part.edits.cpuset is not None
    }


def _gone(report: ClaimReport) -> ClaimReport:
    """Return a report for the same claim that asks for no entry in its status."""
    return ClaimReport(
        namespace=report.namespace,
        name=report.name,
        uid=report.uid,
        device_class=report.device_class,
        is_of_parts=report.is_of_parts,
    )
