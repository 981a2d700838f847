"""A configuration against a device: what this interface cannot do is refused before anything is
changed.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from topobus.nic.interfaces.rules.interface_checks import addresses_in_pod, check_interface_config, name_in_pod
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig
from topobus.nic.interfaces.rules.interface_reading import read_interface_config
from topobus.nic.interfaces.rules.interface_state import (
    HeldAddress,
    HeldRoute,
    InterfaceState,
    state_from_journal,
    state_to_journal,
)

STATE = InterfaceState(
    name="eth1",
    index=7,
    mac="02:00:00:00:00:07",
    mtu=1500,
    least_mtu=68,
    largest_mtu=9000,
    addresses=(
        HeldAddress(address="10.0.0.7/24"),
        HeldAddress(address="fe80::7/64"),
        HeldAddress(address="fd00::7/64"),
    ),
)


def configured(**fields: Any) -> InterfaceConfig:
    """A configuration that is right by itself."""
    config = read_interface_config([{"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", **fields}])
    assert isinstance(config, InterfaceConfig), config
    return config


ROUTE = {"destination": "10.9.0.0/16", "gateway": "10.0.0.1"}
OUT_OF_REACH = {"interface": {"addresses": ["10.1.0.7/24"]}, "routes": [ROUTE]}
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("an MTU above the device's", {"interface": {"mtu": 9001}}, "interface.mtu"),
    ("an MTU above the parent's", {"interface": {"mtu": 1501}, "share": {"mode": "macvlan"}}, "interface.mtu"),
    ("an MTU too small for IPv6", {"interface": {"mtu": 1279}}, "interface.mtu"),
    ("a virtual function's settings", {"vf": {"vlan": 5}}, "vf"),
    ("a gateway out of reach", OUT_OF_REACH, "routes[0].gateway"),
    ("a gateway that is itself", {"routes": [{**ROUTE, "gateway": "10.0.0.7"}]}, "routes[0].gateway"),
    ("a gateway without any address", {"interface": {"addresses": []}, "routes": [ROUTE]}, "routes[0].gateway"),
    ("a source that is not there", {"routes": [{**ROUTE, "source": "10.0.0.8"}]}, "routes[0].source"),
    ("routes of an interface that is off", {"interface": {"up": False}, "routes": [ROUTE]}, "interface.up"),
    (
        "IPv6 off with its address",
        {"sysctls": {"net.ipv6.conf.IFNAME.disable_ipv6": 1}},
        "sysctls[net.ipv6.conf.IFNAME.disable_ipv6]",
    ),
]


@pytest.mark.parametrize("kind", ["bridge", "bond", "vrf"])
def test_check_refuses_what_the_kernel_never_moves(kind: str) -> None:
    """At prepare: at attach the kernel would say so too late, with the bridge off and its ports
    without each other.

    A child of it is fine.
    """
    state = replace(STATE, name="br0", kind=kind)

    refusal = check_interface_config(configured(), state)

    assert refusal is not None
    assert [reason.facts["field"] for reason in refusal.reasons] == ["mode"]
    assert state.name in refusal.reasons[0].message
    assert check_interface_config(configured(share={"mode": "macvlan"}), state) is None


@pytest.mark.parametrize(("fields", "field"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_check_refuses_the_field_when_the_device_cannot_have_it(fields: dict[str, Any], field: str) -> None:
    """The field, once, and what the device takes."""
    refusal = check_interface_config(configured(**fields), STATE)

    assert refusal is not None
    assert [reason.facts["field"] for reason in refusal.reasons] == [field]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"interface": {"mtu": 9000}},
        {"routes": [ROUTE]},
        {**OUT_OF_REACH, "routes": [{**ROUTE, "onlink": True}]},
        {**OUT_OF_REACH, "routes": [{"destination": "10.0.0.1/32"}, ROUTE]},
        {**OUT_OF_REACH, "interface": {}, "routes": [], "cni": {}},
        {"interface": {"addresses": []}, "routes": [{"destination": "::/0", "gateway": "fe80::1"}]},
    ],
    ids=[
        "nothing",
        "largest MTU",
        "gateway beside us",
        "on link",
        "by a route before it",
        "a chain brings the network",
        "link-local gateway",
    ],
)
def test_check_lets_a_configuration_pass_when_the_device_can_have_it(fields: dict[str, Any]) -> None:
    """No refusal of what works."""
    refusal = check_interface_config(configured(**fields), STATE)

    assert refusal is None


def test_check_lets_settings_of_a_function_pass_when_there_is_a_physical_one() -> None:
    """A virtual function has somebody who configures it."""
    refusal = check_interface_config(configured(vf={"vlan": 5}), STATE, is_virtual_function=True)

    assert refusal is None


@pytest.mark.parametrize(
    ("fields", "addresses"),
    [
        ({}, ("10.0.0.7/24", "fd00::7/64")),
        ({"interface": {"addresses": []}}, ()),
        ({"interface": {"addresses": ["10.5.0.1/24"]}}, ("10.5.0.1/24",)),
        ({"cni": {}}, ()),
        ({"share": {"mode": "macvlan"}}, ()),
    ],
)
def test_addresses_in_pod_are_the_hosts_when_none_are_written(
    fields: dict[str, Any], addresses: tuple[str, ...]
) -> None:
    """What the administrator gave the card goes along, but for link-local ones, which the kernel
    makes anew, and where others bring theirs.
    """
    assert addresses_in_pod(configured(**fields), STATE) == addresses


def test_name_in_pod_is_the_hosts_when_none_is_written() -> None:
    """A claim that renames nothing keeps the host's name."""
    assert (name_in_pod(configured(), STATE), name_in_pod(configured(interface={"name": "net1"}), STATE)) == (
        "eth1",
        "net1",
    )


def test_state_comes_back_equal_when_a_journal_kept_it() -> None:
    """What is put back is what was there."""
    state = InterfaceState(
        name="eth1",
        index=7,
        mac="02:00:00:00:00:07",
        mtu=1500,
        is_up=True,
        addresses=(HeldAddress(address="10.0.0.7/24", broadcast="10.0.0.255", valid_s=60),),
        routes=(HeldRoute(destination="0.0.0.0/0", gateway="10.0.0.1", metric=7),),
        sysctls={"net.ipv4.conf.IFNAME.rp_filter": 2},
    )

    assert state_from_journal(state_to_journal(state)) == state
