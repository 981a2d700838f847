"""Puts claims' devices into the sandboxes of their pods, and takes them out again, as the container
runtime starts and stops sandboxes.

Each request to the device service is recorded in the checkpoint before and after. A sandbox waits
no longer than the runtime allows. What is not done by then, or was refused, keeps the pod's
containers from starting. It is tried again each time kubelet tries to create one. One claim's
devices are in one sandbox at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from topobus.formats.messages.sandbox_messages import Accepted
from topobus.gateway.asks import NodeAsks
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_key import ClaimFailed, refused
from topobus.gateway.claims.claim_reading import ReadClaim
from topobus.gateway.claims.claim_reports import ClaimReports
from topobus.gateway.claims.rules.claim_entry import ClaimEntry, SandboxAttachment
from topobus.gateway.claims.rules.claim_pods import pods_of
from topobus.gateway.containers.rules import sandbox_rules as rules
from topobus.gateway.key_locks import KeyLocks
from topobus.process.backoff import full_jitter
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.names import ClaimUid
from topobus.values.outcome import Reason, Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["SandboxAttachments"]

T = TypeVar("T")

_NO_RUNTIME = "the gateway is no plugin of the runtime: set TOPOBUS_GATEWAY__RUNTIME__SOCKET"
# Pauses in seconds between requests to a device service that is away or has not finished.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


@dataclass(eq=False)
class _Attaching:
    """One try to put a claim's devices into a sandbox."""

    sandbox: Sandbox
    task: asyncio.Task[Refusal | None] = field(init=False)
    is_under_way: bool = False
    """True: the device service has been called and has not refused. It may still be working."""
    remark: str = ""
    """What the device service is doing, or why it cannot be called."""


