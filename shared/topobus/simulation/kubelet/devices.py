"""kubelet's device manager as a value store: which devices exist, which are held, and which would
be taken.

No sockets, no calls. Where kubelet takes devices of a set at random, this takes them in the order
of ids, so a test gets the same answer every time.
Source: kubelet 1.36 cm/devicemanager/{manager,topology_hints,pod_devices}.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from topobus.engine.alignment.devices.device_hints import device_hints
from topobus.simulation.kubelet.checkpoint import Holding, read_checkpoint, write_checkpoint
from topobus.simulation.kubelet.values import Capacity
from topobus.values.device import Device
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet

__all__ = ["NO_SUCH_NODE", "AffinitySplit", "DeviceStore", "PluginDevice", "split_by_affinity"]

NO_SUCH_NODE = 64
"""Stands for a NUMA node that no machine has, as the -1 that some plugins send: kubelet's masks
hold 0 to 63. Such a device fits no hint."""


class PluginDevice(Struct, frozen=True, kw_only=True):
    """One entry of a plugin's list. `nodes` None: no topology sent."""

    id: str
    is_healthy: bool
    nodes: NodeSet | None = None


class AffinitySplit(Struct, frozen=True, kw_only=True):
    """Free devices by their relation to the merged hint, each sorted by id."""

    aligned: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    no_topology: tuple[str, ...] = ()


def split_by_affinity(
    devices: Mapping[str, PluginDevice], available: Iterable[str], affinity: NodeSet | None
) -> AffinitySplit:
    """Split free devices: aligned touch the affinity, unaligned do not, the rest have no topology.

    No affinity: all count as without topology.

    >>> gpu = PluginDevice(id="a", is_healthy=True, nodes=NodeSet(1))
    >>> split_by_affinity({"a": gpu}, ["a"], NodeSet(0)).unaligned
    ('a',)
    """
    free = sorted(available)
    if affinity is None:
        return AffinitySplit(no_topology=tuple(free))
    aligned: list[str] = []
    unaligned: list[str] = []
    without: list[str] = []
    for device_id in free:
        nodes = devices[device_id].nodes
        if not nodes:
            without.append(device_id)
        elif nodes & affinity:
            aligned.append(device_id)
        else:
            unaligned.append(device_id)
    return AffinitySplit(aligned=tuple(aligned), unaligned=tuple(unaligned), no_topology=tuple(without))


class _Resource:
    """One resource's devices. `stopped_at` is set while no plugin serves it."""

    def __init__(self) -> None:
        self.devices: dict[str, PluginDevice] = {}
        self.stopped_at: float | None = None
        self.healthy_counts: list[int] = []

    def note(self) -> None:
        """Record how many are healthy now."""
        self.healthy_counts.append(sum(1 for device in self.devices.values() if device.is_healthy))


