"""Interfaces, SR-IOV and default routes, read from a recorded machine and from small trees."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from msgspec import structs

from topobus.simulation.machines import build
from topobus.sysfs.net import default_route_interfaces, function_interfaces, function_ports
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.errors import HardwareError
from topobus.values.pci import PciAddress

ADDRESS = PciAddress.parse("0000:3b:00.0")
FOLDER = f"sys/bus/pci/devices/{ADDRESS}"
ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


def make_tree(root: Path, files: dict[str, str]) -> Tree:
    """Write files below a root and open it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Tree(HardwareSettings(root=str(root)))


def interface(name: str, **files: str) -> dict[str, str]:
    """Give the files of one interface of the function under test."""
    return {f"{FOLDER}/net/{name}/{file}": text for file, text in files.items()}


def test_function_interfaces_tells_link_and_address_when_the_interface_is_up(tmp_path: Path) -> None:
    """What the kernel shows of an interface comes back as values with units."""
    tree = make_tree(
        tmp_path, interface("eth0", flags="0x1003", carrier="1", speed="25000", address="02:00:00:00:00:01", mtu="9000")
    )

    (net_interface,) = function_interfaces(tree, ADDRESS)

    assert (net_interface.name, net_interface.mac, net_interface.mtu) == ("eth0", "02:00:00:00:00:01", 9000)
    assert (net_interface.is_up, net_interface.carrier, net_interface.speed_mbps) == (True, True, 25000)


def test_function_interfaces_tells_the_same_of_the_link_when_asked_for_it_alone(tmp_path: Path) -> None:
    """A look each second reads no address and no MTU, and sees the same link."""
    files = {
        "flags": "0x1003",
        "carrier": "1",
        "speed": "25000",
        "duplex": "full",
        "address": "02:00:00:00:00:01",
        "mtu": "9000",
    }
    tree = make_tree(tmp_path, interface("eth0", **files, operstate="up"))

    (whole,) = function_interfaces(tree, ADDRESS)
    (link,) = function_interfaces(tree, ADDRESS, only_link=True)

    assert link == structs.replace(whole, mac="", mtu=None)
    assert (link.carrier, link.speed_mbps, link.duplex, link.is_up) == (True, 25000, "full", True)


@pytest.mark.parametrize("speed", ["-1", "4294967295"])
def test_function_interfaces_leaves_the_speed_open_when_the_driver_does_not_know(tmp_path: Path, speed: str) -> None:
    """SPEED_UNKNOWN, signed or unsigned, is no speed."""
    tree = make_tree(tmp_path, interface("eth0", carrier="0", speed=speed))

    (net_interface,) = function_interfaces(tree, ADDRESS)

    assert net_interface.speed_mbps is None


def test_function_interfaces_finds_the_interface_when_the_function_is_virtio(tmp_path: Path) -> None:
    """A virtio function's interface hangs one folder below the function."""
    tree = make_tree(
        tmp_path, {f"{FOLDER}/virtio0/net/ens3/address": "02:00:00:00:00:02", f"{FOLDER}/virtio0/net/ens3/mtu": "1500"}
    )

    assert [function_interface.name for function_interface in function_interfaces(tree, ADDRESS)] == ["ens3"]


def test_function_interfaces_is_empty_when_the_interface_is_in_another_namespace(tmp_path: Path) -> None:
    """A function without an interface in sight has none, and that is no error."""
    tree = make_tree(tmp_path, {f"{FOLDER}/vendor": "0x15b3"})

    assert function_interfaces(tree, ADDRESS) == ()


def test_function_interfaces_names_the_file_when_it_is_no_number(tmp_path: Path) -> None:
    """A file that contradicts its format is an error with the path and the raw text."""
    tree = make_tree(tmp_path, interface("eth0", carrier="banana"))

    with pytest.raises(HardwareError, match=r"net/eth0/carrier.*banana"):
        function_interfaces(tree, ADDRESS)


def test_default_route_interfaces_names_the_interface_when_the_route_is_ipv4(tmp_path: Path) -> None:
    """Only a route to everywhere counts, not one to a subnet that begins with zeros."""
    lines = "eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\neth1\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"  # noqa: E501
    tree = make_tree(tmp_path, {"proc/net/route": ROUTES + lines})

    assert default_route_interfaces(tree) == {"eth0"}


def test_default_route_interfaces_asks_the_node_when_we_run_in_a_container(tmp_path: Path) -> None:
    """With the node's /proc mounted into a container, proc/net is the container's network.

    The first process has the node's.
    """
    line = "{}\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    files = {"proc/1/net/route": ROUTES + line.format("enp3s0"), "proc/net/route": ROUTES + line.format("eth0")}

    assert default_route_interfaces(make_tree(tmp_path, files)) == {"enp3s0"}


def test_default_route_interfaces_names_the_interface_when_the_route_is_ipv6_alone(tmp_path: Path) -> None:
    """A node with IPv6 only has its default route protected too.

    The kernel's reject route on lo is none.
    """
    zero = "0" * 32
    gateway = "fe80" + "0" * 27 + "1"
    text = (
        f"{zero} 00 {zero} 00 {gateway} 00000400 00000001 00000000 00000003     eth2\n"
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n"
        f"fe80{'0' * 28} 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001     eth3\n"
    )

    assert default_route_interfaces(make_tree(tmp_path, {"proc/net/ipv6_route": text})) == {"eth2"}


