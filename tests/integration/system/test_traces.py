"""Traces end to end: what one call of kubelet does in three processes is one trace at a collector,
with the decision's id.
"""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from lab.bench.node_processes import NODE, BenchNode, bench_node
from support.trace_collector import TraceCollector, trace_collector
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.simulation.kubelet.simulator import Admission, ClaimReference, Container, Pod
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

_SERVICES = ("discovery", "gpu", "topology", "gateway")
_LIMIT_S = 60.0


async def _allocate(node: BenchNode, device: str) -> None:
    async with grpc.aio.insecure_channel(
        f"unix:{node.plugin_socket('gpu')}", options=[("grpc.default_authority", "localhost")]
    ) as channel:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[device])])
        await rpc.DevicePluginStub(channel).Allocate(request, timeout=_LIMIT_S)


def _stored_claim(device: str) -> ApiObject:
    results = [{"request": "r", "driver": DRIVER, "pool": NODE, "device": device}]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": "uid-c"},
        status={"allocation": {"devices": {"results": results}}},
    )


def _assert_one_trace(collector: TraceCollector, root: str) -> None:
    """All spans of the root's trace are below it, and nothing of it is lost."""
    (first,) = collector.named(root)
    of_trace = [span for span in collector.spans if span.trace == first.trace]
    assert first.parent == b""
    assert {collector.path_of(span)[0] for span in of_trace} == {f"topobus-gateway: {root}"}


async def test_one_trace_shows_what_a_call_of_kubelet_does_in_each_process() -> None:
    """Allocate and prepare: the asks at both sides of the bus, the ledger's write, the driver's
    call and the CDI file.

    Adopt and gateway name the same decision.
    """
    with trace_collector() as collector:
        environment = {"TOPOBUS_ALL__TRACING__ENDPOINT": collector.endpoint}
        async with bench_node(_SERVICES, machine="laptop", environment=environment) as node:
            await node.kubelet.wait_for_driver(DRIVER)
            await node.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=1, timeout_s=_LIMIT_S)
            (device,) = node.kubelet.devices("topobus.dev/gpu")
            await node.bus.put(OBJECT, _stored_claim(device), kind="resourceclaim", namespace="default", name="c")
            pod = Pod(
                name="p",
                uid="p-1",
                containers=(Container(name="main"),),
                claims=(ClaimReference(name="c", uid="uid-c", drivers=(DRIVER,)),),
            )
            admitted = await node.kubelet.admit(pod)
            await asyncio.to_thread(collector.wait_for, "write CDI file", 1)
            await node.bus.delete(OBJECT, kind="resourceclaim", namespace="default", name="c")
            errors = await node.kubelet.remove(pod)
            await _allocate(node, device)
            await asyncio.to_thread(collector.wait_for, "kubelet Allocate", 1)

    assert isinstance(admitted, Admission), admitted
    assert errors == {}
    prepare = "topobus-gateway: kubelet NodePrepareResources"
    paths = {tuple(collector.path_of(span)) for span in collector.spans}
    assert (
        prepare,
        "topobus-gateway: ask adopt",
        "topobus-topology: answer adopt",
        "topobus-topology: write ledger",
    ) in paths
    drivers = [
        path for path in paths if path[:3] == (prepare, "topobus-gateway: ask prepare", "topobus-gpu: answer prepare")
    ]
    assert any(path[-1] == "topobus-gpu: driver prepare" for path in drivers), paths
    assert (prepare, "topobus-gateway: write CDI file") in paths
    allocate = "topobus-gateway: kubelet Allocate"
    assert (
        allocate,
        "topobus-gateway: ask adopt",
        "topobus-topology: answer adopt",
        "topobus-topology: write ledger",
    ) in paths
    for root in ("kubelet NodePrepareResources", "kubelet Allocate"):
        _assert_one_trace(collector, root)
        (first,) = collector.named(root)
        answers = [span for span in collector.named("answer adopt") if span.trace == first.trace]
        assert first.attributes["topobus.decision_id"] in {span.attributes["topobus.decision_id"] for span in answers}
    # Loops that run all the time are in no trace.
    assert {collector.path_of(span)[0].partition(" ")[2].partition(" ")[0] for span in collector.spans} == {"kubelet"}


async def test_services_serve_as_ever_when_the_collector_is_away() -> None:
    """Nothing listens at the endpoint: a pod is admitted, and each service ends in time."""
    environment = {"TOPOBUS_ALL__TRACING__ENDPOINT": "http://127.0.0.1:9"}
    async with bench_node(_SERVICES, machine="laptop", environment=environment) as node:
        await node.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=1, timeout_s=_LIMIT_S)
        (device,) = node.kubelet.devices("topobus.dev/gpu")
        await _allocate(node, device)
        services = list(node.services.values())

    assert [service.end_status for service in services] == [0] * len(_SERVICES)
