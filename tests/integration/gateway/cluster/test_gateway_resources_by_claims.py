"""Who serves pods that ask for a resource by its name: claims where the API server keeps
`extendedResourceName`, else the device plugin; and the ways between.
"""

from __future__ import annotations

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from support.cluster_slices import taints
from support.gateway_rig import Rig
from support.looks import until
from support.node_plane import NODE, device
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.clock import ManualClock
from topobus.testing.kubelet import Admission, Container, Pod
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU, NIC = "topobus.dev/gpu", "topobus.dev/nic"
POD = Pod(name="p", uid="p-1", containers=(Container(name="main", resources={GPU: 1}),))


def device_class(expression: str = class_selector("gpu"), *, name: str = "gpu.topobus.dev") -> dict[str, object]:
    """The class by which claims serve the resource, as examples/claims/classes.yaml has it."""
    spec = {"selectors": [{"cel": {"expression": expression}}], "extendedResourceName": GPU}
    return {"kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def sockets(rig: Rig) -> list[str]:
    """The class's device plugin sockets in kubelet's folder."""
    return [path.name for path in rig.kubelet.device_plugin_dir.glob("topobus-gpu-*.sock")]


async def taken_back(rig: Rig) -> None:
    """Wait until kubelet counts no device of the class's resource, sick ones included."""
    while rig.kubelet.capacity()[GPU].capacity:
        await rig.kubelet.wait_for_more(len(rig.kubelet.events))


async def registered(rig: Rig) -> set[str]:
    """The resources that kubelet has, once the gateway has nothing left to register."""
    await rig.readiness.until(lambda report: report.get("registration") == "ready")
    await rig.kubelet.wait_for_driver(DRIVER)
    return set(rig.kubelet.capacity())


async def test_device_plugin_is_not_registered_when_the_api_server_keeps_the_resources_name(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """Kubelet never hears of the class whose resource claims serve.

    Its driver is there, and the other class has its device plugin.
    """
    server.put(device_class())
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(NIC, allocatable=1)
        seen = await registered(rig)

    assert seen == {NIC}


@pytest.mark.parametrize(
    ("case", "expression", "node"),
    [
        ("older-server", class_selector("gpu"), {}),
        ("class-of-others", 'device.driver == "gpu.nvidia.com"', {}),
        ("class-of-a-part", 'device.attributes["resource.kubernetes.io"].numaNode == 0', {}),
        ("class-that-does-not-compile", "device.drivers", {}),
        ("older-kubelet", class_selector("gpu"), {"nodeInfo": {"kubeletVersion": "v1.35.3"}}),
    ],
)
async def test_device_plugin_serves_when_claims_cannot(
    rig: Rig, server: ApiServerSimulator, case: str, expression: str, node: dict[str, object]
) -> None:
    """A server that drops the field, a class that selects other devices, a kubelet that would not
    prepare the claim: all is as it was.
    """
    if case == "older-server":
        server.set_drops({"DeviceClass": ["spec.extendedResourceName"]})
    server.put({"kind": "Node", "metadata": {"name": NODE}, "status": node})
    server.put(device_class(expression))
    async with rig.kubelet, rig.gateway():
        offered = await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        admitted = await rig.kubelet.admit(POD)

    assert offered.allocatable == 2
    assert isinstance(admitted, Admission)


async def test_device_plugin_serves_when_the_class_selects_a_pools_devices_too(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """What a pod gets by a name is the same by either way: a class of all GPUs is no word for those
    that no pool has.

    The log warns of such a class.
    """
    pooled = structs.replace(device("gpu-1", 1), pool="gpu-big")
    await rig.plane.show("gpu", device("gpu-0", 0), pooled)
    server.put(device_class())
    with capture_logs() as lines:
        async with rig.kubelet, rig.gateway():
            own = await rig.kubelet.wait_for_resource(GPU, allocatable=1)
            pool = await rig.kubelet.wait_for_resource("topobus.dev/gpu-big", allocatable=1)

    warnings = [line for line in lines if line["event"] == "resource.served" and line["log_level"] == "warning"]
    assert (own.allocatable, pool.allocatable) == (1, 1)
    assert [(line["resource"], line["by"]) for line in warnings] == [(GPU, "device-plugin")]
    assert "also selects gpu-1" in warnings[0]["why"]


@pytest.mark.parametrize("setting", ["device-plugin", "claims"])
async def test_setting_goes_before_what_the_server_tells(rig: Rig, server: ApiServerSimulator, setting: str) -> None:
    """`device-plugin` registers beside a class that would serve; `claims` registers nothing though
    no class does.
    """
    if setting == "device-plugin":
        server.put(device_class())
    async with rig.kubelet, rig.gateway(resources_by=setting):
        if setting == "device-plugin":
            await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        seen = await registered(rig)

    assert (GPU in seen) == (setting == "device-plugin")


async def test_pod_keeps_its_device_when_the_server_is_upgraded_and_downgraded(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """A class that appears takes kubelet's list back at once.

    The pod's device stays its own, closed to claims, until it ends; and the
    list returns with the class gone.
    """
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.kubelet.admit(POD)
        server.put(device_class())
        await taken_back(rig)
        during = await rig.readiness.until(lambda report: "claims serve" in report["registration"])
        held = [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()]
        await server.until(lambda: _tainted(server) == 1, what="the device closed to claims")
        refused = await rig.kubelet.admit(structs.replace(POD, name="q", uid="q-1"))
        await rig.kubelet.remove(POD)
        await server.until(lambda: _tainted(server) == 0, what="the device open to claims")
        await rig.readiness.until(lambda report: report["registration"] == "ready")
        left = sockets(rig)
        server.remove("DeviceClass", "gpu.topobus.dev")
        back = await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        admitted = await rig.kubelet.admit(structs.replace(POD, name="r", uid="r-1"))

    assert "pods keep the devices" in during["registration"]
    assert (held, left) == ([GPU], [])
    assert not isinstance(refused, Admission)
    assert back.allocatable == 2
    assert isinstance(admitted, Admission)


@pytest.mark.parametrize("pod_ends", [True, False], ids=["pod-ended", "pod-runs"])
async def test_list_is_taken_back_when_another_gateway_had_offered_it(
    rig: Rig, server: ApiServerSimulator, pod_ends: bool
) -> None:
    """An earlier gateway process' devices are kubelet's for five minutes after its end.

    The next one takes them back, and stays as long as a pod has one.
    """
    async with rig.kubelet:
        async with rig.gateway(resources_by="device-plugin"):
            await rig.kubelet.wait_for_resource(GPU, allocatable=2)
            await rig.kubelet.admit(POD)
            if pod_ends:
                await rig.kubelet.remove(POD)
                await rig.plane.asks.wait_for("released")
        server.put(device_class())
        server.put({"kind": "Node", "metadata": {"name": NODE}, "status": {"capacity": {GPU: "2"}}})
        for earlier in (1, 2):
            await rig.kubelet.wait_for_event("ListAndWatch.closed", subject=GPU, count=earlier)
            async with rig.gateway():
                await rig.kubelet.wait_for_event("Register.ok", subject=GPU, count=earlier + 1)
                await taken_back(rig)
                if pod_ends:
                    await rig.kubelet.wait_for_event("ListAndWatch.closed", subject=GPU, count=earlier + 1)
                else:
                    await rig.readiness.until(lambda report: f"claims serve {GPU}" in report.get("registration", ""))
        last = rig.kubelet.capacity()[GPU]

    assert (last.allocatable, last.capacity) == (0, 0)


async def test_list_is_taken_back_when_the_class_comes_before_the_node_counts_the_devices(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """Kubelet tells its Node every ten seconds what it has.

    A list that was merely dropped would keep kubelet from starting
    pods with claims for five minutes.
    """
    server.put({"kind": "Node", "metadata": {"name": NODE}, "status": {"capacity": {GPU: "0"}}})
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        server.put(device_class())
        await taken_back(rig)
        await rig.kubelet.wait_for_event("ListAndWatch.closed", subject=GPU, count=2)
        # Kubelet has its answer before the plugin's server has ended.
        await until(lambda: not sockets(rig))


async def test_list_of_an_earlier_gateway_is_taken_back_when_the_node_counts_it_late(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """The one before ended within the seconds that kubelet takes to tell its Node: it is looked at
    once more.
    """
    clock = ManualClock()
    server.put({"kind": "Node", "metadata": {"name": NODE}, "status": {"capacity": {GPU: "0"}}})
    async with rig.kubelet:
        async with rig.gateway(resources_by="device-plugin"):
            await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.kubelet.wait_for_event("ListAndWatch.closed", subject=GPU, count=1)
        server.put(device_class())
        async with rig.gateway(clock=clock):
            await clock.asleep(15.0)
            server.put({"kind": "Node", "metadata": {"name": NODE}, "status": {"capacity": {GPU: "2"}}})
            clock.advance(15.0)
            await taken_back(rig)

    assert rig.kubelet.capacity()[GPU].capacity == 0


def _tainted(server: ApiServerSimulator) -> int:
    """How many GPUs the slices close to claims."""
    return sum("topobus.dev/occupied:NoSchedule" in closed for closed in taints(server).values())
