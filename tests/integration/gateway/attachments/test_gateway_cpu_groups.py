"""Claims for so many CPUs of a group: which they are is decided when the claim is prepared, kept
over restarts, and never the same for two claims.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import HostServices, PrepareContext
from topobus.devicekit.settings import CpuGroupSettings
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.messages.catalogue import ADOPT, ALIGNMENT
from topobus.formats.messages.messages import Adopted, AdoptRequest, ApiObject, Prepared, PrepareReply, PrepareRequest
from topobus.gateway.config import CpuSettings
from topobus.simulation.container_runtime import SimulatedRuntime
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.kubelet import Admission, ClaimReference, Container, KubeletSimulator, Pod
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER, pool_of_class
from topobus.values.edits import ContainerEdits
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.outcome import Refusal
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

ALL = CpuSet.parse("0-7")
GPU = Device(name="gpu-0", device_class="gpu", numa_nodes=NodeSet(1))
WORKER = OwnShape(name="worker", parts={"gpu": 1, "cpu": 2}, within="numa")


def machine() -> Machine:
    """The machine that the node plane shows: two NUMA nodes of four CPUs."""
    cpus = tuple(Cpu(id=cpu, online=True, core=cpu, numa_node=cpu // 4, socket=cpu // 4) for cpu in ALL)
    nodes = tuple(
        NumaNode(id=node, cpus=CpuSet.of(range(4 * node, 4 * node + 4)), memory_bytes=1 << 34) for node in (0, 1)
    )
    return Machine(node=NODE, numa_nodes=nodes, cpus=cpus)


def groups(by: str = "numa") -> tuple[Device, ...]:
    """The groups as the cpu service shows them."""
    driver = LinuxCpuDriver()
    driver.configure(HostServices(cpus=msgspec.convert({"groups": by}, CpuGroupSettings)))
    return tuple(driver.discover(Tree(HardwareSettings(root="/nowhere")), machine()).devices)


def claim(name: str, parameters: dict[str, Any] | None = None, **cpus: int) -> ApiObject:
    """A claim that was given so many CPUs of groups, by the last part of their names."""
    results = [
        {
            "request": group,
            "driver": DRIVER,
            "pool": pool_of_class(NODE, "cpu"),
            "device": f"cpu-{group.replace('_', '-')}",
            "shareID": f"3cec12a4-0000-4000-8000-{number:012d}",
            "consumedCapacity": {"cpus": str(count)},
        }
        for number, (group, count) in enumerate(cpus.items())
    ]
    for result in results:
        result["request"] = str(result["request"]).replace("_", "-")
    metadata = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    opaque = {
        "driver": DRIVER,
        "parameters": {"apiVersion": "topobus.dev/v1", "kind": "CpuParameters", **(parameters or {})},
    }
    status = {"allocation": {"devices": {"results": results, "config": [{"source": "FromClaim", "opaque": opaque}]}}}
    return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status)


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A node whose CPUs are offered by NUMA node."""
    async with make_rig(nats_server.url, classes=("cpu", "gpu")) as made:
        nodes = made.root / "sys/devices/system/node"
        for node in (0, 1):
            (nodes / f"node{node}").mkdir(parents=True)
            (nodes / f"node{node}/cpulist").write_text(f"{4 * node}-{4 * node + 3}\n")
        (nodes / "has_memory").write_text("0-1\n")
        driver, tree = LinuxCpuDriver(), Tree(HardwareSettings(root=str(made.root)))

        async def prepare(request: PrepareRequest) -> PrepareReply:
            if request.devices == (GPU.name,):
                return PrepareReply(result=Prepared(edits={GPU.name: ContainerEdits(env={"GPU": "0"})}))
            devices = [device for by in ("numa", "machine") for device in groups(by) if device.name in request.devices]
            answer = driver.prepare(
                tree, devices, PrepareContext(owner=request.owner, cpus=request.cpus, config=request.config)
            )
            if isinstance(answer, Refusal):
                return PrepareReply(result=answer)
            return PrepareReply(
                result=Prepared(edits={device.name: answer[device.name] for device in devices}, common=answer[""])
            )

        made.plane.prepare_by = prepare
        await made.plane.show("cpu", *groups())
        made.settings = msgspec.structs.replace(made.settings, cpus=CpuSettings(owned="all"))
        yield made


