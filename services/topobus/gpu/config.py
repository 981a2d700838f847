"""Settings of the gpu service: those of every device service, how a GPU is cleaned after its owner,
and who runs the control daemons of MPS.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from topobus.devicekit.settings import DeviceServiceSettings

__all__ = ["GpuSettings", "LeftoverSettings", "MpsSettings"]


class LeftoverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a GPU is clean after its last owner."""

    check: bool = True
    """Whether a GPU is checked after its last owner has left. The check needs a folder for the
    journal and a view of the host's processes. Set it to false where they are missing."""
    wait_s: Annotated[float, Meta(gt=0, le=20)] = 5.0
    """Seconds that what is left may take to end by itself, and once more after a kill. 5 s: the
    driver gives 80 GiB of a killed process back in two. At most 20, for a try has
    `cleaning.limit_s` in all."""
    kill: bool = False
    """Whether processes that pods left on a GPU are killed then; those of the host never are.
    False: a person decides. It needs the host's pid namespace and CAP_KILL."""
    idle_memory_mib: Annotated[int, Meta(ge=0)] = 1024
    """MiB that may be in use where the use before is not known (the service has restarted since).
    1024: an idle GPU of 80 GiB shows about 500."""


class MpsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the control daemons of NVIDIA's MPS run, and who runs them: docs/reference/mps.md."""

    owned: bool = False
    """Whether this service starts, watches and ends a control daemon for each GPU that is shared by
    MPS. It needs rights that it has not by default (overlay kubernetes-gpu-mps). False: MPS is
    served where an operator runs a daemon."""
    state_dir: str = "/run/topobus/mps"
    """Folder with a folder for each daemon: its pipes, which containers get mounted, its logs, and
    what the next start must know. The same path here and on the host; it need not survive a reboot.
    The gateway must also allow another folder, in `edits`."""
    shared_memory: str = "/dev/shm"
    """The host's folder that this service has at /dev/shm, where daemon and clients exchange data;
    clients get it at /dev/shm. In a pod it must be a folder of the host, because no other
    container sees the container's own /dev/shm."""
    exclusive_process: bool = True
    """Whether a GPU is in compute mode EXCLUSIVE_PROCESS as long as its daemon runs, so that no
    process gets past it (`nvidia-smi -c`, which only root may). The mode from before comes back."""
    start_s: Annotated[float, Meta(gt=0, le=120)] = 20.0
    """Seconds that a daemon's start may take, compute modes included. 20 s: nvidia-smi takes two on
    a node with eight GPUs that no daemon keeps initialised."""


class GpuSettings(DeviceServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the gpu service."""

    leftovers: LeftoverSettings = LeftoverSettings()
    """When a GPU is clean after its last owner."""
    mps: MpsSettings = MpsSettings()
    """How the control daemons of MPS are run."""
