"""The configuration of an interface: every mistake is refused by the name of its field, and classes
and claims merge as the page says.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.interface_model import render_interface_config
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig, InterfaceFields, Route, VfFields
from topobus.nic.interfaces.rules.interface_fields import SYSCTLS
from topobus.nic.interfaces.rules.interface_reading import read_interface_config
from topobus.values.outcome import Refusal


def entry(**fields: Any) -> dict[str, Any]:
    """One configuration of kind Interface."""
    return {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", **fields}


def fields_refused(*entries: dict[str, Any]) -> list[object]:
    """The fields that a refusal names."""
    answer = read_interface_config(entries)
    return [reason.facts["field"] for reason in answer.reasons] if isinstance(answer, Refusal) else []


ROUTE = {"destination": "10.9.0.0/16", "gateway": "10.0.0.1"}
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("a mode that is none", {"mode": "guest"}, "config[0].mode"),
    ("settings of an interface that stays", {"mode": "host", "interface": {"mtu": 9000}}, "mode"),
    (
        "an RDMA device that leaves an interface that stays",
        {"mode": "host", "rdma": {"mode": "exclusive"}},
        "rdma.mode",
    ),
    ("an address that is none", {"interface": {"addresses": ["10.0.0.300/8"]}}, "config[0].interface.addresses[0]"),
    ("an address without its length", {"interface": {"addresses": ["10.0.0.3"]}}, "config[0].interface.addresses[0]"),
    ("a length of 33", {"interface": {"addresses": ["10.0.0.3/33"]}}, "config[0].interface.addresses[0]"),
    ("a mask for a length", {"interface": {"addresses": ["10.0.0.3/255.0.0.0"]}}, "config[0].interface.addresses[0]"),
    ("an IPv6 length of 129", {"interface": {"addresses": ["fd00::3/129"]}}, "config[0].interface.addresses[0]"),
    ("an address with a zone", {"interface": {"addresses": ["fe80::3%eth0/64"]}}, "config[0].interface.addresses[0]"),
    ("a group's address", {"interface": {"addresses": ["224.0.0.1/24"]}}, "config[0].interface.addresses[0]"),
    ("the network's own address", {"interface": {"addresses": ["10.0.0.0/24"]}}, "config[0].interface.addresses[0]"),
    ("the broadcast address", {"interface": {"addresses": ["10.0.0.255/24"]}}, "config[0].interface.addresses[0]"),
    ("the loopback address", {"interface": {"addresses": ["127.0.0.1/8"]}}, "config[0].interface.addresses[0]"),
    (
        "an address twice",
        {"interface": {"addresses": ["10.0.0.3/24", "10.0.0.3/16"]}},
        "config[0].interface.addresses[1]",
    ),
    (
        "more addresses than there can be",
        {"interface": {"addresses": ["10.0.0.3/24"] * 257}},
        "config[0].interface.addresses",
    ),
    ("a name of 16 bytes", {"interface": {"name": "n" * 16}}, "config[0].interface.name"),
    ("a name of 16 bytes in 8 letters", {"interface": {"name": "ü" * 8}}, "config[0].interface.name"),
    ("a name with a slash", {"interface": {"name": "a/b"}}, "config[0].interface.name"),
    ("a name with a blank", {"interface": {"name": "a b"}}, "config[0].interface.name"),
    ("a pattern for a name", {"interface": {"name": "eth%d"}}, "config[0].interface.name"),
    ("the loopback's name", {"interface": {"name": "lo"}}, "config[0].interface.name"),
    ("no name", {"interface": {"name": ""}}, "config[0].interface.name"),
    ("an MTU of 67", {"interface": {"mtu": 67}}, "config[0].interface.mtu"),
    ("an MTU of 65536", {"interface": {"mtu": 65536}}, "config[0].interface.mtu"),
    ("an MTU that is a text", {"interface": {"mtu": "9000"}}, "config[0].interface.mtu"),
    ("a MAC of five bytes", {"interface": {"mac": "02:00:00:00:01"}}, "config[0].interface.mac"),
    ("a group's MAC", {"interface": {"mac": "03:00:00:00:00:01"}}, "config[0].interface.mac"),
    ("a MAC of zeros", {"interface": {"mac": "00:00:00:00:00:00"}}, "config[0].interface.mac"),
    (
        "a word for detection",
        {"interface": {"duplicateAddressDetection": "never"}},
        "config[0].interface.duplicateAddressDetection",
    ),
    ("an unknown field", {"interface": {"mtuu": 9000}}, "config[0].interface.mtuu"),
    ("an unknown group", {"interfaces": {}}, "config[0].interfaces"),
    ("a list for an object", {"interface": []}, "config[0].interface"),
    ("a VLAN of 5000", {"vf": {"vlan": 5000}}, "config[0].vf.vlan"),
    ("the reserved VLAN", {"vf": {"vlan": 4095}}, "config[0].vf.vlan"),
    ("a QoS of 8", {"vf": {"vlan": 5, "qos": 8}}, "config[0].vf.qos"),
    ("a QoS without a VLAN", {"vf": {"qos": 3}}, "vf.qos"),
    ("a protocol without a VLAN", {"vf": {"vlanProtocol": "802.1ad"}}, "vf.vlanProtocol"),
    ("a protocol that is none", {"vf": {"vlan": 5, "vlanProtocol": "802.1x"}}, "config[0].vf.vlanProtocol"),
    ("a link state that is none", {"vf": {"linkState": "up"}}, "config[0].vf.linkState"),
    ("a negative rate", {"vf": {"maxTxRate": -1}}, "config[0].vf.maxTxRate"),
    ("a rate above its limit", {"vf": {"minTxRate": 200, "maxTxRate": 100}}, "vf.minTxRate"),
    ("a route to a host's bits", {"routes": [{"destination": "10.9.1.0/16"}]}, "config[0].routes[0].destination"),
    ("a route to nowhere", {"routes": [{"destination": "here"}]}, "config[0].routes[0].destination"),
    ("a default without a gateway", {"routes": [{"destination": "default"}]}, "config[0].routes[0].destination"),
    ("a gateway of the other family", {"routes": [{**ROUTE, "gateway": "fd00::1"}]}, "config[0].routes[0].gateway"),
    ("a source of the other family", {"routes": [{**ROUTE, "source": "fd00::1"}]}, "config[0].routes[0].source"),
    (
        "onlink without a gateway",
        {"routes": [{"destination": "10.9.0.0/16", "onlink": True}]},
        "config[0].routes[0].onlink",
    ),
    ("scope link with a gateway", {"routes": [{**ROUTE, "scope": "link"}]}, "config[0].routes[0].scope"),
    ("a metric that is too large", {"routes": [{**ROUTE, "metric": 2**32}]}, "config[0].routes[0].metric"),
    ("the kernel's own table", {"routes": [{**ROUTE, "table": 255}]}, "config[0].routes[0].table"),
    ("a route twice", {"routes": [ROUTE, ROUTE]}, "routes[1].destination"),
    ("more routes than there can be", {"routes": [ROUTE] * 257}, "config[0].routes"),
    ("a route without its destination", {"routes": [{"gateway": "10.0.0.1"}]}, "config[0].routes[0]"),
    ("a rule of no family", {"rules": [{"table": 100, "priority": 5}]}, "config[0].rules[0].family"),
    (
        "a rule of both",
        {"rules": [{"from": "10.0.0.0/8", "to": "fd00::/8", "table": 100, "priority": 5}]},
        "config[0].rules[0]",
    ),
    (
        "a rule before the kernel's",
        {"rules": [{"from": "10.0.0.0/8", "table": 100, "priority": 0}]},
        "config[0].rules[0].priority",
    ),
    (
        "a neighbour that is none",
        {"neighbours": [{"address": "x", "mac": "02:00:00:00:00:01"}]},
        "config[0].neighbours[0].address",
    ),
    (
        "a neighbour twice",
        {"neighbours": [{"address": "10.0.0.1", "mac": "02:00:00:00:00:01"}] * 2},
        "neighbours[1].address",
    ),
    ("a setting of the namespace", {"sysctls": {"net.ipv4.ip_forward": 1}}, "config[0].sysctls[net.ipv4.ip_forward]"),
    (
        "a setting of another interface",
        {"sysctls": {"net.ipv4.conf.eth0.rp_filter": 1}},
        "config[0].sysctls[net.ipv4.conf.eth0.rp_filter]",
    ),
    (
        "a setting's value out of range",
        {"sysctls": {"net.ipv4.conf.IFNAME.rp_filter": 3}},
        "config[0].sysctls[net.ipv4.conf.IFNAME.rp_filter]",
    ),
    ("a sharing mode that is none", {"share": {"mode": "macvtap"}}, "config[0].share.mode"),
    ("a submode of the other", {"share": {"mode": "ipvlan", "submode": "vepa"}}, "config[0].share.submode"),
    (
        "a MAC for an ipvlan child",
        {"share": {"mode": "ipvlan"}, "interface": {"mac": "02:00:00:00:00:01"}},
        "interface.mac",
    ),
    ("a shared virtual function", {"share": {"mode": "macvlan"}, "vf": {"vlan": 5}}, "share"),
    (
        "an exclusive RDMA device that is shared",
        {"share": {"mode": "macvlan"}, "rdma": {"mode": "exclusive"}},
        "rdma.mode",
    ),
    ("a VLAN that a chain would leave", {"vf": {"vlan": 5}, "cni": {}}, "vf"),
    ("an MTU beside a chain", {"interface": {"mtu": 1500}, "cni": {}}, "interface.mtu"),
    ("routes beside a chain", {"routes": [ROUTE], "cni": {}}, "routes"),
    (
        "two hardware addresses",
        {"interface": {"mac": "02:00:00:00:00:01"}, "vf": {"mac": "02:00:00:00:00:02"}},
        "interface.mac",
    ),
]


@pytest.mark.parametrize(("fields", "field"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_reading_refuses_the_field_when_it_is_wrong(fields: dict[str, Any], field: str) -> None:
    """Each mistake is refused once, by its field."""
    refused = fields_refused(entry(**fields))

    assert refused == [field]


def test_reading_names_the_nearest_field_when_a_name_is_misspelt() -> None:
    """The user reads which field was meant."""
    answer = read_interface_config([entry(interface={"adresses": []})])

    assert isinstance(answer, Refusal)
    assert 'did you mean "addresses"?' in answer.reasons[0].message


def test_reading_refuses_each_field_when_several_are_wrong() -> None:
    """Nobody mends one field to be told of the next."""
    refused = fields_refused(entry(interface={"mtu": 67, "name": "a/b"}, vf={"vlan": 5000, "qos": 8}))

    assert refused == ["config[0].interface.name", "config[0].interface.mtu", "config[0].vf.vlan", "config[0].vf.qos"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"kind": "Interface"}, "config[0].apiVersion"),
        ({"apiVersion": "nic.topobus.dev/v2", "kind": "Interface"}, "config[0].apiVersion"),
        ({"apiVersion": "nic.topobus.dev/v1", "kind": "Interfaces"}, "config[0].kind"),
        ({}, "config[0].kind"),
    ],
)
def test_reading_refuses_an_entry_when_it_is_of_another_kind_or_version(wrong: dict[str, Any], field: str) -> None:
    """What is addressed to this driver and not understood is never ignored."""
    refused = fields_refused(wrong)

    assert refused == [field]


def test_reading_leaves_an_entry_to_others_when_it_says_how_to_share() -> None:
    """SharingParameters are read by the kit."""
    answer = read_interface_config(
        [{"apiVersion": "topobus.dev/v1", "kind": "SharingParameters", "strategy": "Exclusive"}]
    )

    assert answer == InterfaceConfig()


def test_reading_makes_values_canonical_when_they_are_written_in_other_ways() -> None:
    """Equal things compare equal, and the kernel's spelling is the one that is compared with."""
    answer = read_interface_config(
        [
            entry(
                interface={"mac": "02-AB-00-00-00-01", "addresses": ["FD00:0::3/64"], "mtu": None},
                routes=[{"destination": "default", "gateway": "FD00::0:1"}],
                vf={"vlan": 5, "vlanProtocol": "802.1q"},
            )
        ]
    )

    assert answer == InterfaceConfig(
        interface=InterfaceFields(mac="02:ab:00:00:00:01", addresses=("fd00::3/64",)),
        routes=(Route(destination="::/0", gateway="fd00::1"),),
        vf=VfFields(vlan=5, vlan_protocol="802.1Q"),
    )


