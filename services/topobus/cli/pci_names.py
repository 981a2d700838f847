"""Names of PCI vendors and devices, from the system's list: pci.ids, of the packages pci.ids and
hwdata.

Nothing is ever fetched. A recording of a machine gets the part of the list that the machine needs.

Source: the format is described at the head of pci.ids itself, https://pci-ids.ucw.cz.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from topobus.engine.drawing.leaves import PciIds
from topobus.sysfs.regular_file import inside_root, read_regular
from topobus.values.machine import PciDevice

__all__ = ["copy_names", "read_pci_names"]

# Debian and Arch, then Red Hat, Alpine and SUSE.
_PLACES = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids")
# The whole list has 1.5 MB. A file that is much larger is something else.
_MOST_BYTES = 16 << 20
_LINE = re.compile(r"(\t?)([0-9a-f]{4})  (.+)")
# A vendor's name ends before these: `Intel Corporation`, `Samsung Electronics Co Ltd`.
_COMPANY = re.compile(
    r",? "
    r"(?:Corporation|Corp|Technologies|Technology|Electronics|Systems|Semiconductor|Co|Inc|Ltd|LLC|AG|GmbH|S\.A|Group)\b.*"
)
# Words that repeat the kind of a function, which is drawn before its name.
_KIND = re.compile(r"^(?:Ethernet (?:Controller|Connection|Adapter)|NVMe SSD Controller) (?=\S)")
_BRACKETS = re.compile(r"\[([^\[\]]+)\]")


def read_pci_names(devices: Iterable[PciDevice], *roots: Path) -> dict[PciIds, str]:
    """Name functions by the first list that one of the roots has: the machine's own root first,
    then that of the system that draws.

    A function that the list lacks has no name. If only its vendor is listed, it has the vendor's.
    Cost: one pass over 40,000 lines, 20 ms, where there is a list.
    """
    names: dict[PciIds, str] = {}
    vendor_name = ""
    wanted = _ids(devices)
    for ids, name, _ in _entries(roots, wanted):
        vendor, device = ids
        if device is None:
            vendor_name = _vendor(name)
            names |= {pair: f"{vendor_name} [{pair[0]:04x}:{pair[1]:04x}]" for pair in wanted if pair[0] == vendor}
        else:
            names[vendor, device] = f"{vendor_name} {_device(name, vendor_name)}"
    return names


def copy_names(devices: Iterable[PciDevice], root: Path, folder: Path) -> bool:
    """Write the names of the recorded system's functions into a recording, so that it is drawn with
    names anywhere. Returns whether there is a list.

    Errors: raises OSError when the file cannot be written.
    """
    lines = [line for _, _, line in _entries((root,), _ids(devices))]
    if not lines:
        return False
    file = folder / _PLACES[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return True


def _ids(devices: Iterable[PciDevice]) -> set[PciIds]:
    return {(device.vendor, device.device) for device in devices}


def _entries(roots: Iterable[Path], wanted: set[PciIds]) -> Iterable[tuple[tuple[int, int | None], str, str]]:
    """Find the wanted entries of the first list: ids (None in place of the device: the vendor
    itself), name and line.

    A vendor before its devices.
    """
    text = next((text for root in roots for place in _PLACES if (text := _read(root, place)) is not None), "")
    vendors = {vendor for vendor, _ in wanted}
    vendor = -1
    for line in text.splitlines():
        # After the vendors there are lists of device classes, `C 03 Display controller`. Subsystems
        # have two tabs.
        if line.startswith("C "):
            return
        if line[:1] == "\t" and vendor not in vendors:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        number = int(match[2], 16)
        if not match[1]:
            vendor = number
            if vendor in vendors:
                yield (vendor, None), match[3], line
        elif (vendor, number) in wanted:
            yield (vendor, number), match[3], line


def _read(root: Path, place: str) -> str | None:
    """Read a list inside a root.

    None where none can be read: names are an addition, and the drawing is complete without them.
    """
    try:
        return read_regular(inside_root(root, place), _MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None


def _vendor(name: str) -> str:
    """Shorten a company's name to the one in common use.

    >>> _vendor("Intel Corporation"), _vendor("Advanced Micro Devices, Inc. [AMD/ATI]"), _vendor("Samsung Electronics Co Ltd")
    ('Intel', 'AMD/ATI', 'Samsung')
    """  # noqa: E501
    brackets = _BRACKETS.search(name)
    return brackets[1] if brackets is not None else _COMPANY.sub("", name) or name


def _device(name: str, vendor: str) -> str:
    """Prefer a card's product name, in brackets, to that of its chip, and repeat no word.

    >>> _device("MT2910 Family [ConnectX-7]", "Mellanox"), _device("ASPEED Graphics Family", "ASPEED"), _device("Ethernet Controller X550", "Intel")
    ('ConnectX-7', 'Graphics Family', 'X550')
    """  # noqa: E501
    brackets = _BRACKETS.search(name)
    return brackets[1] if brackets is not None else _KIND.sub("", name.removeprefix(f"{vendor} "))
