"""The nic driver attaches by an operator's CNI network: the interface itself goes by an unmodified
plugin, and is afterwards all that it was.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cni_bundle import Bundle, driver_of
from support.nic_rig import FAR, NicRig, ping, state_of
from support.real_interfaces import why_not_here
from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())]

ADDRESS = "10.213.7.5/24"


@pytest.fixture
def driver(rig: NicRig, bundle: Bundle, tmp_path: Path) -> LinuxNetdevDriver:
    """A driver whose operator has a network of host-device, static addresses and another MTU."""
    chain = [
        {"type": "host-device", "ipam": {"type": "static", "addresses": [{"address": ADDRESS}]}},
        {"type": "tuning", "mtu": 1300, "mac": "02:73:00:00:00:55"},
    ]
    return driver_of(rig, bundle, tmp_path, chain)


def test_interface_is_all_that_it_was_when_a_chain_has_moved_and_changed_it(
    rig: NicRig, driver: LinuxNetdevDriver
) -> None:
    """The plugins give back the name.

    MAC, MTU, addresses, routes and settings are ours to put back.
    """
    before, record = state_of(rig.name), DeviceRecord(RecordState(sandbox=rig.sandbox))
    context = rig.context(interface={"name": "data0"}, cni={"network": "data"})

    refusal = driver.check(rig.tree, [rig.device], context)
    attached = driver.attach(rig.tree, rig.device, context, rig.sandbox, record)
    link, has_answer = rig.link_in_pod("data0"), ping(rig.pod, FAR)
    driver.detach(rig.tree, rig.device, rig.sandbox, record)

    assert refusal is None
    assert isinstance(attached, AttachedInterface), attached
    assert (attached.name, attached.addresses) == ("data0", (ADDRESS,))
    assert (link["mtu"], link["address"], has_answer) == (1300, "02:73:00:00:00:55", True)
    assert state_of(rig.name) == before
    assert record.steps == ()


def test_check_refuses_a_network_that_nobody_has_configured(rig: NicRig, driver: LinuxNetdevDriver) -> None:
    """Before anything was changed, with the device's name."""
    before = state_of(rig.name)

    refusal = driver.check(rig.tree, [rig.device], rig.context(cni={"network": "storage"}))

    assert isinstance(refusal, Refusal)
    assert [reason.facts["device"] for reason in refusal.reasons] == [rig.device.name]
    assert state_of(rig.name) == before