@pytest.fixture
def runtime(rig: Rig) -> SimulatedRuntime:
    """A runtime; the test starts it."""
    return SimulatedRuntime(rig.root / "nri.sock", ALL)


async def prepare(rig: Rig, name: str) -> str:
    """Prepare a claim as kubelet does; gives its error."""
    await rig.kubelet.wait_for_driver(DRIVER)
    (prepared,) = await rig.kubelet.prepare_claims([reference(name)])
    return prepared.error


def reference(name: str) -> ClaimReference:
    """How kubelet knows a claim."""
    return ClaimReference(name=name, uid=f"u-{name}", drivers=(DRIVER,))


def adoption(name: str, **cpus: int) -> AdoptRequest:
    """What was written of a claim some time ago."""
    counts = {f"cpu-{group.replace('_', '-')}": count for group, count in cpus.items()}
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name=name, uid=f"u-{name}")
    return AdoptRequest(
        op_id="of-old", owner=owner, devices={"cpu": tuple(counts)}, shared={"cpu": tuple(counts)}, group_cpus=counts
    )


def held(rig: Rig, name: str) -> CpuSet:
    """What the ledger says a claim has."""
    cpus = CpuSet()
    for allocation in rig.plane.ledger.allocations.values():
        for holding in allocation.holdings if allocation.owner.name == name else ():
            cpus |= holding.cpus
    return cpus


def test_groups_are_the_units_of_the_machine() -> None:
    """Each unit is one device with a capacity of its CPUs, of which claims have shares of one CPU
    or more.
    """
    (first, second), (whole,) = groups("numa"), groups("machine")

    assert (first.name, second.name, whole.name) == ("cpu-numa-0", "cpu-numa-1", "cpu-machine")
    assert (first.near_cpus, first.numa_nodes, whole.numa_nodes) == (CpuSet.parse("0-3"), NodeSet(0), NodeSet(0, 1))
    assert [device.capacity for device in (first, second, whole)] == [{"cpus": 4}, {"cpus": 4}, {"cpus": 8}]
    assert all(device.allows_multiple for device in (first, second, whole))


async def test_claims_of_a_group_get_cpus_of_their_own(rig: Rig, runtime: SimulatedRuntime) -> None:
    """The policy chooses inside the group.

    Containers are pinned to the choice with memory of its node, and all
    others have the rest until it ends.
    """
    await rig.plane.store(claim("one", numa_1=2))
    await rig.plane.store(claim("two", numa_1=1))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour", pod="other")
        errors = (await prepare(rig, "one"), await prepare(rig, "two"))
        first = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-one-cpu-numa-1",))
        second = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-two-cpu-numa-1",))
        shared = neighbour.cpus
        await runtime.end(first)
        await rig.kubelet.unprepare_claims([reference("one")])
        await runtime.until(lambda: neighbour.cpus == ALL - CpuSet(6))

    assert errors == ("", "")
    assert (first.cpus, first.mems, second.cpus, second.mems) == (CpuSet(4, 5), "1", CpuSet(6), "1")
    assert shared == CpuSet.parse("0-3,7")


