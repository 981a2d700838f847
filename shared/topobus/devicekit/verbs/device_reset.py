"""Resets one device: by its driver where that can, else the PCI function by the kernel's own file.

The journal records it before and after. A reset cannot be undone. The next start therefore does not
repeat one that a crash has cut off: it reports it, and looks at the device as at any other.
"""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.pci import pci_folder
from topobus.process.logging import get_logger
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.outcome import Refusal, refuse

__all__ = ["forget_interrupted", "reset_device"]

_STEP = "reset"


def reset_device(journal: Journal, driver: DeviceDriver, tree: Tree, device: Device, *, op_id: str) -> Refusal | None:
    """Reset a device that has no holder. None when it is done. Blocks, and runs in the driver's
    thread.

    Errors: raises HardwareError when the journal cannot be written, and what the driver raises;
    then it may be done or not.
    """
    if driver.capabilities.resets:
        reset = partial(driver.reset, tree, device)
    else:
        path = _reset_file(tree, device)
        if isinstance(path, Refusal):
            return path
        reset = partial(_write_reset, path, device)
    record = journal.reset_record(device)
    record.intend(_STEP, {"op_id": op_id})
    try:
        return reset()
    finally:
        record.undone(_STEP)


def forget_interrupted(journal: Journal) -> list[str]:
    """Remove from the journal the resets that a crash has cut off, and return their devices."""
    interrupted = [(name, entry.device) for name, entry in journal.entries.items() if entry.reset.steps]
    for name, device in interrupted:
        journal.reset_record(device).undone(_STEP)
        get_logger().warning(
            "reset.interrupted", device=name, next_step="it may be reset or not; reset it again if in doubt"
        )
    return [name for name, _ in interrupted]


def _reset_file(tree: Tree, device: Device) -> Path | Refusal:
    """Find the file by which the kernel resets a PCI function.

    Source: Documentation/ABI/testing/sysfs-bus-pci, `reset`.
    """
    if device.pci is None:
        text = f"driver {device.driver} cannot reset {device.name}, and it is no PCI function"
    elif not tree.exists(f"{pci_folder(device.pci)}/reset"):
        text = f"the kernel has no way to reset PCI function {device.pci} of {device.name}"
    else:
        return tree.path(f"{pci_folder(device.pci)}/reset")
    return refuse("reset-unsupported", text, device=device.name, driver=device.driver)


def _write_reset(path: Path, device: Device) -> Refusal | None:
    try:
        path.write_text("1\n", encoding="ascii")
    except OSError as err:
        text = f"{path}: {err.strerror or err}"
        if err.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text += ": give this service the right to write there (docs/reference/rights.md)"
        return refuse("reset-failed", text, device=device.name, error=err.errno or 0)
    return None
