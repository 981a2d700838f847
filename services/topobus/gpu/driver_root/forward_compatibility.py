"""Decides whether the compatibility libraries of a CUDA image are used instead of the host's. Pure.

With such libraries a newer CUDA runs on an older driver's kernel module. Libraries older than the
driver's own would only lose abilities of the driver.
Source: CUDA Compatibility guide, "Forward Compatibility"; the note of libcuda names the drivers
that it serves, and without a note a greater major version counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from topobus.gpu.driver_root.elf import Elf

__all__ = ["COMPATIBILITY_FOLDER", "compatibility_library", "is_used"]

COMPATIBILITY_FOLDER = "/usr/local/cuda/compat"
"""Where images of NVIDIA have them."""

_LIBRARY = re.compile(r"libcuda\.so\.(\d+(?:\.\d+)+)")


def compatibility_library(names: Iterable[str]) -> str:
    """Choose libcuda among the names of the folder.

    Empty when there is none, or when there are several and the one in use is not known.

    >>> compatibility_library(["libcuda.so", "libcuda.so.1", "libcuda.so.590.44.01"])
    'libcuda.so.590.44.01'
    """
    libraries = [name for name in names if _LIBRARY.fullmatch(name)]
    return libraries[0] if len(libraries) == 1 else ""


def is_used(name: str, facts: Elf, driver_version: str) -> bool:
    """Return whether the libraries beside a compatibility libcuda serve a driver better than its
    own.

    >>> is_used("libcuda.so.590.44.01", Elf(machine=62), "580.95.05"), is_used("libcuda.so.570.86.10", Elf(machine=62), "580.95.05")
    (True, False)
    """  # noqa: E501
    match = _LIBRARY.fullmatch(name)
    if match is None:
        return False
    image, host = _numbers(match[1]), _numbers(driver_version)
    if facts.serves_drivers is not None:
        return host[:1] != () and host[0] in facts.serves_drivers and image > host
    return image[:1] > host[:1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