async def test_shape_has_cpus_of_its_own_beside_its_devices(rig: Rig, runtime: SimulatedRuntime) -> None:
    """Its container is pinned to CPUs of its GPU's node, a claim for a single CPU to another one, and all
    others have the rest. The shape may say of its CPUs that its containers run on the pool as well.
    """
    cpus = Inventory(node=NODE, device_class="cpu", generation=1, devices=groups())
    gpus = Inventory(node=NODE, device_class="gpu", generation=1, devices=(GPU,))
    parts = shapes_of([cpus, gpus], [WORKER]).parts
    shape = next(name for name in parts if name.startswith("shape-worker"))
    single = next(name for name, groups_of in parts.items() if groups_of == ("cpu-numa-1",))
    await rig.plane.bus.put(ALIGNMENT, NodeAlignment(node=NODE, own_shapes=(WORKER,)), node=NODE)
    await rig.plane.show("gpu", GPU)
    for name, device in (("one", shape), ("two", single), ("mixed", shape)):
        stored = claim(name, {"withShared": True, "apiVersion": "cpu.topobus.dev/v1"} if name == "mixed" else {})
        result = {"request": "r", "driver": DRIVER, "pool": NODE, "device": device}
        stored.status["allocation"]["devices"]["results"] = [result]
        await rig.plane.store(stored)
    cdi = {name: f"topobus.dev/cpu=claim-u-{name}-cpu-numa-1" for name in ("one", "two", "mixed")}
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour", pod="other")
        errors = [await prepare(rig, "one"), await prepare(rig, "two"), await prepare(rig, "mixed")]
        first = await runtime.create("main", cdi=(cdi["one"],))
        second = await runtime.create("main", cdi=(cdi["two"],))
        pinned = (first.cpus, first.mems, second.cpus, neighbour.cpus)
        await runtime.end(first)
        await rig.plane.drop("one")
        await rig.kubelet.unprepare_claims([reference("one")])
        await runtime.until(lambda: neighbour.cpus == ALL - CpuSet(6))
        mixed_error = await prepare(rig, "mixed")
        mixed = await runtime.create("main", cdi=(cdi["mixed"],))

    assert errors[:2] == ["", ""]
    assert "claim default/one holds gpu-0" in errors[2]
    assert pinned == (CpuSet(4, 5), "1", CpuSet(6), CpuSet.parse("0-3,7"))
    assert (mixed_error, mixed.cpus) == ("", ALL - CpuSet(6))


async def test_choice_stays_when_the_claim_is_asked_for_again(rig: Rig, runtime: SimulatedRuntime) -> None:
    """After a restart of the gateway, and after a preparation that went wrong, the claim has the
    CPUs that the ledger gave it.
    """
    await rig.plane.store(claim("first", numa_0=1))
    await rig.plane.store(claim("one", numa_0=2))
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig, "first")
            await prepare(rig, "one")
            chosen = held(rig, "one")
            await rig.kubelet.unprepare_claims([reference("first")])
        await runtime.until(lambda: not runtime.synchronized.is_set())
        async with rig.gateway():
            await runtime.synchronized.wait()
            await rig.kubelet.wait_for_event("NotifyRegistrationStatus", subject=DRIVER, count=2)
            await prepare(rig, "one")
            again = held(rig, "one")
            await rig.kubelet.unprepare_claims([reference("one")])
            await prepare(rig, "one")
            pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-one-cpu-numa-0",))

    assert (chosen, again, pinned.cpus) == (CpuSet(1, 2), CpuSet(1, 2), CpuSet(1, 2))


async def test_claim_is_refused_when_others_hold_the_groups_cpus(rig: Rig, runtime: SimulatedRuntime) -> None:
    """Kubelet's own CPU manager is such another.

    Nothing was taken, and what is there can still be had.
    """
    await rig.plane.hold(Owner(kind=OwnerKind.POD, namespace="default", name="db", uid="u-db"), cpu=("cpu-0", "cpu-1"))
    await rig.plane.store(claim("large", numa_0=3))
    await rig.plane.store(claim("small", numa_0=2))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        large, small = await prepare(rig, "large"), await prepare(rig, "small")

    assert "group cpu-numa-0: wants 3 exclusive CPUs, of which 2 can be had together" in large
    assert (small, held(rig, "small"), held(rig, "large")) == ("", CpuSet(2, 3), CpuSet())


