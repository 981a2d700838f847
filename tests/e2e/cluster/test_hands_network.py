"""An operator's CNI networks, bad input and restarts of kubelet and runtime, with hands on a real
node.

As `test_hands`: TOPOBUS_CLUSTER_INSTALLATION=hands, TOPOBUS_CLUSTER_NRI.
TOPOBUS_CLUSTER_RESTART_KUBELET and TOPOBUS_CLUSTER_RESTART_RUNTIME are shell commands
that restart them. The CNI project's plugins (Debian's containernetworking-plugins) stand
in /usr/lib/cni or /opt/cni/bin.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.hands import Hands, container_pid, cpus_of_pid, ping, refusals_of
from support.cluster import until
from support.installation import command, setting
from support.real_hands import (
    HandsInstallation,
    Interface,
    host_interfaces,
    installed_hands,
    interface_of_process,
    veth_bench,
)
from support.real_traffic import Rate, changes_of_interfaces, measure_rate
from topobus.values.idset import CpuSet

_INTERFACES = 3
_LIMIT_S = 150.0
_BRIDGE = "tbhcni"
_BITS = 10_000_000
_HOST_PORT = 18077
_HOST = "10.77.0.1"
# The same in all tests, through whichever interface: the host learns each time where they are now.
_FIRST, _SECOND = "10.77.40.1", "10.77.40.2"

pytestmark = pytest.mark.skipif(
    setting("INSTALLATION") != "hands", reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `hands`"
)


def _networks(folder: Path) -> dict[str, str]:
    """Write the operator's networks: `door` hands the chosen interface over, `slow` is a bridge
    with limits, `broken` names a plugin that is not installed.
    """
    static = {"ipam": {"type": "static"}, "capabilities": {"ips": True}}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    bandwidth = {"type": "bandwidth", "capabilities": {"bandwidth": True}}
    plugins = {
        "door": [{"type": "host-device", **static}, portmap],
        "slow": [{"type": "bridge", "bridge": _BRIDGE, "isGateway": True, **static}, portmap, bandwidth],
        "broken": [{"type": "host-device", **static}, {"type": "not-installed"}],
    }
    paths = {}
    for name, chain in plugins.items():
        path = folder / f"{name}.conflist"
        path.write_text(json.dumps({"cniVersion": "1.0.0", "name": f"tbh-{name}", "plugins": chain}))
        paths[name] = str(path)
    return paths


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Interface]]:
    """Interfaces that may be handed out, as they are before anything happens."""
    with veth_bench(_INTERFACES) as interfaces:
        try:
            yield interfaces
        finally:
            subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True, timeout=20, check=False)


@pytest.fixture(scope="module")
def topobus(bench: dict[str, Interface], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandsInstallation]:
    """Topobus on this node, with the operator's networks."""
    folder = tmp_path_factory.mktemp("cni")
    settings = {
        "TOPOBUS_NIC__INTERFACES__OFFER": json.dumps([{"name": name} for name in bench]),
        "TOPOBUS_NIC__CNI__NETWORKS": json.dumps(_networks(folder)),
        "TOPOBUS_NIC__CNI__PLUGINS": json.dumps(
            ["bandwidth", "bridge", "host-device", "loopback", "not-installed", "portmap", "static"]
        ),
        "TOPOBUS_NIC__CNI__STATE_DIR": str(folder / "state"),
    }
    with installed_hands(settings) as installation:
        yield installation


