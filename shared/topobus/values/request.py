"""A request: pods, containers and devices, and who requests them.

CPUs in a request are exclusive ones (whole logical CPUs, as kubelet's static policy grants). Shared
CPU time is not placed here.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

__all__ = [
    "ClaimUse",
    "ContainerKind",
    "ContainerRequest",
    "DeviceRequest",
    "Locality",
    "LocalityLevel",
    "Owner",
    "OwnerKind",
    "PodRequest",
    "Policy",
    "Scope",
]


class Policy(StrEnum):
    """Topology Manager policies, by kubelet's names."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class Scope(StrEnum):
    """Whether each container or the pod as a whole is aligned."""

    CONTAINER = "container"
    POD = "pod"


class LocalityLevel(StrEnum):
    """The domain that an allocation must not leave, narrowest first."""

    LINK = "link"
    """Devices that are linked with each other directly (NVLink, XGMI); binds only classes whose
    devices report links."""
    SWITCH = "switch"
    """One PCIe switch; CPUs count as inside on the NUMA nodes that the switch is local to."""
    L3 = "l3"
    """One L3 cache; devices count as inside when local to a NUMA node of the cache's CPUs."""
    NUMA = "numa"
    SOCKET = "socket"


class Locality(Struct, frozen=True, kw_only=True):
    """All devices of a container lie within one domain of this level.

    Hard: the container is refused otherwise. Soft: only where that is possible.
    """

    level: LocalityLevel
    is_hard: bool = True

    def __str__(self) -> str:
        return f"{'hard' if self.is_hard else 'soft'}:{self.level.value}"


class ContainerKind(StrEnum):
    """When a container runs: `init` ends before the next starts, `sidecar` is an init container
    that keeps running, `app` runs with its siblings.
    """

    INIT = "init"
    SIDECAR = "sidecar"
    APP = "app"


class OwnerKind(StrEnum):
    """The kind of an owner in the ledger."""

    POD = "pod"
    """A pod placed through `place`."""
    CLAIM = "claim"
    """A ResourceClaim."""
    DEVICE_PLUGIN = "device-plugin"
    """An Allocate call of kubelet's, which names no pod; `name` is the resource, `uid` is made of
    the device ids."""
    CONTAINER = "container"
    """A container to which kubelet's own CPU manager or memory manager gave something; `name` is
    the pod, `uid` the container: kubelet reports no uid."""
    OPERATOR = "operator"
    """A person who works on a device (`topobus device`). Only in decisions: an operator holds
    nothing. `name` is the person, `uid` the device with its class."""


class Owner(Struct, frozen=True, kw_only=True):
    """An owner that holds, or requests, devices. The ledger is keyed by `key`."""

    kind: OwnerKind
    namespace: str = "default"
    name: str
    uid: str

    @property
    def key(self) -> str:
        """Stable text form: `pod/default/trainer/1f0c…`."""
        return f"{self.kind}/{self.namespace}/{self.name}/{self.uid}"

    def __str__(self) -> str:
        if self.kind is OwnerKind.CONTAINER:
            return f"container {self.uid or '(all)'} of pod {self.namespace}/{self.name}"
        if self.kind is OwnerKind.OPERATOR:
            return f"operator {self.name}"
        return f"{self.kind} {self.namespace}/{self.name}"


class DeviceRequest(Struct, frozen=True, kw_only=True):
    """A number of devices of a class, of one of its pools (`gpu-h100`) or of a resource named in
    full (`nvidia.com/gpu`), or exactly the named devices of a class.

    A class by count means the devices that are in none of its pools, as the class's own resource
    does for kubelet. `names`, when given, is the exact set wanted (a claim's allocation), and
    `count` must equal its length.
    """

    device_class: str
    """A class, a pool, or, with a slash in it, the resource of somebody else's device plugin: the
    class that has its devices is the node's to know."""
    count: int
    names: tuple[str, ...] = ()
    is_shared: bool = False
    """True for admin access: looks at devices without holding them."""
    by_share: bool = False
    """True for a share of each of the named devices. Others may also hold shares of them, but none
    the whole."""
    amounts: dict[str, dict[str, int]] = {}
    """With `by_share`: how much of each named device, as capacity to amount; a device that is not
    named here is not counted."""


class ContainerRequest(Struct, frozen=True, kw_only=True):
    """What one container requests. `cpus` are exclusive logical CPUs, and 0 means none
    exclusive.
    """

    name: str
    kind: ContainerKind = ContainerKind.APP
    cpus: int = 0
    memory_bytes: int = 0
    is_memory_fixed: bool = True
    """False for memory that may be exceeded (no limit, or one above the request): it is recorded
    and never aligned."""
    hugepages: dict[str, int] = {}
    """Bytes of huge pages by kind: `hugepages-2Mi`."""
    devices: tuple[DeviceRequest, ...] = ()


class ClaimUse(Struct, frozen=True, kw_only=True):
    """A claim of a pod that holds its devices already, named by its owner's key."""

    owner_key: str
    containers: tuple[str, ...] = ()
    """The containers that use it, in the pod's order. When there are none, it is aligned with
    nothing under scope container."""


class PodRequest(Struct, frozen=True, kw_only=True):
    """What a pod (or a claim, as one nameless container) requests, with its own policy and scope
    when it has them.
    """

    owner: Owner
    containers: tuple[ContainerRequest, ...]
    policy: Policy | None = None
    """None: the node's policy."""
    scope: Scope | None = None
    """None: the node's scope."""
    locality: tuple[Locality, ...] = ()
    """Each level once at most. With scope pod the pod as a whole stays within the domain, else each
    container by itself."""
    claims: tuple[ClaimUse, ...] = ()
    """Claims of the pod whose devices and CPUs are to be aligned together with what it gets, as if
    it had asked for exactly these; they stay the claims'."""
