"""Container edits: what a device adds to a container, in CDI's terms.

One value serves three interfaces: the device plugin's Allocate answer, a CDI file, and an OCI spec.
None of them can carry a cpuset: the gateway applies it through the container runtime's plugin
interface (NRI). Source: CDI spec 1.1.0, containerEdits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import TypeVar

from msgspec import Struct

from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Refusal, refuse

__all__ = ["ContainerEdits", "Cpuset", "DeviceNode", "Hook", "IntelRdt", "Mount", "NetDevice", "join_edits"]

V = TypeVar("V")


class DeviceNode(Struct, frozen=True, kw_only=True):
    """A device node to create in the container.

    `permissions` is a subset of `rwm`, or `none`: the node is there and may not be opened.
    """

    path: str
    host_path: str = ""
    permissions: str = "rw"
    kind: str = ""
    """`b`, `c`, `u` or `p`; with `major` and `minor` the node need not exist on the host. Empty: as
    the host's node is."""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    """Permission bits of the node in the container; None: the host's."""
    uid: int | None = None
    """Its owner in the container; None: the container's user, or root."""
    gid: int | None = None


class Mount(Struct, frozen=True, kw_only=True):
    """A bind mount."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "bind")
    kind: str = ""
    """Type of the file system (`tmpfs`); empty: a bind mount."""


class Hook(Struct, frozen=True, kw_only=True):
    """A program of the host that the runtime runs as root at one moment of a container's life."""

    name: str
    """`prestart`, `createRuntime`, `createContainer`, `startContainer`, `poststart` or `poststop`,
    as in an OCI spec."""
    path: str
    args: tuple[str, ...] = ()
    """The first is the program's name, as execve(2) has it."""
    env: tuple[str, ...] = ()
    timeout_s: int | None = None


class NetDevice(Struct, frozen=True, kw_only=True):
    """A network interface of the host that the runtime moves into the container."""

    host_name: str
    name: str
    """Its name in the container."""


class IntelRdt(Struct, frozen=True, kw_only=True):
    """Cache and memory bandwidth of the container (resctrl)."""

    clos_id: str = ""
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False


class Cpuset(Struct, frozen=True, kw_only=True):
    """CPUs that a container has for itself, and the NUMA nodes that its memory comes from."""

    cpus: CpuSet
    mems: NodeSet = NodeSet()
    """Empty: those of its parent."""
    with_shared: bool = False
    """True: the container also runs on the shared pool, whichever CPUs that has at the time. Its
    memory then comes from any node."""

    def __or__(self, other: Cpuset) -> Cpuset:
        """Join what a container has of two devices."""
        return Cpuset(
            cpus=self.cpus | other.cpus, mems=self.mems | other.mems, with_shared=self.with_shared or other.with_shared
        )


class ContainerEdits(Struct, frozen=True, kw_only=True):
    """Edits for one container.

    Environment keys must be unique per class: kubelet keeps the first of two and only logs it.
    """

    env: dict[str, str] = {}
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    annotations: dict[str, str] = {}
    cpuset: Cpuset | None = None
    """Of a device that is a CPU, or brings some along; None: it has no part in CPUs."""
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    """Groups of the container's processes, besides those of its user."""
    net_devices: tuple[NetDevice, ...] = ()
    intel_rdt: IntelRdt | None = None

    @property
    def is_empty(self) -> bool:
        """Say whether nothing would be edited (CDI refuses such a device)."""
        return not (self.env or self.device_nodes or self.mounts or self.needs_runtime)

    @property
    def needs_runtime(self) -> bool:
        """Say whether the container runtime has to receive the edits as CDI, because a device
        plugin's answer to kubelet cannot express all of them.
        """
        special_nodes = any(
            node.kind or node.file_mode is not None or node.uid is not None or node.gid is not None
            for node in self.device_nodes
        )
        return bool(
            self.hooks
            or self.additional_gids
            or self.net_devices
            or self.intel_rdt
            or special_nodes
            or any(mount.kind for mount in self.mounts)
        )


def join_edits(parts: Iterable[ContainerEdits]) -> ContainerEdits | Refusal:
    """Join edits of one container. Equal edits appear once.

    Contradicting ones are refused (`edits-conflict`), because kubelet and container runtimes would
    keep one of the two without a message.

    >>> join_edits([ContainerEdits(env={"A": "1"}), ContainerEdits(env={"B": "2"})]).env
    {'A': '1', 'B': '2'}
    """
    parts = tuple(parts)
    conflicts: list[str] = []
    env = _united("variable", (item for part in parts for item in part.env.items()), conflicts)
    annotations = _united("annotation", (item for part in parts for item in part.annotations.items()), conflicts)
    nodes = _united("device node", ((node.path, node) for part in parts for node in part.device_nodes), conflicts)
    mounts = _united("mount", ((mount.container_path, mount) for part in parts for mount in part.mounts), conflicts)
    devices = ((device.name, device) for part in parts for device in part.net_devices)
    interfaces = _united("network device", devices, conflicts)
    rdts = [part.intel_rdt for part in parts if part.intel_rdt is not None]
    if any(rdt != rdts[0] for rdt in rdts):
        conflicts.append("cache and memory bandwidth")
    if conflicts:
        edits = tuple(sorted(set(conflicts)))
        text = f"two devices of one container contradict each other in {', '.join(edits)}"
        return refuse("edits-conflict", text, edits=edits)
    cpusets = [part.cpuset for part in parts if part.cpuset is not None]
    return ContainerEdits(
        env=env,
        annotations=annotations,
        device_nodes=tuple(nodes.values()),
        mounts=tuple(mounts.values()),
        cpuset=functools.reduce(operator.or_, cpusets) if cpusets else None,
        # A program runs once, however many devices name it in the same way.
        hooks=tuple(dict.fromkeys(hook for part in parts for hook in part.hooks)),
        additional_gids=tuple(dict.fromkeys(gid for part in parts for gid in part.additional_gids)),
        net_devices=tuple(interfaces.values()),
        intel_rdt=rdts[0] if rdts else None,
    )


def _united(what: str, items: Iterable[tuple[str, V]], conflicts: list[str]) -> dict[str, V]:
    """Join edits by name. Names with two different edits are added to `conflicts`."""
    united: dict[str, V] = {}
    conflicts += [f"{what} {name}" for name, value in items if united.setdefault(name, value) != value]
    return united