def test_reading_lets_the_claim_refine_the_class_when_both_write_a_field() -> None:
    """The later configuration counts, field by field; lists are replaced as a whole."""
    of_class = entry(
        interface={"mtu": 9000, "name": "net1", "addresses": ["10.0.0.3/24"]},
        routes=[ROUTE],
        sysctls={"net.ipv4.conf.IFNAME.rp_filter": 1, "net.ipv4.conf.IFNAME.arp_ignore": 1},
    )
    of_claim = entry(interface={"mtu": 1500, "addresses": []}, sysctls={"net.ipv4.conf.IFNAME.rp_filter": 2})

    merged = read_interface_config([of_class, of_claim])

    assert merged == InterfaceConfig(
        interface=InterfaceFields(mtu=1500, name="net1", addresses=()),
        routes=(Route(destination="10.9.0.0/16", gateway="10.0.0.1"),),
        sysctls={"net.ipv4.conf.IFNAME.arp_ignore": 1, "net.ipv4.conf.IFNAME.rp_filter": 2},
    )


def test_reading_refuses_the_claim_when_it_changes_what_the_class_fixed() -> None:
    """A class's VLAN keeps pods apart: no claim leaves it.

    What the class left open, the claim may say.
    """
    of_class = entry(vf={"vlan": 100, "trust": False})

    refused = fields_refused(of_class, entry(vf={"vlan": 200, "trust": True}))
    merged = read_interface_config([of_class, entry(vf={"vlan": 100, "maxTxRate": 100})])

    assert refused == ["config[1].vf.vlan", "config[1].vf.trust"]
    assert merged == InterfaceConfig(vf=VfFields(vlan=100, trust=False, max_tx_rate=100))
    assert fields_refused(entry(mode="host"), entry(mode="pod")) == ["config[1].mode"]


