"""Interfaces that no PCI function has: a VLAN goes into a pod and comes back, pods share a bond,
and what the kernel binds to its namespace is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vm.kernel import interfaces, links, sh, state
from vm.node import Node

_ADDRESSED = {
    "apiVersion": "nic.topobus.dev/v1",
    "kind": "Interface",
    "interface": {"name": "net1", "addresses": ["10.40.0.5/24"]},
}


@pytest.fixture(scope="module", autouse=True)
def made() -> Iterator[None]:
    """Make a VLAN on the card that stays, and two bonds of dummies: one is offered, the other
    shared.
    """
    sh(
        "ip link add link ens33 name tenant-vlan type vlan id 40; ip link set tenant-vlan mtu 1400 up; ip "
        "addr add 10.41.0.1/24 dev tenant-vlan"
    )
    for bond in ("tenant-bond", "shared-bond"):
        sh(
            f"ip link add {bond} type bond mode active-backup; ip link add {bond}-1 type dummy; ip link set "
            f"{bond}-1 master {bond}"
        )
        sh(f"ip link set {bond} up; ip link set {bond}-1 up")
    yield
    sh("for name in tenant-vlan tenant-bond shared-bond tenant-bond-1 shared-bond-1; do ip link del $name; done")


async def test_vlan_goes_into_a_pod_and_comes_back(nic: Node, pod: str) -> None:
    """It stays the card's: the pod has its number, and the host gets address, MTU and name back."""
    await nic.device("nic-tenant-vlan")
    before = state("tenant-vlan")
    await nic.do("prepare", "nic-tenant-vlan", _ADDRESSED)
    await nic.do("attach", "nic-tenant-vlan", _ADDRESSED)
    (link,) = links(f"-n {pod} addr show dev net1")
    assert (link["linkinfo"]["info_kind"], link["linkinfo"]["info_data"]["id"], link["mtu"]) == ("vlan", 40, 1400)
    assert "10.40.0.5" in {address["local"] for address in link["addr_info"]}
    assert "tenant-vlan" not in interfaces()
    await nic.do("detach", "nic-tenant-vlan")
    await nic.do("unprepare", "nic-tenant-vlan")
    assert state("tenant-vlan") == before


async def test_pods_share_a_bond(nic: Node, pod: str) -> None:
    """Each has an ipvlan child with the bond's hardware address; the bond stays as it is."""
    await nic.device("nic-shared-bond")
    before = state("shared-bond")
    await nic.do("prepare", "nic-shared-bond", _ADDRESSED)
    await nic.do("attach", "nic-shared-bond", _ADDRESSED)
    (child,), (bond,) = links(f"-n {pod} link show dev net1"), links("link show dev shared-bond")
    assert (child["linkinfo"]["info_kind"], child["address"]) == ("ipvlan", bond["address"])
    await nic.do("detach", "nic-shared-bond")
    await nic.do("unprepare", "nic-shared-bond")
    assert interfaces(pod) == set()
    assert state("shared-bond") == before


async def test_bond_as_a_whole_stays_in_its_namespace(nic: Node, pod: str) -> None:
    """The kernel moves no bond: the claim is refused before anything is done, and the refusal names
    the alternative.
    """
    assert "failed" in sh("ip link set tenant-bond netns pod || echo failed")
    await nic.device("nic-tenant-bond")
    before = state("tenant-bond")
    refusal = await nic.refused("prepare", "nic-tenant-bond")
    assert "interfaces.share" in refusal.reasons[0].message
    await nic.do("unprepare", "nic-tenant-bond")
    assert state("tenant-bond") == before
