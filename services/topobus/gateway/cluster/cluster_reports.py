"""Reports to the cluster what happens to claims on this node: in the claims' status, and by events.

Everything goes to `claim_statuses`, and news for people to `pod_events`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.claims.claim_reports import ClaimReports
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.cluster.claim_statuses import ClaimStatuses
from topobus.gateway.cluster.device_health import DeviceHealthReports
from topobus.gateway.cluster.event_recorder import EventRecorder
from topobus.gateway.cluster.pod_details import ClusterPodDetails
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.report_record import ReportRecord
from topobus.gateway.containers.rules.cpusets import CpuDifference
from topobus.gateway.node_state import NodeState
from topobus.process.service import Runtime
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

__all__ = ["ClusterReports"]


class ClusterReports(ClaimReports):
    """Everything that one node reports about its claims."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        record: ReportRecord,
        runtime: Runtime,
        state: NodeState,
        checkpoint: Checkpoint,
    ) -> None:
        """Continue where the previous process ended, according to `record`."""

        def tell(why: str) -> None:
            # Ready in any case, because nothing depends on a claim's status.
            runtime.readiness.set("claim-status", is_ready=True, why=why)

        self._statuses = ClaimStatuses(cluster, record, checkpoint, runtime.clock, runtime.node, tell=tell)
        self._statuses.restore()
        self._recorder = EventRecorder(cluster, runtime.clock, runtime.node)
        self._details = ClusterPodDetails(cluster, runtime.clock)
        self.events = PodEvents(self._recorder, runtime.node)
        self.health = DeviceHealthReports(state, checkpoint, self._statuses, self.events, runtime.clock)

    async def run(self) -> None:
        """Report until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._statuses.run())
            group.create_task(self._recorder.run())

    async def finish(self) -> None:
        """Wait until all writes to disk have ended."""
        await self._statuses.finish()

    def prepared(self, entry: ClaimEntry) -> None:
        """Report that containers may have a claim's devices."""
        self._statuses.prepared(entry)

    def unprepared(self, claim: ClaimKey, device_class: str) -> None:
        """Report that nothing of a claim is prepared any more."""
        self._statuses.unprepared(claim, device_class)

    def cpus_differed(self, difference: CpuDifference) -> None:
        """Report that a container ran on other CPUs than promised."""
        self.events.cpus_differed(difference)

    def attached(self, entry: ClaimEntry, sandbox: Sandbox, interfaces: Mapping[str, AttachedInterface]) -> None:
        """Report that devices are in a sandbox. A repetition after a start causes no event."""
        if self._statuses.attached(entry, sandbox, interfaces):
            self.events.attached(entry, sandbox, interfaces)

    def failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report why devices could not be brought into a sandbox."""
        self._statuses.failed(entry, sandbox, refusal)
        self.events.attach_failed(entry, sandbox, refusal)

    def detached(self, entry: ClaimEntry) -> None:
        """Report that devices are in no sandbox any more."""
        self._statuses.detached(entry)

    def detach_failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report why devices could not be taken out of a sandbox."""
        self.events.detach_failed(entry, sandbox, refusal)

    async def with_details(self, sandbox: Sandbox) -> Sandbox:
        """Add what the API server knows of the sandbox's pod."""
        return await self._details.of(sandbox)
