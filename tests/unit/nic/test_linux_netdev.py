"""Which interfaces the driver for those without a PCI function offers, how it describes them, and
what it calls a fault.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from support.net_trees import add_interface, remove_interface
from topobus.devicekit.device_record import DeviceRecord, RecordState, Step
from topobus.devicekit.driver import PrepareContext
from topobus.formats.kubernetes.slices import fault_of_shares
from topobus.formats.messages.codec import encode
from topobus.nic.config import InterfaceRule, InterfaceSettings, SharedInterface
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.nic.interfaces.rules.interface_state import InterfaceState, state_to_journal
from topobus.nic.oci_hook import handed_over
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import AttachedInterface, Sandbox

CARD = PciAddress.parse("0000:3b:00.0")
FUNCTION = PciDevice(address=CARD, vendor=0x15B3, device=0x1021, class_code=0x020000, numa_node=1, root="pci0000:3a")
MACHINE = Machine(
    node="n", numa_nodes=(NumaNode(id=1, cpus=CpuSet(0), memory_bytes=1),), cpus=(), pci_devices=(FUNCTION,)
)
ROUTES = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    "bond0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\n"
    "veth-node\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
)
MARKED = state_to_journal(InterfaceState(name="veth-a", index=3, mac="02:00:00:00:00:0a", mtu=1500, kind="veth"))
CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="claim", uid="uid"))


class Node:
    """A small tree with interfaces of many kinds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = Tree(HardwareSettings(root=str(root)))
        add_interface(root, "lo", 1, type="772")
        add_interface(root, "eth0", 2, lower_none="", below=f"pci0000:3a/{CARD}")
        (root / f"sys/devices/pci0000:3a/{CARD}/net/eth0/device").symlink_to("../..")
        (root / "sys/bus/pci").mkdir(parents=True)
        (root / f"sys/devices/pci0000:3a/{CARD}/subsystem").symlink_to("../../../bus/pci")
        add_interface(root, "veth-a", 3, iflink="9")
        add_interface(root, "veth-node", 4, iflink="9")
        add_interface(root, "br0.5", 5, uevent="DEVTYPE=vlan\nINTERFACE=br0.5")
        add_interface(root, "bond0", 6, uevent="DEVTYPE=bond", **{"lower_eth0/ifindex": "2"})
        add_interface(root, "tap0", 7, tun_flags="0x1802")
        folder = add_interface(root, "en3f0", 8, below=f"pci0000:3a/{CARD}/mlx5_core.sf.2")
        (folder / "device").symlink_to("../..")
        (root / "sys/bus/auxiliary/drivers/mlx5_core.sf").mkdir(parents=True)
        (folder.parent.parent / "subsystem").symlink_to("../../../../bus/auxiliary")
        (folder.parent.parent / "driver").symlink_to("../../../../bus/auxiliary/drivers/mlx5_core.sf")
        (root / "sys/class/net/bonding_masters").write_text("bond0", encoding="utf-8")
        (root / "proc/1/net").mkdir(parents=True)
        (root / "proc/1/net/route").write_text(ROUTES, encoding="utf-8")

    def driver(self, *rules: InterfaceRule) -> LinuxNetdevDriver:
        """Make the driver for these rules."""
        return LinuxNetdevDriver(InterfaceSettings(offer=rules))

    def names(self, *rules: InterfaceRule) -> tuple[str, ...]:
        """Name the interfaces that these rules offer."""
        return tuple(
            str(device.attributes["interface"]) for device in self.driver(*rules).discover(self.tree, MACHINE).devices
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The tree."""
    return Node(tmp_path)


def test_discover_offers_nothing_when_the_operator_lists_nothing(node: Node) -> None:
    """The node's own bridges and its pods' veths look like any other interface, so none is offered
    unasked.
    """
    driver = LinuxNetdevDriver()

    assert (driver.discover(node.tree, MACHINE).devices, driver.discover(node.tree, MACHINE).warnings) == ((), ())


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        pytest.param([InterfaceRule(name="veth-a")], ("veth-a",), id="by name"),
        pytest.param([InterfaceRule(kind="vlan"), InterfaceRule(kind="tap")], ("br0.5", "tap0"), id="by kind"),
        pytest.param(
            [InterfaceRule(name="veth-*", kind="veth")], ("veth-a",), id="a pattern leaves out what the node uses"
        ),
        pytest.param([InterfaceRule(name="veth-node")], ("veth-node",), id="an exact name takes what the node uses"),
        pytest.param([InterfaceRule(kind="scalable-function")], ("en3f0",), id="a scalable function"),
        pytest.param(
            [InterfaceRule(name="bond0"), InterfaceRule(name="lo"), InterfaceRule(name="eth0")], (), id="never these"
        ),
    ],
)
def test_discover_offers_what_the_rules_name_when_the_node_does_not_need_it(
    node: Node, rules: list[InterfaceRule], names: tuple[str, ...]
) -> None:
    """A rule offers by name and kind.

    Never the loopback, the way to the default route, or a PCI function's interface.
    """
    assert node.names(*rules) == names


def test_discover_says_why_when_a_named_interface_is_left_out(node: Node) -> None:
    """An operator who listed an interface and does not find it reads
    the reason in the inventory.
    """
    driver = node.driver(InterfaceRule(name="bond0"), InterfaceRule(name="eth0"), InterfaceRule(name="veth-*"))

    assert driver.discover(node.tree, MACHINE).warnings == (
        "bond0 is not offered: the default route of this node goes over it",
        f"eth0 is not offered: it belongs to PCI function {CARD}, which plugin pci-netdev offers",
        "veth-node is not offered: the node has an address or a route over it, and no rule names it exactly",
    )


def test_discover_leaves_an_interface_out_when_it_has_a_global_ipv6_address(node: Node) -> None:
    """An address of the link's own reach says nothing; a global one is the node's."""
    lines = "fe80000000000000000000000000000a 03 40 20 80 veth-a\nfd000000000000000000000000000002 07 40 00 82 tap0\n"
    (node.root / "proc/1/net/if_inet6").write_text(lines, encoding="utf-8")

    assert node.names(InterfaceRule(name="veth-a*"), InterfaceRule(name="tap*")) == ("veth-a",)


def test_discover_describes_an_interface_by_what_it_is(node: Node) -> None:
    """Claims select by these; without hardware there is no NUMA node, and so no opinion."""
    (veth,) = node.driver(InterfaceRule(name="veth-a")).discover(node.tree, MACHINE).devices

    assert (veth.name, veth.device_class, veth.driver, veth.numa_nodes, veth.pci) == (
        "nic-veth-a",
        "nic",
        "linux-netdev",
        None,
        None,
    )
    assert veth.attributes == {
        "interface": "veth-a",
        "kind": "veth",
        "mac": "02:00:00:00:00:03",
        "mtu": 1500,
        "linkSpeed": 10000,
    }


def test_discover_places_a_scalable_function_where_its_card_is(node: Node) -> None:
    """It is a part of a PCI function, and as near to the CPUs."""
    (part,) = node.driver(InterfaceRule(name="en3f0")).discover(node.tree, MACHINE).devices

    assert (part.numa_nodes, part.pcie_root, part.parent) == (NodeSet(1), "pci0000:3a", "nic-0000-3b-00-0")
    assert part.attributes["kernelDriver"] == "mlx5_core.sf"


def test_interface_rule_is_refused_when_it_offers_everything() -> None:
    """A node's own network must not be given away by an empty rule."""
    with pytest.raises(ValueError, match="wanted a name or a kind"):
        InterfaceRule(name="**")


@pytest.mark.parametrize(
    ("file", "text", "reasons"),
    [
        pytest.param("carrier", "1", [], id="healthy"),
        pytest.param("carrier", "0", [(HealthState.UNHEALTHY, "carrier-lost")], id="its other end is down"),
        pytest.param("carrier", "", [], id="switched off"),
        pytest.param("carrier", "banana", [(HealthState.UNKNOWN, "tree-unreadable")], id="nonsense"),
    ],
)
def test_observe_judges_the_link(node: Node, file: str, text: str, reasons: list[tuple[HealthState, str]]) -> None:
    """The rules are those of a PCI card's link."""
    driver = node.driver(InterfaceRule(name="veth-a"))
    devices = driver.discover(node.tree, MACHINE).devices
    (node.root / "sys/class/net/veth-a" / file).write_text(text, encoding="utf-8")

    seen = driver.observe(node.tree, devices)["nic-veth-a"]

    assert [(observation.state, observation.reason) for observation in seen] == reasons


def test_observe_is_unhealthy_when_the_interface_is_gone(node: Node) -> None:
    """One that was deleted, or moved by somebody else, is no use to a pod."""
    driver = node.driver(InterfaceRule(name="veth-a"))
    devices = driver.discover(node.tree, MACHINE).devices
    remove_interface(node.root, "veth-a")

    assert [observation.reason for observation in driver.observe(node.tree, devices)["nic-veth-a"]] == ["device-gone"]


@pytest.mark.parametrize(
    ("record", "reasons"),
    [
        pytest.param(encode(RecordState(steps=(Step(name="mark", before={"state": MARKED}),))), [], id="handed over"),
        pytest.param(encode(RecordState()), ["device-gone"], id="nothing was begun"),
        pytest.param(b"{", ["device-gone"], id="a record that is cut off"),
    ],
)
def test_interface_stays_offered_when_an_oci_hook_has_put_it_into_a_container(
    node: Node, record: bytes, reasons: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gone it would be taken from the claim whose container has it. A record alone says so."""
    monkeypatch.setattr("topobus.nic.plugins.linux_netdev.handed_over", partial(handed_over, tmp_path))
    (tmp_path / "trainer@veth-a.json").write_bytes(record)
    rules = InterfaceSettings(offer=(InterfaceRule(name="veth-*", kind="veth"),))
    driver = LinuxNetdevDriver()
    driver.configure(NicServices(interfaces=rules, hands=InterfaceHands()))
    before = driver.discover(node.tree, MACHINE).devices
    remove_interface(node.root, "veth-a")

    after = driver.discover(node.tree, MACHINE).devices
    seen = driver.observe(node.tree, before)["nic-veth-a"]

    assert [device.name for device in after] == ([] if reasons else ["nic-veth-a"])
    assert [observation.reason for observation in seen] == reasons


def test_prepare_tells_the_interface_when_it_is_there_or_in_this_owners_pod(node: Node) -> None:
    """Kubelet asks again for pods that run: the interface is then in the pod, and the answer the
    same.
    """
    driver = node.driver(InterfaceRule(name="veth-a"))
    devices = driver.discover(node.tree, MACHINE).devices
    context = PrepareContext(owner=CONTEXT.owner, attached=frozenset({"nic-veth-a"}))

    before = driver.prepare(node.tree, devices, CONTEXT)
    remove_interface(node.root, "veth-a")

    assert before == {"nic-veth-a": ContainerEdits(env={"TOPOBUS_NIC_VETH_A": "veth-a"})}
    assert driver.prepare(node.tree, devices, context) == before
    assert _codes(driver.prepare(node.tree, devices, CONTEXT)) == ["device-gone"]


def test_discover_gives_two_devices_two_names_when_their_labels_would_be_one(node: Node) -> None:
    """Dots and capitals are no part of a DNS label.

    What tells two interfaces apart is kept in a digest.
    """
    add_interface(node.root, "br0-5", 20)

    devices: list[Device] = list(node.driver(InterfaceRule(name="br0?5")).discover(node.tree, MACHINE).devices)

    assert [device.name for device in devices] == ["nic-br0-5", "nic-br0-5-cf44cf"]


def test_discover_offers_shares_of_an_interface_that_the_operator_shares(node: Node) -> None:
    """It stays on the host, so it may be a PCI function's and below the default route.

    Each claim takes one of its shares.
    """
    card, bond, veth = (
        SharedInterface(name="eth0"),
        SharedInterface(name="bond0", mode="ipvlan", submode="l3"),
        SharedInterface(name="veth-a", shares=3),
    )
    driver = LinuxNetdevDriver(InterfaceSettings(share=(card, bond, veth), offer=(InterfaceRule(name="veth-*"),)))

    devices = {device.name: device for device in driver.discover(node.tree, MACHINE).devices}

    assert {name: (device.allows_multiple, device.capacity) for name, device in devices.items()} == {
        "nic-bond0": (True, {"shares": 16}),
        "nic-eth0": (True, {"shares": 16}),
        "nic-veth-a": (True, {"shares": 3}),
    }
    assert {fault_of_shares(device) for device in devices.values()} == {""}
    assert (devices["nic-eth0"].pci, devices["nic-eth0"].numa_nodes, devices["nic-eth0"].pcie_root) == (
        CARD,
        NodeSet(1),
        "pci0000:3a",
    )
    assert [devices["nic-bond0"].attributes[key] for key in ("shareMode", "shareSubmode")] == ["ipvlan", "l3"]


def test_discover_says_so_when_an_interface_to_share_is_not_there(node: Node) -> None:
    """A misspelt name must not look like a node without NICs."""
    driver = LinuxNetdevDriver(InterfaceSettings(share=(SharedInterface(name="eth9"),)))

    assert (driver.discover(node.tree, MACHINE).devices, driver.discover(node.tree, MACHINE).warnings) == (
        (),
        ("eth9 is not shared: the node has no such interface",),
    )


def test_shared_interface_is_called_as_its_card_is(node: Node) -> None:
    """In the listing stands what the card is, not that it is one.

    An interface without hardware is called by its kind.
    """
    driver = LinuxNetdevDriver(
        InterfaceSettings(offer=(InterfaceRule(name="veth-a"),), share=(SharedInterface(name="eth0"),))
    )
    unnamed = structs.replace(
        MACHINE, pci_devices=tuple(structs.replace(function, device=0xFFFF) for function in MACHINE.pci_devices)
    )

    shown = [
        [(device.vendor, device.model) for device in driver.discover(node.tree, machine).devices]
        for machine in (MACHINE, unnamed)
    ]

    assert shown == [[("Mellanox", "ConnectX-7"), ("", "veth")], [("Mellanox", ""), ("", "veth")]]


def test_discover_of_cards_leaves_out_the_one_that_pods_share(node: Node) -> None:
    """A card is shared or given away as a whole, never both."""
    (node.root / "sys/bus/pci/devices").mkdir()
    (node.root / f"sys/bus/pci/devices/{CARD}").symlink_to(f"../../../devices/pci0000:3a/{CARD}")
    driver = PciNetdevDriver()
    whole = driver.discover(node.tree, MACHINE).devices
    driver.configure(NicServices(interfaces=InterfaceSettings(share=(SharedInterface(name="eth0"),))))

    assert [device.name for device in whole] == []
    assert (driver.discover(node.tree, MACHINE).devices, driver.discover(node.tree, MACHINE).warnings) == (
        (),
        (f"{CARD} is not offered as a whole: pods share its interface eth0",),
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "eth*"}, "the name of one interface"),
        ({"name": "lo"}, "not lo"),
        ({"name": "eth1", "submode": "l3"}, "wanted for macvlan one of"),
        ({"name": "eth1", "submode": "passthru"}, "wanted 1"),
    ],
    ids=["pattern", "loopback", "submode of the other", "passthru for several"],
)
def test_shared_interface_is_refused_when_it_cannot_be(fields: dict[str, Any], words: str) -> None:
    """A setting that no kernel would take ends the service at its start, with the key."""
    with pytest.raises(ValueError, match=words):
        SharedInterface(**fields)


def _codes(answer: object) -> list[str]:
    assert isinstance(answer, Refusal)
    return [reason.code for reason in answer.reasons]


@pytest.mark.parametrize(("name", "is_offered"), [("veth-*", False), ("veth-a", True)])
def test_discover_leaves_a_port_of_a_bridge_out_unless_it_is_named(name: str, is_offered: bool, node: Node) -> None:
    """The node's ends of other pods' interfaces are veths at their network's bridge.

    A wide pattern must not hand them out.
    """
    add_interface(node.root, "cni0", 30, uevent="DEVTYPE=bridge")
    (node.root / "sys/class/net/veth-a/master").symlink_to("../cni0")
    driver = LinuxNetdevDriver(InterfaceSettings(offer=(InterfaceRule(name=name),)))

    devices = driver.discover(node.tree, MACHINE).devices

    assert ("veth-a" in {device.attributes["interface"] for device in devices}) is is_offered
    assert (
        "veth-a is not offered: it is a port of cni0, and no rule names it exactly"
        in driver.discover(node.tree, MACHINE).warnings
    ) is not is_offered


class _Hands(InterfaceHands):
    """Hands that would take everything."""

    def check(self, *_: object, **__: object) -> Refusal | None:
        """Find nothing wrong."""
        return None

    def attach(self, *_: object, **__: object) -> AttachedInterface | Refusal:
        """Say that it was taken."""
        return AttachedInterface(name="taken")


def _with_card(node: Node) -> Node:
    """Put the card of `eth0` onto its bus."""
    (node.root / "sys/bus/pci/devices").mkdir()
    (node.root / f"sys/bus/pci/devices/{CARD}").symlink_to(f"../../../devices/pci0000:3a/{CARD}")
    return node


def _ask(driver: LinuxNetdevDriver | PciNetdevDriver, tree: Tree, device: Device) -> list[list[str]]:
    """Prepare and attach; the codes of each refusal, none where it was taken."""
    driver.configure(NicServices(interfaces=InterfaceSettings(), hands=_Hands()))
    sandbox = Sandbox(id="s", uid="p", namespace="a", name="b", network_namespace="/run/netns/none")
    answers = (driver.check(tree, [device], CONTEXT), driver.attach(tree, device, CONTEXT, sandbox, DeviceRecord()))
    return [[reason.code for reason in answer.reasons] if isinstance(answer, Refusal) else [] for answer in answers]


def test_interface_stays_when_the_default_route_came_to_it_after_it_was_offered(tmp_path: Path) -> None:
    """At boot the service may look before DHCP has answered.

    The pod that came first must not take the node's network.
    """
    node = _with_card(Node(tmp_path))
    route = node.root / "proc/1/net/route"
    late = route.read_text()
    route.write_text(late.replace("bond0", "tap0"))
    driver, cards = LinuxNetdevDriver(InterfaceSettings(offer=(InterfaceRule(name="bond0"),))), PciNetdevDriver()
    (bond,) = driver.discover(node.tree, MACHINE).devices
    (card,) = cards.discover(node.tree, MACHINE).devices
    before = [_ask(driver, node.tree, bond), _ask(cards, node.tree, card)]

    route.write_text(late)

    assert before == [[[], []], [[], []]]
    assert [_ask(driver, node.tree, bond), _ask(cards, node.tree, card)] == [[["interface-of-node"]] * 2] * 2


def test_interface_stays_when_its_name_is_another_ones_by_now(tmp_path: Path) -> None:
    """A card's interface was renamed and its old name given to another: the pod gets neither, until
    the inventory tells which is which.
    """
    node = _with_card(Node(tmp_path))
    (node.root / "proc/1/net/route").write_text("")
    driver, cards = LinuxNetdevDriver(InterfaceSettings(offer=(InterfaceRule(name="veth-a"),))), PciNetdevDriver()
    (veth,) = driver.discover(node.tree, MACHINE).devices
    (card,) = cards.discover(node.tree, MACHINE).devices

    functions = node.root / f"sys/devices/pci0000:3a/{CARD}/net"
    (functions / "eth0").rename(functions / "eth9")
    (node.root / "sys/devices/virtual/net/veth-a/uevent").write_text("DEVTYPE=bridge")

    assert [_ask(driver, node.tree, veth), _ask(cards, node.tree, card)] == [[["interface-changed"]] * 2] * 2