class DeviceStore:
    """The devices of all resources, and their holders."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._resources: dict[str, _Resource] = {}
        self._held: dict[tuple[str, str, str], tuple[str, ...]] = {}
        self._answers: dict[tuple[str, str, str], bytes] = {}
        # The devices that count as allocated: those of `_held`, and those being allocated.
        # kubelet's `allocatedDevices`, with its defect: see `keep_only`.
        self._taken: dict[str, set[str]] = {}

    def replace(self, resource: str, devices: Iterable[PluginDevice]) -> None:
        """Take a complete list. A device that it lacks is gone."""
        entry = self._resources.setdefault(resource, _Resource())
        entry.devices = {device.id: device for device in devices}
        entry.stopped_at = None
        entry.note()

    def stop(self, resource: str, now: float) -> None:
        """Mark a resource without a plugin: all its devices are unhealthy, and stay in the capacity
        for the grace time.
        """
        # kubelet knows the resource from now on, even when no list came: a stream that ended before
        # its first one leaves a capacity of 0.
        entry = self._resources.setdefault(resource, _Resource())
        entry.devices = {
            key: PluginDevice(id=key, is_healthy=False, nodes=device.nodes) for key, device in entry.devices.items()
        }
        entry.stopped_at = now
        entry.note()

    def restart(self) -> None:
        """Start over as a restarted kubelet.

        Resources are known from its checkpoint, without devices until their plugins come back.
        Holdings stay.
        """
        for entry in self._resources.values():
            entry.devices = {}
            entry.stopped_at = None
            entry.note()

    def healthy_counts(self, resource: str) -> tuple[int, ...]:
        """Return how many devices were healthy after each change, in order."""
        entry = self._resources.get(resource)
        return tuple(entry.healthy_counts) if entry else ()

    def capacity(self, now: float) -> dict[str, Capacity]:
        """What the node would report. A plugin gone for longer than the grace time leaves zeros."""
        answer: dict[str, Capacity] = {}
        for name, entry in sorted(self._resources.items()):
            if entry.stopped_at is not None and now - entry.stopped_at > self._grace_s:
                entry.devices = {}
            healthy = sum(1 for device in entry.devices.values() if device.is_healthy)
            answer[name] = Capacity(capacity=len(entry.devices), allocatable=healthy)
        return answer

    def knows(self, resource: str) -> bool:
        """Return whether a plugin ever sent a list for a resource."""
        return resource in self._resources

    def devices(self, resource: str) -> dict[str, PluginDevice]:
        """Present list of a resource."""
        entry = self._resources.get(resource)
        return dict(entry.devices) if entry else {}

    def healthy(self, resource: str) -> set[str]:
        """Ids of healthy devices, held ones included."""
        return {device.id for device in self.devices(resource).values() if device.is_healthy}

    def available(self, resource: str) -> set[str]:
        """Ids that are healthy and free."""
        return self.healthy(resource) - self._taken.get(resource, set())

    def take(self, resource: str, ids: Iterable[str]) -> None:
        """Count devices as allocated while their plugin is called. `hold` follows when it has
        answered, else `drop`.
        """
        self._taken.setdefault(resource, set()).update(ids)

    def hints(
        self, resource: str, count: int, nodes: NodeSet, reusable: Iterable[str], *, held: Iterable[str] = ()
    ) -> tuple[Hint, ...] | None:
        """Return kubelet's hints for `count` devices of a resource.

        A container that holds some already can only have these again.
        """
        own = set(held)
        if own and len(own) != count:
            return ()
        devices = [
            Device(name=device.id, device_class="plugin", numa_nodes=device.nodes or None)
            for device in sorted(self.devices(resource).values(), key=lambda device: device.id)
        ]
        return device_hints(
            devices, own or self.available(resource), count, nodes, reusable=set() if own else set(reusable)
        )

    def hold(self, pod_uid: str, container: str, resource: str, ids: Iterable[str]) -> None:
        """Record a container's devices."""
        self._held[(pod_uid, container, resource)] = tuple(sorted(ids))

    def keep_answer(self, pod_uid: str, container: str, resource: str, answer: bytes) -> None:
        """Keep what the plugin answered for a holding."""
        self._answers[(pod_uid, container, resource)] = answer

    def answer(self, pod_uid: str, container: str, resource: str) -> bytes | None:
        """The plugin's answer for a holding. None when it has not answered."""
        return self._answers.get((pod_uid, container, resource))

    def held(self, pod_uid: str, container: str, resource: str) -> tuple[str, ...]:
        """Ids of one resource that a container holds."""
        return self._held.get((pod_uid, container, resource), ())

    def checkpoint(self) -> bytes:
        """Render what a restarted kubelet needs."""
        holdings = tuple(
            Holding(pod_uid=key[0], container=key[1], resource=key[2], ids=ids, response=self._answers.get(key, b""))
            for key, ids in sorted(self._held.items())
        )
        return write_checkpoint(holdings, {name: tuple(sorted(self.healthy(name))) for name in self._resources})

    def load(self, data: bytes) -> frozenset[str]:
        """Take over a checkpoint, and return the uids of the pods that hold something by it.

        Errors: raises ValueError for a malformed checkpoint.
        """
        remembered = read_checkpoint(data)
        for name in remembered.registered:
            self._resources.setdefault(name, _Resource())
        for holding in remembered.holdings:
            key = (holding.pod_uid, holding.container, holding.resource)
            self._held[key] = holding.ids
            if holding.response:
                self._answers[key] = holding.response
        self._recount()
        return frozenset(holding.pod_uid for holding in remembered.holdings)

    def drop(self, pod_uid: str, container: str, resource: str) -> None:
        """Forget one container's devices of one resource."""
        self._held.pop((pod_uid, container, resource), None)
        self._answers.pop((pod_uid, container, resource), None)
        self._recount()

    def keep_only(self, pod_uids: Iterable[str]) -> None:
        """Free the devices of pods that are no longer active: kubelet does this lazily, before an
        allocation or a PodResources call.

        When there is any, the devices of a running allocation are forgotten as well, and given to
        the next pod if nothing is freed before: kubelet 1.36.2, UpdateAllocatedDevices.
        """
        active = set(pod_uids)
        if all(key[0] in active for key in self._held):
            return
        self._held = {key: ids for key, ids in self._held.items() if key[0] in active}
        self._answers = {key: answer for key, answer in self._answers.items() if key in self._held}
        self._recount()

    def _recount(self) -> None:
        self._taken = {}
        for (_, _, resource), ids in self._held.items():
            self._taken.setdefault(resource, set()).update(ids)

    def held_by(self, pod_uid: str, container: str) -> dict[str, tuple[str, ...]]:
        """The ids of one container by resource."""
        return {
            name: ids
            for (uid, holder, name), ids in sorted(self._held.items())
            if (uid, holder) == (pod_uid, container)
        }
