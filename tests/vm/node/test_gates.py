"""What Topobus does under each feature gate of Kubernetes 1.36 that could make a difference: the
gate has the other value than by default, in the components that read it.

The table of docs/reference/support.md is this one.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import Struct

from topobus.kubernetes.client import object_path
from topobus.values.idset import CpuSet
from vm.kernel import interfaces
from vm.kubelet import CLAIM, CLASSES, DEVICES, TEMPLATES, Kubelet, connect, network_of, pod, until
from vm.monitor import Monitor
from vm.node import JOB, URL, Node

pytestmark = pytest.mark.timeout(1800)
_SLICES = object_path("resource.k8s.io/v1", "resourceslices")
_RESOURCE = "topobus.dev/nic-plain"


class _Gate(Struct, frozen=True, kw_only=True):
    """A gate, what it is set to, and what Topobus then does. The defaults are those of 1.36."""

    sets: str = ""
    """As in `--feature-gates`; after the first one those that want it."""
    is_kubelets: bool = False
    """Kubelet reads it, too."""
    has_counters: bool = True
    has_shares: bool = True
    has_lists: bool = False
    has_taints: bool = True
    has_health: bool = True
    has_message: bool = True
    """Of a sick device in the pod's status."""
    has_status: bool = True
    """The claim's status names the interface in the pod."""
    by_claims: bool = True
    """A pod that names a resource is served by a claim, else by the device plugin."""
    said: str = ""
    """What `topobus doctor` says of it."""

    @property
    def name(self) -> str:
        """The gate's name, which is the test's."""
        return self.sets.split("=", maxsplit=1)[0] or "as-by-default"


_GATES = (
    _Gate(),
    _Gate(
        sets="DRAPartitionableDevices=false",
        has_counters=False,
        said="cards are offered whole, their partitions are not",
    ),
    _Gate(sets="DRAConsumableCapacity=false", has_shares=False, said="devices are held by one claim, not shared"),
    _Gate(sets="DRADeviceTaints=false", has_taints=False, said="DRADeviceTaints"),
    _Gate(
        sets="DRAResourceClaimDeviceStatus=false,DRADeviceBindingConditions=false,"
        "DRAResourceClaimGranularStatusAuthorization=false",
        has_status=False,
    ),
    _Gate(sets="DRAListTypeAttributes=true", has_lists=True),
    _Gate(sets="DRAExtendedResource=false", is_kubelets=True, by_claims=False),
    _Gate(
        sets="ResourceHealthStatus=false,ResourceHealthStatusMessage=false",
        is_kubelets=True,
        has_health=False,
        has_message=False,
    ),
    _Gate(sets="ResourceHealthStatusMessage=false", is_kubelets=True, has_message=False),
    _Gate(sets="DRADeviceTaintRules=true"),
    _Gate(sets="DRADeviceBindingConditions=false"),
    _Gate(sets="DRAResourceClaimGranularStatusAuthorization=false"),
    _Gate(sets="DRAPrioritizedList=false"),
    _Gate(sets="DRASchedulerFilterTimeout=false"),
    _Gate(sets="DRANodeAllocatableResources=true"),
    _Gate(sets="DRAResourcePoolStatus=true"),
    _Gate(sets="KubeletPodResourcesListUseActivePods=false", is_kubelets=True),
    _Gate(sets="CPUManagerPolicyAlphaOptions=true", is_kubelets=True),
    _Gate(sets="CPUManagerPolicyBetaOptions=false", is_kubelets=True),
    _Gate(sets="TopologyManagerPolicyAlphaOptions=true", is_kubelets=True),
    _Gate(sets="TopologyManagerPolicyBetaOptions=false", is_kubelets=True),
)
# What differs from the default only by the news of a sick card is asked for them.
_OF_HEALTH = [gate for gate in _GATES if not (gate.sets and gate.has_taints and gate.has_health and gate.has_message)]


