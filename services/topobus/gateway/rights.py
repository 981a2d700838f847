"""What the gateway needs of the machine: kubelet's folders and the container runtime's, as root,
without a capability.
"""

from __future__ import annotations

from topobus.devicekit.rights import Right, RightKind

__all__ = ["EXCLUSIVE_CPUS", "NODE_LABELS", "RIGHTS"]

EXCLUSIVE_CPUS = "exclusive-cpus"
"""Claims get exclusive CPUs (docs/how-to/exclusive-cpus.md)."""

NODE_LABELS = "node-labels"
"""Node Feature Discovery gets the node's labels (docs/how-to/drop-in.md)."""


def _mount(what: str, why: str, feature: str = "", *, is_writable: bool = True) -> Right:
    return Right(kind=RightKind.MOUNT, what=what, why=why, feature=feature, is_writable=is_writable)


RIGHTS = (
    Right(kind=RightKind.ROOT, why="kubelet's folders belong to root, and root owns what it writes there"),
    _mount("/var/lib/kubelet/device-plugins", "the sockets of device plugins, ours and kubelet's"),
    _mount("/var/lib/kubelet/plugins_registry", "the sockets by which kubelet finds DRA drivers"),
    _mount("/var/lib/kubelet/plugins", "the sockets of DRA drivers"),
    _mount("/var/lib/kubelet/pod-resources", "kubelet lists there which pod has which devices", is_writable=False),
    _mount("/var/run/cdi", "the gateway writes there what a claim's containers get, for the container runtime"),
    _mount("/etc/cdi", "CDI files of other programs that a claim's devices refer to", is_writable=False),
    _mount("/var/lib/topobus/gateway", "the checkpoint must survive the pod and a reboot"),
    _mount("/var/lib/topobus/device-plugins", "device plugins of other vendors register there"),
    _mount(
        "/var/run/nri",
        "the container runtime's plugin socket: it reports when a container has ended, and only then may "
        "another one get its devices",
    ),
    _mount(
        "/sys/fs/cgroup",
        "the CPUs that the kernel shows of containers are compared with those that were promised",
        EXCLUSIVE_CPUS,
        is_writable=False,
    ),
    _mount(
        "/etc/kubernetes/node-feature-discovery/features.d",
        "a file of labels for Node Feature Discovery, whose worker sets them",
        NODE_LABELS,
    ),
)
