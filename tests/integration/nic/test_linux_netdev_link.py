"""The driver for interfaces without a PCI function, on this machine's own kernel: a veth pair whose
other end is switched off and on.
"""

from __future__ import annotations

import pytest

from support.real_interfaces import ip, network_namespace, veth_pair, why_not_here
from topobus.nic.config import InterfaceRule, InterfaceSettings
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.health import HealthState
from topobus.values.machine import Machine

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())]


def test_driver_offers_a_real_veth_and_sees_its_other_end_go_down_and_up() -> None:
    """The kernel's own carrier: lost as soon as the peer is switched off,
    back as soon as it is on.
    """
    machine = Machine(node="n", numa_nodes=(), cpus=())
    tree = Tree(HardwareSettings(root="/"))
    with network_namespace() as far, veth_pair(far) as name:
        ip("link", "set", name, "up")
        ip("-n", far, "link", "set", "peer", "up")
        driver = LinuxNetdevDriver(InterfaceSettings(offer=(InterfaceRule(name=name),)))
        devices = driver.discover(tree, machine).devices

        healthy = driver.observe(tree, devices)
        ip("-n", far, "link", "set", "peer", "down")
        lost = driver.observe(tree, devices)
        ip("-n", far, "link", "set", "peer", "up")
        back = driver.observe(tree, devices)

    assert [
        (device.attributes["interface"], device.attributes["kind"], device.attributes["mtu"]) for device in devices
    ] == [(name, "veth", 1500)]
    assert (healthy, back) == ({devices[0].name: []}, {devices[0].name: []})
    assert [(part.state, part.reason) for part in lost[devices[0].name]] == [(HealthState.UNHEALTHY, "carrier-lost")]
