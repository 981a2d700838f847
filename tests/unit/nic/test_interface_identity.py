"""Which interface was handed over: known again by what nobody can change, and by our mark only
where it could be ours.
"""

from __future__ import annotations

from typing import Any

import pytest
from pyroute2.netlink.exceptions import NetlinkError

from topobus.nic.interfaces.rules.interface_state import InterfaceState
from topobus.nic.netlink.identity import Present, find_interface

TAG = "topobus nic-0000-3b-00-0"
HARDWARE = InterfaceState(
    name="ens1f0",
    index=7,
    mac="02:00:00:00:00:07",
    permanent_mac="02:00:00:00:00:07",
    mtu=1500,
    bus_device="pci/0000:3b:00.0",
)
VETH = InterfaceState(name="veth1", index=7, mac="02:00:00:00:00:07", mtu=1500, kind="veth", link=6)
TUN = InterfaceState(name="tun1", index=7, mac="02:00:00:00:00:07", mtu=1500, kind="tun")


def link(index: int, kind: str = "", bus_device: str = "", permanent: str = "", **fields: Any) -> dict[str, Any]:
    """A link as netlink tells it."""
    bus, _, device = bus_device.partition("/")
    return {
        "index": index,
        "header": {"flags": 0},
        "linkinfo": {"attrs": [("IFLA_INFO_KIND", kind)]} if kind else None,
        "parent_dev_bus_name": bus or None,
        "parent_dev_name": device or None,
        "perm_address": permanent or None,
        **fields,
    }


class Links:
    """Answers for the links of one namespace; `flags` are those of each
    message of the first lists.
    """

    def __init__(self, *links: dict[str, Any], interrupted: int = 0) -> None:
        self.links, self.interrupted = links, interrupted

    def link(self, _verb: str, index: int) -> list[dict[str, Any]]:
        """One link by its index."""
        answer = [each for each in self.links if each["index"] == index]
        if not answer:
            raise NetlinkError(19, "No such device")
        return answer

    def get_links(self) -> list[dict[str, Any]]:
        """All of them, or, while they change, a list that lacks the last."""
        if self.interrupted:
            self.interrupted -= 1
            return [{**each, "header": {"flags": 0x10}} for each in self.links[:-1]]
        return list(self.links)


OURS_PCI = {"bus_device": "pci/0000:3b:00.0", "permanent": "02:00:00:00:00:07"}
CASES: list[tuple[str, InterfaceState, list[dict[str, Any]], int | None]] = [
    (
        "hardware under another index, name, address and alias",
        HARDWARE,
        [link(3, **OURS_PCI, address="02:66:66:66:66:66", ifalias="x")],
        3,
    ),
    (
        "another port of the same card",
        HARDWARE,
        [link(7, bus_device="pci/0000:3b:00.0", permanent="02:00:00:00:00:08", ifalias=TAG)],
        None,
    ),
    (
        "another card",
        HARDWARE,
        [link(7, bus_device="pci/0000:3c:00.0", permanent="02:00:00:00:00:07", ifalias=TAG)],
        None,
    ),
    (
        "our mark on an interface of the pod's own making",
        HARDWARE,
        [link(3, kind="dummy", ifalias=TAG), link(9, **OURS_PCI)],
        9,
    ),
    ("our mark alone, on an interface of the pod's own making", HARDWARE, [link(3, kind="dummy", ifalias=TAG)], None),
    ("a veth that changed its address and alias", VETH, [link(7, kind="veth", link=6, address="02:66:66:66:66:66")], 7),
    (
        "a veth whose index was taken",
        VETH,
        [link(7, kind="veth", link=4), link(12, kind="veth", link=6, ifalias=TAG)],
        12,
    ),
    ("a veth of another pair with our mark", VETH, [link(9, kind="veth", link=8, ifalias=TAG)], None),
    ("a tun with its address", TUN, [link(7, kind="tun", address="02:00:00:00:00:07")], 7),
    ("a tun with an address that we gave it", TUN, [link(7, kind="tun", address="02:00:00:00:00:99")], 7),
    ("another tun of that index", TUN, [link(7, kind="tun", address="02:66:66:66:66:66")], None),
    ("nothing", VETH, [], None),
]


@pytest.mark.parametrize(("before", "links", "index"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_find_knows_the_interface_by_what_nobody_can_change(
    before: InterfaceState, links: list[dict[str, Any]], index: int | None
) -> None:
    """A pod with NET_ADMIN cannot make us take another interface for ours, nor hide ours."""
    assert find_interface(Links(*links), before, Present(), tag=TAG, macs=frozenset({"02:00:00:00:00:99"})) == index


def test_find_reads_the_list_again_when_it_changed_meanwhile() -> None:
    """A list that the kernel calls inconsistent may lack the very interface.

    It is no reason to say that it is lost.
    """
    links = Links(link(3, kind="dummy"), link(12, kind="veth", link=6, ifalias=TAG), interrupted=3)

    assert find_interface(links, VETH, Present(), tag=TAG) == 12
