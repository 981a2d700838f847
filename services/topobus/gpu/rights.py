"""What the gpu service needs of the machine: read access, and what Linux requires for each of its
features that an operator switches on.
"""

from __future__ import annotations

from topobus.devicekit.rights import HARDWARE_RIGHTS, Right, RightKind, kit_rights

__all__ = ["DRIVER_FILES", "MPS", "NVML", "PARTITIONS", "RIGHTS"]

NVML = "nvml"
"""NVML is used (XIDs, ECC, NVLinks), and each GPU is looked at after its last tenant (setting
`leftovers`)."""

DRIVER_FILES = "driver-files"
"""Containers get the files of the host's driver from this service, which runs in a container itself
(setting `hardware.driver_files.host_root`)."""

MPS = "mps"
"""The control daemons of MPS are this service's own (setting `mps.owned`)."""

PARTITIONS = "partitions"
"""Cards are cut when claims get parts of them (settings `partitions.on_demand` and
`partitions.virtual_functions`)."""


def _of_mps(kind: RightKind, why: str, what: str = "", *, is_writable: bool = False) -> Right:
    return Right(kind=kind, what=what, why=why, feature=MPS, is_writable=is_writable)


def _of_nvml(kind: RightKind, why: str, what: str = "", *, is_writable: bool = False) -> Right:
    return Right(kind=kind, what=what, why=why, feature=NVML, is_writable=is_writable)


RIGHTS = (
    *HARDWARE_RIGHTS,
    *kit_rights("gpu"),
    _of_nvml(
        RightKind.PRIVILEGED,
        "Kubernetes has no narrower right for opening /dev/nvidia*, which NVML does; as user `nobody` the process "
        "has no capability and opens only what all users may open",
    ),
    _of_nvml(
        RightKind.HOST_PIDS,
        "NVML names processes by their pids on the host, and what is left on a GPU is reported with its pod",
    ),
    _of_nvml(
        RightKind.MOUNT,
        "what a tenant left must be known after the pod and a reboot, before the next one comes",
        "/var/lib/topobus/gpu",
        is_writable=True,
    ),
    _of_nvml(
        RightKind.MOUNT,
        "libnvidia-ml.so.1 of the loaded driver lies there; write your nodes' folder here when it is another one",
        "/usr/lib/x86_64-linux-gnu",
    ),
    Right(
        kind=RightKind.MOUNT,
        what="/usr",
        why="a driver of packages, of NVIDIA's installer or in /usr/local/nvidia lies there, and containers get "
        "its files",
        feature=DRIVER_FILES,
    ),
    Right(
        kind=RightKind.MOUNT,
        what="/run/nvidia",
        why="a driver container shows its driver there when it is ready, and containers get its files; write "
        "your nodes' folder here when it is another one",
        feature=DRIVER_FILES,
        propagates=True,
    ),
    _of_mps(
        RightKind.ROOT,
        "a daemon of MPS serves clients of any user only when it is root's, and only root may set a GPU's compute mode",
    ),
    _of_mps(
        RightKind.MOUNT,
        "each daemon's pipes and logs are there, and containers get the pipes from there",
        "/run/topobus/mps",
        is_writable=True,
    ),
    _of_mps(
        RightKind.MOUNT,
        "daemon and clients exchange data in it; it is at /dev/shm here and in each client's container",
        "/run/topobus/mps-shm",
        is_writable=True,
    ),
    Right(
        kind=RightKind.ROOT,
        why="the kernel has a card's mode and its number of virtual functions changed by root alone, and NVML "
        "makes MIG instances for root",
        feature=PARTITIONS,
    ),
    Right(
        kind=RightKind.MOUNT,
        what="/sys/devices",
        why="current_compute_partition and sriov_numvfs of a card are written there; the kernel has no narrower "
        "folder that outlives a card",
        feature=PARTITIONS,
        is_writable=True,
    ),
)
