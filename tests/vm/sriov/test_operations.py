"""An operator's reset and rebind of a card and of a virtual function: the kernel has the same
interface and the same driver before and after, and nothing is done that would take either from
whoever uses it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from topobus.formats.messages.operation_messages import Operated
from topobus.values.maintenance import DeviceVerb
from topobus.values.outcome import Refusal
from vm.kernel import PCI, driver, interfaces, sh, state, without_addresses
from vm.node import Node
from vm.sriov.conftest import SETTINGS

_CARD, _CARD_AT = "nic-0000-63-00-0", "0000:63:00.0"
_FUNCTION, _FUNCTION_AT, _FUNCTION_NAME = "nic-0000-21-10-4", "0000:21:10.4", "ens1v2"


def network_sets(name: str) -> None:
    """Do what a host's network configuration does to an interface, also to one that a driver has
    made again.
    """
    sh(f"until ip link show {name}; do sleep 0.2; done; ip link set {name} mtu 1400 up")


def seen(address: str, name: str) -> tuple[str, dict[str, Any], Any]:
    """Give driver, interface, and the card's settings for its functions, as the kernel has them."""
    return driver(address), state(name, with_addresses=False), without_addresses(state("ens1")["functions"])


@pytest.mark.parametrize(
    ("device", "address", "name"),
    [(_CARD, _CARD_AT, "ens31"), (_FUNCTION, _FUNCTION_AT, _FUNCTION_NAME)],
    ids=["card", "function"],
)
async def test_interface_and_driver_are_as_before_after_a_reset_and_after_a_rebind(
    nic: Node, device: str, address: str, name: str
) -> None:
    """A reset keeps the interface with its settings. A rebind makes another one of the same name,
    which the host's network configuration sets as the first.
    """
    sh("ip link set ens1 vf 2 vlan 7")
    sh(f"ip addr flush dev {name}")
    network_sets(name)
    before, of_host = seen(address, name), interfaces()
    number = (PCI / address / "net" / name / "ifindex").read_text()

    reset = await nic.operate(DeviceVerb.RESET, device)
    after_reset, number_after_reset = seen(address, name), (PCI / address / "net" / name / "ifindex").read_text()
    rebound = await nic.operate(DeviceVerb.REBIND, device)
    network_sets(name)
    await nic.device(device)

    assert isinstance(reset, Operated), reset
    assert (after_reset, number_after_reset) == (before, number)
    assert isinstance(rebound, Operated), rebound
    assert (seen(address, name), interfaces()) == (before, of_host)
    assert (PCI / address / "net" / name / "ifindex").read_text() != number
    sh(f"ip link set ens1 vf 2 vlan 0; ip link set {_FUNCTION_NAME} mtu 1500 down; ip link set ens31 mtu 1450 up")


@pytest.mark.parametrize("verb", [DeviceVerb.RESET, DeviceVerb.REBIND])
async def test_operation_is_refused_while_a_pod_or_the_host_uses_the_interface(
    nic: Node, pod: str, verb: DeviceVerb
) -> None:
    """A pod has the function, and the host has an address on the card: both stay as they are."""
    sh("ip addr replace 10.2.2.1/24 dev ens31; ip link set ens31 up")
    await nic.do("prepare", _FUNCTION)
    await nic.do("attach", _FUNCTION)
    of_host = state("ens31")

    held, used = await nic.operate(verb, _FUNCTION), await nic.operate(verb, _CARD)

    assert isinstance(held, Refusal)
    assert held.reasons[0].code == "device-held"
    assert "claim vm/claim-1" in held.reasons[0].message
    assert isinstance(used, Refusal)
    assert used.reasons[0].code == f"{verb}-busy"
    assert "the node has an address or a route over ens31" in used.reasons[0].message
    assert interfaces(pod) == {_FUNCTION_NAME}
    assert (driver(_FUNCTION_AT), driver(_CARD_AT), state("ens31")) == ("igbvf", "igb", of_host)
    await nic.do("detach", _FUNCTION)
    await nic.do("unprepare", _FUNCTION)
    sh("ip addr flush dev ens31")


async def test_function_is_bound_again_by_the_next_life_when_the_service_is_killed_between_unbind_and_bind(
    nic: Node,
) -> None:
    """The driver's file `bind` is a pipe that no process reads, so the service waits there until it
    is killed. The kernel alone does not bind the function again.
    """
    sh(f"ip link set {_FUNCTION_NAME} down")
    before = seen(_FUNCTION_AT, _FUNCTION_NAME)
    sh("mkfifo /tmp/bind; mount --bind /tmp/bind /sys/bus/pci/drivers/igbvf/bind")
    rebind = asyncio.create_task(nic.operate(DeviceVerb.REBIND, _FUNCTION))
    await asyncio.to_thread(sh, f"while [ -e {PCI}/{_FUNCTION_AT}/driver ]; do sleep 0.2; done")
    nic.kill("nic")
    rebind.cancel()
    sh("umount /sys/bus/pci/drivers/igbvf/bind; rm /tmp/bind")
    between = driver(_FUNCTION_AT), _FUNCTION_NAME in interfaces()

    await nic.start("nic", **SETTINGS)
    await nic.device(_FUNCTION)
    sh(f"until ip link show {_FUNCTION_NAME}; do sleep 0.2; done")

    assert between == ("", False)
    assert seen(_FUNCTION_AT, _FUNCTION_NAME) == before
    await nic.do("prepare", _FUNCTION)
    await nic.do("unprepare", _FUNCTION)
