"""Long work of drivers: begun by `prepare`, queried by the same request again, refused over its
limit.

The answer is Accepted while the work runs, then its result, until the owner is answered or gone.
Each work runs in a thread of its own, beside the driver's other methods, so neither a driver's
looks nor its other devices wait. A thread cannot be ended. Work that comes back too late is undone
by its own thread, and until then its devices are given to no owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from topobus.devicekit.host.isolation import DriverFailed, DriverHung, IsolatedDriver
from topobus.devicekit.verbs.journaled_verbs import Edits, JournaledWork
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.outcome import Refusal, refuse
from topobus.values.request import Owner

__all__ = ["LongJobs"]

# Seconds until it is worth to ask again: kubelet repeats a refused prepare at
# once and then ever more slowly.
_ASK_AGAIN_S = 1.0

_Key = tuple[str, tuple[str, ...]]


@dataclass(kw_only=True)
class _Job:
    what: str
    limit_s: float
    ends_s: float
    """By the monotonic clock."""
    isolated: IsolatedDriver
    run: Callable[[Callable[[], bool]], Edits | Refusal]
    result: Edits | Refusal | None = None

    def work(self) -> Edits | Refusal:
        """Work, in the thread."""
        return self.run(lambda: self.result is None)

    @property
    def is_over(self) -> bool:
        """Say whether its thread has ended."""
        return self.result is not None and not self.isolated.is_hung


class LongJobs:
    """The long work of one class's drivers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: dict[_Key, _Job] = {}
        self._new: asyncio.Queue[tuple[_Key, _Job]] = asyncio.Queue()

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Begin the given work, each as a task of the group, until cancelled."""
        while True:
            key, job = await self._new.get()
            group.create_task(self._work(key, job))

    def begin(self, owner: Owner, devices: Iterable[str], isolated: IsolatedDriver, work: JournaledWork) -> Accepted:
        """Begin work on devices in a driver's own thread. `result` returns its state."""
        job = _Job(
            what=work.what,
            limit_s=work.limit_s,
            ends_s=self._clock.monotonic() + work.limit_s,
            isolated=isolated,
            run=work.run,
        )
        key = (owner.key, tuple(sorted(devices)))
        self._jobs[key] = job
        self._new.put_nowait((key, job))
        return self._accepted(job)

    def result(self, owner: Owner, devices: Iterable[str]) -> Edits | Refusal | Accepted | None:
        """Return the state of an owner's work.

        None when there is none, or it was refused before and may begin again.
        """
        key = (owner.key, tuple(sorted(devices)))
        job = self._jobs.get(key)
        if job is None:
            return None
        if job.result is None:
            return self._accepted(job)
        if isinstance(job.result, Refusal) and job.is_over:
            del self._jobs[key]
        return job.result

    def forget(self, owner: Owner, devices: Iterable[str]) -> None:
        """Drop results that were returned, or that no request needs any more. Work that still runs
        stays.
        """
        names = set(devices)
        for key in [
            key for key, job in self._jobs.items() if key[0] == owner.key and names & set(key[1]) and job.is_over
        ]:
            del self._jobs[key]

    def is_under_way(self, device: str, owner: Owner) -> bool:
        """Return whether a thread works on a device for an owner."""
        return any(key[0] == owner.key and device in key[1] and not job.is_over for key, job in self._jobs.items())

    def _accepted(self, job: _Job) -> Accepted:
        left_s = max(0.0, job.ends_s - self._clock.monotonic())
        return Accepted(retry_after_s=min(_ASK_AGAIN_S, left_s), limit_s=left_s, what=job.what)

    async def _work(self, key: _Key, job: _Job) -> None:
        get_logger().info("work.begun", what=job.what, devices=list(key[1]), owner=key[0], limit_s=job.limit_s)
        try:
            job.result = await job.isolated.call("long work", job.work)
        except DriverHung:
            text = f"{job.what} takes longer than its {job.limit_s:g} s"
            job.result = _refuse("work-overdue", text, job)
        except DriverFailed as err:
            job.result = _refuse("driver-failed", err.message, job)
        is_refused = isinstance(job.result, Refusal)
        get_logger().info(
            "work.refused" if is_refused else "work.ended", what=job.what, devices=list(key[1]), owner=key[0]
        )


def _refuse(code: str, message: str, job: _Job) -> Refusal:
    return refuse(code, message, driver=job.isolated.name)