class _Slices(Struct, frozen=True):
    """What of the gated fields the node's slices have, the taints, and what they offer."""

    counters: bool
    shares: bool
    lists: bool
    taints: dict[str, str]
    devices: frozenset[str]


async def _slices(cluster: Kubelet) -> _Slices:
    answer: Any = await cluster.client.ask("GET", _SLICES)
    specs = [each["spec"] for each in answer["items"]]
    devices = [device for spec in specs for device in spec.get("devices", ())]
    return _Slices(
        counters=any("sharedCounters" in spec for spec in specs),
        shares=any(device.get("allowMultipleAllocations") for device in devices),
        lists=any("ints" in value for device in devices for value in device.get("attributes", {}).values()),
        taints={device["name"]: taint["effect"] for device in devices for taint in device.get("taints", ())},
        devices=frozenset(device["name"] for device in devices),
    )


async def _set(cluster: Kubelet, gate: _Gate) -> None:
    """Start what reads the gate again, with it, and let claims serve the plain card's resource."""
    (JOB / ".gates").write_text(gate.sets)
    (JOB / ".gates").rename(JOB / "gates")
    wanted = {key: value == "true" for key, _, value in (each.partition("=") for each in gate.sets.split(",") if each)}
    settings = {key: value for key, value in cluster.settings.items() if key != "featureGates"}
    if gate.is_kubelets:
        settings["featureGates"] = wanted
    if settings != cluster.settings:
        await cluster.start(**settings)
    await until("the gates", lambda: not (JOB / "gates").exists())
    # It is another API server, to which the connections so far do not lead.
    await cluster.client.close()
    cluster.client = connect()
    # The server keeps what stored classes name, whatever its gates are.
    await cluster.client.ask("DELETE", f"{CLASSES}/plain")
    selectors = [
        {"cel": {"expression": expression}}
        for expression in (
            'device.driver == "topobus.dev"',
            'device.attributes["resource.kubernetes.io"].pciBusID == "0000:22:00.0"',
        )
    ]
    spec = {"extendedResourceName": _RESOURCE, "selectors": selectors}
    await cluster.make(CLASSES, {"metadata": {"name": "plain"}, "spec": spec})
    await cluster.ready()


def _doctor() -> str:
    """What the check-up prints, whatever it finds, in one line."""
    words = ["/opt/topobus/bin/topobus", "doctor", "--nats", URL]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return " ".join(done.stdout.split())


