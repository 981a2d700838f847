"""Tells claims and pods of this node when a device of theirs fails, and when it is well again: by
events, and by a condition in the claim's `status.devices`.

Flows in: prepared claims, inventories, the node's pods. Flows out: what `claim_statuses` and
`pod_events` write, and which claims have sick devices. kubelet tells a pod's status of devices of
`spec.resourceClaims` alone (pkg/kubelet/cm/dra/manager.go, UpdateAllocatedResourcesStatus, 1.36): a
pod that names a resource which claims serve learns it here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from topobus.gateway.claims.checkpoint import Checkpoint, ClaimEntry
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
    """The health of devices that prepared claims of one node have."""

    def __init__(
        self, state: NodeState, checkpoint: Checkpoint, statuses: ClaimStatuses, events: PodEvents, clock: Clock
    ) -> None:
        self._state = state
        self._checkpoint = checkpoint
        self._statuses = statuses
        self._events = events
        self._clock = clock
        self._told: set[tuple[PodUid, str, str]] = set()
        """Pods that were told of a sick device: uid, claim and class, device. One that comes while
        the device is sick is told, too."""

    def tell(self, pods: Collection[NodePod]) -> Mapping[str, tuple[str, ...]]:
        """Tell what is news.

        The answer is which devices of which claim (namespace and name) are sick now.
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
        """Judge the devices of a claim; what it only looks at (admin access) is nobody's loss."""
        now = in_whole_seconds(self._clock.now())
        names = sorted({device.device for device in entry.devices if not device.is_shared})
        judged = {
            name: health_note(self._state.device(entry.device_class, name), earlier.get(name), now) for name in names
        }
        return {name: note for name, note in judged.items() if note is not None}
