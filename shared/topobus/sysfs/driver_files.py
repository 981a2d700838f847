"""Settings of the files that belong to a kernel driver and that containers need: where they are,
and how a container's loader finds them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

__all__ = ["HOOK_PROGRAM", "LIBRARY_PATH", "DriverFilesSettings", "LoaderWay"]

LoaderWay = Literal["auto", "hook", "variable", "image"]


class DriverFilesSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user-space files of NVIDIA's driver, which containers get of the host:
    docs/how-to/cuda-without-a-toolkit.md.
    """

    bring: Literal["auto", "always", "never"] = "auto"
    """Whether containers get the driver's files from us. `never`: NVIDIA's container runtime brings
    them, and is given the GPUs. `always`: a claim is refused where they are incomplete. `auto`:
    where they are complete; else as `never`, with a warning in the inventory. Of a recorded machine
    only with `root`."""
    root: str = ""
    """The driver root's path on the host: `/run/nvidia/driver`, `/home/kubernetes/bin/nvidia`.
    Empty: the first of the usual ones that has the loaded version."""
    host_root: str = "/"
    """Where this process sees the host's root folder; in a container a folder where it is mounted,
    read-only."""
    loader: LoaderWay = "auto"
    """How a container's loader finds the libraries. `hook`: a program of ours extends the
    container's /etc/ld.so.cache before it starts. `variable`: `LD_LIBRARY_PATH`, in place of the
    image's. `image`: nothing is set; images of NVIDIA look into /usr/local/nvidia/lib64 by
    themselves. `auto`: `hook` for claims where the program is there, else `variable`; kubelet's
    device plugin API knows no hooks, so pods by resource have `variable` instead of `hook`."""
    hook: str = ""
    """Path of `topobus-gpu-hook` on the host, which must be in the gateway's `edits` unless it is
    in /usr/bin, /usr/local/bin or /opt/topobus/bin. Empty: the one beside this process's
    interpreter, when this process sees the host's own root."""


LIBRARY_PATH = "/usr/local/nvidia/lib64:/usr/local/nvidia/lib:/usr/local/cuda/lib64"
"""`LD_LIBRARY_PATH` where a variable leads to the libraries. The image's own value is lost with it,
so this has the folder of CUDA's images that such a value usually names."""
HOOK_PROGRAM = "topobus-gpu-hook"
"""The console script that a container runtime starts on the host."""
