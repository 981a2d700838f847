"""One real interface that the nic driver offers, a pod's namespace, and the network on the
interface's other end.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.net_namespaces import Namespace
from support.real_interfaces import ip, lines, network_namespace, veth_pair
from topobus.devicekit.driver import PrepareContext
from topobus.nic.config import InterfaceRule, InterfaceSettings
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.machine import Machine
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import Sandbox

__all__ = ["FAR", "NEAR", "OWNER", "NicRig", "interface_config", "nic_rig", "ping", "state_of"]

OWNER = Owner(kind=OwnerKind.CLAIM, namespace="apps", name="storage-net", uid="5e1f0c2a")
FAR, NEAR = "10.213.7.1", "10.213.7.2/24"
MAC = "02:73:00:00:00:77"
MTU = 1420
ADDRESS = "10.214.7.9/24"
# Longer than an address resolution takes on a busy machine (three requests, a second apart).
_ECHO_S = 5.0


@dataclass(frozen=True, kw_only=True)
class NicRig:
    """The rig."""

    name: str
    far: str
    pod: str
    device: Device
    tree: Tree

    @property
    def sandbox(self) -> Sandbox:
        """The pod's sandbox as the runtime describes it."""
        return Sandbox(
            id="sb-1", uid="pod-1", namespace="apps", name="trainer", network_namespace=f"/run/netns/{self.pod}"
        )

    def driver(self, settings: InterfaceSettings | None = None) -> LinuxNetdevDriver:
        """Make a driver, as a service that starts does."""
        driver = LinuxNetdevDriver()
        driver.configure(
            NicServices(
                interfaces=settings or InterfaceSettings(offer=(InterfaceRule(name=self.name),)), hands=InterfaceHands()
            )
        )
        return driver

    def context(self, **config: Any) -> PrepareContext:
        """The claim's configuration."""
        return PrepareContext(owner=OWNER, config=(interface_config(**config),) if config else ())

    def link_in_pod(self, name: str) -> dict[str, Any]:
        """The output of `ip address` about an interface in the pod."""
        (link,) = lines("-n", self.pod, "-d", "address", "show", name)
        return link


def interface_config(**config: Any) -> dict[str, Any]:
    """Write an opaque configuration."""
    return {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", **config}


@contextmanager
def nic_rig() -> Iterator[NicRig]:
    """Make a veth pair with MAC, MTU and an address of its own, switched on.

    The other end answers at FAR.
    """
    with network_namespace() as far, network_namespace() as pod, veth_pair(far) as name:
        ip("link", "set", name, "address", MAC, "mtu", str(MTU))
        ip("address", "add", ADDRESS, "dev", name)
        ip("link", "set", name, "up")
        ip("-n", far, "address", "add", f"{FAR}/24", "dev", "peer")
        ip("-n", far, "link", "set", "peer", "up")
        tree = Tree(HardwareSettings(root="/"))
        driver = LinuxNetdevDriver(InterfaceSettings(offer=(InterfaceRule(name=name),)))
        (device,) = driver.discover(tree, Machine(node="n", numa_nodes=(), cpus=())).devices
        yield NicRig(name=name, far=far, pod=pod, device=device, tree=tree)


def state_of(name: str) -> dict[str, Any]:
    """Say all of an interface on the host that a hand-over could change.

    Counters and link-local addresses are the kernel's own business.
    """
    (link,) = lines("-d", "address", "show", "dev", name)
    addresses = sorted(
        (entry["local"], entry["prefixlen"], entry["scope"]) for entry in link["addr_info"] if entry["scope"] != "link"
    )
    routes = sorted(json.dumps(route, sort_keys=True) for route in lines("route", "show", "dev", name))
    kept = {key: link.get(key) for key in ("ifname", "address", "mtu", "txqlen", "ifalias", "group", "link_type")}
    settings = {
        str(path.relative_to(f"/proc/sys/net/ipv4/conf/{name}")): path.read_text(encoding="ascii").strip()
        for path in sorted(Path(f"/proc/sys/net/ipv4/conf/{name}").iterdir())
    }
    return {
        **kept,
        "flags": sorted(set(link["flags"]) - {"LOWER_UP", "NO-CARRIER"}),
        "addresses": addresses,
        "routes": routes,
        "settings": settings,
    }


def ping(namespace: str, address: str) -> bool:
    """Say whether an address answers an ICMP echo request from a namespace: the kernel at the far
    end does, if packets flow both ways.
    """
    return Namespace(namespace).call(lambda: _echo(address))


def _echo(address: str) -> bool:
    # Type 8, code 0, checksum, identifier, sequence (RFC 792). The identifier distinguishes our
    # answer from others'.
    body = struct.pack("!HH", 0x7462, 1) + b"topobus"
    packet = struct.pack("!BBH", 8, 0, _checksum(struct.pack("!BBH", 8, 0, 0) + body)) + body
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as opened:
        opened.settimeout(_ECHO_S)
        try:
            opened.sendto(packet, (address, 0))
            while True:
                answer = opened.recv(2048)
                payload = answer[(answer[0] & 0xF) * 4 :]
                if payload[0] == 0 and payload[4:] == body:
                    return True
        except OSError:
            return False


def _checksum(data: bytes) -> int:
    words = struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2))
    total = sum(words)
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF
