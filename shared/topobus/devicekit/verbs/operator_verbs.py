"""What an operator may have done to a device that has no owner: a reset by its driver, or by the
kernel's own file; a rebind of its PCI function to the kernel's driver.

The journal records each before and after. Neither can be undone, so the next start repeats none
that a crash has cut off: it reports it, and looks at the device as at any other. A function that
was released stays in the journal until its kernel driver has it again. All functions block, and run
in a thread of a driver.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path

from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.journal.journal_values import REBIND
from topobus.devicekit.passthrough.function_switch import FunctionDriver, FunctionSwitch
from topobus.devicekit.passthrough.function_users import function_uses, interface_uses
from topobus.process.logging import get_logger
from topobus.sysfs.net import function_ports
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["bind_again", "rebind_device", "report_interrupted", "reset_device"]

_RESET = "reset"
# linux/if.h
_IFF_UP = 0x1


def reset_device(journal: Journal, driver: DeviceDriver, tree: Tree, device: Device, *, op_id: str) -> Refusal | None:
    """Reset a device. None when it is done.

    It is refused while the node itself uses an interface of its PCI function. One that is up is
    switched off and on afterwards.

    Errors: raises HardwareError when the journal cannot be written, and what the driver raises;
    then it may be done or not.
    """
    reset: Callable[[], Refusal | None]
    if driver.capabilities.resets:
        reset = partial(driver.reset, tree, device)
    else:
        path = _reset_file(tree, device)
        if isinstance(path, Refusal):
            return path
        reset = partial(_write_reset, path, device)
    # The kernel resets a card below the node's own connections as well.
    if device.pci is not None and (uses := interface_uses(tree, device.pci)):
        return refuse("reset-busy", f"{device.name} is in use: {'; '.join(uses)}", device=device.name)
    record = journal.operation_record(device)
    record.intend(_RESET, {"op_id": op_id})
    try:
        return reset() or _open_again(tree, device)
    finally:
        record.undone(_RESET)


def rebind_device(journal: Journal, driver: DeviceDriver, switch: FunctionSwitch, device: Device) -> Refusal | None:
    """Make the kernel's driver of a PCI function release it and bind it again. None when it is done.

    Errors: raises HardwareError when the journal cannot be written.
    """
    address = device.pci
    if address is None:
        text = f"{device.name} is no PCI function, so it has no kernel driver to bind again"
        return refuse("rebind-unsupported", text, device=device.name)
    before = _driver_to_rebind(switch, device.name, address)
    if isinstance(before, Refusal):
        return before
    journal.operation_record(device).intend(REBIND, {"driver": before.name, "override": before.override})
    refusal: Refusal | None = None
    try:
        driver.let_go(switch.tree, device)
        refusal = _refuse_used(driver, switch.tree, device, address)
        if refusal is None:
            switch.release(address)
    except HardwareError as err:
        refusal = refuse("rebind-failed", f"{device.name}: {err}", device=device.name)
    try:
        bind_again(journal, driver, switch, device)
    except HardwareError as err:
        text = f"{device.name}: {err}; it is tried again until {before.name} has it"
        refusal = refuse("rebind-failed", text, device=device.name)
    return refusal


def bind_again(journal: Journal, driver: DeviceDriver, switch: FunctionSwitch, device: Device) -> None:
    """Bind the function of a rebind to its earlier driver, if that does not have it.

    Errors: raises HardwareError; the journal still has the rebind then.
    """
    record = journal.operation_record(device)
    step = record.step(REBIND)
    if step is None or device.pci is None:
        return
    switch.restore(device.pci, FunctionDriver(name=step.before["driver"], override=step.before["override"]))
    driver.take_back(switch.tree, device)
    record.undone(REBIND)


def report_interrupted(journal: Journal) -> None:
    """Report the operations that a crash has cut off.

    They are removed from the journal, except a rebind, whose function may be without a driver.
    """
    entries = journal.entries.values()
    for device, verb in [(entry.device, step.name) for entry in entries for step in entry.operation.steps]:
        get_logger().warning(
            "operation.interrupted",
            device=device.name,
            verb=verb,
            next_step=f"it is not known whether the {verb} was done; ask for it again if in doubt",
        )
        if verb != REBIND:
            journal.operation_record(device).undone(verb)


def _driver_to_rebind(switch: FunctionSwitch, device: str, address: PciAddress) -> FunctionDriver | Refusal:
    """Read which kernel driver has a device's function, or refuse a function that cannot be bound
    again as it is.
    """
    before = switch.present(address)
    parts = switch.tree.read_int(f"{pci_folder(address)}/sriov_numvfs") or 0
    if not before.name:
        text = f"no kernel driver has PCI function {address} of {device}: bind it to one first"
    elif parts:
        # Most drivers remove them when they release the card, and none makes them again.
        text = f"{device} has {parts} virtual functions, which would be lost: remove them first (sriov_numvfs)"
    else:
        return before
    return refuse("rebind-unsupported", text, device=device)


def _refuse_used(driver: DeviceDriver, tree: Tree, device: Device, address: PciAddress) -> Refusal | None:
    """Refuse a function that something uses: the kernel waits in `unbind`, without limit, until no
    process has it open.
    """
    uses = function_uses(tree, address, driver.own_nodes(tree, device))
    if uses.users:
        text = f"{device.name} is in use: {'; '.join(uses.users)}"
    elif uses.unseen:
        text = (
            f"the open files of {uses.unseen} processes cannot be seen, so {device.name} may be in use: give the "
            "service CAP_SYS_PTRACE"
        )
    else:
        return None
    return refuse("rebind-busy", text, device=device.name)


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


def _open_again(tree: Tree, device: Device) -> Refusal | None:
    """Switch the interfaces of a function that was reset off and on, as far as they are on.

    The kernel puts back what it knows of a function, and only some drivers hear of the reset. The
    others find their card without what they had set, so no interrupt comes, and the interface shows
    the last carrier whatever happens to the cable. They set the card up when an interface is
    switched off and on (seen with igb on Linux 6.12).
    Source: Documentation/ABI/testing/sysfs-class-net, `flags`; `reset_done` in
    Documentation/PCI/pci.rst.
    """
    if device.pci is None:
        return None
    for interface in function_ports(tree, device.pci, only_link=True).interfaces:
        if not interface.is_up:
            continue
        path = tree.path(f"{interface.path}/flags")
        try:
            flags = int(path.read_text(encoding="ascii"), 0)
            for written in (flags & ~_IFF_UP, flags | _IFF_UP):
                path.write_text(f"{written:#x}\n", encoding="ascii")
        except OSError as err:
            text = (
                f"{device.name} was reset, but its interface {interface.name} could not be switched off and on: "
                f"{path}: {err.strerror or err}: do that by hand, and give this service CAP_NET_ADMIN"
            )
            return refuse("reset-failed", text, device=device.name, error=err.errno or 0)
    return None


def _write_reset(path: Path, device: Device) -> Refusal | None:
    try:
        path.write_text("1\n", encoding="ascii")
    except OSError as err:
        text = f"{path}: {err.strerror or err}"
        if err.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text += ": give this service the right to write there (docs/reference/rights.md)"
        return refuse("reset-failed", text, device=device.name, error=err.errno or 0)
    return None