def _configuration(**fields: object) -> dict[str, Any]:
    return {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", "interface": {"name": "net1"}, **fields}


def _at(address: str, **fields: object) -> dict[str, Any]:
    return _configuration(interface={"name": "net1", "addresses": [f"{address}/16"], **fields})


def _through(network: str, address: str) -> dict[str, Any]:
    return _configuration(cni={"network": network, "runtimeConfig": {"ips": [address]}})


def _forwarded(port: int, chain: str = "") -> list[str]:
    """The kernel's rules of a chain (empty: of all) in their order that name a port of the host."""
    rules = subprocess.run(
        ["iptables", "-t", "nat", "-S", *([chain] if chain else [])],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return [rule for rule in rules.stdout.splitlines() if f"--dport {port} " in rule or f"--dports {port} " in rule]


def _forget_other_chains(port: int, network: str) -> None:
    """Take out the rules for a port that lead to other networks' chains: the cluster's own network
    may have `portmap`, too, and its rule comes first.
    """
    for rule in _forwarded(port, "CNI-HOSTPORT-DNAT"):
        if f'\\"{network}\\"' not in rule:
            words = shlex.split(rule.replace("-A ", "-D ", 1))
            subprocess.run(["iptables", "-t", "nat", *words], timeout=20, check=True)


def _fetch(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
        return str(answer.read().decode())


async def test_host_port_is_answered_through_the_chosen_interface(hands: Hands, bench: dict[str, Interface]) -> None:
    """The pod listens on the chosen interface's address alone, and the cluster's own rule for the
    port is taken out: what answers came through our chain.
    """
    address = "10.77.20.1"
    pod = await hands.make(nic=_through("door", f"{address}/16"), address=address, host_port=_HOST_PORT)
    await hands.started(pod, _LIMIT_S)
    interface = interface_of_process(await container_pid(pod.uid))["net1"]
    _forget_other_chains(_HOST_PORT, "tbh-door")
    rules = _forwarded(_HOST_PORT)
    chains = _forwarded(_HOST_PORT, "CNI-HOSTPORT-DNAT")
    answer = await asyncio.to_thread(_fetch, f"http://{_HOST}:{_HOST_PORT}/hostname")
    await hands.remove(pod, _LIMIT_S)

    assert interface.mac in {before.mac for before in bench.values()}
    assert len(chains) == 1
    targets = {rule.split("--to-destination ")[1] for rule in rules if "--to-destination " in rule}
    assert f"{address}:8080" in targets
    assert answer.strip() == pod.name
    assert _forwarded(_HOST_PORT) == []
    assert {name: host_interfaces()[name] for name in bench} == bench


async def test_limits_of_the_annotations_hold_within_5_percent(hands: Hands, bench: dict[str, Interface]) -> None:
    """10 Mbit/s in each direction by annotation: real TCP over 5 s carries that on the wire."""
    annotations = {"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "10M"}
    pod = await hands.make(nic=_through("slow", "10.78.0.9/24"), address="10.78.0.9", annotations=annotations)
    await hands.started(pod, _LIMIT_S)
    pid = await container_pid(pod.uid)
    to_pod = await asyncio.to_thread(
        partial(measure_rate, sender=None, receiver=pid, address="10.78.0.9", interface="net1")
    )
    from_pod = await asyncio.to_thread(
        partial(measure_rate, sender=pid, receiver=None, address="10.78.0.1", interface=_BRIDGE)
    )
    await hands.remove(pod, _LIMIT_S)

    print(f"hands: to the pod {_say(to_pod)}, from it {_say(from_pod)}")  # noqa: T201 - acceptance asks for the figure
    assert to_pod.wire == pytest.approx(_BITS, rel=0.05)
    assert from_pod.wire == pytest.approx(_BITS, rel=0.05)
    assert {name: host_interfaces()[name] for name in bench} == bench


def _say(rate: Rate) -> str:
    return f"{rate.wire / 1e6:.3f} Mbit/s on the wire ({rate.payload / 1e6:.3f} of payload) in {rate.seconds:.1f} s"


@pytest.mark.parametrize(
    ("nic", "cpu_count", "words"),
    [
        pytest.param(_configuration(interface={"name": "net1", "addresses": ["10.77.300.1/16"]}), 0, ("interface.addresses[0]", "10.77.300.1"), id="address"),  # noqa: E501
        pytest.param(_configuration(interface={"name": "eth0"}), 0, ("name-taken", "write another interface.name"), id="name"),  # noqa: E501
        pytest.param(_configuration(interface={"name": "net1", "mtu": 70000}), 0, ("interface.mtu", "70000"), id="mtu"),
        pytest.param(_configuration(vf={"vlan": 5000}), 0, ("vf.vlan", "5000"), id="vlan"),
        pytest.param(_through("broken", "10.77.21.1/16"), 0, ("plugins[1]", "not-installed"), id="binary"),
        pytest.param(None, os.cpu_count(), ("last of the shared pool",), id="cpus"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_by_field_and_changes_nothing(
    nic: dict[str, Any] | None,
    cpu_count: int,
    words: tuple[str, ...],
    hands: Hands,
    topobus: HandsInstallation,
    bench: dict[str, Interface],
) -> None:
    """The pod stays pending with an event that names the field.

    No interface is touched meanwhile, and the pods beside it go on.
    """
    neighbour = await hands.make(nic=_at(_FIRST))
    await hands.started(neighbour, _LIMIT_S)
    pid = await container_pid(neighbour.uid)
    before, journal, cpus = host_interfaces(), _journal(topobus), cpus_of_pid(pid)
    with changes_of_interfaces("tbh") as changes:
        pod = await hands.make(nic=nic, has_cpu=cpu_count > 0, cpu_count=cpu_count)
        (line,) = await until("a refusal that names the field", partial(refusals_of, hands, pod, words), bool)
        phase = await hands.phase(pod)
    after, cpus_after = host_interfaces(), cpus_of_pid(pid)
    later = await hands.make(nic=_at(_SECOND))
    await hands.started(later, _LIMIT_S)
    reached = [await asyncio.to_thread(ping, address) for address in (_FIRST, _SECOND)]
    for made in (pod, later, neighbour):
        await hands.remove(made, _LIMIT_S)

    print(f"hands: {line}")  # noqa: T201 - for people
    assert phase == "Pending"
    # The kernel tells of the other ends (tbhp0) when it gets round to it: they came up with the
    # neighbour's interface, before anybody listened.
    assert [change for change in changes if " tbhp" not in change] == []
    assert (after, cpus_after) == (before, cpus)
    assert len(journal) == 1
    assert reached == [True, True]
    assert _journal(topobus) == []
    assert {name: host_interfaces()[name] for name in bench} == bench


def _journal(topobus: HandsInstallation) -> list[str]:
    return sorted(path.name for path in (topobus.folder / "journal-nic").glob("*.json"))


@pytest.mark.parametrize("which", ["RESTART_KUBELET", "RESTART_RUNTIME"])
async def test_interface_and_cpu_stay_right_over_a_restart(
    which: str, hands: Hands, topobus: HandsInstallation, bench: dict[str, Interface]
) -> None:
    """A pod holds an interface and a CPU while kubelet or the runtime is restarted: both stay, a
    pod that comes later gets the rest, and all comes back.
    """
    neighbour = await hands.make()
    await hands.started(neighbour, _LIMIT_S)
    neighbour_pid = await container_pid(neighbour.uid)
    online = cpus_of_pid(neighbour_pid)
    pod = await hands.make(nic=_at(_FIRST, mtu=1400), has_cpu=True)
    seen = await hands.started(pod, _LIMIT_S)
    pid = await container_pid(pod.uid)
    before = (interface_of_process(pid)["net1"], cpus_of_pid(pid), cpus_of_pid(neighbour_pid))
    await command(which)
    later = await hands.make(nic=_at(_SECOND))
    later_seen = await hands.started(later, _LIMIT_S)
    after = (interface_of_process(pid)["net1"], cpus_of_pid(pid), cpus_of_pid(neighbour_pid))
    reached = [await asyncio.to_thread(ping, address) for address in (_FIRST, _SECOND)]
    for made in (pod, later):
        await hands.remove(made, _LIMIT_S)
    await until("everybody has all CPUs again", partial(_cpus_of, neighbour_pid), lambda cpus: cpus == online)
    topobus.check()

    assert before[1] == seen.cpus
    assert CpuSet.parse(seen.cpus).isdisjoint(CpuSet.parse(before[2]))
    assert after == before
    assert CpuSet.parse(later_seen.cpus) == CpuSet.parse(before[2])
    assert reached == [True, True]
    assert {name: host_interfaces()[name] for name in bench} == bench


async def _cpus_of(pid: int) -> str:
    return cpus_of_pid(pid)
