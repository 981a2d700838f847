"""The lines of devices at /metrics of a running service follow each hand-over, through every door,
and the readings go on while nothing else changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from support.cluster_slices import allocated
from support.device_bench import NODE, PROFILES, DeviceBench
from support.fake_nvml import FakeGpu, fake_nvml, needs_gcc
from support.looks import until_scraped
from support.sick_devices import SickNode, sick_node
from support.toy_driver import ToyDriver
from topobus.devicekit.host import driver_poller
from topobus.formats.messages.catalogue import LEDGER
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import Tree
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import Admission, Container, Pod
from topobus.values.device import Device
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.readings import Quantity, Reading
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

GPU = "topobus.dev/gpu"
Holder = tuple[str, str, str, str]
"""Namespace, pod, container and claim."""


def _lines(metrics: CollectorRegistry, name: str) -> list[tuple[dict[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for metric in metrics.collect()
        for sample in metric.samples
        if sample.name == name
    ]


def _holders(metrics: CollectorRegistry, device: str, name: str = "topobus_device_power_watts") -> set[Holder]:
    return {
        (labels["namespace"], labels["pod"], labels["container"], labels["claim"])
        for labels, _ in _lines(metrics, name)
        if labels["device"] == device
    }


@pytest_asyncio.fixture
async def node(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[SickNode]:
    """Two GPUs with the libnvidia-ml of a profile, a gateway, a kubelet and an API server."""
    machine = build(PROFILES / "h100-pair.toml", tmp_path / "machine")
    gpus = [
        FakeGpu(address=address, minor=minor, uuid=f"GPU-{minor}", power=(600_000 + minor, 0))
        for minor, address in enumerate(machine.pci("h100"))
    ]
    with fake_nvml(tmp_path / "lib", *gpus) as library:
        async with (
            ApiServerSimulator(token="secret", bookmark_s=0.5) as server,
            sick_node(
                nats_server.url, server, machine.root, tmp_path, [NvidiaDriver()], library_path=str(library.folder)
            ) as started,
        ):
            yield started


@needs_gcc
async def test_line_of_a_gpu_names_who_has_it_when_kubelet_hands_it_out(node: SickNode) -> None:
    """By the device plugin: pod and container, as soon as kubelet lists them, and no other one
    after the pod has gone.
    """
    await node.inventory_of(2)
    admission = await node.rig.kubelet.admit(
        Pod(name="trainer", uid="u1", containers=(Container(name="main", resources={GPU: 1}),))
    )
    assert isinstance(admission, Admission), admission
    (device,) = admission.container("main").devices[GPU]

    await until_scraped(lambda: _holders(node.metrics, device) == {("default", "trainer", "main", "")})
    lines = await asyncio.to_thread(_lines, node.metrics, "topobus_device_power_watts")
    others = {labels["device"]: labels["pod"] for labels, _ in lines}
    await node.rig.kubelet.remove(Pod(name="trainer", uid="u1", containers=(Container(name="main"),)))
    await until_scraped(lambda: _holders(node.metrics, device) == {("", "", "", "")})

    assert sorted(others.values()) == ["", "trainer"]
    assert await asyncio.to_thread(_holders, node.metrics, device, "topobus_device_held") == set()


@needs_gcc
async def test_line_of_a_gpu_names_who_has_it_when_a_claim_is_prepared(node: SickNode) -> None:
    """By DRA: pod, container and claim, and the next claim's after that. Of the pod's containers the
    one that uses the claim is named, and none where two do.
    """
    first, second = await node.inventory_of(2)
    for number, (device, container) in enumerate(((first, "main"), (second, "side"), (first, ""))):
        claim = allocated(node.server, f"claim-{number}", device.name)
        containers = [
            Container(name=name, claims=(claim.name,) if container in ("", name) else ()) for name in ("main", "side")
        ]
        pod = Pod(name=f"pod-{number}", uid=f"p{number}", containers=tuple(containers), claims=(claim,))

        admission = await node.rig.kubelet.admit(pod)

        assert isinstance(admission, Admission), admission
        wanted = {("default", pod.name, container, claim.name)}
        await until_scraped(lambda device=device, wanted=wanted: _holders(node.metrics, device.name) == wanted)  # type: ignore[misc]  # bound for this round
        await node.rig.kubelet.remove(pod)
        node.server.remove("ResourceClaim", claim.name)
        await until_scraped(lambda device=device: _holders(node.metrics, device.name) == {("", "", "", "")})  # type: ignore[misc]


class _Meter(ToyDriver):
    """A driver whose every reading is the next number."""

    reads = 0

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Give the number of this reading."""
        self.reads += 1
        return {device.name: [Reading(quantity=Quantity.POWER, value=self.reads)] for device in devices}


async def test_device_that_pods_share_has_its_reading_once_and_each_pod(bench: DeviceBench) -> None:
    """Whatever writes the ledger, the service reads it at once."""
    pods = [Owner(kind=OwnerKind.POD, namespace="team", name=name, uid=name) for name in ("a", "b")]
    holding = Holding(container="main", devices={"gpu": ("gpu-toy-0",)}, shared={"gpu": ("gpu-toy-0",)})
    allocations = {pod.key: Allocation(owner=pod, holdings=(holding,)) for pod in pods}
    await bench.publish_machine()
    async with bench.service(_Meter(count=1)):
        await bench.inventory(lambda inventory: len(inventory.devices) == 1)
        await bench.bus.put(LEDGER, Ledger(node=NODE, sequence=1, allocations=allocations), node=NODE)
        wanted = {("team", "a", "main", ""), ("team", "b", "main", "")}
        await until_scraped(lambda: _holders(bench.metrics, "gpu-toy-0", "topobus_device_held") == wanted)

        assert await asyncio.to_thread(_holders, bench.metrics, "gpu-toy-0") == {("", "", "", "")}


async def test_readings_go_on_while_nothing_else_changes(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own thread takes them between its looks, and wakes nothing for them."""
    monkeypatch.setattr(driver_poller, "READ_EVERY_S", 0.0)
    await bench.publish_machine()
    async with bench.service(_Meter(count=1)):
        inventory = await bench.inventory(lambda inventory: len(inventory.devices) == 1)
        await until_scraped(
            lambda: any(value >= 20 for _, value in _lines(bench.metrics, "topobus_device_power_watts"))
        )

        assert await bench.inventory(lambda _: True) == inventory
