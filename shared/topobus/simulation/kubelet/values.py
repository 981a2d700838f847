"""Inputs and outputs of the kubelet simulator: pods, claims, admissions, rejections, time limits,
folders, the event log.

They are frozen values that a test can compare. Sockets and calls are in the other modules of this
package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from topobus.process.broadcast import Broadcast
from topobus.values.edits import ContainerEdits
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet
from topobus.values.request import ContainerKind

__all__ = [
    "DEVICE_PLUGINS",
    "PLUGINS",
    "PLUGINS_REGISTRY",
    "POD_RESOURCES",
    "Admission",
    "Capacity",
    "ClaimDevice",
    "ClaimReference",
    "Container",
    "ContainerGrant",
    "EventLog",
    "KubeletEvent",
    "KubeletTimings",
    "Pod",
    "PreparedClaim",
    "Rejection",
    "make_folders",
]


DEVICE_PLUGINS, PLUGINS_REGISTRY = "device-plugins", "plugins_registry"
PLUGINS, POD_RESOURCES = "plugins", "pod-resources"
_SOCKET_PATH_LIMIT = 107


class KubeletTimings(Struct, frozen=True, kw_only=True):
    """kubelet's own time limits, in seconds, and a race. Shorten one in a test that waits for it.

    The defaults are kubelet 1.36's.
    """

    dial_s: float = 10.0
    """How long a plugin's socket may take to accept (deviceplugin
    Register and the plugin watcher)."""
    get_info_s: float = 1.0
    notify_s: float = 5.0
    pre_start_s: float = 30.0
    dra_s: float = 45.0
    grace_s: float = 300.0
    """How long a stopped device plugin's devices stay in the node's capacity."""
    wipe_s: float = 30.0
    """How long a DRA driver may stay away, or without its connection, until its ResourceSlices are
    deleted."""
    reconcile_s: float = 60.0
    """How often unprepares are repeated that failed."""
    pod_retry_s: float = 90.0
    """How long after a failed preparation or start the pod is tried again."""
    health_retry_s: float = 5.0
    health_timeout_s: float = 30.0
    """A DRA device's health turns Unknown when it is not reported again within this time."""
    has_reregister_race: bool = False
    """As kubelets before 1.36: the end of an old stream cuts off the plugin that replaced it."""


def make_folders(root: Path) -> None:
    """Make kubelet's folders under the simulator's root, as under /var/lib/kubelet.

    Errors: raises ValueError when a socket's path would be too long for the kernel.
    """
    longest = max(len(str(root / name / "kubelet.sock")) for name in (DEVICE_PLUGINS, POD_RESOURCES))
    if longest > _SOCKET_PATH_LIMIT:
        raise ValueError(
            f"{root}: kubelet.sock below it would have a path of {longest} bytes, wanted "
            f"{_SOCKET_PATH_LIMIT} or fewer; take a shorter folder"
        )
    for name in (DEVICE_PLUGINS, PLUGINS_REGISTRY, PLUGINS, POD_RESOURCES):
        (root / name).mkdir(parents=True, exist_ok=True)


class Container(Struct, frozen=True, kw_only=True):
    """One container.

    Extended resources are by name, allocated in the order given. `cpus` are exclusive ones (a
    static CPU manager's). `memory` is what a static memory manager pinned, NUMA node to bytes:
    PodResources reports it as given, and nothing is managed. `claims` are the names of those of the
    pod's claims that it uses; None: all.
    """

    name: str
    resources: dict[str, int] = {}
    kind: ContainerKind = ContainerKind.APP
    cpus: int = 0
    memory: dict[int, int] = {}
    claims: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, count in {**self.resources, "exclusive CPUs": self.cpus}.items():
            if count < 0:
                raise ValueError(f"container {self.name}: {count} of {name}; wanted 0 or more")


class ClaimReference(Struct, frozen=True, kw_only=True):
    """A ResourceClaim that a pod uses, and the drivers in its allocation."""

    namespace: str = "default"
    name: str
    uid: str
    drivers: tuple[str, ...]