async def test_choice_keeps_to_the_cpus_that_are_topobus_to_give(rig: Rig, runtime: SimulatedRuntime) -> None:
    """What the gateway's setting leaves to kubelet is chosen for nobody."""
    await rig.plane.store(claim("one", numa_0=1))
    await rig.plane.store(claim("two", numa_0=1))
    async with runtime.serving(), rig.kubelet, rig.gateway(cpus=CpuSettings(owned="3-7")):
        await runtime.synchronized.wait()
        first, second = await prepare(rig, "one"), await prepare(rig, "two")

    assert (first, held(rig, "one")) == ("", CpuSet(3))
    assert "wants 1 exclusive CPUs, of which 0 can be had together" in second


async def test_claim_has_all_cpus_of_a_group_when_the_cluster_shares_no_devices(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Without consumable capacity a group is allocated as a whole: the claim has those of its CPUs
    that are Topobus' to give, and the next claim none of them.
    """
    whole = claim("whole", numa_0=1)
    del whole.status["allocation"]["devices"]["results"][0]["shareID"]
    del whole.status["allocation"]["devices"]["results"][0]["consumedCapacity"]
    await rig.plane.store(whole)
    await rig.plane.store(claim("two", numa_0=1))
    async with runtime.serving(), rig.kubelet, rig.gateway(cpus=CpuSettings(owned="1-7")):
        await runtime.synchronized.wait()
        first = await prepare(rig, "whole")
        pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-whole-cpu-numa-0",))
        chosen = held(rig, "whole")
        again = await prepare(rig, "whole")
        second = await prepare(rig, "two")
        await rig.kubelet.unprepare_claims([reference("whole")])

    assert (first, chosen, pinned.cpus, again) == ("", CpuSet(1, 2, 3), CpuSet(1, 2, 3), "")
    assert "claim default/whole holds cpu-numa-0" in second


async def test_container_runs_on_the_pool_too_when_its_claim_says_so(rig: Rig, runtime: SimulatedRuntime) -> None:
    """Its own CPUs and everybody's, as the pool is now: it shrinks and grows with the others', and
    nobody else has its own.
    """
    await rig.plane.store(claim("mixed", {"withShared": True}, numa_0=1))
    await rig.plane.store(claim("one", numa_1=2))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour", pod="other")
        error = await prepare(rig, "mixed")
        mixed = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-mixed-cpu-numa-0",))
        alone = (mixed.cpus, neighbour.cpus)
        await prepare(rig, "one")
        beside = (mixed.cpus, neighbour.cpus)
        await rig.kubelet.unprepare_claims([reference("one")])
        await runtime.until(lambda: mixed.cpus == ALL)

    assert (error, mixed.mems, mixed.quota) == ("", "", -1)
    assert alone == (ALL, ALL - CpuSet(0))
    assert beside == (CpuSet.parse("0-3,6-7"), CpuSet.parse("1-3,6-7"))


async def test_containers_of_a_pod_have_what_they_name(rig: Rig, runtime: SimulatedRuntime) -> None:
    """An init container and two others of one claim have the same CPUs.

    One that names two claims has both's, with memory of both nodes;
    one that names none has the pool.
    """
    await rig.plane.store(claim("near", numa_0=2))
    await rig.plane.store(claim("far", numa_1=1))
    near, far = "topobus.dev/cpu=claim-u-near-cpu-numa-0", "topobus.dev/cpu=claim-u-far-cpu-numa-1"
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        errors = (await prepare(rig, "near"), await prepare(rig, "far"))
        first = await runtime.create("init", cdi=(near,))
        await runtime.end(first)
        containers = [
            await runtime.create(name, cdi=cdi)
            for name, cdi in (("a", (near,)), ("b", (near,)), ("both", (near, far)), ("none", ()))
        ]

    assert errors == ("", "")
    assert (first.cpus, first.mems) == (CpuSet(0, 1), "0")
    assert [(container.cpus, container.mems) for container in containers] == [
        (CpuSet(0, 1), "0"),
        (CpuSet(0, 1), "0"),
        (CpuSet(0, 1, 4), "0-1"),
        (CpuSet.parse("2-3,5-7"), ""),
    ]


async def test_claim_is_refused_when_its_parameters_are_none(rig: Rig, runtime: SimulatedRuntime) -> None:
    """The field is named, and no CPU was taken from anybody."""
    await rig.plane.store(claim("one", {"withshared": True}, numa_0=1))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour", pod="other")
        error = await prepare(rig, "one")

    assert 'CpuParameters.withshared is True, wanted one of withShared, did you mean "withShared"?' in error
    assert neighbour.cpus == ALL


async def test_sets_stay_when_kubelet_and_the_cpu_service_come_back(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A new kubelet asks for its claims again, and a new cpu service publishes its groups again:
    nobody's CPUs change, and the next claim gets others.
    """
    await rig.plane.store(claim("one", numa_0=2))
    await rig.plane.store(claim("two", numa_0=1))
    async with runtime.serving(), rig.gateway():
        async with rig.kubelet:
            await runtime.synchronized.wait()
            neighbour = await runtime.create("neighbour", pod="other")
            await prepare(rig, "one")
            pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-one-cpu-numa-0",))
        await rig.plane.show("cpu", *groups())
        async with KubeletSimulator(rig.kubelet.root) as kubelet:
            await kubelet.wait_for_driver(DRIVER)
            (again,) = await kubelet.prepare_claims([reference("one")])
            before = (pinned.cpus, neighbour.cpus, held(rig, "one"))
            (other,) = await kubelet.prepare_claims([reference("two")])

    assert (again.error, other.error) == ("", "")
    assert before == (CpuSet(0, 1), CpuSet.parse("2-7"), CpuSet(0, 1))
    assert (pinned.cpus, neighbour.cpus, held(rig, "two")) == (CpuSet(0, 1), CpuSet.parse("3-7"), CpuSet(2))


async def test_no_two_claims_have_a_cpu_in_any_history(rig: Rig, runtime: SimulatedRuntime) -> None:
    """Claims of random sizes come and go while the gateway starts anew now and then: sets never
    meet, sizes are those asked for, and each keeps its own.
    """
    random = Random(11)
    live: dict[str, CpuSet] = {}
    made = refused = 0
    async with runtime.serving(), rig.kubelet:
        for life in range(4):
            async with rig.gateway():
                await runtime.synchronized.wait()
                await rig.kubelet.wait_for_event("NotifyRegistrationStatus", subject=DRIVER, count=life + 1)
                await rig.kubelet.wait_for_driver(DRIVER)
                for step in range(12):
                    if live and random.random() < 0.45:
                        gone = random.choice(sorted(live))
                        assert await rig.kubelet.unprepare_claims([reference(gone)]) == {}
                        await rig.plane.drop(gone)
                        await rig.plane.let_go(
                            Owner(kind=OwnerKind.CLAIM, namespace="default", name=gone, uid=f"u-{gone}")
                        )
                        del live[gone]
                        continue
                    name, group, count = (
                        f"c{life}-{step}",
                        random.choice(("numa_0", "numa_1")),
                        random.choice((1, 1, 2, 3)),
                    )
                    await rig.plane.store(claim(name, **{group: count}))
                    error = await prepare(rig, name)
                    if error:
                        refused += 1
                        continue
                    made += 1
                    live[name] = held(rig, name)
                    assert len(live[name]) == count
                    for cpus in (held(rig, other) for other in live if other != name):
                        assert not cpus & live[name]
                for name, cpus in live.items():
                    await prepare(rig, name)
                    assert held(rig, name) == cpus
            await runtime.until(lambda: not runtime.synchronized.is_set())

    assert made > 10
    assert refused > 0


async def test_cpus_of_a_running_claim_are_given_to_nobody_when_the_ledger_is_lost(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """The ledger begins empty and knows nothing of the claim, but the checkpoint does: the next
    claim of the group gets other CPUs, or none.
    """
    await rig.plane.store(claim("one", numa_0=2))
    await rig.plane.store(claim("two", numa_0=2))
    await rig.plane.store(claim("three", numa_0=1))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        first = await prepare(rig, "one")
        pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-one-cpu-numa-0",))
        await rig.plane.lose()
        second, third = await prepare(rig, "two"), await prepare(rig, "three")

    assert (first, second, pinned.cpus, held(rig, "two")) == ("", "", CpuSet(0, 1), CpuSet(2, 3))
    assert "group cpu-numa-0: wants 1 exclusive CPUs, of which 0 can be had together" in third


async def test_ledger_that_was_lost_is_told_of_a_groups_cpus_again(rig: Rig, runtime: SimulatedRuntime) -> None:
    """Kubelet lists the claim's pod, and the checkpoint says which CPUs it has: the ledger gets
    these again, not others of the group.
    """
    await rig.plane.store(claim("first", numa_0=1))
    await rig.plane.store(claim("one", numa_0=2))
    pod = Pod(
        name="p", namespace="default", uid="u-p", containers=(Container(name="main"),), claims=(reference("one"),)
    )
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig, "first")
        admitted = await rig.kubelet.admit(pod)
        before = held(rig, "one")
        await rig.plane.lose()
        await rig.plane.asks.wait_for("adopted", 3)
        after = held(rig, "one")
        (allocation,) = rig.plane.ledger.allocations.values()

    assert isinstance(admitted, Admission), admitted
    assert (before, after, allocation.is_prepared) == (CpuSet(1, 2), CpuSet(1, 2), True)
    assert [dict(holding.groups) for holding in allocation.holdings] == [{"cpu-numa-0": CpuSet(1, 2)}]


async def test_claim_gets_other_cpus_when_an_old_ledger_gives_it_those_of_another(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A ledger that came back from a backup holds CPUs for a claim that has others' by now: the
    gateway knows whose they are and does not share them.
    """
    await rig.plane.store(claim("one", numa_0=2))
    await rig.plane.store(claim("two", numa_0=2))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig, "one")
        pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-one-cpu-numa-0",))
        await rig.plane.lose()
        asked = await rig.bus.ask(ADOPT, adoption("two", numa_0=2), timeout_s=60, node=NODE)
        error = await prepare(rig, "two")

    assert isinstance(asked.result, Adopted)
    assert asked.result.cpus == {"cpu-numa-0": CpuSet(0, 1)}
    assert (error, pinned.cpus, held(rig, "two")) == ("", CpuSet(0, 1), CpuSet(2, 3))


async def test_claim_is_refused_when_its_cpus_are_a_running_claims(rig: Rig, runtime: SimulatedRuntime) -> None:
    """Whatever ledger and cpu service say, no CPU is in two exclusive sets; with the other claim's
    end it can be had.
    """
    honest = rig.plane.prepare_by
    assert honest is not None

    async def confused(request: PrepareRequest) -> PrepareReply:
        return await honest(msgspec.structs.replace(request, cpus={"cpu-numa-0": CpuSet(0, 1)}))

    await rig.plane.store(claim("one", numa_0=2))
    await rig.plane.store(claim("two", numa_0=2))
    rig.plane.prepare_by = confused
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        first, second = await prepare(rig, "one"), await prepare(rig, "two")
        await rig.kubelet.unprepare_claims([reference("one")])
        again = await prepare(rig, "two")

    assert (first, again) == ("", "")
    assert "CPUs 0-1 belong to another prepared claim on this node" in second


async def test_claim_of_a_group_is_not_adopted_anew_when_kubelet_lists_its_pod(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """The ledger has the claim's CPUs by their group: at every look it says the same as kubelet,
    and nothing is written again.
    """
    await rig.plane.store(claim("one", numa_0=2))
    pod = Pod(
        name="p", namespace="default", uid="u-p", containers=(Container(name="main"),), claims=(reference("one"),)
    )
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await rig.kubelet.wait_for_driver(DRIVER)
        admitted = await rig.kubelet.admit(pod)
        before = len([event for event in rig.kubelet.events if event.event == "PodResources.List"])
        await rig.kubelet.wait_for_event("PodResources.List", count=before + 6)
        adoptions = rig.plane.asks.requests("adopted")

    assert isinstance(admitted, Admission), admitted
    assert len(adoptions) == 1
