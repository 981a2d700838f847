"""What a claim may say of CNI, and what plugins are told of a pod and its device."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.nic.cni.pod_values import chain_for_device, pod_arguments, pod_values
from topobus.nic.cni.request import CniRequest, read_request
from topobus.nic.cni.rules.chain import Chain, parse_chain
from topobus.nic.cni.settings import CniSettings
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.sandbox import HostPort, Sandbox

CONFLIST = {"cniVersion": "1.0.0", "name": "mine", "plugins": [{"type": "bridge"}]}
VF = Device(
    name="nic-0000-3b-00-1",
    device_class="nic",
    pci=PciAddress.parse("0000:3b:00.1"),
    attributes={"interface": "ens1f1"},
)
VETH = Device(name="nic-veth", device_class="nic", attributes={"interface": "veth0"})
BARE = Device(name="nic-bare", device_class="nic")


def read(cni: object, *, may_bring_chain: bool = False) -> CniRequest | Refusal:
    """Read with one network known."""
    return read_request(
        cni, "claim default/c", networks={"data": "/etc/data.conflist"}, may_bring_chain=may_bring_chain
    )


def chain_of(*plugins: dict[str, Any]) -> Chain:
    """A chain."""
    chain = parse_chain({"cniVersion": "1.0.0", "name": "data", "plugins": list(plugins)}, "data.conflist")
    assert isinstance(chain, Chain)
    return chain


def sandbox(**changes: Any) -> Sandbox:
    """A pod."""
    return Sandbox(**{"id": "s1", "uid": "u1", "namespace": "default", "name": "web", **changes})


def test_request_names_a_network_when_the_operator_has_it() -> None:
    """With values for capabilities and arguments, sorted."""
    request = read(
        {
            "network": "data",
            "args": {"B": "2", "A": "1"},
            "runtimeConfig": {"mac": "02:00:00:00:00:01", "ips": ["10.0.0.2/24"]},
        }
    )

    assert request == CniRequest(
        network="data",
        arguments=(("A", "1"), ("B", "2")),
        runtime_values={"ips": ["10.0.0.2/24"], "mac": "02:00:00:00:00:01"},
    )


def test_request_brings_a_chain_when_the_operator_allows_it() -> None:
    """Read by the rules of every list."""
    request = read({"conflist": CONFLIST}, may_bring_chain=True)

    assert isinstance(request, CniRequest)
    assert request.chain is not None
    assert request.chain.name == "mine"


@pytest.mark.parametrize(
    ("cni", "code", "field"),
    [
        ("data", "cni-config-invalid", "cni"),
        ({}, "cni-config-invalid", "cni"),
        ({"network": "data", "conflist": CONFLIST}, "cni-config-invalid", "cni"),
        ({"network": 7}, "cni-config-invalid", "cni.network"),
        ({"network": "data", "binDir": "/tmp"}, "cni-config-invalid", "cni.binDir"),
        ({"network": "data", "args": ["A=1"]}, "cni-config-invalid", "cni.args"),
        ({"network": "data", "args": {"A;B": "1"}}, "cni-config-invalid", "cni.args.A;B"),
        ({"network": "data", "args": {"K8S_POD_NAME": "other"}}, "cni-config-invalid", "cni.args.K8S_POD_NAME"),
        ({"network": "data", "args": {"A": "1;K8S_POD_NAME=other"}}, "cni-config-invalid", "cni.args.A"),
        ({"network": "data", "args": {"A": 1}}, "cni-config-invalid", "cni.args.A"),
        ({"network": "data", "runtimeConfig": []}, "cni-config-invalid", "cni.runtimeConfig"),
        (
            {"network": "data", "runtimeConfig": {"deviceID": "0000:00:00.0"}},
            "cni-config-invalid",
            "cni.runtimeConfig.deviceID",
        ),
        ({"network": "data", "runtimeConfig": {"mac": "02:00"}}, "cni-config-invalid", "cni.runtimeConfig.mac"),
        ({"network": "data", "runtimeConfig": {"ips": ["10.0.0.300"]}}, "cni-config-invalid", "cni.runtimeConfig.ips"),
        ({"network": "data", "runtimeConfig": {"ips": []}}, "cni-config-invalid", "cni.runtimeConfig.ips"),
        (
            {"network": "data", "runtimeConfig": {"infinibandGUID": "1"}},
            "cni-config-invalid",
            "cni.runtimeConfig.infinibandGUID",
        ),
    ],
)
def test_request_is_refused_with_its_field_when_it_cannot_be_used(cni: object, code: str, field: str) -> None:
    """Also what would pass for the pod's or the device's own values."""
    refusal = read(cni)

    assert isinstance(refusal, Refusal)
    assert (refusal.reasons[0].code, refusal.reasons[0].facts["field"]) == (code, field)


def test_request_is_refused_when_its_chain_is_called_like_an_operator_s_network() -> None:
    """Plugins keep addresses by the network's name, so it would take those of the operator's."""
    refusal = read({"conflist": CONFLIST | {"name": "data"}}, may_bring_chain=True)

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["field"] == "cni.conflist.name"


def test_request_is_refused_when_it_brings_a_chain_without_leave() -> None:
    """The chain is not even read."""
    refusal = read({"conflist": "anything"})

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].code == "cni-chain-forbidden"


def test_plugins_are_told_the_pod_when_it_has_ports_rates_and_a_function() -> None:
    """In the shapes of the conventions: ports by name, rates in bits a second with 50 ms of burst,
    the PCI address.
    """
    pod = sandbox(
        host_ports=(
            HostPort(host_port=8080, container_port=80),
            HostPort(host_port=53, container_port=5353, protocol="udp", host_ip="10.0.0.1"),
        ),
        annotations={"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "1G"},
    )

    assert pod_values(pod, VF) == {
        "portMappings": [
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
            {"hostPort": 53, "containerPort": 5353, "protocol": "udp", "hostIP": "10.0.0.1"},
        ],
        "bandwidth": {
            "ingressRate": 10_000_000,
            "ingressBurst": 500_000,
            "egressRate": 10**9,
            "egressBurst": 50_000_000,
        },
        "deviceID": "0000:3b:00.1",
    }
    assert pod_values(sandbox(), VETH) == {}
    assert dict(pod_arguments(pod))["K8S_POD_NAME"] == "web"


@pytest.mark.parametrize(("needs_ports", "code"), [(True, "cni-ports-unknown"), (False, "")])
def test_ports_that_are_not_known_are_refused_when_a_plugin_opens_them(needs_ports: bool, code: str) -> None:
    """A chain with portMappings would open too few in silence; any other goes on without them."""
    values = pod_values(sandbox(ports_unknown="the API server is away"), VETH, needs_ports=needs_ports)

    assert (values.reasons[0].code if isinstance(values, Refusal) else "") == code


@pytest.mark.parametrize(("text", "burst"), [("1k", 262_144), ("1P", 2**32 - 1), ("1000500m", 262_144)])
def test_burst_keeps_its_bounds_when_a_rate_is_extreme(text: str, burst: int) -> None:
    """At least some packets, at most what 32 bits hold."""
    values = pod_values(sandbox(annotations={"kubernetes.io/egress-bandwidth": text}), VETH)

    assert isinstance(values, dict)
    assert values["bandwidth"]["egressBurst"] == burst


@pytest.mark.parametrize("text", ["", "fast", "10", "-10M", "2P", "10 M"])
def test_rate_is_refused_when_it_is_none(text: str) -> None:
    """By kubelet's limits, with the annotation's name."""
    refusal = pod_values(sandbox(annotations={"kubernetes.io/ingress-bandwidth": text}), VETH)

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["field"] == "annotation kubernetes.io/ingress-bandwidth"


@pytest.mark.parametrize(
    ("plugin", "device", "written"),
    [
        ({"type": "host-device", "hwaddr": "02:00:00:00:00:09"}, VETH, {"type": "host-device", "device": "veth0"}),
        ({"type": "host-device", "runtimeConfig": {"deviceID": "x"}}, VF, {"type": "host-device", "device": "ens1f1"}),
        (
            {"type": "host-device"},
            Device(name="dpdk", device_class="nic", pci=VF.pci),
            {"type": "host-device", "pciBusID": "0000:3b:00.1"},
        ),
        (
            {"type": "macvlan", "master": "eth0", "mode": "vepa"},
            VETH,
            {"type": "macvlan", "mode": "vepa", "master": "veth0"},
        ),
        (
            {"type": "sriov", "deviceID": "0000:00:00.0", "vlan": 7},
            VF,
            {"type": "sriov", "vlan": 7, "deviceID": "0000:3b:00.1"},
        ),
        ({"type": "tuning", "mtu": 1400}, VETH, {"type": "tuning", "mtu": 1400}),
    ],
)
def test_chain_names_the_chosen_device_when_it_is_run(
    plugin: dict[str, Any], device: Device, written: dict[str, Any]
) -> None:
    """Whatever the list names: it would hand out another interface of the host."""
    name = device.attributes.get("interface", "")

    chain = chain_for_device(chain_of(plugin), device, str(name))

    assert isinstance(chain, Chain)
    assert chain.plugins[0].configuration == written


@pytest.mark.parametrize(("kind", "device"), [("sriov", VETH), ("host-device", BARE), ("ipvlan", BARE)])
def test_chain_is_refused_when_the_device_has_not_what_a_plugin_needs(kind: str, device: Device) -> None:
    """A virtual function for sriov, an interface for its children."""
    refusal = chain_for_device(
        chain_of({"type": "tuning"}, {"type": kind}), device, str(device.attributes.get("interface", ""))
    )

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["field"] == f"plugins[1].type {kind}"


@pytest.mark.parametrize(
    "changes", [{"bin_dirs": ("cni",)}, {"networks": {"data": "data.conflist"}}, {"state_dir": ""}]
)
def test_settings_are_refused_when_a_path_is_relative(changes: dict[str, Any]) -> None:
    """Where the process was started must not decide what runs as root."""
    with pytest.raises(ValueError, match="absolute"):
        CniSettings(**changes)