def test_reading_checks_the_whole_when_a_field_of_the_class_and_of_the_claim_contradict() -> None:
    """Two entries that are right by themselves can be wrong together."""
    refused = fields_refused(entry(vf={"maxTxRate": 100}), entry(vf={"minTxRate": 200}))

    assert refused == ["vf.minTxRate"]


def test_rendering_gives_what_reading_took_when_all_fields_are_written() -> None:
    """One document with everything goes through and comes back as it was."""
    document = entry(
        interface={
            "name": "net1",
            "mtu": 9000,
            "mac": "02:00:00:00:00:02",
            "addresses": ["10.0.0.3/24", "fd00::3/64"],
            "up": False,
            "duplicateAddressDetection": "wait",
        },
        routes=[
            {
                "destination": "10.9.0.0/16",
                "gateway": "10.0.0.1",
                "source": "10.0.0.3",
                "metric": 7,
                "table": 100,
                "scope": "global",
                "onlink": True,
            }
        ],
        rules=[{"from": "10.0.0.0/24", "to": "10.9.0.0/16", "table": 100, "priority": 5, "family": "ipv4"}],
        neighbours=[{"address": "10.0.0.9", "mac": "02:00:00:00:00:09"}],
        sysctls={name: least for name, (least, _) in sorted(SYSCTLS.items())},
        vf={
            "mac": "02:00:00:00:00:02",
            "vlan": 5,
            "qos": 3,
            "vlanProtocol": "802.1ad",
            "trust": True,
            "spoofCheck": False,
            "linkState": "enable",
            "minTxRate": 10,
            "maxTxRate": 100,
        },
        rdma={"mode": "exclusive"},
    )
    of_chain = entry(
        interface={"name": "net1"}, cni={"conflist": {"cniVersion": "1.0.0", "plugins": [{"type": "bridge"}]}}
    )

    configs = [read_interface_config([each]) for each in (document, of_chain)]

    assert [render_interface_config(config) for config in configs if isinstance(config, InterfaceConfig)] == [
        document,
        of_chain,
    ]
