"""Which files of a folder's listing belong to NVIDIA's driver, and under which names a container
needs them. Pure.

A library belongs to the driver when its name ends with exactly the version of the loaded kernel
module, because CUDA refuses any other. A few libraries have versions of their own.
Source: file names of NVIDIA-Linux-x86_64-*.run, its README ("Installed Components"), and the facts
in tests/data/driver_files/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

__all__ = [
    "BINARIES",
    "CONFIGURATION",
    "FIRMWARE_FOLDERS",
    "LIBRARY_FOLDERS",
    "REQUIRED",
    "SOCKETS",
    "STORAGE_FILES",
    "XORG_MODULES",
    "driver_libraries",
    "library_names",
    "missing_libraries",
    "other_versions",
]

LIBRARY_FOLDERS = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
    "lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
)
"""Folders of a driver root, the first one first; relative to the root. The last ones: Debian's own
packages."""
BINARIES = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-xconfig",
)
FIRMWARE_FOLDERS = ("lib/firmware/updates/nvidia", "lib/firmware/nvidia", "usr/lib/firmware/nvidia")
"""Each has a folder for a version, with `gsp*.bin`."""
SOCKETS = ("nvidia-persistenced/socket", "nvidia-fabricmanager/socket")
"""Below /run."""
STORAGE_FILES = ("etc/cufile.json",)
"""What GPUDirect Storage reads besides its nodes."""
XORG_MODULES = ("nvidia_drv.so", "libglxserver_nvidia.so")
"""The X server's: its driver, and an extension that has the driver's version at its end."""
CONFIGURATION = {
    "/etc/OpenCL/vendors/nvidia.icd": ("etc/OpenCL/vendors/nvidia.icd",),
    "/etc/vulkan/icd.d/nvidia_icd.json": (
        "etc/vulkan/icd.d/nvidia_icd.json",
        "usr/share/vulkan/icd.d/nvidia_icd.json",
        "vulkan/icd.d/nvidia_icd.json",
    ),
    "/etc/vulkan/icd.d/nvidia_icd.x86_64.json": (
        "etc/vulkan/icd.d/nvidia_icd.x86_64.json",
        "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json",
    ),
    "/etc/vulkan/icd.d/nvidia_icd.aarch64.json": (
        "etc/vulkan/icd.d/nvidia_icd.aarch64.json",
        "usr/share/vulkan/icd.d/nvidia_icd.aarch64.json",
    ),
    "/etc/vulkan/icd.d/nvidia_layers.json": (
        "etc/vulkan/icd.d/nvidia_layers.json",
        "usr/share/vulkan/icd.d/nvidia_layers.json",
    ),
    "/etc/vulkan/implicit_layer.d/nvidia_layers.json": (
        "etc/vulkan/implicit_layer.d/nvidia_layers.json",
        "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
        "vulkan/implicit_layer.d/nvidia_layers.json",
    ),
    **{
        f"/usr/share/{name}": (f"usr/share/{name}", f"etc/{name}", f"share/{name}")
        for name in (
            "glvnd/egl_vendor.d/10_nvidia.json",
            "egl/egl_external_platform.d/15_nvidia_gbm.json",
            "egl/egl_external_platform.d/10_nvidia_wayland.json",
            "egl/egl_external_platform.d/09_nvidia_wayland2.json",
            "egl/egl_external_platform.d/20_nvidia_xcb.json",
            "egl/egl_external_platform.d/20_nvidia_xlib.json",
            "nvidia/nvoptix.bin",
            "X11/xorg.conf.d/10-nvidia.conf",
            "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
        )
    },
}
"""Where a container's own loaders of graphics and OpenCL look, and where a driver root may have the
file."""
REQUIRED = ("libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so")
"""Without one of these no CUDA program runs."""

# Libraries with versions of their own: the compiler's former library, and the platforms of EGL.
_OWN_VERSIONS = (
    "libnvidia-nvvm70.so.*",
    "libnvidia-egl-gbm.so.*.*",
    "libnvidia-egl-wayland.so.*.*",
    "libnvidia-egl-wayland2.so.*.*",
    "libnvidia-egl-xcb.so.*.*",
    "libnvidia-egl-xlib.so.*.*",
)
# Names that programs open and that are no library's SONAME.
_MORE_NAMES: Mapping[str, tuple[str, ...]] = {
    "libcuda.so": ("libcuda.so",),
    "libnvidia-opticalflow.so": ("libnvidia-opticalflow.so",),
    "libGLX_nvidia.so": ("libGLX_indirect.so.0",),
    "libnvidia-vulkan-producer.so": ("libnvidia-vulkan-producer.so",),
    "libnvidia-allocator.so": ("gbm/nvidia-drm_gbm.so",),
}
_VERSIONED = re.compile(r"libcuda\.so\.(\d+(?:\.\d+){1,3})")


def driver_libraries(names: Iterable[str], version: str) -> tuple[str, ...]:
    """Choose the libraries of one version among file names, sorted.

    >>> driver_libraries(["libcuda.so.1", "libcuda.so.580.95.05", "libcuda.so.570.86.10", "libc.so.6"], "580.95.05")
    ('libcuda.so.580.95.05',)
    """
    end = f".so.{version}"
    return tuple(
        sorted(
            name
            for name in names
            if (name.startswith("lib") and name.endswith(end))
            or any(fnmatchcase(name, pattern) for pattern in _OWN_VERSIONS)
        )
    )


def library_names(name: str, soname: str, listed: Iterable[str]) -> tuple[str, ...]:
    """List the names under which a container has a library: its own, its SONAME, and the
    unversioned ones that programs open.

    Shapes: listed — the names beside it: a name for linking (`libnvcuvid.so`) is given only where
    the driver has it.
    >>> library_names("libcuda.so.580.95.05", "libcuda.so.1", [])
    ('libcuda.so.580.95.05', 'libcuda.so.1', 'libcuda.so')
    """
    base = f"{name.partition('.so')[0]}.so"
    plain = (base,) if base in listed else ()
    return tuple(dict.fromkeys((name, *((soname,) if soname else ()), *plain, *_MORE_NAMES.get(base, ()))))


def missing_libraries(names: Iterable[str], version: str) -> tuple[str, ...]:
    """List the required libraries that are not among the names."""
    listed = set(names)
    return tuple(wanted for base in REQUIRED if (wanted := f"{base}.{version}") not in listed)


def other_versions(names: Iterable[str]) -> tuple[str, ...]:
    """List the versions of the drivers that have left a libcuda here.

    >>> other_versions(["libcuda.so.1", "libcuda.so.570.86.10"])
    ('570.86.10',)
    """
    return tuple(sorted({match[1] for name in names if (match := _VERSIONED.fullmatch(name))}))
