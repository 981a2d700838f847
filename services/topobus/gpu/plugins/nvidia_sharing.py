"""Sharing strategies on NVIDIA GPUs: the container's variables and mounts, and the checks of what
must run on the node.

TimeSlicing adds nothing to a container: the default slice is the behaviour of every GPU, and other
slices are a setting of the GPU (`topobus.gpu.time_slices`). MPS needs its control daemon. This
module serves a daemon that an operator runs. Those that the service owns (setting `mps.owned`) are
in `topobus.gpu.mps`.
Source: CUDA Multi-Process Service guide, "Environment Variables" and "MPS control daemon" (default
folder /tmp/nvidia-mps).
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.formats.kubernetes.classic.classic_parameters import MPS, TIME_SLICING, Sharing
from topobus.gpu.mig.offer import is_mig
from topobus.gpu.mps.claims import MpsSharing
from topobus.sysfs.tree import Tree
from topobus.values.device import Device, DeviceRole
from topobus.values.edits import ContainerEdits, Mount
from topobus.values.outcome import Refusal, refuse
from topobus.values.quantity import Quantity

__all__ = ["STRATEGIES", "ReadsWholeGpus", "sharing_edits"]

STRATEGIES = frozenset({TIME_SLICING, MPS})

# The control daemon's name as the kernel cuts it (15 characters). The server that it starts has the
# same.
_DAEMON = b"nvidia-cuda-mps"
_PIPES_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
# The folder where the daemon listens by default. It exchanges data with its clients by files in
# /dev/shm as well.
_PIPES = "/tmp/nvidia-mps"
# A longer environment is cut. In a daemon that was started by hand or by a unit, the variable is
# near the front.
_ENVIRONMENT_BYTES = 1 << 16
_SHARED_MEMORY = "/dev/shm"
_WRITABLE = ("rw", "nosuid", "nodev", "bind")
_MIB = 1 << 20


class ReadsWholeGpus:
    """Base of NVIDIA's driver: decides when preparing changes nothing."""

    mps: MpsSharing

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Return True for whole GPUs that are not shared: no instance is made and no slice is set.

        False where the service owns daemons, because stale ones may be ended.
        """
        return not self.mps.is_owned and all(
            not is_mig(device) and device.role is DeviceRole.COMPUTE and device.sharing is None for device in devices
        )


def sharing_edits(tree: Tree, sharing: Sharing, count: int) -> ContainerEdits | Refusal:
    """Return what a container of a claim with `count` GPUs needs to share them by this strategy."""
    if sharing.strategy == MPS:
        return _mps(tree, sharing, count)
    return ContainerEdits()


def _mps(tree: Tree, sharing: Sharing, count: int) -> ContainerEdits | Refusal:
    pipes = _find_daemon(tree)
    if pipes is None:
        return refuse(
            "mps-not-running",
            "no MPS control daemon runs on this node: run nvidia-cuda-mps-control -d there, or let the gpu "
            "service own it (mps.owned)",
        )
    env = {_PIPES_VARIABLE: pipes}
    config = sharing.mps_config
    if config is not None and config.default_active_thread_percentage is not None:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(config.default_active_thread_percentage)
    if config is not None and config.default_pinned_device_memory_limit is not None:
        # By the ordinals that the container sees, in MiB, rounded down because a limit must not be
        # exceeded.
        mib = Quantity.parse(config.default_pinned_device_memory_limit).units // _MIB
        env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{index}={mib}M" for index in range(count))
    folders = (pipes, _SHARED_MEMORY)
    return ContainerEdits(
        env=env, mounts=tuple(Mount(host_path=folder, container_path=folder, options=_WRITABLE) for folder in folders)
    )


def _find_daemon(tree: Tree) -> str | None:
    """Find the folder where the node's MPS control daemon listens, or return None when none
    runs.
    """
    for name in tree.names("proc"):
        # A process may end at any time, and another user's environment cannot be read. Then take
        # the default folder; a wrong one shows as errors of the clients.
        if not name.isdecimal() or (tree.read_bytes(f"proc/{name}/comm") or b"").strip() != _DAEMON:
            continue
        environment = (tree.read_bytes(f"proc/{name}/environ", _ENVIRONMENT_BYTES) or b"").decode("utf-8", "replace")
        variables = {
            variable: value for variable, _, value in (part.partition("=") for part in environment.split("\0"))
        }
        return variables.get(_PIPES_VARIABLE) or _PIPES
    return None