class SandboxAttachments:
    """Keeps the sandbox state in the checkpoint, the device services and the runtime consistent."""

    def __init__(
        self,
        asks: NodeAsks,
        checkpoint: Checkpoint,
        read_claim: ReadClaim,
        clock: Clock,
        limit_s: float,
        *,
        reports: ClaimReports,
        describe: Callable[[ClaimEntry, Mapping[str, AttachedInterface]], Awaitable[None]],
        with_details: Callable[[Sandbox], Awaitable[Sandbox]] | None,
    ) -> None:
        """`limit_s` is how long the runtime waits for one event. `describe` writes what devices
        became in a sandbox to files that its containers read. `with_details` adds to a sandbox what
        the cluster alone knows of its pod, within half a second (`ClusterPodDetails.of`).
        """
        self.why_no_runtime: Callable[[], str] = lambda: _NO_RUNTIME
        """Returns why no events arrive. Empty: they do."""
        self._asks = asks
        self._checkpoint = checkpoint
        self._read_claim = read_claim
        self._clock = clock
        self._limit_s = limit_s
        self._reports = reports
        self._describe = describe
        self._with_details = with_details
        self._sandboxes: dict[str, Sandbox] = {}
        """The existing sandboxes, by id."""
        self._attaching: dict[str, _Attaching] = {}
        self._detaching: dict[str, asyncio.Task[None]] = {}
        self._locks = KeyLocks()
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Own the work that outlives an event, until cancelled. Events arrive only meanwhile."""
        async with asyncio.TaskGroup() as self._group:
            await asyncio.Event().wait()

    # Called by `ClaimPreparer`.

    def check(self, entry: ClaimEntry) -> None:
        """Check that the runtime will report the claim's sandbox.

        Errors: raises PeerUnavailable when the claim has devices to attach and the runtime is not
        connected.
        """
        why = self.why_no_runtime() if entry.to_attach or entry.to_adjust else ""
        if why:
            raise PeerUnavailable(
                f"claim {entry.claim} needs the container runtime's plugin interface (NRI) "
                f"to {rules.purpose(entry)}: {why}",
                next_step="switch NRI on in the container runtime, and mount its socket into the gateway's container",
            )

    async def detach(self, entry: ClaimEntry) -> None:
        """Take a claim's devices out of any sandbox, which may be gone.

        Errors: raises ClaimFailed when the device service refuses, PeerUnavailable when it is away.
        """
        await self._end_attaching(entry.key)
        async with self._locks.of(entry.key):
            latest = await self._latest(entry.key)
            if latest is not None and latest.attachment is not None:
                await self._detach(latest, latest.attachment.sandbox)

    # Called for the runtime's events.

    def synchronize(self, sandboxes: Sequence[Sandbox]) -> None:
        """Compare the existing sandboxes with the checkpoint, because a sandbox may have come or
        gone without an event.
        """
        self._sandboxes = {sandbox.id: sandbox for sandbox in sandboxes}
        for sandbox in {attaching.sandbox.id: attaching.sandbox for attaching in self._attaching.values()}.values():
            if sandbox.id not in self._sandboxes:
                self._leave(sandbox)
        for entry in self._checkpoint.entries():
            if not entry.to_attach or not entry.is_running:
                continue
            is_ready = self._checkpoint.is_ready(entry)
            if entry.attachment is None:
                # Stopped sandboxes are listed as well. Of several, only a container's creation
                # shows which one is alive (`admit`).
                candidates = [
                    sandbox
                    for sandbox in sandboxes
                    if entry.is_reserved_for(sandbox) and sandbox.id != entry.left_sandbox
                ]
                if is_ready and len(candidates) == 1 and rules.refuse_sandbox(entry, candidates[0]) is None:
                    self._attach_to(entry, candidates[0])
            elif entry.attachment.sandbox.id not in self._sandboxes:
                self._detach_dead(entry.key)
            elif not is_ready:
                # A dead sandbox of an earlier boot: it is left when the claim is prepared again.
                continue
            elif entry.attachment.is_attached:
                self._reports.attached(entry, entry.attachment.sandbox, entry.attachment.interfaces)
            else:
                self._attach_to(entry, entry.attachment.sandbox)

    async def sandbox_started(self, sandbox: Sandbox) -> None:
        """Bring the devices of a pod's claims into its new sandbox, within the time that the
        runtime waits.

        What is refused or unfinished keeps the pod's containers from starting (`admit`). The
        sandbox itself is never refused: containerd before 2.2.6 leaves a process behind for each
        one that a plugin refuses, and ends when it is restarted afterwards (containerd issues
        13355, 13609).
        """
        self._sandboxes[sandbox.id] = sandbox
        await self._bring([entry for entry in self._entries() if entry.is_reserved_for(sandbox)], sandbox)

    async def sandbox_stopped(self, sandbox: Sandbox) -> None:
        """Take devices out of a sandbox while its namespaces still exist.

        The runtime does not wait for a detach that takes too long. The detach continues alone.
        """
        tasks = self._leave(sandbox)
        await self._wait(tasks)

    def sandbox_removed(self, sandbox: Sandbox) -> None:
        """Handle a sandbox whose stop was not reported."""
        self._leave(sandbox)

    async def admit(self, sandbox: Sandbox, guards: Iterable[tuple[ClaimUid, str]]) -> Refusal | None:
        """Refuse a container unless all devices of its pod's claims are in its sandbox.

        Missing devices are attached now.

        Shapes: guards — claims that the container itself names, by uid and class.
        """
        self._sandboxes.setdefault(sandbox.id, sandbox)
        named = set(guards)
        entries = [
            entry
            for entry in self._entries()
            if (entry.uid, entry.device_class) in named or entry.is_reserved_for(sandbox)
        ]
        reasons = await self._bring([entry for entry in entries if not entry.is_attached_to(sandbox)], sandbox)
        late = [
            entry
            for entry in entries
            if (latest := self._checkpoint.get(entry.uid, entry.device_class)) is None
            or not latest.is_attached_to(sandbox)
        ]
        if reasons:
            return Refusal(reasons=reasons)
        return (
            Refusal(reasons=tuple(reason for entry in late for reason in self._pending(entry).reasons))
            if late
            else None
        )

    # Implementation.

    def _entries(self) -> list[ClaimEntry]:
        return [entry for entry in self._checkpoint.entries() if entry.to_attach and self._checkpoint.is_ready(entry)]

    async def _bring(self, entries: Sequence[ClaimEntry], sandbox: Sandbox) -> tuple[Reason, ...]:
        """Attach to a sandbox as long as the runtime waits.

        Returns the reasons of refusals, and none for what is done or continues.
        """
        attachings: list[tuple[ClaimEntry, _Attaching]] = []
        reasons: list[Reason] = []
        for entry in entries:
            under_way = self._under_way(entry.key)
            refusal = rules.refuse_sandbox(entry, sandbox) or rules.refuse_taken(
                entry, under_way.sandbox if under_way is not None else None, sandbox, self._sandboxes
            )
            if refusal is None:
                attachings.append((entry, self._attach_to(entry, sandbox)))
            else:
                reasons += self._failed(entry, sandbox, refusal).reasons
        await self._wait(attaching.task for _, attaching in attachings)
        for entry, attaching in attachings:
            if attaching.task.done():
                refusal = None if attaching.task.cancelled() else attaching.task.result()
                reasons += refusal.reasons if refusal is not None else ()
            elif not attaching.is_under_way:
                remark = attaching.remark or "its turn did not come"
                refusal = rules.unanswered(entry, remark)
                reasons += self._failed(entry, sandbox, refusal).reasons
        return tuple(reasons)

    async def _wait(self, tasks: Iterable[asyncio.Task[Refusal | None] | asyncio.Task[None]]) -> None:
        """Wait for tasks, which continue when the time is over."""
        waited = tuple(tasks)
        if not waited:
            return
        try:
            async with self._clock.timeout(self._limit_s):
                await asyncio.wait(waited)
        except TimeoutError:
            return

    def _attach_to(self, entry: ClaimEntry, sandbox: Sandbox) -> _Attaching:
        """Begin or continue to attach a claim's devices to a sandbox."""
        under_way = self._under_way(entry.key)
        if under_way is not None:
            if under_way.sandbox.id == sandbox.id:
                return under_way
            # The pod was created again: the former sandbox is gone or ending.
            under_way.task.cancel()
        attaching = self._attaching[entry.key] = _Attaching(sandbox)
        attaching.task = self._start(self._attach_patiently(entry, attaching))
        return attaching

    async def _attach_patiently(self, entry: ClaimEntry, attaching: _Attaching) -> Refusal | None:
        """Attach, and retry while a peer is away, until it is done, refused, or cancelled."""
        attempt = 0
        while True:
            wait_s = full_jitter(attempt, least_s=_PAUSE_S, most_s=_LONGEST_PAUSE_S)
            try:
                async with self._locks.of(entry.key):
                    answer = await self._attach(entry.key, attaching)
                if not isinstance(answer, Accepted):
                    return answer if answer is None else self._failed(entry, attaching.sandbox, answer)
                wait_s = max(wait_s, answer.retry_after_s)
            except PeerUnavailable as err:
                attaching.is_under_way, attaching.remark = False, str(err)
            except (ClaimFailed, TopobusError, OSError) as err:
                return self._failed(entry, attaching.sandbox, rules.failed(entry, str(err)))
            except Exception as err:  # noqa: BLE001
                # boundary: one claim. A defect that its values trigger must not end the gateway for
                # all others.
                get_logger().exception("sandbox.attach-broken", claim_uid=entry.uid, pod=str(attaching.sandbox))
                return self._failed(
                    entry, attaching.sandbox, rules.failed(entry, f"a defect of the gateway: {err!r}; see its log")
                )
            await self._clock.sleep(min(wait_s, _LONGEST_PAUSE_S))
            attempt += 1

    async def _attach(self, key: str, attaching: _Attaching) -> Refusal | Accepted | None:
        """Attach once. None: it is done.

        Errors: raises PeerUnavailable when a peer is away, ClaimFailed when the devices cannot be
        taken out of a former sandbox, OSError when the checkpoint cannot be written.
        """
        sandbox = attaching.sandbox
        entry = await self._latest(key)
        if entry is None or not self._checkpoint.is_ready(entry):
            return rules.claim_undone(sandbox)
        former = entry.attachment
        refusal = rules.refuse_taken(
            entry, former.sandbox if former is not None else None, sandbox, self._sandboxes
        ) or await self._refuse_stranger(entry, sandbox)
        if refusal is not None:
            return refusal
        if former is not None and former.sandbox.id != sandbox.id:
            await self._detach(entry, former.sandbox)
            former = None
        if former is not None and former.is_attached:
            self._reports.attached(entry, former.sandbox, former.interfaces)
            return None
        # An attachment that was begun continues with the same values, also after a crash.
        detailed = await self._with_details(sandbox) if former is None and self._with_details is not None else sandbox
        begun = former or SandboxAttachment(sandbox=detailed)
        entry = await self._checkpoint.change(key, _with(begun))
        if entry is None or not self._checkpoint.is_ready(entry):
            return rules.claim_undone(sandbox)
        attaching.is_under_way = True
        claim = entry.claim
        op_id = f"{entry.attempt}-attach-{sandbox.id}"
        answer = await self._asks.attach(
            op_id, claim.owner, entry.device_class, entry.to_attach, begun.sandbox, entry.config
        )
        if isinstance(answer, Accepted):
            attaching.remark = answer.what
            return answer
        refusal = (
            rules.of_claim(entry, answer)
            if isinstance(answer, Refusal)
            else rules.refuse_interfaces(entry, answer.interfaces)
        )
        if refusal is not None or isinstance(answer, Refusal):
            with suppress(ClaimFailed, TopobusError):
                # Otherwise it is undone before the next sandbox, or with the claim.
                await self._detach(entry, begun.sandbox)
            return refusal
        await self._describe(entry, answer.interfaces)
        done = SandboxAttachment(sandbox=begun.sandbox, is_attached=True, interfaces=answer.interfaces)
        entry = await self._checkpoint.change(key, _with(done))
        if entry is not None and entry.attachment == done:
            get_logger().info(
                "sandbox.attached",
                claim_uid=entry.uid,
                pod=str(sandbox),
                sandbox=sandbox.id,
                devices=list(entry.to_attach),
            )
            self._reports.attached(entry, sandbox, done.interfaces)
        return None

    async def _refuse_stranger(self, entry: ClaimEntry, sandbox: Sandbox) -> Refusal | None:
        """Check whether the claim belongs to the pod, because the pod may have come after the claim
        was read.

        A claim that names no pods at all (stand-alone) belongs to any pod whose container names it.

        Errors: raises PeerUnavailable when the claim cannot be read.
        """
        if entry.is_reserved_for(sandbox):
            return None
        claim = await self._read_claim(entry.namespace, entry.name)
        pods = pods_of(claim) if claim is not None and claim.metadata.get("uid") == entry.uid else ()
        if pods and sandbox.uid in pods:
            await self._checkpoint.change(
                entry.key, lambda claim_entry: msgspec.structs.replace(claim_entry, pods=pods)
            )
            return None
        if not pods and not entry.pods:
            return None
        return rules.not_reserved(entry, sandbox)

    def _leave(self, sandbox: Sandbox) -> tuple[asyncio.Task[None], ...]:
        """Begin to take out of a sandbox what is in it or being attached."""
        self._sandboxes.pop(sandbox.id, None)
        keys = {
            entry.key
            for entry in self._entries()
            if entry.attachment is not None and entry.attachment.sandbox.id == sandbox.id
        }
        for key, attaching in self._attaching.items():
            if attaching.sandbox.id == sandbox.id:
                attaching.task.cancel()
                keys.add(key)
        return tuple(self._detach_dead(key) for key in sorted(keys))

    def _detach_dead(self, key: str) -> asyncio.Task[None]:
        """Take a claim's devices out of a sandbox that no longer exists, until it succeeds."""
        former = self._detaching.get(key)
        if former is not None:
            former.cancel()
        task = self._detaching[key] = self._start(self._detach_patiently(key))
        return task

    async def _detach_patiently(self, key: str) -> None:
        attempt, logged = 0, ""
        while True:
            try:
                async with self._locks.of(key):
                    entry = await self._latest(key)
                    # Unprepared meanwhile: unpreparing detaches first.
                    if (
                        entry is None
                        or not entry.is_running
                        or entry.attachment is None
                        or entry.attachment.sandbox.id in self._sandboxes
                    ):
                        return
                    await self._detach(entry, entry.attachment.sandbox)
                    return
            except (ClaimFailed, TopobusError, OSError) as err:
                # Logged once for each different error, because a service may be away for hours.
                if str(err) != logged:
                    logged = str(err)
                    get_logger().warning("sandbox.not-detached", entry=key, error=logged)
            except Exception as err:  # noqa: BLE001
                # boundary: one claim, as above. A failed detach is tried again.
                if repr(err) != logged:
                    logged = repr(err)
                    get_logger().exception("sandbox.detach-broken", entry=key)
            await self._clock.sleep(full_jitter(attempt, least_s=_PAUSE_S, most_s=_LONGEST_PAUSE_S))
            attempt += 1

    async def _detach(self, entry: ClaimEntry, sandbox: Sandbox) -> None:
        """Detach once.

        Errors: raises ClaimFailed when the device service refuses, PeerUnavailable when it is away,
        OSError when the checkpoint cannot be written.
        """
        claim = entry.claim
        op_id = f"{entry.attempt}-detach-{sandbox.id}"
        refusal = await self._asks.detach(op_id, claim.owner, entry.device_class, entry.to_attach, sandbox)
        if refusal is not None:
            self._reports.detach_failed(entry, sandbox, refusal)
            raise refused(refusal)
        # The devices are not brought back to a sandbox that they have left.
        changed = await self._checkpoint.change(
            entry.key,
            lambda claim_entry: msgspec.structs.replace(claim_entry, attachment=None, left_sandbox=sandbox.id),
        )
        get_logger().info(
            "sandbox.detached", claim_uid=entry.uid, pod=str(sandbox), sandbox=sandbox.id, devices=list(entry.to_attach)
        )
        self._reports.detached(changed or entry)

    async def _end_attaching(self, key: str) -> None:
        tasks: list[asyncio.Task[Refusal | None] | asyncio.Task[None]] = []
        attaching, detaching = self._attaching.pop(key, None), self._detaching.pop(key, None)
        if attaching is not None:
            tasks.append(attaching.task)
        if detaching is not None:
            tasks.append(detaching)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _under_way(self, key: str) -> _Attaching | None:
        attaching = self._attaching.get(key)
        return attaching if attaching is not None and not attaching.task.done() else None

    def _failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> Refusal:
        get_logger().warning("sandbox.refused", claim_uid=entry.uid, pod=str(sandbox), error=refusal.reasons[0].message)
        self._reports.failed(entry, sandbox, refusal)
        return refusal

    def _pending(self, entry: ClaimEntry) -> Refusal:
        attaching = self._attaching.get(entry.key)
        what = (
            attaching.remark
            if attaching is not None and attaching.remark
            else f"the {entry.device_class} service is at work"
        )
        return rules.pending(entry, what)

    async def _latest(self, key: str) -> ClaimEntry | None:
        """Return an entry after all writes, because a cancelled task may have left one running."""
        return await self._checkpoint.change(key, lambda claim_entry: claim_entry)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        assert self._group is not None, "events come only while `run` runs"
        return self._group.create_task(work)


def _with(attachment: SandboxAttachment) -> Callable[[ClaimEntry], ClaimEntry]:
    """Return the change of an entry that gets an attachment, unless its claim is being undone."""
    return lambda entry: msgspec.structs.replace(entry, attachment=attachment) if entry.is_running else entry
