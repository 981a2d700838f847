"""The Node's conditions about device classes, and its start-up taint, by the requests that an API
server got.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from support.cluster_slices import SLICES, taints
from support.gateway_rig import Rig
from support.node_plane import NODE, device
from topobus.formats.messages.catalogue import REPORT
from topobus.formats.messages.report_messages import ReportReply, ReportRequest, Taken
from topobus.gateway.boot import boot_id
from topobus.testing.apiserver import ApiRequest, ApiServerSimulator
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState
from topobus.values.outcome import refuse
from topobus.values.verdict import Verdict, VerdictState

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu-ready"
NIC = "topobus.dev/nic-ready"
TAINT = {"key": "topobus.dev/starting", "effect": "NoSchedule"}
OTHER_TAINT = {"key": "example.com/other", "effect": "NoSchedule"}
KUBELETS = {"type": "Ready", "status": "True", "reason": "KubeletReady"}


def conditions(server: ApiServerSimulator) -> dict[str, dict[str, Any]]:
    """The Node's conditions by type."""
    (node,) = server.objects("Node")
    return {condition["type"]: condition for condition in node.get("status", {}).get("conditions", ())}


def reasons(server: ApiServerSimulator) -> dict[str, str]:
    """The reasons of our conditions by type."""
    return {kind: shown["reason"] for kind, shown in conditions(server).items() if kind.startswith(DRIVER)}


def node_writes(server: ApiServerSimulator) -> list[ApiRequest]:
    """Every write of the Node or its status that the server took."""
    return [
        request for request in server.requests if request.is_write and "/nodes/" in request.path and request.code < 300
    ]


def written(server: ApiServerSimulator, kind: str) -> list[tuple[str, str]]:
    """The status and reason of a condition in each write, without repetitions."""
    shown: list[tuple[str, str]] = []
    for request in node_writes(server):
        for condition in request.body["status"].get("conditions", ()) if request.path.endswith("/status") else ():
            if condition["type"] == kind and shown[-1:] != [(condition["status"], condition["reason"])]:
                shown.append((condition["status"], condition["reason"]))
    return shown


def shows_ready(request: ApiRequest, kind: str) -> bool:
    """Whether a write says that a class is ready."""
    shown = request.body["status"].get("conditions", ()) if request.path.endswith(f"/nodes/{NODE}/status") else ()
    return any((condition["type"], condition["status"]) == (kind, "True") for condition in shown)


@asynccontextmanager
async def settled(rig: Rig, server: ApiServerSimulator, **changes: object) -> AsyncIterator[None]:
    """Run a gateway and a kubelet for the length of a block, which begins when all is registered
    and published.
    """
    async with rig.kubelet, rig.gateway(**changes):
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=2)
        await rig.kubelet.wait_for_driver(DRIVER)
        await server.until(lambda: len(server.objects("ResourceSlice")) >= 2, what="two slices")
        yield


def expecting(rig: Rig, taint: str = "", **expected: int) -> dict[str, object]:
    """The settings with which a gateway expects devices."""
    cluster = msgspec.structs.replace(rig.settings.cluster, expected_devices=expected, startup_taint=taint)
    return {"cluster": cluster}


async def test_node_tells_that_its_classes_are_ready_when_they_are_offered(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """Starting, then Ready, each with its numbers; kubelet's own condition stays, and a device that
    becomes sick is no news.
    """
    server.put({"kind": "Node", "metadata": {"name": NODE}, "status": {"conditions": [KUBELETS]}})
    async with settled(rig, server):
        await server.until(lambda: set(reasons(server).values()) == {"Ready"}, what="ready classes")
        before = node_writes(server)
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1, HealthState.UNHEALTHY))
        await server.until(lambda: taints(server)["gpu-1"], what="a sick device in the slice")

    mark = f" (boot {boot_id()[:8]})"
    assert conditions(server)["Ready"] == KUBELETS
    assert conditions(server)[GPU]["message"] == f"2 devices{mark}"
    assert conditions(server)[NIC]["message"] == f"1 device{mark}"
    assert written(server, GPU) == [("False", "Starting"), ("True", "Ready")]
    assert "lastHeartbeatTime" not in conditions(server)[GPU]
    assert node_writes(server) == before


