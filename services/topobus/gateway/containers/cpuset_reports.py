"""Reports containers whose CPUs differ from the promised ones, and why the kernel's cpusets cannot
be read: in the log, in a metric, in the gateway's readiness and by events in the cluster. No call
waits.
"""

from __future__ import annotations

from collections.abc import Callable

from topobus.gateway.containers.rules.cpusets import CpuDifference
from topobus.gateway.metrics import CpusetMetrics
from topobus.process.logging import get_logger

__all__ = ["CpusetReports"]


class CpusetReports:
    """Reports on one node's containers.

    Args: tell — called with each difference, where there is a cluster; tell_unseen — called with the
    reason why the cpusets cannot be read, empty when they can.
    """

    def __init__(
        self, tell: Callable[[CpuDifference], None] | None, metrics: CpusetMetrics, tell_unseen: Callable[[str], None]
    ) -> None:
        self._tell = tell
        self._metrics = metrics
        self._tell_unseen = tell_unseen
        self.unseen = ""
        """Why the kernel's cpusets cannot be read. Empty while they can, or need not be read."""

    def note_unseen(self, why: str) -> None:
        """Report once why the kernel's cpusets cannot be read. Empty: they can."""
        if why == self.unseen:
            return
        self.unseen = why
        if why:
            step = (
                "mount the node's /sys/fs/cgroup read-only below the gateway's setting hardware.root "
                "(docs/how-to/exclusive-cpus.md)"
            )
            get_logger().warning("cpusets.unseen", why=why, next_step=step)
        self._tell_unseen(why)

    def differed(self, difference: CpuDifference) -> None:
        """Report that a container was on other CPUs than the promised ones."""
        self._metrics.differences.labels("shared" if difference.claims else "own").inc()
        get_logger().warning(
            "cpuset.differed",
            pod=str(difference.sandbox),
            container=difference.container,
            has=str(difference.has),
            wanted=str(difference.wanted),
            claims=[f"{claim.namespace}/{claim.name}" for claim in difference.claims],
            error=difference.error,
            next_step="find out what else changes cpusets on this node, what keeps the gateway away, or why a start "
            "takes so long"
            if not difference.error
            else "look into the container runtime's log",
        )
        if self._tell is not None:
            self._tell(difference)
