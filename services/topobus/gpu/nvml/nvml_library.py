"""Loads NVML and reopens it: the lifecycle of the vendor's library in this process.

A loaded library keeps its version until it is closed, so after a driver update a new session has to
load the file again. This module queries no GPU.
Source: nvidia-ml-py (module `pynvml`); dlopen(3).
"""

from __future__ import annotations

import _ctypes
import ctypes
from importlib import import_module, reload
from pathlib import Path
from typing import Any

from topobus.sysfs.tree import Tree

__all__ = ["NvmlUnavailable", "open_library", "reopen_library"]

_LIBRARY = "libnvidia-ml.so.1"


class NvmlUnavailable(Exception):
    """Raised when the library cannot be used at all. The message has the reason."""


def open_library(tree: Tree) -> Any:
    """Load and start the library, and return the module pynvml.

    The library comes from `hardware.library_path` when that is set, else from the system.

    Errors: raises NvmlUnavailable with the reason.
    """
    try:
        # Untyped on purpose: the package has no types, and it is imported only when NVML may be
        # asked.
        module: Any = import_module("pynvml")
    except ImportError as err:
        raise NvmlUnavailable(
            "the Python package nvidia-ml-py is not installed: pip install '.[gpu]' from the checkout"
        ) from err
    _start(module, tree)
    return module


def _start(module: Any, tree: Tree) -> None:
    folder = tree.settings.library_path
    try:
        if folder:
            # pynvml finds its library only by name, but uses one that it already has.
            module.nvmlLib = ctypes.CDLL(str(Path(folder) / _LIBRARY))
        module.nvmlInit()
    except (OSError, module.NVMLError) as err:
        raise NvmlUnavailable(f"{_LIBRARY} cannot be used: {err}") from err


def reopen_library(module: Any, *, tree: Tree) -> Any:
    """Close a session and open another with the library that is on the disk now.

    The loader returns the same library as long as it is in use, so it is closed first. pynvml keeps
    it, and pointers into it, in globals, so the module is reloaded.
    Errors: raises NvmlUnavailable when the library cannot be loaded or started.
    """
    try:
        module.nvmlShutdown()
    except module.NVMLError:
        # A session that is no longer valid cannot be closed.
        pass
    library = module.nvmlLib
    module = reload(module)
    if library is not None:
        _ctypes.dlclose(library._handle)
    _start(module, tree)
    return module