class Pod(Struct, frozen=True, kw_only=True):
    """A pod bound to this node. Containers are in spec order, init containers first."""

    name: str
    namespace: str = "default"
    uid: str
    containers: tuple[Container, ...]
    claims: tuple[ClaimReference, ...] = ()

    def __post_init__(self) -> None:
        names = [container.name for container in self.containers]
        if len(set(names)) != len(names):
            raise ValueError(f"pod {self.name}: two containers of one name among {names}")
        strange = {name for container in self.containers for name in container.claims or ()}
        strange -= {claim.name for claim in self.claims}
        if strange:
            raise ValueError(f"pod {self.name}: its containers use claims that it does not have: {sorted(strange)}")


class ContainerGrant(Struct, frozen=True, kw_only=True):
    """What one container gets: devices by resource, and the edits of all resources merged (the
    first wins, as in kubelet).
    """

    name: str
    devices: dict[str, tuple[str, ...]] = {}
    cpus: CpuSet = CpuSet()
    alignment: Hint
    edits: ContainerEdits = ContainerEdits()
    cdi_devices: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    """What two resources set differently: kubelet keeps the first and only logs it."""


class ClaimDevice(Struct, frozen=True, kw_only=True):
    """One device of a prepared claim."""

    driver: str
    pool: str
    device: str
    requests: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    share_id: str = ""


class PreparedClaim(Struct, frozen=True, kw_only=True):
    """The drivers' answer for one claim. `error` is not empty when a driver failed."""

    uid: str
    devices: tuple[ClaimDevice, ...] = ()
    error: str = ""


class Admission(Struct, frozen=True, kw_only=True):
    """The pod runs: one grant for each container, in order, and its prepared claims."""

    pod: Pod
    containers: tuple[ContainerGrant, ...]
    claims: tuple[PreparedClaim, ...] = ()

    def container(self, name: str) -> ContainerGrant:
        """Find a container's grant.

        Errors: raises KeyError when there is none of that name.
        """
        container_grant = next((container for container in self.containers if container.name == name), None)
        if container_grant is None:
            raise KeyError(
                f"pod {self.pod.name} has no container {name!r}: it has "
                f"{[container.name for container in self.containers]}"
            )
        return container_grant


class Rejection(Struct, frozen=True, kw_only=True):
    """The pod does not run.

    `is_final` False: kubelet would try again (claims, container start). True: the pod is Failed for
    good.
    """

    pod: Pod
    reason: str
    message: str
    is_final: bool = True


class Capacity(Struct, frozen=True, kw_only=True):
    """What the node would report for one resource."""

    capacity: int
    allocatable: int


class KubeletEvent(Struct, frozen=True, kw_only=True):
    """One call that the simulator made or answered, in the words of the recorded transcript."""

    t: float
    """Seconds since the simulator was made."""
    event: str
    """`Register.ok`, `ListAndWatch.send`, `Allocate`, …"""
    subject: str
    """Resource or driver name."""
    detail: dict[str, Any] = {}
    """Request, error text or list; what the transcript calls `req`, `msg`, `code`, `details`."""
    deadline_s: float | None = None


class EventLog:
    """All events in order, and a way to wait for one."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._start = monotonic()
        self._grown = Broadcast()
        self._entries: list[KubeletEvent] = []

    def add(
        self, event: str, subject: str, detail: dict[str, Any] | None = None, deadline_s: float | None = None
    ) -> None:
        """Append one event and wake all who wait."""
        at = round(self._monotonic() - self._start, 3)
        self._entries.append(
            KubeletEvent(t=at, event=event, subject=subject, detail=detail or {}, deadline_s=deadline_s)
        )
        self.wake()

    def wake(self) -> None:
        """Make all waiters check again."""
        self._grown.announce()

    def all(self) -> tuple[KubeletEvent, ...]:
        """Everything so far."""
        return tuple(self._entries)

    async def more_than(self, count: int) -> tuple[KubeletEvent, ...]:
        """Wait for more events."""
        await self._grown.until(lambda: len(self._entries) > count)
        return self.all()

    async def until(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until `holds()` is true.

        Errors: raises TimeoutError that names what was awaited and which events came instead.
        """
        if not await self._grown.until(holds, asyncio.timeout(timeout_s)):
            seen = ", ".join(f"{event.event}({event.subject})" for event in self._entries[-12:]) or "nothing"
            raise TimeoutError(f"kubelet simulator: waited {timeout_s} s for {what}; the last events were {seen}")
