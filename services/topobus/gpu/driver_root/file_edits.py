"""Container edits for a driver's files: mounts, and how the container's loader finds the libraries.
Pure.

Each library is mounted under each of its names, so that no link has to be made in the container.
Where the loader's cache leads to the libraries, they are in a folder that no image names. Then an
image's compatibility libraries take precedence where they should, even where the image sets
`LD_LIBRARY_PATH` to NVIDIA's usual folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from topobus.gpu.driver_root.driver_files import DriverFiles, File
from topobus.sysfs.driver_files import HOOK_PROGRAM, LIBRARY_PATH
from topobus.values.edits import ContainerEdits, Hook, Mount

__all__ = ["CACHED_FOLDER", "IMAGES_FOLDER", "Way", "file_edits"]

CACHED_FOLDER = "/opt/topobus/nvidia/lib64"
IMAGES_FOLDER = "/usr/local/nvidia/lib64"
"""In the `LD_LIBRARY_PATH` of NVIDIA's images."""

Way = Literal["hook", "variable", "image"]

_SOCKET_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "bind")
# The hook runs as root beside the container and must not inherit the image's environment.
_HOOK_ENVIRONMENT = ("LC_ALL=C.UTF-8",)
# It takes a tenth of a second, and longer on a node under load.
_HOOK_TIMEOUT_S = 60


def file_edits(
    driver_files: DriverFiles, *, sockets: Sequence[File] = (), way: Way, hook: str, has_storage: bool = False
) -> ContainerEdits:
    """Make the edits, common to all GPUs of a container.

    Shapes: hook — the program's path on the host, for the way `hook`; has_storage — with the files
    of GPUDirect Storage.
    """
    folder = CACHED_FOLDER if way == "hook" else IMAGES_FOLDER
    mounts = [
        Mount(host_path=library.host_path, container_path=f"{folder}/{name}")
        for library in driver_files.libraries
        for name in library.names
    ]
    others = (*driver_files.files, *(driver_files.storage if has_storage else ()))
    mounts += [Mount(host_path=file.host_path, container_path=file.container_path) for file in others]
    mounts += [
        Mount(host_path=file.host_path, container_path=file.container_path, options=_SOCKET_OPTIONS) for file in sockets
    ]
    hooks: tuple[Hook, ...] = ()
    if way == "hook":
        arguments = (HOOK_PROGRAM, "--folder", folder, "--driver-version", driver_files.version)
        hooks = (
            Hook(name="createContainer", path=hook, args=arguments, env=_HOOK_ENVIRONMENT, timeout_s=_HOOK_TIMEOUT_S),
        )
    env = {"LD_LIBRARY_PATH": LIBRARY_PATH} if way == "variable" else {}
    return ContainerEdits(env=env, mounts=tuple(mounts), hooks=hooks)