def test_default_route_interfaces_names_all_below_when_the_route_goes_over_a_vlan_on_a_bond(tmp_path: Path) -> None:
    """The cards below a stack of virtual interfaces carry the route as well."""
    route = ROUTES + "bond0.7\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    tree = make_tree(
        tmp_path,
        {
            "proc/net/route": route,
            "sys/class/net/bond0.7/lower_bond0/mtu": "1500",
            "sys/class/net/bond0/lower_eth0/mtu": "1500",
            "sys/class/net/bond0/lower_eth1/mtu": "1500",
            "sys/class/net/eth2/mtu": "1500",
        },
    )

    assert default_route_interfaces(tree) == {"bond0.7", "bond0", "eth0", "eth1"}


def test_default_route_interfaces_is_empty_when_the_tree_has_no_routes(tmp_path: Path) -> None:
    """A recording without /proc/net protects nothing."""
    assert default_route_interfaces(make_tree(tmp_path, {"proc/uptime": "1"})) == frozenset()


def test_function_interfaces_agrees_with_the_class_folder_when_the_machine_is_recorded(tmp_path: Path) -> None:
    """Every interface of the class is found at exactly one function of
    the recorded demo machine.
    """
    tree = Tree(HardwareSettings(root=str(build("dgx", tmp_path / "dgx").root)))

    names = [
        function_interface.name
        for name in tree.names("sys/bus/pci/devices")
        for function_interface in function_interfaces(tree, PciAddress.parse(name))
    ]

    assert sorted(names) == sorted(tree.names("sys/class/net"))
    assert len(names) == 8


@pytest.mark.parametrize(
    ("named", "own", "first"),
    [
        ({"ens8f1": "p1", "58609951635cbfa": "pf1vf1", "ens8f1_0": "pf1vf0"}, ["ens8f1"], "ens8f1"),
        ({"enp3s0f0np0": "p0", "en3f0pf0sf88": "pf0sf88", "eth9": "c1pf0vf3"}, ["enp3s0f0np0"], "enp3s0f0np0"),
        ({"p0": "p0", "pf0hpf": "pf0hpf", "pf0vf0": "pf0vf0"}, ["p0"], "p0"),
        ({"a0": "0", "a1": "1", "z": "p0"}, ["z"], "z"),
        ({"ens1f0_0": "pf0vf0"}, [], ""),
        ({"ens1": ""}, ["ens1"], "ens1"),
        ({"ens1": "p0s2"}, ["ens1"], "ens1"),
        ({"a": "", "b": "pf0vf0"}, ["a"], "a"),
    ],
    ids=["switchdev", "scalable", "smart-nic", "bare-numbers", "uplink-away", "no-name", "split", "unnamed-uplink"],
)
def test_function_ports_leaves_out_representors_whatever_their_names(
    tmp_path: Path, named: dict[str, str], own: list[str], first: str
) -> None:
    """The port of the card is the function's interface.

    What stands for other functions is not, even where it is alone.
    """
    files = {f"{FOLDER}/net/{name}/phys_port_name": port for name, port in named.items() if port}
    tree = make_tree(tmp_path, {**files, **{f"{FOLDER}/net/{name}/flags": "0x1003" for name in named}})

    ports = function_ports(tree, ADDRESS)

    assert [interface.name for interface in ports.interfaces] == own
    assert (ports.first.name if ports.first is not None else "") == first
    assert set(ports.others) == set(named) - set(own)


@pytest.mark.parametrize(
    ("numbers", "order", "first"),
    [
        ({"ens1": "1", "ens1d1": "0"}, ["ens1d1", "ens1"], "ens1d1"),
        ({"a": "0", "b": "0"}, ["a", "b"], ""),
        ({"a": "0", "b": ""}, ["a", "b"], ""),
    ],
    ids=["told", "equal", "untold"],
)
def test_function_ports_goes_by_port_number_when_a_function_has_several(
    tmp_path: Path, numbers: dict[str, str], order: list[str], first: str
) -> None:
    """The first port is told by its number.

    Where nothing tells them apart none is taken, and it says so.
    """
    files = {f"{FOLDER}/net/{name}/dev_port": number for name, number in numbers.items() if number}
    tree = make_tree(tmp_path, {**files, **{f"{FOLDER}/net/{name}/flags": "0x1003" for name in numbers}})

    ports = function_ports(tree, ADDRESS)

    assert [interface.name for interface in ports.interfaces] == order
    assert (ports.first.name if ports.first is not None else "") == first
    assert bool(ports.unclear) is not bool(first)


def test_read_tells_nothing_when_the_kernel_says_that_a_port_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most drivers name no port: reading the file says EOPNOTSUPP,
    which is no fault of the card.
    """
    tree = make_tree(tmp_path, interface("ens1", flags="0x1003", phys_port_name="p0"))
    open_file = os.open

    def refuse(path: str, *arguments: int) -> int:
        if path.endswith("phys_port_name"):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported", path)
        return open_file(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)

    assert [port.name for port in function_ports(tree, ADDRESS).interfaces] == ["ens1"]