@pytest_asyncio.fixture(scope="module")
async def gated(node: Node, cards: Kubelet) -> AsyncIterator[Kubelet]:
    """Show the CPUs of a socket, which are of two NUMA nodes, as one device, and ask for one of
    them and a function, or the card, by one claim.
    """
    before = cards.settings
    await node.start("cpu", TOPOBUS_CPU__CPUS__GROUPS="socket", TOPOBUS_CPU__HEALTH__FORGET_S="5")
    pcis = {"function": "0000:21:10.0", "card": "0000:21:00.0"}
    interface = {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", "interface": {"name": "net1"}}
    for name, pci in pcis.items():
        selector = {"cel": {"expression": f'device.attributes["resource.kubernetes.io"].pciBusID == "{pci}"'}}
        requests = [
            {
                "name": "nic",
                "exactly": {
                    "deviceClassName": "nic.topobus.dev",
                    "selectors": [selector],
                    # Its pod is not evicted, so that its status can be read.
                    "tolerations": [{"key": "topobus.dev/health", "operator": "Exists"}],
                },
            },
            {"name": "cpu", "exactly": {"deviceClassName": "cpu.topobus.dev", "capacity": {"requests": {"cpus": "1"}}}},
        ]
        config = {"requests": ["nic"], "opaque": {"driver": "topobus.dev", "parameters": interface}}
        body = {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": requests, "config": [config]}}}}
        await cards.make(TEMPLATES, body)
    yield cards
    await _set(cards, _Gate())
    await cards.client.ask("DELETE", f"{CLASSES}/plain")
    for name in pcis:
        await cards.client.ask("DELETE", f"{TEMPLATES}/{name}")
    await node.start("cpu")
    assert cards.settings == before


@pytest.mark.parametrize("gate", _GATES, ids=lambda gate: gate.name)
async def test_pods_have_their_devices_when_a_gate_is_not_as_by_default(
    node: Node, gated: Kubelet, monitor: Monitor, gate: _Gate
) -> None:
    """Slices have what the server keeps, a pod has an interface and CPUs by its claim and another
    card by its resource, and a sick card is told of where it can be.
    """
    of_host = interfaces()
    await _set(gated, gate)
    whole = {DEVICES["card"], DEVICES["plain"], "cpu-socket-1"}

    async def are_published() -> bool:
        seen = await _slices(gated)
        wanted = whole | ({DEVICES["function"], DEVICES["second"]} if gate.has_counters else set())
        return (seen.counters, seen.shares, seen.lists, seen.devices, seen.taints) == (
            gate.has_counters, gate.has_shares, gate.has_lists, wanted, {},
        )  # fmt: skip

    await until("slices", are_published, said=lambda: _slices(gated))
    asked = "function" if gate.has_counters else "card"
    await gated.run(pod("all", template=asked, on_host=False, main={**CLAIM, "limits": {_RESOURCE: "1"}}))
    inside = interfaces(network_of((await gated.containers())["all/main"]))
    cpus, (claim, *by_resource) = (await gated.cpus())["all/main"], await gated.claims("all")
    networks = [each["networkData"]["interfaceName"] for each in _entries(claim) if "networkData" in each]

    assert [each for each in _given(claim) if each.startswith("nic-")] == [DEVICES[asked]]
    assert [_given(each) for each in by_resource] == ([[DEVICES["plain"]]] if gate.by_claims else [])
    # By a resource that the device plugin serves a card stays on the host.
    assert (len(inside), "net1" in inside) == (2 if gate.by_claims else 1, True)
    assert networks == (["net1"] if gate.has_status else [])
    assert (len(cpus.are), cpus.are <= CpuSet.parse("4-7")) == (1 if gate.has_shares else 4, True)

    if gate in _OF_HEALTH:
        await _sicken(gated, node, monitor, gate)
    if gate.said:
        await until(f"{gate.said!r} of the check-up", lambda: gate.said in _doctor())
    await gated.delete("all")
    await until("all interfaces on the host", lambda: interfaces() == of_host)
    node.check()


def _given(claim: dict[str, Any]) -> list[str]:
    return [each["device"] for each in claim["status"]["allocation"]["devices"]["results"]]


def _entries(claim: dict[str, Any]) -> list[dict[str, Any]]:
    return claim["status"].get("devices", [])  # type: ignore[no-any-return]


async def _sicken(cluster: Kubelet, node: Node, monitor: Monitor, gate: _Gate) -> None:
    """Pull the cable of the card of which the pod has a part, and put it in again: the slices have
    a taint, and the pod's status has what is wrong, each where its gate is on.
    """

    async def reported() -> list[dict[str, Any]]:
        statuses = (await cluster.pod("all"))["status"]["containerStatuses"]
        resources = [each["resources"] for status in statuses for each in status.get("allocatedResourcesStatus", ())]
        return [each for of_container in resources for each in of_container if each["health"] == "Unhealthy"]

    async def is_sick() -> bool:
        taints = (await _slices(cluster)).taints
        return (bool(await reported()) or not gate.has_health) and (bool(taints) or not gate.has_taints)

    monitor.link("nic1", is_up=False)
    await node.device(DEVICES["function"], "unhealthy")
    await until("news of it", is_sick, said=reported)
    taints, sick = (await _slices(cluster)).taints, await reported()
    monitor.link("nic1", is_up=True)
    await node.device(DEVICES["function"])

    assert taints.get(DEVICES["function"]) == ("NoExecute" if gate.has_taints else None)
    assert [*{bool(each.get("message")) for each in sick}] == ([gate.has_message] if gate.has_health else [])
