"""Interfaces of real cards go into a pod of a real kubelet and containerd, on cgroup v2, by the
gateway's connection with the runtime (NRI), and come back as they were, by the kernel's word.
"""

from __future__ import annotations

from typing import Any

import pytest

from vm.kernel import interfaces, links, sh, state
from vm.kubelet import CLAIM, DEVICES, GATEWAY, PODS, TEMPLATES, Kubelet, cpus_of, network_of, pod, until
from vm.node import Node

pytestmark = pytest.mark.timeout(1800)
_WANTED = {
    "function": {"name": "net1", "mtu": 1400, "addresses": ["10.1.1.5/24"]},
    "plain": {"name": "net2", "mtu": 1400, "mac": "52:54:00:77:00:01", "addresses": ["10.2.2.5/24"]},
}


def _host_name(card: str) -> str:
    """Name the interface of a card on the host."""
    *_, domain, bus, slot, function = DEVICES[card].split("-")
    return sh(f"ls /sys/bus/pci/devices/{domain}:{bus}:{slot}.{function}/net").strip()


def _states() -> dict[str, Any]:
    """What the kernel has of each interface; a function gets another address by chance with each
    reset.
    """
    names = {card: _host_name(card) for card in _WANTED}
    return {name: state(name, with_addresses=card == "plain") for card, name in names.items()}


async def _template(cluster: Kubelet) -> None:
    """Ask for a virtual function and a card by one claim, each with settings of its own."""
    asked = [
        {
            "name": card,
            "exactly": {
                "deviceClassName": "nic.topobus.dev",
                "selectors": [
                    {"cel": {"expression": f'device.attributes["resource.kubernetes.io"].pciBusID == "{pci}"'}}
                ],
            },
        }
        for card, pci in (("function", "0000:21:10.0"), ("plain", "0000:22:00.0"))
    ]
    configs = [
        {
            "requests": [card],
            "opaque": {
                "driver": "topobus.dev",
                "parameters": {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", "interface": wanted},
            },
        }
        for card, wanted in _WANTED.items()
    ]
    body = {"metadata": {"name": "cards"}, "spec": {"spec": {"devices": {"requests": asked, "config": configs}}}}
    await cluster.make(TEMPLATES, body)


@pytest.mark.parametrize("is_killed", [False, True], ids=["gateway-stays", "gateway-is-killed-and-the-pod-ends"])
async def test_interfaces_are_the_pods_and_come_back_as_they_were(
    node: Node, cards: Kubelet, *, is_killed: bool
) -> None:
    """A virtual function and a whole card have name, MTU, MAC and address as asked for, in the
    pod's network namespace alone, and reach the host.

    They come back also where the gateway is killed and the pod's containers end without it.
    """
    await _template(cards)
    before, of_host = _states(), interfaces()
    handed = {_host_name(card) for card in _WANTED}
    await cards.run(pod("network", template="cards", on_host=False, main=CLAIM))
    container = (await cards.containers())["network/main"]
    network = network_of(container)
    inside = {name: links(f"-n {network} addr show dev {name}")[0] for name in interfaces(network)}
    left = interfaces()
    sh(f"ip netns exec {network} ping -c 1 -w 60 10.1.1.9")
    (claim,) = await cards.claims("network")
    if is_killed:
        node.kill("gateway")
        await cards.client.ask("DELETE", f"{PODS}/network")
        await until("the container's end", lambda: cpus_of(container) is None)
        await node.start("gateway", **GATEWAY)
    await cards.delete("network")
    await cards.client.ask("DELETE", f"{TEMPLATES}/cards")

    assert inside.keys() == {"net1", "net2"}
    assert {name: link["mtu"] for name, link in inside.items()} == {"net1": 1400, "net2": 1400}
    assert inside["net2"]["address"] == "52:54:00:77:00:01"
    assert {"10.1.1.5", "10.2.2.5"} <= {each["local"] for link in inside.values() for each in link["addr_info"]}
    assert left == of_host - handed
    reported = {
        each["networkData"]["interfaceName"]: each["networkData"]["hardwareAddress"]
        for each in claim["status"]["devices"]
    }
    assert reported == {name: link["address"] for name, link in inside.items()}
    assert _states() == before
    assert interfaces() == of_host
