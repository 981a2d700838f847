"""What the publisher writes while only some of a pool's classes are known, and of a node's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from support.shape_machines import cpu_group
from support.shape_names import plain
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.cluster.objects import ClusterChange, ClusterChangeKind, Rejected
from topobus.gateway.cluster.slice_publisher import SlicePublisher
from topobus.gateway.config import ClusterSettings
from topobus.gateway.node_state import NodeState
from topobus.process.readiness import Readiness
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.virtual_time

NODE = "n1"


class Server:
    """An API server with a node and the slices of it."""

    def __init__(self, *, counts: bool = True) -> None:
        self.slices: dict[str, ApiObject] = {}
        self._counts = counts
        self._version = 100

    async def get(self, *_: object) -> ApiObject:
        """The node."""
        return ApiObject(api_version="v1", kind="Node", metadata={"name": NODE, "uid": "u"})

    async def create(self, _: object, api_object: ApiObject, *, is_dry_run: bool = False) -> ApiObject | Rejected:
        """Store a slice under a name of its own."""
        if is_dry_run:
            return api_object
        name = f"{api_object.metadata['generateName']}{self._version}"
        return self._store(api_object, {**api_object.metadata, "name": name, "uid": name})

    async def update(self, _: object, api_object: ApiObject) -> ApiObject | Rejected:
        """Replace a slice."""
        return self._store(api_object, api_object.metadata)

    async def delete(self, _: object, name: str, **__: object) -> None:
        """Delete a slice."""
        self.slices.pop(name, None)

    async def watch(self, *_: object, **__: object) -> AsyncGenerator[ClusterChange, None]:
        """Show what is there, and nothing more: the publisher alone writes."""
        yield ClusterChange(kind=ClusterChangeKind.SNAPSHOT, objects=tuple(self.slices.values()))
        await asyncio.Event().wait()

    def shown(self) -> dict[str, list[str]]:
        """What each pool shows."""
        pools: dict[str, list[str]] = {}
        for api_object in self.slices.values():
            names = [device["name"] for device in api_object.spec.get("devices", ())]
            pools.setdefault(api_object.spec["pool"]["name"], []).extend(names)
        return {pool: sorted(names) for pool, names in sorted(pools.items())}

    def devices(self) -> dict[str, dict[str, Any]]:
        """What it shows of each device."""
        specs = [api_object.spec for api_object in self.slices.values()]
        return {plain(device["name"]): device for spec in specs for device in spec.get("devices", ())}

    def taints(self) -> dict[str, list[str]]:
        """Key and effect of the taints of each device that has some."""
        return {
            name: [f"{taint['key']}:{taint['effect']}" for taint in device["taints"]]
            for name, device in self.devices().items()
            if device.get("taints")
        }

    def _store(self, api_object: ApiObject, metadata: dict[str, Any]) -> ApiObject:
        self._version += 1
        if not self._counts:
            spec = {key: value for key, value in api_object.spec.items() if key != "sharedCounters"}
            devices = [
                {key: value for key, value in device.items() if key != "consumesCounters"}
                for device in spec.get("devices", ())
            ]
            api_object = msgspec.structs.replace(api_object, spec={**spec, "devices": devices})
        stored = msgspec.structs.replace(api_object, metadata={**metadata, "resourceVersion": str(self._version)})
        self.slices[str(metadata["name"])] = stored
        return stored


def inventory(device_class: str, *names: str) -> Inventory:
    """An inventory."""
    devices = tuple(Device(name=name, device_class=device_class) for name in names)
    return Inventory(node=NODE, device_class=device_class, generation=1, devices=devices)


async def publish(
    server: Server,
    *steps: Inventory | Holders,
    but: tuple[str, ...] = (),
    shapes: bool = False,
    own_shapes: tuple[OwnShape, ...] = (),
    readiness: Readiness | None = None,
) -> SlicePublisher:
    """Run a gateway that learns one inventory after the other, or who holds what, and offers all classes but some."""
    state = NodeState(
        cast(Any, SimpleNamespace(is_connected=True)),
        NODE,
        lambda name: f"topobus.dev/{name}",
        in_claims=lambda device: device.device_class not in but,
    )
    state.take_own_shapes(own_shapes, CpuSet())
    publisher = SlicePublisher(
        cast(KubernetesCluster, server),
        state,
        offers=lambda device_class: device_class not in but,
        shows=lambda device: device,
        is_judged=lambda _: True,
        settings=ClusterSettings(shapes=shapes),
        readiness=readiness or Readiness(),
        registry=CollectorRegistry(),
    )
    task = asyncio.create_task(publisher.run())
    await asyncio.sleep(5)
    for step in steps:
        if isinstance(step, Holders):
            state.take_ledger(step)
        else:
            state.take_inventory(step.device_class, step)
        await asyncio.sleep(5)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return publisher


async def test_class_keeps_its_devices_when_only_another_one_is_known() -> None:
    """The next gateway hears of the NICs first: their change is written, and the GPUs that the
    server shows stay.
    """
    server = Server()
    await publish(server, inventory("gpu", "gpu-0", "gpu-1"), inventory("nic", "nic-0"), inventory("cpu", "cpu-0"))
    before = server.shown()

    await publish(server, inventory("nic", "nic-0", "nic-1"))

    assert before == {"n1": ["gpu-0", "gpu-1", "nic-0"], "n1/cpu": ["cpu-0"]}
    assert server.shown() == {"n1": ["gpu-0", "gpu-1", "nic-0", "nic-1"], "n1/cpu": ["cpu-0"]}


async def test_class_loses_its_devices_when_its_inventory_says_so() -> None:
    """What is known counts: a class without devices has none, whatever slices showed."""
    server = Server()
    await publish(server, inventory("gpu", "gpu-0"), inventory("nic", "nic-0"))

    await publish(server, inventory("gpu"))

    assert server.shown() == {"n1": ["nic-0"]}


async def test_empty_pool_stays_shown_when_nothing_is_known_yet() -> None:
    """A gateway that starts before any device service takes nothing back: without a slice nobody
    knows that there are no devices.
    """
    server = Server()
    await publish(server, inventory("gpu"))
    before = dict(server.slices)

    await publish(server)

    assert server.shown() == {"n1": []}
    assert server.slices == before


async def test_class_goes_when_it_is_not_offered_any_more() -> None:
    """The others of its pool stay, and a pool without an offered class has no slice."""
    server = Server()
    await publish(server, inventory("gpu", "gpu-0"), inventory("nic", "nic-0"), inventory("cpu", "cpu-0"))

    await publish(server, but=("gpu", "cpu"))

    assert server.shown() == {"n1": ["nic-0"]}


async def test_slice_of_no_pool_of_ours_is_deleted_with_its_devices() -> None:
    """It is nothing that this node's gateway published: its devices are not taken over."""
    server = Server()
    await publish(server, inventory("nic", "nic-0"))
    (ours,) = server.slices.values()
    device = {**ours.spec["devices"][0], "name": "gpu-9"}
    spec = {**ours.spec, "pool": {**ours.spec["pool"], "name": "old"}, "devices": [device]}
    server.slices["001-stray"] = msgspec.structs.replace(ours, spec=spec, metadata={"name": "001-stray", "uid": "x"})

    await publish(server)

    assert server.shown() == {"n1": ["nic-0"]}