async def test_condition_does_not_flap_when_the_gateway_is_replaced(rig: Rig, server: ApiServerSimulator) -> None:
    """A roll-over with two gateways, then a gap without any: the Node is not written at all."""
    async with rig.kubelet:
        async with rig.gateway(instance="pod-1") as old:
            await server.until(lambda: set(reasons(server).values()) == {"Ready"}, what="ready classes")
            before, shown = node_writes(server), conditions(server)
            async with rig.gateway(instance="pod-2"):
                await rig.readiness.until(lambda report: "another gateway" in report.get("lock", ""))
                old.cancel()
                await rig.readiness.until(lambda report: report.get("registration") == "ready")
                await rig.readiness.until(lambda report: report.get("slices") == "ready")
        server.wipe_slices(NODE)
        async with rig.gateway(instance="pod-3"):
            await server.until(lambda: len(server.objects("ResourceSlice")) == 2, what="two slices")
            await rig.readiness.until(lambda report: report.get("registration") == "ready")
            await rig.readiness.until(lambda report: report.get("slices") == "ready")

    assert node_writes(server) == before
    assert conditions(server) == shown


async def test_class_starts_again_when_the_node_was_booted(
    rig: Rig, server: ApiServerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server still shows the boot before, and the store its devices: neither counts until
    the device service has looked in this boot.
    """
    async with settled(rig, server):
        await server.until(lambda: set(reasons(server).values()) == {"Ready"}, what="ready classes")
    monkeypatch.setattr("topobus.gateway.service.boot_id", lambda: "the-next-boot")
    async with settled(rig, server):
        await server.until(lambda: set(reasons(server).values()) == {"Starting"}, what="starting classes")
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1), boot="the-next-boot")
        await server.until(lambda: reasons(server) == {GPU: "Ready", NIC: "Starting"}, what="ready GPUs")

    assert written(server, GPU) == [("False", "Starting"), ("True", "Ready"), ("False", "Starting"), ("True", "Ready")]


async def test_condition_names_what_is_missing_when_devices_go(rig: Rig, server: ApiServerSimulator) -> None:
    """Fewer than expected, then all again."""
    gone = device("gpu-1", 1, HealthState.UNHEALTHY)
    fault = msgspec.structs.replace(gone.health.conditions[0], reason="fell-off-bus")
    gone = msgspec.structs.replace(gone, health=msgspec.structs.replace(gone.health, conditions=(fault,)))
    async with settled(rig, server, **expecting(rig, gpu=2)):
        await server.until(lambda: reasons(server)[GPU] == "Ready", what="ready GPUs")
        await rig.plane.show("gpu", device("gpu-0", 0), gone)
        await server.until(lambda: reasons(server)[GPU] == "FewerThanExpected", what="too few GPUs")
        message = conditions(server)[GPU]["message"]
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await server.until(lambda: reasons(server)[GPU] == "Ready", what="ready GPUs again")

    assert message.startswith("1 device, 2 expected; gpu-1 gone; compare with `topobus inventory` (boot")


async def test_taint_goes_when_the_last_slice_is_there(rig: Rig, server: ApiServerSimulator) -> None:
    """Not before the expected class that comes last is looked for, published and registered, and
    before its condition is True. Other taints stay.
    """
    server.put({"kind": "Node", "metadata": {"name": NODE}, "spec": {"taints": [OTHER_TAINT, TAINT]}})
    async with settled(rig, server, **expecting(rig, "topobus.dev/starting:NoSchedule", gpu=2, fpga=1)):
        await server.until(lambda: reasons(server)[GPU] == "Ready", what="ready GPUs")
        early = server.objects("Node")[0]["spec"]["taints"]
        await rig.plane.answer_for("fpga")
        await rig.plane.show("fpga", device("fpga-0", 0))
        await server.until(lambda: reasons(server)["topobus.dev/fpga-ready"] == "Ready", what="a ready FPGA")
        late = server.objects("Node")[0]["spec"]["taints"]
        server.put({"kind": "Node", "metadata": {"name": NODE}, "spec": {"taints": [TAINT]}})
    async with settled(rig, server, **expecting(rig, "topobus.dev/starting:NoSchedule", gpu=2, fpga=1)):
        await rig.readiness.until(lambda report: report.get("slices") == "ready")
        set_later = server.objects("Node")[0]["spec"]["taints"]

    requests = [request for request in server.requests if request.is_write and request.code < 300]
    (removed,) = (index for index, request in enumerate(requests) if request.path.endswith(f"/nodes/{NODE}"))
    offered = [
        index for index, request in enumerate(requests) if SLICES in request.path and "fpga-0" in str(request.body)
    ]
    ready = [index for index, request in enumerate(requests) if shows_ready(request, "topobus.dev/fpga-ready")]
    assert (early, late) == ([OTHER_TAINT, TAINT], [OTHER_TAINT])
    assert offered[0] < removed < ready[0]
    assert set_later == [TAINT]


async def test_node_is_freed_when_it_was_made_again(rig: Rig, server: ApiServerSimulator) -> None:
    """At its next start kubelet makes a deleted Node, with the taint: that one goes as well."""
    server.put({"kind": "Node", "metadata": {"name": NODE}, "spec": {"taints": [TAINT]}})
    async with settled(rig, server, **expecting(rig, "topobus.dev/starting:NoSchedule", gpu=2)):
        await server.until(lambda: reasons(server).get(GPU) == "Ready", what="ready GPUs")
        server.remove("Node", NODE)
        server.put({"kind": "Node", "metadata": {"name": NODE}, "spec": {"taints": [TAINT]}})
        await rig.kubelet.restart()
        await server.until(lambda: not server.objects("Node")[0]["spec"]["taints"], what="no taint")
        await server.until(lambda: reasons(server).get(GPU) == "Ready", what="ready GPUs")


async def test_gateway_says_what_it_may_not_write_and_goes_on(rig: Rig, server: ApiServerSimulator) -> None:
    """Without the rights the Node stays as it is, readiness says why, and slices are published; with
    them all is written.
    """
    server.put({"kind": "Node", "metadata": {"name": NODE}, "spec": {"taints": [TAINT]}})
    server.refuse("PATCH", "nodes", code=403, reason="Forbidden", times=2)
    # Not `settled`: once all is registered the third write, which is not refused, may be done.
    async with rig.kubelet, rig.gateway(**expecting(rig, "topobus.dev/starting:NoSchedule", gpu=2)):
        await rig.readiness.until(lambda report: "refused by the test" in report.get("node-conditions", ""))
        await server.until(lambda: reasons(server).get(GPU) == "Ready", what="ready GPUs")
        report = await rig.readiness.until(lambda report: report["node-conditions"] == "ready")

    assert report["slices"] == "ready"
    assert not server.objects("Node")[0]["spec"]["taints"]


async def test_conditions_of_others_reach_the_device_service_as_verdicts(rig: Rig, server: ApiServerSimulator) -> None:
    """Each look passes on what the Node says then; a class without a service and a refusal are in
    the readiness, and keep no other class waiting.
    """
    cluster = msgspec.structs.replace(
        rig.settings.cluster, resync_s=0.05, condition_verdicts={"KernelDeadlock": ("gpu", "fpga", "nic-1")}
    )
    gpu: list[Verdict] = []
    heard = asyncio.Event()

    async def take(request: ReportRequest) -> ReportReply:
        gpu.append(request.verdict)
        heard.set()
        return ReportReply(result=Taken())

    async def refuse_all(_: ReportRequest) -> ReportReply:
        return ReportReply(result=refuse("source-unlisted", "source 'node-condition' is not believed"))

    await rig.plane.bus.answer(REPORT, take, node=NODE, device_class="gpu")
    await rig.plane.bus.answer(REPORT, refuse_all, node=NODE, device_class="nic")
    deadlock = {
        "type": "KernelDeadlock",
        "status": "True",
        "reason": "Hung",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }
    server.put({"kind": "Node", "metadata": {"name": NODE}, "status": {"conditions": [KUBELETS, deadlock]}})
    async with settled(rig, server, cluster=cluster):
        await heard.wait()
        report = await rig.readiness.until(lambda report: "believed" in report.get("node-verdicts", ""))
        first = gpu[0]
        mended = {**deadlock, "status": "False", "lastTransitionTime": "2026-01-02T04:04:05Z"}
        server.put({"kind": "Node", "metadata": {"name": NODE}, "status": {"conditions": [KUBELETS, mended]}})
        while gpu[-1] == first:
            heard.clear()
            await heard.wait()

    assert first == Verdict(
        source="node-condition/KernelDeadlock",
        state=VerdictState.UNHEALTHY,
        code="Hung",
        observed_at="2026-01-02T03:04:05Z",
    )
    assert (gpu[-1].state, gpu[-1].observed_at) == (VerdictState.HEALTHY, "2026-01-02T04:04:05Z")
    assert "to class fpga: no service answers report" in report["node-verdicts"]
