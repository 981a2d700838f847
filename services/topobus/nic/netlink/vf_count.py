"""Sets the number of virtual functions of a physical one by sysfs, where the operator asks for it
and they are not in use.

The kernel changes the number only by way of 0, which removes all functions. So nothing is changed
while one of them is held, bound to a driver other than its netdev's, or away in a namespace.
Source: Documentation/PCI/pci-iov-howto.rst, Documentation/ABI/testing/sysfs-bus-pci (sriov_numvfs,
sriov_totalvfs).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from topobus.values.outcome import Refusal, refuse

__all__ = ["functions_in_use", "set_vf_count"]

# Drivers under which a pod or a virtual machine uses a function from user space.
_PASSTHROUGH = frozenset({"vfio-pci", "pci-stub", "xen-pciback", "uio_pci_generic", "igb_uio"})


def set_vf_count(sys: str, address: str, wanted: int, *, held: Sequence[str] = ()) -> Refusal | None:
    """Bring the number of virtual functions to what is wanted, and return None when it is.

    Shapes: sys — where /sys is; address — of the physical function, `0000:3b:00.0`; held — names or
    addresses of whoever holds it or one of its functions.
    Errors: refuses `vf-count-held`, `vf-count-in-use` and `vf-count-impossible` before anything is
    changed, `vf-count-failed` when the driver refuses, after asking for the former number again.
    Cost: a driver needs up to some seconds to make its functions; call it from a worker thread.
    """
    folder = Path(sys, "bus", "pci", "devices", address)
    try:
        present, total = (
            int((folder / name).read_text(encoding="ascii")) for name in ("sriov_numvfs", "sriov_totalvfs")
        )
    except (OSError, ValueError):
        return _impossible(
            address, f"{address} has no virtual functions: {folder}/sriov_totalvfs cannot be read", wanted, 0
        )
    if not 0 <= wanted <= total:
        return _impossible(
            address, f"{address} can have 0 to {total} virtual functions, wanted {wanted}", wanted, total
        )
    if wanted == present:
        return None
    in_use = functions_in_use(folder)
    if held or in_use:
        users = ", ".join(held) if held else ", ".join(in_use)
        code = "vf-count-held" if held else "vf-count-in-use"
        return refuse(
            code,
            f"{address} has {present} virtual functions and is to have {wanted}, but is in use: {users}; "
            "the number changes when they are released",
            address=address,
            present=present,
            wanted=wanted,
            users=tuple(held or in_use),
        )
    return _write(folder, address, present, wanted)


def _write(folder: Path, address: str, present: int, wanted: int) -> Refusal | None:
    numbers = folder / "sriov_numvfs"
    try:
        # From a number other than 0 the kernel changes only to 0.
        if present:
            numbers.write_text("0", encoding="ascii")
        if wanted:
            numbers.write_text(str(wanted), encoding="ascii")
    except OSError as err:
        back = _put_back(numbers, present)
        return refuse(
            "vf-count-failed",
            f"the driver of {address} does not make {wanted} virtual functions: {err.strerror}; it has {back} now",
            address=address,
            wanted=wanted,
            present=back,
            error=err.errno or 0,
        )
    return None


def _put_back(numbers: Path, present: int) -> int:
    try:
        if present and int(numbers.read_text(encoding="ascii")) == 0:
            numbers.write_text(str(present), encoding="ascii")
        return int(numbers.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1  # Not readable any more. The message has what was wanted.


def functions_in_use(folder: Path) -> list[str]:
    """List the functions that are in use although no device of them is held: passed through, or
    with their interface switched on or away.
    """
    users: list[str] = []
    for link in sorted(folder.glob("virtfn*"), key=lambda path: int(path.name.removeprefix("virtfn") or 0)):
        function = link.resolve()
        driver = (function / "driver").resolve().name if (function / "driver").exists() else ""
        names = sorted(path.name for path in (function / "net").iterdir()) if (function / "net").is_dir() else []
        if driver in _PASSTHROUGH:
            users.append(f"{function.name} is bound to {driver}")
        elif driver and not names and (function / "net").is_dir():
            users.append(f"{function.name} has its interface in another namespace")
        users.extend(f"{function.name} is {name}, which is on" for name in names if _is_on(function / "net" / name))
    return users


def _is_on(interface: Path) -> bool:
    try:
        return bool(int((interface / "flags").read_text(encoding="ascii"), 0) & 1)
    except (OSError, ValueError):
        return False


def _impossible(address: str, message: str, wanted: int, total: int) -> Refusal:
    return refuse("vf-count-impossible", message, address=address, wanted=wanted, total=total)