@pytest.mark.parametrize("name", ["gpu-9", "nic-0", "gpu-acme--0"])
async def test_devices_that_a_pool_cannot_have_go_when_nothing_else_is_known_of_it(name: str) -> None:
    """A node without a CPU service has no pool of CPUs. Who shows other devices in it offers what no
    claim could be prepared with.
    """
    server = Server()
    await publish(server, inventory("nic", "nic-0"))
    (ours,) = server.slices.values()
    device = {**ours.spec["devices"][0], "name": name}
    spec = {**ours.spec, "pool": {**ours.spec["pool"], "name": "n1/cpu"}, "devices": [device]}
    server.slices["000-stray"] = msgspec.structs.replace(ours, spec=spec, metadata={"name": "000-stray", "uid": "x"})

    await publish(server)

    assert server.shown() == {"n1": ["nic-0"]}


SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(Condition(dimension=Dimension.COMPUTE, state=HealthState.UNHEALTHY, reason="xid"),),
)


def machine(device_class: str, count: int = 4, sick: str = "") -> Inventory:
    """Devices of a class on two NUMA nodes, each beside one of the other class under a root."""
    devices = tuple(
        Device(
            name=f"{device_class}-{number}",
            device_class=device_class,
            numa_nodes=NodeSet(number // 2),
            pcie_root=f"pci0000:0{number}",
            health=SICK if f"{device_class}-{number}" == sick else DeviceHealth(),
        )
        for number in range(count)
    )
    return Inventory(node=NODE, device_class=device_class, generation=1, devices=devices)


def held(*names: str, kind: OwnerKind = OwnerKind.CLAIM) -> Holders:
    """One owner that holds GPUs."""
    owner = Owner(kind=kind, namespace="default", name="a", uid="u-a")
    allocation = Allocation(owner=owner, holdings=(Holding(devices={"gpu": names}),), decision_id="d")
    return Holders(node=NODE, sequence=1, allocations={owner.key: allocation})


PAIRS = [f"shape-gpu-nic-{number}" for number in range(4)]
HALVES = ["shape-half-0", "shape-half-1"]


async def test_shapes_are_published_with_what_they_and_their_parts_take() -> None:
    """Each NUMA node is a half, and each GPU has a NIC: all count on one counter a part."""
    server = Server()

    await publish(server, machine("gpu"), machine("nic"), shapes=True)

    devices = server.devices()
    assert sorted(name for name in devices if name.startswith("shape")) == [*PAIRS, *HALVES, "shape-machine"]
    taken = {"counterSet": "shape-1", "counters": {"gpu-2": {"value": "1Ki"}}}
    assert devices["gpu-2"]["consumesCounters"] == (taken,)
    pair = {"counterSet": "shape-1", "counters": {"gpu-2": {"value": "1Ki"}, "nic-2": {"value": "1Ki"}}}
    assert devices["shape-gpu-nic-2"]["consumesCounters"] == (pair,)
    assert devices["shape-half-1"]["attributes"]["numa"] == {"bool": True}


async def test_shapes_have_the_taints_of_their_parts() -> None:
    """What a pod holds without a claim occupies its shapes, and a sick part makes them sick."""
    server = Server()

    await publish(server, machine("gpu"), machine("nic", sick="nic-3"), held("gpu-0", kind=OwnerKind.POD), shapes=True)

    occupied, sick = "topobus.dev/occupied:NoSchedule", "topobus.dev/health:NoExecute"
    assert server.taints() == {
        **{key: [occupied] for key in ("gpu-0", "shape-gpu-nic-0", "shape-half-0")},
        **{key: [sick] for key in ("nic-3", "shape-gpu-nic-3", "shape-half-1")},
        "shape-machine": [sick, occupied],
    }
    assert server.devices()["shape-half-1"]["attributes"]["healthReason"] == {"string": "xid"}


@pytest.mark.parametrize(("counts", "shapes"), [(False, True), (True, False)])
async def test_no_shape_is_published_where_it_could_not_be_counted_or_is_switched_off(
    *, counts: bool, shapes: bool
) -> None:
    """The parts are published without counters."""
    server = Server(counts=counts)

    await publish(server, machine("gpu"), machine("nic"), shapes=shapes)

    assert sorted(server.devices()) == [f"{name}-{number}" for name in ("gpu", "nic") for number in range(4)]
    assert not any("consumesCounters" in device for device in server.devices().values())


async def test_shapes_stay_while_a_class_is_not_known_yet() -> None:
    """The next gateway hears of the GPUs alone: nothing changes but their state."""
    server = Server()
    await publish(server, machine("gpu"), machine("nic"), shapes=True)
    before = server.devices()

    await publish(server, machine("gpu", sick="gpu-0"), shapes=True)

    assert server.devices().keys() == before.keys()
    assert server.taints().keys() == {"gpu-0", "shape-gpu-nic-0", "shape-half-0", "shape-machine"}
    assert {name: device.get("consumesCounters") for name, device in server.devices().items()} == {
        name: device.get("consumesCounters") for name, device in before.items()
    }


async def test_shape_that_the_machine_no_longer_has_stays_as_long_as_a_claim_has_it() -> None:
    """A fifth GPU makes a half bigger: the other one is no half any more. Its claim goes on, and its
    parts stay counted.
    """
    server = Server()
    await publish(server, machine("gpu"), machine("nic"), shapes=True)
    parts = server.devices()["shape-half-0"]["consumesCounters"]
    more = machine("gpu", count=5)
    more = msgspec.structs.replace(
        more, devices=(*more.devices[:4], msgspec.structs.replace(more.devices[4], numa_nodes=NodeSet(1)))
    )

    await publish(server, held("gpu-0", "gpu-1"), machine("gpu"), machine("nic"), more, shapes=True)

    kept = server.devices()["shape-half-0"]
    assert (kept["consumesCounters"], server.taints()["shape-half-0"]) == (parts, ["topobus.dev/changed:NoSchedule"])

    await publish(server, Holders(node=NODE, sequence=2), more, machine("nic"), shapes=True)

    assert "shape-half-0" not in server.devices()


DUO = OwnShape(name="duo", parts={"gpu": 1, "nic": 2}, within="numa")


async def test_shapes_of_the_operator_are_published_and_stay_while_a_claim_has_one_that_is_no_longer_set() -> None:
    """They count on the same counters as the others. Without the setting no new claim gets one."""
    server = Server()
    await publish(server, machine("gpu"), machine("nic"), shapes=True, own_shapes=(DUO,))
    before = {name: device for name, device in server.devices().items() if name.startswith("shape-duo")}

    await publish(server, held("gpu-0"), machine("gpu"), machine("nic"), shapes=True)

    counters = {name: {"value": "1Ki"} for name in ("gpu-0", "nic-0", "nic-1")}
    assert before.keys() == {"shape-duo-0", "shape-duo-2"}
    assert before["shape-duo-0"]["consumesCounters"] == ({"counterSet": "shape-0", "counters": counters},)
    assert before["shape-duo-0"]["attributes"]["level"] == {"string": "duo"}
    kept = server.devices()["shape-duo-0"]
    assert (kept["consumesCounters"], server.taints()["shape-duo-0"]) == (
        before["shape-duo-0"]["consumesCounters"],
        ["topobus.dev/changed:NoSchedule"],
    )
    assert "shape-duo-2" not in server.devices()


@pytest.mark.parametrize(
    ("shapes", "remark"),
    [(True, "ready"), (False, "ready: the own_shapes of topology are not published: cluster.shapes is off")],
)
async def test_readiness_tells_of_shapes_that_are_set_and_not_published(*, shapes: bool, remark: str) -> None:
    """The gateway is ready all the same."""
    readiness = Readiness()

    await publish(Server(), machine("gpu"), machine("nic"), shapes=shapes, own_shapes=(DUO,), readiness=readiness)

    assert readiness.report() == {"slices": remark}


WORKER = OwnShape(name="worker", parts={"gpu": 1, "nic": 1, "cpu": 4}, within="numa")
GROUPS = Inventory(node=NODE, device_class="cpu", generation=1, devices=(cpu_group(0), cpu_group(1)))
WORKERS = [f"shape-worker-{number}" for number in range(4)]
SINGLES = [f"shape-cpu-numa-{node}-{number}" for node in (0, 1) for number in range(8)]


def cpus_held(kind: OwnerKind, cpus: str, *, is_of_group: bool = False) -> Holders:
    """One owner that holds CPUs of the first node."""
    owner, held_cpus = Owner(kind=kind, namespace="default", name="a", uid="u-a"), CpuSet.parse(cpus)
    holding = Holding(cpus=held_cpus, groups={"cpu-numa-0": held_cpus} if is_of_group else {})
    allocation = Allocation(owner=owner, holdings=(holding,), decision_id="d")
    return Holders(node=NODE, sequence=1, allocations={owner.key: allocation})


def counts(server: Server) -> dict[str, str]:
    """The counters of CPUs."""
    sets = [each for api_object in server.slices.values() for each in api_object.spec.get("sharedCounters", ())]
    return {
        name: counter["value"] for each in sets for name, counter in each["counters"].items() if name.startswith("cpu-")
    }


async def test_cpus_of_shapes_are_counted_in_the_pool_of_the_devices_and_in_no_other() -> None:
    """A scheduler sees counters of one pool alone. The CPUs' own pool says that it has none."""
    server = Server()

    await publish(server, machine("gpu"), machine("nic"), GROUPS, shapes=True, own_shapes=(WORKER,))

    pools = {pool: {plain(name) for name in names} for pool, names in server.shown().items()}
    assert pools["n1/cpu"] == set()
    assert {name for name in pools["n1"] if name.startswith(("shape-worker", "shape-cpu"))} == {*WORKERS, *SINGLES}
    (taken,) = server.devices()["shape-worker-2"]["consumesCounters"]
    assert taken["counters"]["cpu-numa-1"] == {"value": "4"}
    assert counts(server) == {"cpu-numa-0": "8", "cpu-numa-1": "8"}


@pytest.mark.parametrize(
    ("shapes", "keeps", "own_shapes"),
    [
        pytest.param(False, True, (WORKER,), id="switched-off"),
        pytest.param(True, False, (WORKER,), id="no-counters"),
        pytest.param(True, True, (DUO,), id="no-shape-with-cpus"),
    ],
)
async def test_groups_are_published_with_their_capacity_where_no_shape_counts_them(
    *, shapes: bool, keeps: bool, own_shapes: tuple[OwnShape, ...]
) -> None:
    """A claim has a share of one, as without shapes."""
    server = Server(counts=keeps)

    await publish(server, machine("gpu"), machine("nic"), GROUPS, shapes=shapes, own_shapes=own_shapes)

    assert server.shown()["n1/cpu"] == ["cpu-numa-0", "cpu-numa-1"]
    assert not any(name.startswith(("shape-worker", "shape-cpu")) for name in server.shown()["n1"])


async def test_shape_with_cpus_is_left_out_where_claims_may_have_no_cpus() -> None:
    """The other shapes do not need them."""
    server = Server()

    await publish(server, machine("gpu"), machine("nic"), GROUPS, but=("cpu",), shapes=True, own_shapes=(WORKER,))

    assert server.shown().keys() == {"n1"}
    names = {plain(name) for name in server.shown()["n1"]}
    assert {*HALVES, *PAIRS} <= names
    assert not any(name.startswith(("shape-worker", "shape-cpu")) for name in names)


@pytest.mark.parametrize(
    ("ledger", "left"),
    [
        (cpus_held(OwnerKind.POD, "0-2"), "5"),
        (cpus_held(OwnerKind.CLAIM, "0-2"), "5"),
        (cpus_held(OwnerKind.CLAIM, "0-2", is_of_group=True), "8"),
    ],
    ids=["pod", "claim-by-name", "claim-by-number"],
)
async def test_counter_of_cpus_tells_what_a_scheduler_does_not_know(ledger: Holders, left: str) -> None:
    """Claims by number are counted by their shapes and single CPUs. All else is taken off."""
    server = Server()

    await publish(server, machine("gpu"), machine("nic"), GROUPS, ledger, shapes=True, own_shapes=(WORKER,))

    assert counts(server) == {"cpu-numa-0": left, "cpu-numa-1": "8"}


async def test_cpus_stay_counted_while_their_service_is_not_known_yet() -> None:
    """The next gateway hears of the other classes alone: what is held by claims must go on counting."""
    server = Server()
    await publish(server, machine("gpu"), machine("nic"), GROUPS, shapes=True, own_shapes=(WORKER,))
    before = server.devices()

    await publish(server, machine("gpu"), machine("nic"), shapes=True, own_shapes=(WORKER,))

    assert server.devices() == before


async def test_single_cpu_that_went_offline_stays_while_a_claim_has_cpus_of_its_node() -> None:
    """The counter is never less than what claims have: nothing more would be given of the whole pool."""
    server = Server()
    fewer = msgspec.structs.replace(GROUPS, devices=(cpu_group(0, 6), cpu_group(1)))
    held_by_claim = cpus_held(OwnerKind.CLAIM, "0-7", is_of_group=True)
    await publish(server, machine("gpu"), machine("nic"), GROUPS, shapes=True, own_shapes=(WORKER,))

    await publish(server, held_by_claim, machine("gpu"), machine("nic"), fewer, shapes=True, own_shapes=(WORKER,))

    changed = {f"shape-cpu-numa-0-{number}": ["topobus.dev/changed:NoSchedule"] for number in (6, 7)}
    assert (server.taints(), counts(server)["cpu-numa-0"]) == (changed, "8")
