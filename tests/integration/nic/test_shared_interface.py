"""Pods share a real interface by macvlan children: each has a network of its own, none of them
outlives its claim, and the parent stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from support.nic_rig import FAR, NicRig, interface_config, nic_rig, ping, state_of
from support.real_interfaces import ip, lines, network_namespace, why_not_here
from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.devicekit.driver import PrepareContext
from topobus.nic.config import InterfaceSettings, SharedInterface
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.values.device import Device
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import AttachedInterface, Sandbox

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())]


class Shared:
    """A shared interface and some pods."""

    def __init__(self, rig: NicRig, stack: ExitStack) -> None:
        self.rig = rig
        self.pods = [stack.enter_context(network_namespace()) for _ in range(3)]
        self.driver: LinuxNetdevDriver = rig.driver(
            InterfaceSettings(share=(SharedInterface(name=rig.name, shares=3),))
        )
        (self.device,) = self.driver.discover(rig.tree, Machine(node="n", numa_nodes=(), cpus=())).devices
        self.records = [DeviceRecord(RecordState(owner=self.owner(number))) for number in range(3)]

    def owner(self, number: int) -> Owner:
        """The claim of a pod."""
        return Owner(kind=OwnerKind.CLAIM, name=f"net-{number}", uid=f"claim-{number}")

    def sandbox(self, number: int) -> Sandbox:
        """The sandbox of a pod."""
        return Sandbox(
            id=f"sb-{number}",
            uid=f"pod-{number}",
            namespace="apps",
            name=f"pod-{number}",
            network_namespace=f"/run/netns/{self.pods[number]}",
        )

    def attach(self, number: int, **config: object) -> object:
        """Give a pod its share."""
        fields = config or {"interface": {"name": "net1", "addresses": [f"10.213.7.{10 + number}/24"]}}
        context = PrepareContext(owner=self.owner(number), config=(interface_config(**fields),))
        refusal = self.driver.check(self.rig.tree, [self.device], context)
        return refusal or self.driver.attach(
            self.rig.tree, self.device, context, self.sandbox(number), self.records[number]
        )

    def detach(self, number: int) -> None:
        """Take it back."""
        self.driver.detach(self.rig.tree, self.device, self.sandbox(number), self.records[number])


@pytest.fixture
def shared() -> Iterator[Shared]:
    """Three pods, one interface for all of them."""
    with ExitStack() as stack:
        yield Shared(stack.enter_context(nic_rig()), stack)


def test_pods_have_a_network_each_and_the_parent_stays_as_it_is(shared: Shared) -> None:
    """Each child has a MAC of its own and reaches the network; when a pod leaves, the others go on.

    In the end nothing is left.
    """
    before = state_of(shared.rig.name)

    attached = [shared.attach(number) for number in range(3)]
    answers = [ping(pod, FAR) for pod in shared.pods]
    shared.detach(1)
    others = [ping(shared.pods[number], FAR) for number in (0, 2)]
    gone = [link["ifname"] for link in lines("-n", shared.pods[1], "link", "show")]
    shared.detach(0)
    shared.detach(2)

    assert [part.addresses for part in attached if isinstance(part, AttachedInterface)] == [
        ("10.213.7.10/24",),
        ("10.213.7.11/24",),
        ("10.213.7.12/24",),
    ]
    assert len({part.mac for part in attached if isinstance(part, AttachedInterface)}) == 3
    assert (answers, others, gone) == ([True] * 3, [True] * 2, ["lo"])
    assert state_of(shared.rig.name) == before
    assert [record.steps for record in shared.records] == [(), (), ()]


def test_the_parent_s_link_is_the_link_of_all(shared: Shared) -> None:
    """When the parent loses its carrier, the device is Unhealthy: whoever has a share of it is
    told, for it is one device in the ledger.
    """
    shared.attach(0)
    shared.attach(1)
    healthy = shared.driver.observe(shared.rig.tree, [shared.device])
    ip("-n", shared.rig.far, "link", "set", "peer", "down")
    lost = shared.driver.observe(shared.rig.tree, [shared.device])
    shared.detach(0)
    shared.detach(1)

    assert healthy == {shared.device.name: []}
    assert [part.reason for part in lost[shared.device.name]] == ["carrier-lost"]


def test_a_share_ends_with_its_pod_s_namespace(shared: Shared) -> None:
    """The kernel deletes the child.

    Taking it back is then no error, and leaves nothing in the record.
    """
    shared.attach(0)
    ip("netns", "del", shared.pods[0])

    shared.detach(0)

    assert shared.records[0].steps == ()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        pytest.param({"share": {"mode": "ipvlan"}}, "share.mode", id="another mode than the operator's"),
        pytest.param({"vf": {"vlan": 5}}, "vf", id="a virtual function's settings"),
        pytest.param({"rdma": {"mode": "exclusive"}}, "rdma.mode", id="an RDMA device that others use"),
        pytest.param({"interface": {"mtu": 9000}}, "interface.mtu", id="a larger MTU than the parent's"),
    ],
)
def test_a_share_is_refused_when_it_would_reach_beyond_itself(
    shared: Shared, config: dict[str, object], field: str
) -> None:
    """What the operator has set for all is not changed by one.

    The field is named, and nothing was made.
    """
    answer = shared.attach(0, **config)

    assert isinstance(answer, Refusal)
    assert [reason.facts.get("field") for reason in answer.reasons] == [field]
    assert shared.records[0].steps == ()
    assert [
        link["ifname"] for link in lines("-d", "link", "show", "type", "macvlan") if link.get("link") == shared.rig.name
    ] == []


def test_device_is_the_same_with_and_without_sharers(shared: Shared) -> None:
    """The slice does not change when a pod comes."""
    shared.attach(0)
    (device,) = shared.driver.discover(shared.rig.tree, Machine(node="n", numa_nodes=(), cpus=())).devices
    shared.detach(0)

    assert _without_speed(device) == _without_speed(shared.device)


def _without_speed(device: Device) -> Device:
    return msgspec.structs.replace(
        device, attributes={key: value for key, value in device.attributes.items() if key != "linkSpeed"}
    )
