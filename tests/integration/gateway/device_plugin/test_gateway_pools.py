"""Pools at kubelet's device plugin door: a resource of its own each, one device in one list, and
exposure decided for each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from support.plugin_pods import admitted
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import (
    Capacity,
    ClaimReference,
    Container,
    Pod,
    Rejection,
)
from topobus.values.device import Device
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
POOL = "topobus.dev/gpu-h100"


def gpu(name: str, node: int, *, pool: str = "", state: HealthState = HealthState.HEALTHY) -> Device:
    """A GPU, in a pool where one is named."""
    return structs.replace(device(name, node, state), pool=pool)


GPUS = (gpu("gpu-0", 0), gpu("gpu-1", 0, pool="gpu-h100"), gpu("gpu-2", 1, pool="gpu-h100"), gpu("gpu-3", 1))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Four GPUs, two of them in a pool, and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", *GPUS)
        async with made.kubelet:
            yield made


def pod(uid: str, **resources: int) -> Pod:
    """A pod with one container; `gpu_h100=2` asks two of the pool."""
    wanted = {f"topobus.dev/{name.replace('_', '-')}": count for name, count in resources.items()}
    return Pod(name=f"pod-{uid}", uid=uid, containers=(Container(name="main", resources=wanted),))


def held(rig: Rig) -> dict[str, dict[str, tuple[str, ...]]]:
    """Resource to devices by class, in the ledger."""
    return {
        allocation.owner.name: dict(allocation.holdings[0].devices)
        for allocation in rig.plane.ledger.allocations.values()
    }


async def test_kubelet_gives_a_pods_devices_of_the_pool_when_it_asks_for_the_pool(rig: Rig) -> None:
    """Each resource has its list, Registration and allocations.

    The ledger, the device service and `topobus pods` know the class.
    """
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(POOL, allocatable=2)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        lists = {
            resource: {name: device.nodes for name, device in rig.kubelet.devices(resource).items()}
            for resource in (GPU, POOL)
        }
        pooled = await admitted(rig, pod("a", gpu_h100=2))
        plain = await admitted(rig, pod("b", gpu=1))
        refused = await rig.kubelet.admit(pod("c", gpu_h100=1))
        shown = await rig.pods()

    assert {key: sorted(devices) for key, devices in lists.items()} == {
        GPU: ["gpu-0", "gpu-3"],
        POOL: ["gpu-1", "gpu-2"],
    }
    assert [str(node_set) for node_set in lists[POOL].values()] == ["0", "1"]
    assert pooled.container("main").devices == {POOL: ("gpu-1", "gpu-2")}
    assert pooled.container("main").edits.env["TOPOBUS_GPU_DEVICES"] == "gpu-1,gpu-2"
    assert isinstance(refused, Rejection)
    assert held(rig) == {POOL: {"gpu": ("gpu-1", "gpu-2")}, GPU: {"gpu": plain.container("main").devices[GPU]}}
    assert [
        (container.pod, container.resource, container.device_class, len(container.devices))
        for container in shown.containers
    ] == [
        ("pod-a", POOL, "gpu", 2),
        ("pod-b", GPU, "gpu", 1),
    ]
    assert shown.disagreements == ()


async def test_gateway_releases_a_pools_devices_when_kubelet_lists_its_pod_no_more(rig: Rig) -> None:
    """The reconciliation knows resources of pools as it knows those of classes."""
    gone, stays = pod("gone", gpu_h100=1), pod("stays", gpu=1)
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(POOL, allocatable=2)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await admitted(rig, gone)
        await admitted(rig, stays)
        await rig.kubelet.remove(gone)
        await rig.plane.asks.wait_for("released")

    assert list(held(rig)) == [GPU]


async def test_gateway_adopts_a_pools_devices_when_the_ledger_has_lost_them(rig: Rig) -> None:
    """What a container has through a pool is written down under the pool's resource again."""
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(POOL, allocatable=2)
        given = (await admitted(rig, pod("a", gpu_h100=1))).container("main").devices[POOL]
        await rig.plane.lose()
        await rig.plane.asks.wait_for("adopted", count=2)

    assert held(rig) == {POOL: {"gpu": given}}


