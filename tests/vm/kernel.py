"""The kernel's own word, by its own tools: what a test compares Topobus with, and what must be as
before when a device has come back.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

PCI = Path("/sys/bus/pci/devices")
# Of an interface: what changes with each move between namespaces, or
# with the other end of its wire.
_MOVING = {"operstate", "carrier_changes", "stats64", "ifindex", "qdisc", "link_index", "link_netnsid"}


def sh(command: str) -> str:
    """Run a command and return its output.

    Errors: raises AssertionError with the output when the command fails.
    """
    done = subprocess.run(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}"
    return done.stdout


def links(arguments: str) -> list[dict[str, Any]]:
    """Give the rows of `ip -json`; none where it fails, as for an interface that is not there."""
    done = subprocess.run(
        ["ip", "-json", "-d", *arguments.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return json.loads(done.stdout or "[]")  # type: ignore[no-any-return]


def interfaces(namespace: str = "") -> set[str]:
    """Name the interfaces of the host or of a network namespace, without loopback."""
    inside = f"-n {namespace} " if namespace else ""
    return {row["ifname"] for row in links(f"{inside}link") if row} - {"lo"}


def state(name: str, *, with_addresses: bool = True) -> dict[str, Any]:
    """Give all that a host's interface has, to compare: link, addresses, routes, settings, and what
    is set for its virtual functions.

    `with_addresses` False leaves the hardware addresses out: a virtual function gets another
    one by chance with each reset.
    """
    moving = _MOVING if with_addresses else {*_MOVING, "address", "permaddr"}
    link = [
        {key: value for key, value in row.items() if key not in moving and key != "vfinfo_list"}
        for row in links(f"addr show dev {name}")
    ]
    for row in link:
        row["flags"] = sorted({*row.get("flags", ())} - {"LOWER_UP", "NO-CARRIER"})
        row["addr_info"] = [
            {k: v for k, v in a.items() if "life_time" not in k}
            for a in row.get("addr_info", ())
            if a.get("scope") != "link"
        ]
    functions = [row.get("vfinfo_list", []) for row in links(f"link show dev {name}")]
    routes = [
        # `linkdown` comes and goes with the carrier.
        {key: value for key, value in row.items() if key != "flags"}
        for row in (*links(f"route show dev {name}"), *links(f"-6 route show dev {name}"))
        if not str(row.get("dst", "")).startswith("fe80")
    ]
    settings = {}
    for family in ("ipv4", "ipv6"):
        for path in sorted(Path(f"/proc/sys/net/{family}/conf/{name}").glob("*")):
            try:
                settings[f"{family}.{path.name}"] = path.read_text().strip()
            except OSError:
                settings[f"{family}.{path.name}"] = "unreadable"
    return {"link": link, "functions": functions, "routes": routes, "settings": settings}


def without_addresses(functions: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Leave out of a card's functions what a function itself announces to its card when it is first
    used.
    """
    return [
        [{key: value for key, value in each.items() if key not in ("address", "broadcast")} for each in of_card]
        for of_card in functions
    ]


def driver(address: str) -> str:
    """Name the driver that has a PCI function; empty when none has."""
    link = PCI / address / "driver"
    return link.resolve().name if link.exists() else ""


def number(path: Path) -> int:
    """Read a file of one number, of either base."""
    return int(path.read_text().strip(), 0)
