"""Reports to the cluster what happens to claims on this node: in the claims' status, and by events.

It implements `ClaimReports`: everything goes to `claim_statuses`, and news for people to
`pod_events`. No call waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from topobus.gateway.claims.checkpoint import Checkpoint, ClaimEntry
from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.cluster.claim_statuses import ClaimStatuses
from topobus.gateway.cluster.device_health import DeviceHealthReports
from topobus.gateway.cluster.event_recorder import EventRecorder
from topobus.gateway.cluster.objects import Cluster
from topobus.gateway.cluster.pod_details import ClusterPodDetails
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.report_record import ReportRecord
from topobus.gateway.containers.rules.cpusets import CpuDifference
from topobus.gateway.node_state import NodeState
from topobus.process.clock import Clock
from topobus.process.service import Runtime
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["ClusterReports"]


class ClusterReports:
    """Everything that one node reports about its claims."""

    def __init__(
        self,
        statuses: ClaimStatuses,
        recorder: EventRecorder,
        details: ClusterPodDetails,
        node: str,
        state: NodeState,
        checkpoint: Checkpoint,
        clock: Clock,
    ) -> None:
        self.events = PodEvents(recorder, node)
        self.details = details
        """The API server's facts about pods."""
        self.health = DeviceHealthReports(state, checkpoint, statuses, self.events, clock)
        self._statuses = statuses
        self._recorder = recorder

    @classmethod
    async def open(
        cls, cluster: Cluster, path: Path, runtime: Runtime, state: NodeState, checkpoint: Checkpoint
    ) -> ClusterReports:
        """Continue where the previous process ended. Only the lock's holder may call it."""
        record = await asyncio.to_thread(ReportRecord.open, path)

        def tell(why: str) -> None:
            # Ready in any case, because nothing depends on a claim's status.
            runtime.readiness.set("claim-status", is_ready=True, why=why)

        statuses = ClaimStatuses(cluster, record, checkpoint, runtime.clock, runtime.node, tell=tell)
        statuses.restore()
        recorder, details = (
            EventRecorder(cluster, runtime.clock, runtime.node),
            ClusterPodDetails(cluster, runtime.clock),
        )
        return cls(statuses, recorder, details, runtime.node, state, checkpoint, runtime.clock)

    async def run(self) -> None:
        """Report until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._statuses.run())
            group.create_task(self._recorder.run())

    async def finish(self) -> None:
        """Wait until all writes to disk have ended."""
        await self._statuses.finish()

    # The methods of `ClaimReports`.

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
