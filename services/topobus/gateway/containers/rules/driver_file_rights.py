"""Lists the files of the host that belong to a GPU's driver and that a container may have: the part
of class gpu's rights that names files one by one.

Folders of libraries are public on every host, and a mount from one is a single library
(`lib*.so*`). Of other folders only what is listed here may be mounted. Drivers lie below one of a
few roots.
"""

from __future__ import annotations

import re

from topobus.sysfs.driver_files import HOOK_PROGRAM, LIBRARY_PATH

__all__ = ["DRIVER_FILES", "DRIVER_HOOKS", "DRIVER_LIBRARIES", "DRIVER_VARIABLES", "LIBRARY_NAME"]

LIBRARY_NAME = re.compile(r"(lib[A-Za-z0-9_+-]+|nvidia_drv)\.so(\.[0-9]+)*")
"""Form of a library's file name: `libcuda.so.580.95.05`."""

_ROOTS = ("", "/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/usr/local/nvidia", "/run/opengl-driver")
_PROGRAMS = ("smi", "debugdump", "persistenced", "cuda-mps-control", "cuda-mps-server", "imex", "imex-ctl", "xconfig")
_PROGRAM_FOLDERS = ("usr/bin", "bin", "usr/sbin", "sbin", "usr/local/bin")
# Firmware, the targets of Debian's alternatives, and what graphics and OpenCL read.
_FOLDERS = (
    "lib/firmware/nvidia",
    "lib/firmware/updates/nvidia",
    "usr/lib/firmware/nvidia",
    "usr/lib/nvidia",
    "usr/share/nvidia",
    "usr/share/glvnd/egl_vendor.d",
    "usr/share/egl/egl_external_platform.d",
    "usr/share/vulkan",
    "usr/share/X11/xorg.conf.d",
    "etc/glvnd/egl_vendor.d",
    "etc/vulkan",
    "etc/OpenCL/vendors",
    "vulkan/icd.d",
    "vulkan/implicit_layer.d",
    "run/nvidia-persistenced/socket",
    "run/nvidia-fabricmanager/socket",
    "etc/cufile.json",
)

DRIVER_FILES = (
    *(f"{root}/{folder}/nvidia-{program}" for root in _ROOTS for folder in _PROGRAM_FOLDERS for program in _PROGRAMS),
    *(f"{root}/{folder}" for root in _ROOTS for folder in _FOLDERS),
    # On every NixOS all users may read all of it, and nothing secret may be there.
    "/nix/store",
)
DRIVER_LIBRARIES = tuple(f"{root}/{folder}" for root in _ROOTS for folder in ("usr/lib64", "usr/lib", "lib64", "lib"))
DRIVER_VARIABLES = (f"LD_LIBRARY_PATH={LIBRARY_PATH}",)
DRIVER_HOOKS = tuple(f"{folder}/{HOOK_PROGRAM}" for folder in ("/usr/bin", "/usr/local/bin", "/opt/topobus/bin"))
