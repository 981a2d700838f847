"""Measures running processes: processor time, read calls, wake-ups, memory and threads from the
kernel, and messages from nats-server.

Counts only grow (`Counts`), and a `Use` is the difference of two of them.

Source: proc(5), clock_getres(2) (the CPU-time clock of another process), nats-server's monitoring
page /connz.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

__all__ = ["Counts", "Use", "count_messages", "parse_field", "processor_s", "read_counts", "use_between"]

# clockid of a process's CPU time: include/linux/posix-timers.h, MAKE_PROCESS_CPUCLOCK with
# CPUCLOCK_SCHED. It counts nanoseconds, where /proc/PID/stat counts ticks of 10 ms: more than an
# idle process uses in ten seconds.
_CPUCLOCK_SCHED = 2
_PAGE_KIB = 1024


class Counts(Struct, frozen=True, kw_only=True):
    """What one process has used since it began, and what it has now."""

    processor_s: float
    reads: int
    """read(2) and its relatives, without what arrives by sockets (recv)."""
    wakeups: int
    """Times that one of its threads gave up the processor to wait: each
    is followed by one wake-up."""
    resident_mib: float
    own_mib: float
    """Proportional: pages that several processes map are divided among them."""
    threads: int
    sent: int = 0
    received: int = 0


class Use(Struct, frozen=True, kw_only=True):
    """What one process used per second, on average, and what it had at the end."""

    name: str
    processor_percent: float
    reads_per_s: float
    wakeups_per_s: float
    sent_per_s: float
    received_per_s: float
    resident_mib: float
    own_mib: float
    threads: int


def read_counts(pid: int, *, sent: int = 0, received: int = 0) -> Counts:
    """Read one process's counts. `sent` and `received` are its messages, which the kernel does not
    know.

    Errors: raises OSError for a process that has ended or is another user's.
    """
    folder = Path(f"/proc/{pid}")
    status = (folder / "status").read_text(encoding="ascii", errors="replace")
    tasks = [_read_task(path) for path in (folder / "task").iterdir()]
    return Counts(
        processor_s=processor_s(pid),
        reads=parse_field((folder / "io").read_text(encoding="ascii"), "syscr"),
        wakeups=sum(parse_field(text, "voluntary_ctxt_switches") for text in tasks if text),
        resident_mib=parse_field(status, "VmRSS") / _PAGE_KIB,
        own_mib=parse_field((folder / "smaps_rollup").read_text(encoding="ascii"), "Pss") / _PAGE_KIB,
        threads=parse_field(status, "Threads"),
        sent=sent,
        received=received,
    )


def processor_s(pid: int) -> float:
    """Read the processor time of all threads of a process since it began.

    Errors: raises OSError for a process that has ended.
    """
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def parse_field(text: str, name: str) -> int:
    r"""Read one number of a /proc file of `Name: number` lines.

    Errors: raises KeyError for a name that it lacks.

    >>> parse_field("VmRSS:\t   2048 kB\nThreads:\t3\n", "VmRSS")
    2048
    """
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return int(value.split()[0])
    raise KeyError(name)


def count_messages(connz: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return each service's messages, sent and received, from nats-server's /connz.

    A connection `gpu-1a2b` is one of `gpu`.

    >>> count_messages({"connections": [{"name": "gpu-1a2b", "in_msgs": 3, "out_msgs": 5}, {"cid": 7}]})
    {'gpu': (3, 5)}
    """
    counts: dict[str, tuple[int, int]] = {}
    for connection in connz["connections"]:
        name = str(connection.get("name", "")).rpartition("-")[0]
        if name:
            sent, received = counts.get(name, (0, 0))
            # The server's directions are the opposite of the service's.
            counts[name] = (sent + int(connection["in_msgs"]), received + int(connection["out_msgs"]))
    return counts


def use_between(name: str, before: Counts, after: Counts, elapsed_s: float) -> Use:
    """Return what a process used per second between two counts."""
    return Use(
        name=name,
        processor_percent=(after.processor_s - before.processor_s) / elapsed_s * 100,
        reads_per_s=(after.reads - before.reads) / elapsed_s,
        wakeups_per_s=(after.wakeups - before.wakeups) / elapsed_s,
        sent_per_s=(after.sent - before.sent) / elapsed_s,
        received_per_s=(after.received - before.received) / elapsed_s,
        resident_mib=after.resident_mib,
        own_mib=after.own_mib,
        threads=after.threads,
    )


def _read_task(folder: Path) -> str:
    try:
        return (folder / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        # A thread that has just ended.
        return ""
