"""Reports to claims and pods of this node when one of their devices fails or becomes healthy again:
by events, and by a condition in the claim's `status.devices`.

`claim_statuses` and `pod_events` write the reports. kubelet reports only the devices of
`spec.resourceClaims` in a pod's status (pkg/kubelet/cm/dra/manager.go,
UpdateAllocatedResourcesStatus, 1.36). A pod that names a resource which claims serve gets the
report from here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.cluster.claim_statuses import ClaimStatuses
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.rules.device_faults import HealthNote, health_note
from topobus.gateway.cluster.rules.waiting import NodePod
from topobus.gateway.node_state import NodeState
from topobus.process.clock import Clock
from topobus.values.names import PodUid
from topobus.values.timestamps import in_whole_seconds

__all__ = ["DeviceHealthReports"]


class DeviceHealthReports:
    """Reports the health of the devices of one node's prepared claims."""

    def __init__(
        self, state: NodeState, checkpoint: Checkpoint, statuses: ClaimStatuses, events: PodEvents, clock: Clock
    ) -> None:
        self._state = state
        self._checkpoint = checkpoint
        self._statuses = statuses
        self._events = events
        self._clock = clock
        self._told: set[tuple[PodUid, str, str]] = set()
        """Pods to which an unhealthy device was reported: uid, claim and class, device. A pod
        that comes while the device is unhealthy gets the report as well."""

    def tell(self, pods: Collection[NodePod]) -> Mapping[str, tuple[str, ...]]:
        """Report what has changed.

        Returns which devices of which claim (namespace and name) are unhealthy now.
        """
        sick: dict[str, tuple[str, ...]] = {}
        told_pods: set[tuple[PodUid, str, str]] = set()
        for entry in self._checkpoint.entries():
            if not self._checkpoint.is_ready(entry):
                continue
            earlier = self._statuses.health_of(entry.key)
            notes = self._notes_of(entry, earlier)
            users = [pod for pod in pods if pod.namespace == entry.namespace and entry.name in pod.claims]
            for device, note in notes.items():
                if not note.is_healthy:
                    owner = f"{entry.namespace}/{entry.name}"
                    sick[owner] = (*sick.get(owner, ()), device)
                    told_pods |= {(pod.uid, entry.key, device) for pod in users}
                if note != earlier.get(device):
                    self._events.device_health(entry, users, device, note)
                elif not note.is_healthy:
                    late = [pod for pod in users if (pod.uid, entry.key, device) not in self._told]
                    self._events.device_health(entry, late, device, note, is_of_claim=False)
            self._statuses.judged(entry.key, notes)
        self._told = told_pods
        return sick

    def _notes_of(self, entry: ClaimEntry, earlier: Mapping[str, HealthNote]) -> dict[str, HealthNote]:
        """Judge a claim's devices, without those with only admin access, which no pod loses."""
        now = in_whole_seconds(self._clock.now())
        names = sorted({device.device for device in entry.devices if not device.is_shared})
        judged = {
            name: health_note(self._state.device(entry.device_class, name), earlier.get(name), now) for name in names
        }
        return {name: note for name, note in judged.items() if note is not None}
