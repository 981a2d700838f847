"""The nic driver hands a real interface over to a real network namespace and takes it back: with
real packets, on this machine's kernel.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.nic_rig import FAR, NEAR, NicRig, ping, state_of
from support.real_interfaces import ip, why_not_here
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import PrepareContext
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import AttachedInterface

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())]


def fields(answer: object) -> list[tuple[str, object]]:
    """Codes and fields of a refusal."""
    assert isinstance(answer, Refusal), answer
    return [(reason.code, reason.facts.get("field")) for reason in answer.reasons]


def test_attach_gives_the_pod_a_network_and_detach_gives_the_host_its_interface_back(rig: NicRig) -> None:
    """Name, address and MTU are those of the claim, packets flow.

    Afterwards name, MAC, MTU, addresses, routes and settings are as before.
    """
    driver, record, before = rig.driver(), DeviceRecord(), state_of(rig.name)
    context = rig.context(
        interface={"name": "net1", "mtu": 1400, "mac": "02:73:00:00:00:99", "addresses": [NEAR]},
        routes=[{"destination": "10.215.0.0/16", "gateway": FAR}],
        sysctls={"net.ipv4.conf.IFNAME.rp_filter": 2},
    )

    refusal = driver.check(rig.tree, [rig.device], context)
    attached = driver.attach(rig.tree, rig.device, context, rig.sandbox, record)
    link = rig.link_in_pod("net1")
    has_answer = ping(rig.pod, FAR)
    driver.detach(rig.tree, rig.device, rig.sandbox, record)

    assert refusal is None
    assert attached == AttachedInterface(name="net1", mac="02:73:00:00:00:99", addresses=(NEAR,), mtu=1400)
    assert (link["mtu"], link["address"], "UP" in link["flags"]) == (1400, "02:73:00:00:00:99", True)
    assert has_answer
    assert state_of(rig.name) == before
    assert record.steps == ()


def test_to_attach_names_an_interface_unless_it_stays(rig: NicRig) -> None:
    """A claim attaches by default; with `mode: host`, or for a device plugin, which names no pod,
    it stays and is told in the variable.
    """
    driver = rig.driver()
    plugin = PrepareContext(owner=Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/nic", uid="u"))
    variable = f"TOPOBUS_NIC_{rig.name.upper()}"

    assert driver.to_attach([rig.device], rig.context()) == (rig.device.name,)
    assert driver.to_attach([rig.device], rig.context(mode="host")) == ()
    assert driver.to_attach([rig.device], plugin) == ()
    assert driver.prepare(rig.tree, [rig.device], rig.context(interface={"name": "net1"})) == {
        rig.device.name: ContainerEdits(env={variable: "net1"})
    }
    assert driver.prepare(rig.tree, [rig.device], rig.context(mode="host")) == {
        rig.device.name: ContainerEdits(env={variable: rig.name})
    }


@pytest.mark.parametrize(
    ("config", "field"),
    [
        pytest.param(
            {"interface": {"addresses": ["10.0.0.300/24"]}},
            "config[0].interface.addresses[0]",
            id="an address that is none",
        ),
        pytest.param({"interface": {"mtu": 65536}}, "config[0].interface.mtu", id="an MTU that no interface has"),
        pytest.param({"vf": {"vlan": 5000}}, "config[0].vf.vlan", id="a VLAN of 5000"),
        pytest.param({"vf": {"vlan": 5}}, "vf", id="a VLAN for what is no virtual function"),
        pytest.param({"rdma": {"mode": "exclusive"}}, "rdma.mode", id="RDMA that is not there"),
        pytest.param({"mode": "host", "interface": {"mtu": 1400}}, "mode", id="settings for what stays"),
        pytest.param({"interface": {"name": "a/b"}}, "config[0].interface.name", id="a name that is none"),
    ],
)
def test_check_refuses_the_field_when_it_cannot_be(rig: NicRig, config: dict[str, Any], field: str) -> None:
    """Nothing was changed, and the refusal names the device and the field."""
    before = state_of(rig.name)

    refusal = rig.driver().check(rig.tree, [rig.device], rig.context(**config))

    assert fields(refusal) == [("interface-config-invalid", field)]
    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts["device"] == rig.device.name
    assert state_of(rig.name) == before


def test_attach_refuses_a_name_that_the_pod_has_already(rig: NicRig) -> None:
    """Only the sandbox can tell; nothing was changed on the way."""
    before = state_of(rig.name)
    ip("-n", rig.pod, "link", "add", "net1", "type", "veth", "peer", "name", "net2")
    driver, record = rig.driver(), DeviceRecord()

    answer = driver.attach(rig.tree, rig.device, rig.context(interface={"name": "net1"}), rig.sandbox, record)

    assert fields(answer) == [("name-taken", "interface.name")]
    assert (state_of(rig.name), record.steps) == (before, ())


def test_attach_takes_another_name_when_the_host_s_is_taken_in_the_pod(rig: NicRig) -> None:
    """A pod has an eth0 of its own, as the host may have: nobody has to
    configure a name for that.
    """
    ip("-n", rig.pod, "link", "add", rig.name, "type", "veth", "peer", "name", "net1")
    driver, record = rig.driver(), DeviceRecord()

    answer = driver.attach(rig.tree, rig.device, rig.context(), rig.sandbox, record)
    driver.detach(rig.tree, rig.device, rig.sandbox, record)

    assert isinstance(answer, AttachedInterface)
    assert answer.name == "net2"


def test_attach_refuses_a_sandbox_that_is_gone(rig: NicRig) -> None:
    """The pod ended meanwhile: a refusal, and nothing changed."""
    before = state_of(rig.name)
    record = DeviceRecord()
    sandbox = type(rig.sandbox)(
        id="sb-2", uid="p", namespace="a", name="b", network_namespace="/run/netns/tb-nicdrv-nowhere"
    )

    answer = rig.driver().attach(rig.tree, rig.device, rig.context(), sandbox, record)

    assert fields(answer) == [("namespace-gone", None)]
    assert (state_of(rig.name), record.steps) == (before, ())


def test_check_leaves_an_interface_alone_that_this_owner_s_pod_has(rig: NicRig) -> None:
    """Kubelet asks again for pods that run: the interface is away then, and that is right."""
    driver, record = rig.driver(), DeviceRecord()
    context = rig.context(interface={"name": "net1", "addresses": [NEAR]})
    driver.attach(rig.tree, rig.device, context, rig.sandbox, record)
    attached = PrepareContext(owner=context.owner, config=context.config, attached=frozenset({rig.device.name}))

    refusal = driver.check(rig.tree, [rig.device], attached)
    edits = driver.prepare(rig.tree, [rig.device], attached)
    driver.detach(rig.tree, rig.device, rig.sandbox, record)

    assert refusal is None
    assert edits == {rig.device.name: ContainerEdits(env={f"TOPOBUS_NIC_{rig.name.upper()}": "net1"})}


def test_detach_is_content_when_nothing_is_attached(rig: NicRig) -> None:
    """Twice, or never attached, with a sandbox or without: no error, no change."""
    before = state_of(rig.name)
    driver = rig.driver()

    driver.detach(rig.tree, rig.device, rig.sandbox, DeviceRecord())
    driver.detach(rig.tree, rig.device, None, DeviceRecord())

    assert state_of(rig.name) == before