async def test_a_held_device_stays_in_its_list_when_the_operator_changes_the_pools(rig: Rig) -> None:
    """A container's device does not vanish from the resource that gave it.

    The other resource has it once the container is gone.
    """
    first = pod("a", gpu_h100=2)
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(POOL, allocatable=2)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await admitted(rig, first)
        await rig.plane.show("gpu", *(structs.replace(each_gpu, pool="") for each_gpu in GPUS), gpu("gpu-4", 1))
        moved = await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        during = rig.kubelet.capacity()[POOL]
        await rig.kubelet.remove(first)
        after = await rig.kubelet.wait_for_resource(GPU, allocatable=5)
        empty = await rig.kubelet.wait_for_resource(POOL, allocatable=0)

    assert during == Capacity(capacity=2, allocatable=2)
    assert (moved.capacity, after.capacity, empty.capacity) == (5, 5, 0)


async def test_a_pool_loses_only_its_sick_device_when_a_card_dies(rig: Rig) -> None:
    """One dead card takes neither its pool nor its class along."""
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.kubelet.wait_for_resource(POOL, allocatable=2)
        await rig.plane.show("gpu", *GPUS[:2], gpu("gpu-2", 1, pool="gpu-h100", state=HealthState.UNHEALTHY), GPUS[3])
        pool = await rig.kubelet.wait_for_resource(POOL, allocatable=1)
        given = await admitted(rig, pod("a", gpu_h100=1, gpu=2))

    assert pool.capacity == 2
    assert given.container("main").devices == {POOL: ("gpu-1",), GPU: ("gpu-0", "gpu-3")}


async def test_a_claim_takes_a_pools_device_away_from_kubelet_while_it_has_it(rig: Rig) -> None:
    """The DRA driver has the devices of a class's pools, too, and the ledger stands between the
    doors.
    """
    reference = ClaimReference(name="training", uid="u-1", drivers=(DRIVER,))
    await rig.plane.store(claim("training", "u-1", "gpu-1"))
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(POOL, allocatable=2)
        await rig.kubelet.wait_for_driver(DRIVER)
        (prepared,) = await rig.kubelet.prepare_claims([reference])
        withheld = await rig.kubelet.wait_for_resource(POOL, allocatable=1)

    assert prepared.error == ""
    assert withheld.capacity == 2
    assert held(rig) == {"training": {"gpu": ("gpu-1",)}}


@pytest.mark.parametrize(
    ("exposure", "resources", "drivers"),
    [
        pytest.param({}, [GPU, POOL], [DRIVER], id="all"),
        pytest.param({"gpu": "none", "gpu-h100": "both"}, [POOL], [DRIVER], id="only-the-pool"),
        pytest.param({"gpu-h100": "none"}, [GPU], [DRIVER], id="all-but-the-pool"),
        pytest.param({"gpu": "dra", "gpu-h100": "device-plugin"}, [POOL], [DRIVER], id="one-door-each"),
        pytest.param({"gpu": "device-plugin"}, [GPU, POOL], [], id="a-pool-goes-with-its-class"),
        pytest.param({"gpu": "none"}, [], [], id="nothing"),
    ],
)
async def test_exposure_is_decided_for_the_class_and_for_its_pools(
    rig: Rig, exposure: dict[str, Any], resources: list[str], drivers: list[str]
) -> None:
    """A pool that is not named goes with its class; another class, which is not offered to claims,
    shows when all is served.
    """
    await rig.plane.show("nic", device("nic-0", 0))
    async with rig.gateway(exposure={"nic": "device-plugin", **exposure}):
        await rig.kubelet.wait_for_resource("topobus.dev/nic", allocatable=1)
        for resource in resources:
            await rig.kubelet.wait_for_resource(resource, allocatable=2)
        for driver in drivers:
            await rig.kubelet.wait_for_driver(driver)
        await rig.readiness.until(lambda report: report.get("registration") == "ready")

        offered = (sorted(rig.kubelet.capacity()), sorted(rig.kubelet.drivers()))

    assert offered == (sorted([*resources, "topobus.dev/nic"]), drivers)
