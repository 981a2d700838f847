"""Topobus with hands on this machine's own hardware: exclusive CPUs, and virtual interfaces made
for the purpose that are moved into pods.

The interfaces are one end each of veth pairs; the other ends hang on a bridge of the host's, so
that a pod can be reached by what it was given. Nothing else of the machine is offered: the nic
service has an allow-list, and all names made here begin with `tbh`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.cluster import Cluster
from support.installation import Processes, setting

__all__ = [
    "BRIDGE_ADDRESS",
    "HandsInstallation",
    "Interface",
    "host_interfaces",
    "installed_hands",
    "interface_of_process",
    "make_bench",
    "remove_bench",
    "run_ip",
    "veth_bench",
]

BRIDGE = "tbhbr"
BRIDGE_ADDRESS = "10.77.0.1/16"
_SERVICES = ("discovery", "nic", "cpu", "topology")


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface as the kernel shows it."""

    name: str
    mac: str
    mtu: int
    is_up: bool
    addresses: tuple[str, ...] = ()


def run_ip(*words: str, pid: int | None = None, on: Sequence[str] = ()) -> str:
    """Run `ip` and return its output.

    Shapes: pid — run it in the network namespace of this process; on — run it on another node, by
    the words that run a command there.
    Errors: raises AssertionError with its error output.
    """
    prefix = ["nsenter", "-t", str(pid), "-n"] if pid is not None else []
    process = subprocess.run([*on, *prefix, "ip", *words], capture_output=True, text=True, timeout=20, check=False)
    assert process.returncode == 0, f"ip {' '.join(words)}: {process.stderr.strip()}"
    return process.stdout


def _parse(text: str) -> dict[str, Interface]:
    interfaces = {}
    for link in json.loads(text or "[]"):
        addresses = [
            f"{address['local']}/{address['prefixlen']}"
            for address in link.get("addr_info", ())
            if address.get("scope") == "global"
        ]
        interfaces[link["ifname"]] = Interface(
            name=link["ifname"],
            mac=link.get("address", ""),
            mtu=link["mtu"],
            is_up="UP" in link["flags"],
            addresses=tuple(sorted(addresses)),
        )
    return interfaces


def host_interfaces(on: Sequence[str] = ()) -> dict[str, Interface]:
    """Our interfaces on the host, by name."""
    return {
        name: interface for name, interface in _parse(run_ip("-j", "addr", on=on)).items() if name.startswith("tbh")
    }


def interface_of_process(pid: int) -> dict[str, Interface]:
    """Interfaces in the network namespace of a process, by name."""
    return _parse(run_ip("-j", "addr", pid=pid))


@contextmanager
def veth_bench(count: int) -> Iterator[dict[str, Interface]]:
    """Make a bridge and `count` pairs for the length of a block.

    Gives the ends that may be handed out (`tbh0`, `tbh1`, …) as they are now.
    """
    try:
        yield make_bench(count)
    finally:
        remove_bench(count)


def make_bench(count: int, on: Sequence[str] = ()) -> dict[str, Interface]:
    """Make what `veth_bench` does, again where it exists."""
    remove_bench(count, on)
    run_ip("link", "add", BRIDGE, "type", "bridge", on=on)
    run_ip("addr", "add", BRIDGE_ADDRESS, "dev", BRIDGE, on=on)
    run_ip("link", "set", BRIDGE, "up", on=on)
    for number in range(count):
        run_ip("link", "add", f"tbh{number}", "type", "veth", "peer", "name", f"tbhp{number}", on=on)
        run_ip("link", "set", f"tbhp{number}", "master", BRIDGE, "up", on=on)
        run_ip("link", "set", f"tbh{number}", "mtu", str(1500 - number), "up", on=on)
    interfaces = host_interfaces(on)
    return {f"tbh{number}": interfaces[f"tbh{number}"] for number in range(count)}


def remove_bench(count: int, on: Sequence[str] = ()) -> None:
    """Remove what `make_bench` made, or what is there of it."""
    names = [BRIDGE, *(f"tbhp{number}" for number in range(count)), *(f"tbh{number}" for number in range(count))]
    for name in names:
        subprocess.run([*on, "ip", "link", "del", name], capture_output=True, timeout=20, check=False)


class HandsInstallation(Processes):
    """NATS, the node's services and the gateway as processes of this one, on this machine's own
    hardware, as root.
    """

    services = (*_SERVICES, "gateway")

    def __init__(
        self,
        node: str,
        kubelet: Path,
        kubeconfig: Path,
        *,
        settings: Mapping[str, str],
        on: Sequence[str] = (),
        address: str = "127.0.0.1",
        nats_url: str = "",
    ) -> None:
        super().__init__(node, kubelet, kubeconfig, on=on, address=address, nats_url=nats_url)
        self._settings = settings

    def _prepare(self) -> None:
        """The machine is this one."""

    def _service_settings(self) -> dict[str, str]:
        return {
            "TOPOBUS_ALL__HARDWARE__ROOT": "/",
            "TOPOBUS_ALL__HARDWARE__RUNTIME_DEV": "/dev",
            "TOPOBUS_NIC__JOURNAL__DIR": str(self._folder / "journal-nic"),
            "TOPOBUS_CPU__JOURNAL__DIR": str(self._folder / "journal-cpu"),
            "TOPOBUS_GATEWAY__CPUS__OWNED": "all",
            "TOPOBUS_GATEWAY__EXPOSURE": json.dumps({"cpu": "dra", "nic": "dra"}),
            "TOPOBUS_GATEWAY__EDITS": "{}",
            **self._settings,
        }


@contextmanager
def installed_hands(settings: Mapping[str, str]) -> Iterator[HandsInstallation]:
    """Topobus with hands on the node that the environment names, for the length of a block.

    Errors: fails the tests with one sentence when the cluster cannot be used, or
    TOPOBUS_CLUSTER_NRI does not name the runtime's socket.
    """
    kubeconfig, kubelet = Path(os.environ["KUBECONFIG"]), Path(os.environ["TOPOBUS_KUBELET_DIR"])
    node = asyncio.run(Cluster.find_node(kubeconfig, os.environ.get("TOPOBUS_CLUSTER_NODE", "")))
    if not setting("NRI"):
        pytest.fail("TOPOBUS_CLUSTER_NRI is not set: name the container runtime's NRI socket", pytrace=False)
    installation = HandsInstallation(node, kubelet, kubeconfig, settings=settings)
    try:
        asyncio.run(installation.install())
        yield installation
    finally:
        installation.close()
