"""Network interfaces in a recorded tree, as the kernel shows those that
are no PCI function's own.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["add_interface", "remove_interface"]

_DEFAULTS = {
    "flags": "0x1003",
    "carrier": "1",
    "operstate": "up",
    "speed": "10000",
    "duplex": "full",
    "mtu": "1500",
    "type": "1",
}


def add_interface(root: Path, name: str, index: int, *, below: str = "virtual", **files: str) -> Path:
    """Write one interface: up and linked, but for `files`; `below` is the folder of sys/devices
    that has it.

    Its folder is the answer.
    """
    folder = root / "sys/devices" / below / "net" / name
    folder.mkdir(parents=True)
    values = {
        **_DEFAULTS,
        "ifindex": str(index),
        "iflink": str(index),
        "address": f"02:00:00:00:00:{index:02x}",
        "uevent": "",
        **files,
    }
    for file, text in values.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    link = root / "sys/class/net" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"../../devices/{below}/net/{name}")
    return folder


def remove_interface(root: Path, name: str) -> None:
    """Take an interface out of sight."""
    (root / "sys/class/net" / name).unlink()
