"""Interfaces of real cards go into a pod as it was asked, and come back as they were."""

from __future__ import annotations

from typing import Any

import pytest

from vm.kernel import interfaces, links, sh, state, without_addresses
from vm.node import Node

_PF, _VF, _VF_NAME = "nic-0000-63-00-0", "nic-0000-21-10-2", "ens1v1"


def interface(**fields: Any) -> dict[str, Any]:
    """Configure an interface as a claim does."""
    return {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", **fields}


def answers() -> None:
    """Ping the host from the pod, once its link is up."""
    sh("ip netns exec pod ping -c 1 -w 30 10.1.1.9")


@pytest.mark.short
async def test_card_comes_back_with_all_that_it_had(nic: Node, pod: str) -> None:
    """Name, MTU, MAC, addresses of both families, routes, policy routing, a neighbour and a setting
    are the pod's while it has it.

    The host's own ones return, with the route through it.
    """
    assert "mtu 1450" in sh("ip addr show dev ens31")
    before, of_host = state("ens31"), interfaces()
    wanted = interface(
        interface={
            "name": "net1", "mtu": 9000, "mac": "52:54:00:77:00:01", "addresses": ["10.1.1.5/24", "fd00::5/64"],
            "duplicateAddressDetection": "off",
        },
        routes=[
            {"destination": "10.30.0.0/16", "gateway": "10.1.1.9"},
            {"destination": "default", "gateway": "10.1.1.9", "table": 100, "metric": 7},
        ],
        rules=[{"from": "10.1.1.5/32", "table": 100, "priority": 1000}],
        neighbours=[{"address": "10.1.1.8", "mac": "52:54:00:77:00:08"}],
        sysctls={"net.ipv4.conf.IFNAME.rp_filter": 2},
    )  # fmt: skip

    await nic.do("prepare", _PF, wanted)
    await nic.do("attach", _PF, wanted)
    assert interfaces(pod) == {"net1"}
    assert interfaces() == of_host - {"ens31"}
    (link,) = links(f"-n {pod} addr show dev net1")
    assert (link["mtu"], link["address"]) == (9000, "52:54:00:77:00:01")
    assert {address["local"] for address in link["addr_info"]} >= {"10.1.1.5", "fd00::5"}
    assert not [each for each in link["addr_info"] if each["local"] == "fd00::5" and each.get("tentative")]
    assert "10.30.0.0/16 via 10.1.1.9" in sh(f"ip -n {pod} route")
    assert "default via 10.1.1.9 dev net1 proto static metric 7" in sh(f"ip -n {pod} route show table 100")
    assert "1000:\tfrom 10.1.1.5 lookup 100" in sh(f"ip -n {pod} rule")
    assert "10.1.1.8 dev net1 lladdr 52:54:00:77:00:08 PERMANENT" in sh(f"ip -n {pod} neigh")
    assert sh(f"ip netns exec {pod} cat /proc/sys/net/ipv4/conf/net1/rp_filter").strip() == "2"
    answers()
    await nic.do("detach", _PF)
    await nic.do("unprepare", _PF)

    assert state("ens31") == before
    assert interfaces() == of_host


@pytest.mark.short
async def test_function_comes_back_though_each_reset_gives_it_another_address(nic: Node, pod: str) -> None:
    """A virtual function's permanent address is the kernel's throw of a die.

    The card's settings for all of its functions are as before.
    """
    before, card = state(_VF_NAME, with_addresses=False), state("ens1")["functions"]
    wanted = interface(
        interface={"name": "net1", "mtu": 1400, "addresses": ["10.1.1.6/24"]}, vf={"mac": "52:54:00:aa:bb:01"}
    )

    await nic.do("prepare", _VF, wanted)
    await nic.do("attach", _VF, wanted)
    (link,) = links(f"-n {pod} addr show dev net1")
    assert (link["mtu"], link["address"]) == (1400, "52:54:00:aa:bb:01")
    answers()
    await nic.do("detach", _VF)
    await nic.do("unprepare", _VF)

    assert state(_VF_NAME, with_addresses=False) == before
    assert without_addresses(state("ens1")["functions"]) == without_addresses(card)


async def test_functions_settings_are_those_asked_for_and_end_with_the_pod(nic: Node, pod: str) -> None:
    """VLAN, priority, spoof check, trust and rate, as the physical function shows them."""
    card = state("ens1")["functions"]
    wanted = interface(vf={"vlan": 100, "qos": 3, "spoofCheck": False, "trust": True, "maxTxRate": 500})

    await nic.do("prepare", _VF, wanted)
    await nic.do("attach", _VF, wanted)
    function = state("ens1")["functions"][0][1]
    assert (
        function["vlan_list"][0]["vlan"],
        function["vlan_list"][0]["qos"],
        function["spoofchk"],
        function["trust"],
        function["rate"]["max_tx"],
    ) == (
        100,
        3,
        False,
        True,
        500,
    )
    await nic.do("detach", _VF)
    await nic.do("unprepare", _VF)

    assert without_addresses(state("ens1")["functions"]) == without_addresses(card)


@pytest.mark.parametrize(
    ("field", "setting"),
    [
        pytest.param("vf.linkState", {"trust": True, "linkState": "enable"}, id="link-state"),
        pytest.param("vf.minTxRate", {"trust": True, "minTxRate": 10}, id="least-rate"),
        pytest.param("vf.vlanProtocol", {"trust": True, "vlan": 5, "vlanProtocol": "802.1ad"}, id="service-vlan"),
    ],
)
async def test_what_the_driver_does_not_know_is_refused_and_leaves_nothing(
    nic: Node, pod: str, field: str, setting: dict[str, Any]
) -> None:
    """Igb knows none of the three: the refusal names the field, what was set before it is taken
    back, and the next claim gets the function.
    """
    card = state("ens1")["functions"]
    wanted = interface(vf=setting)

    await nic.do("prepare", _VF, wanted)
    refusal = await nic.refused("attach", _VF, wanted)
    assert field in str(refusal.reasons[0].message), refusal
    await nic.do("detach", _VF)
    await nic.do("unprepare", _VF)
    assert without_addresses(state("ens1")["functions"]) == without_addresses(card)

    await nic.do("prepare", _VF, claim="next")
    await nic.do("attach", _VF, claim="next")
    assert interfaces(pod) == {_VF_NAME}
    await nic.do("detach", _VF, claim="next")
    await nic.do("unprepare", _VF, claim="next")


@pytest.mark.short
@pytest.mark.parametrize(("device", "name"), [(_PF, "ens31"), (_VF, _VF_NAME)])
async def test_service_killed_while_a_pod_has_the_interface_takes_it_back(
    nic: Node, pod: str, device: str, name: str
) -> None:
    """SIGKILL between attach and detach: the next life finds by its journal what the one before
    did.
    """
    before = state(name, with_addresses=False)
    wanted = interface(interface={"name": "net1", "mtu": 1400})
    await nic.do("prepare", device, wanted)
    await nic.do("attach", device, wanted)

    await nic.restart("nic")
    assert interfaces(pod) == {"net1"}
    await nic.do("detach", device)
    await nic.do("unprepare", device)

    assert state(name, with_addresses=False) == before


async def test_interface_whose_pod_has_gone_is_found_on_the_host(nic: Node) -> None:
    """The kernel puts a card back itself when the namespace ends, under the pod's name for it: the
    host's name, MAC and MTU return.
    """
    before = state("ens31")
    sh("ip netns add gone")
    wanted = interface(interface={"name": "net1", "mtu": 1400, "mac": "52:54:00:77:00:03"})
    await nic.do("prepare", _PF, wanted)
    await nic.do("attach", _PF, wanted, pod="gone")

    sh("ip netns del gone; until ls /sys/bus/pci/devices/0000:63:00.0/net; do sleep 0.2; done")
    await nic.do("detach", _PF, pod="gone")
    await nic.do("unprepare", _PF)

    assert state("ens31") == before


async def test_card_comes_back_under_a_spare_name_when_its_own_is_taken(nic: Node, pod: str) -> None:
    """Somebody has made an interface with the card's name meanwhile: the card is on the host all
    the same, and serves the next claim.
    """
    await nic.do("prepare", _PF)
    await nic.do("attach", _PF)
    # With the first of its interfaces the driver may come, and dummy0 with it.
    sh("ip link add ens31 type dummy")
    of_host = interfaces()
    await nic.do("detach", _PF)
    await nic.do("unprepare", _PF)
    assert interfaces(pod) == set()
    (spare,) = interfaces() - of_host
    assert "igb" in sh(f"ethtool -i {spare}")
    sh(f"ip link del ens31; ip link set {spare} down; ip link set {spare} name ens31; ip link set ens31 up")


async def test_shared_card_gives_a_child_of_its_own(nic: Node, pod: str) -> None:
    """A macvlan is made in the pod, answers, and is gone afterwards; the card stays."""
    of_host = interfaces()
    wanted = interface(interface={"name": "net1", "addresses": ["10.1.1.7/24"]})
    await nic.do("prepare", "nic-ens33", wanted)
    await nic.do("attach", "nic-ens33", wanted)
    (link,) = links(f"-n {pod} link show dev net1")
    assert link["linkinfo"]["info_kind"] == "macvlan"
    await nic.do("detach", "nic-ens33")
    await nic.do("unprepare", "nic-ens33")
    assert interfaces(pod) == set()
    assert interfaces() == of_host
