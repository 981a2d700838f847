"""The nic driver attaches by an operator's CNI network: the interface comes back as it was,
whatever the chain left behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cni_bundle import Bundle, driver_of
from support.nic_rig import FAR, NicRig, ping, state_of
from support.real_interfaces import ip, why_not_here
from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())]

STATIC = {"type": "static", "addresses": [{"address": "10.213.7.2/24"}]}
MOVED = [{"type": "host-device", "ipam": STATIC}, {"type": "tuning", "mtu": 1400, "mac": "02:73:00:00:00:98"}]


def test_interface_comes_back_as_it_was_when_a_chain_moved_and_tuned_it(
    rig: NicRig, bundle: Bundle, tmp_path: Path
) -> None:
    """host-device gives back the name alone: MAC, MTU, addresses, routes and settings are from the
    record.

    Packets flow in between.
    """
    driver, record, before = driver_of(rig, bundle, tmp_path, MOVED), DeviceRecord(), state_of(rig.name)
    context = rig.context(interface={"name": "net1"}, cni={"network": "data"})

    refusal = driver.check(rig.tree, [rig.device], context)
    attached = driver.attach(rig.tree, rig.device, context, rig.sandbox, record)
    has_answer = ping(rig.pod, FAR)
    mtu = rig.link_in_pod("net1")["mtu"]
    driver.detach(rig.tree, rig.device, rig.sandbox, record)

    assert refusal is None
    assert attached == AttachedInterface(name="net1", mac="02:73:00:00:00:98", addresses=("10.213.7.2/24",))
    assert (has_answer, mtu) == (True, 1400)
    assert (state_of(rig.name), record.steps) == (before, ())


@pytest.mark.parametrize("is_known", [True, False], ids=["sandbox-known", "after-a-crash"])
def test_interface_comes_back_when_it_left_the_pod_by_itself(
    rig: NicRig, bundle: Bundle, tmp_path: Path, *, is_known: bool
) -> None:
    """As hardware does when its namespace ends: on the host under the pod's name for it, with what
    the chain had set.
    """
    driver, before = driver_of(rig, bundle, tmp_path, MOVED), state_of(rig.name)
    states: list[RecordState] = []
    context = rig.context(interface={"name": "tbq-net1"}, cni={"network": "data"})
    driver.attach(rig.tree, rig.device, context, rig.sandbox, DeviceRecord(write=states.append))
    ip("-n", rig.pod, "link", "set", "tbq-net1", "netns", "1")
    ip("netns", "del", rig.pod)
    record = DeviceRecord(states[-1])

    driver_of(rig, bundle, tmp_path, MOVED).detach(rig.tree, rig.device, rig.sandbox if is_known else None, record)

    assert (state_of(rig.name), record.steps) == (before, ())


def test_interface_is_as_it_was_when_a_chain_fails(rig: NicRig, bundle: Bundle, tmp_path: Path) -> None:
    """The refusal names the plugin; the chain's own DEL and the driver's detach leave nothing."""
    bad = [MOVED[0], {"type": "tuning", "sysctl": {"net.no.such": "1"}}]
    driver, record, before = driver_of(rig, bundle, tmp_path, bad), DeviceRecord(), state_of(rig.name)
    context = rig.context(interface={"name": "net1"}, cni={"network": "data"})

    answer = driver.attach(rig.tree, rig.device, context, rig.sandbox, record)
    driver.detach(rig.tree, rig.device, rig.sandbox, record)

    assert isinstance(answer, Refusal)
    assert (answer.reasons[0].code, answer.reasons[0].facts["plugin"]) == ("cni-plugin-failed", "tuning")
    assert (state_of(rig.name), record.steps) == (before, ())


def test_child_is_made_and_gone_when_a_chain_leaves_the_device_on_the_host(
    rig: NicRig, bundle: Bundle, tmp_path: Path
) -> None:
    """A macvlan of the chosen device: the device itself does not move."""
    driver = driver_of(rig, bundle, tmp_path, [{"type": "macvlan", "mode": "bridge", "ipam": STATIC}])
    record, before = DeviceRecord(), state_of(rig.name)
    context = rig.context(interface={"name": "net1"}, cni={"network": "data"})

    attached = driver.attach(rig.tree, rig.device, context, rig.sandbox, record)
    has_answer = ping(rig.pod, FAR)
    driver.detach(rig.tree, rig.device, rig.sandbox, record)

    assert isinstance(attached, AttachedInterface), attached
    assert has_answer
    assert (state_of(rig.name), record.steps) == (before, ())


def test_check_names_the_claim_and_the_device_when_the_network_is_unknown(
    rig: NicRig, bundle: Bundle, tmp_path: Path
) -> None:
    """At prepare, with what there is."""
    refusal = driver_of(rig, bundle, tmp_path, MOVED).check(
        rig.tree, [rig.device], rig.context(cni={"network": "storage"})
    )

    assert isinstance(refusal, Refusal)
    assert (refusal.reasons[0].code, refusal.reasons[0].facts["known"], refusal.reasons[0].facts["device"]) == (
        "cni-network-unknown",
        ("data",),
        rig.device.name,
    )
