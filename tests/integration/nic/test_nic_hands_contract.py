"""The driver of interfaces keeps the contract of drivers with hands, on real veth pairs: each verb
is killed before and after each write, and undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import CalledProcessError
from typing import ClassVar

import pytest

from support.net_trees import add_interface, remove_interface
from support.nic_rig import interface_config, state_of
from support.real_interfaces import ip, network_namespace, veth_pair, why_not_here
from topobus.devicekit.driver import DeviceDriver
from topobus.nic.config import InterfaceRule, InterfaceSettings
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.testing.drivers.hands_contract import HandsContract
from topobus.values.device import Device
from topobus.values.sandbox import Sandbox

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())]


class TestLinuxNetdevHands(HandsContract):
    """The laptop's tree, with two interfaces that this kernel has, too: discovery reads the tree,
    hands reach the kernel.
    """

    config = (
        interface_config(
            interface={"name": "net1", "mtu": 1300, "mac": "02:73:00:00:00:66", "addresses": ["10.213.9.2/24"]}
        ),
    )
    bad_config = (interface_config(interface={"mtu": 70000}),)
    stack: ClassVar[ExitStack]
    pods: ClassVar[list[str]]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def namespaces(cls) -> Iterator[None]:
        """Remove all that was made, in the end."""
        with ExitStack() as stack:
            cls.stack, cls.pods = stack, []
            yield

    def make_driver(self) -> DeviceDriver:
        """Make the driver, with hands."""
        driver = LinuxNetdevDriver()
        driver.configure(
            NicServices(
                interfaces=InterfaceSettings(offer=(InterfaceRule(name="tbn*", kind="veth"),)), hands=InterfaceHands()
            )
        )
        return driver

    def record(self, into: Path) -> RecordedMachine:
        """Build the laptop, and two interfaces in its tree and in this kernel."""
        machine = build("laptop", into)
        far = self.stack.enter_context(network_namespace())
        for index in (201, 202):
            name = self.stack.enter_context(veth_pair(far, peer=f"peer{index}"))
            ip("link", "set", name, "mtu", "1400", "up")
            ip("address", "add", f"10.214.{index}.9/24", "dev", name)
            add_interface(into, name, index, iflink=str(index + 100))
        return machine

    def vanish(self, recorded: RecordedMachine, device: Device) -> None:
        """Take the interface out of the tree."""
        remove_interface(recorded.root, str(device.attributes["interface"]))

    def make_sandbox(self, recorded: RecordedMachine) -> Sandbox:
        """Make a network namespace."""
        pod = self.stack.enter_context(network_namespace())
        return Sandbox(id="s1", uid="p1", namespace="default", name="pod", network_namespace=f"/run/netns/{pod}")

    def remove_sandbox(self, recorded: RecordedMachine, sandbox: Sandbox) -> None:
        """Remove it."""
        ip("netns", "del", Path(sandbox.network_namespace).name)

    def look(self, recorded: RecordedMachine) -> object:
        """Say how this kernel's interfaces look; one that is not here is in a pod."""
        names = sorted(path.name for path in (recorded.root / "sys/class/net").iterdir() if path.name.startswith("tbn"))
        return {name: _look(name) for name in names}


def _look(name: str) -> object:
    # The contract looks from within the driver, whose thread may be in
    # the pod's namespace just then.
    try:
        return state_of(name)
    except (CalledProcessError, OSError):
        return None
