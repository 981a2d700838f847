"""What people and containers see of a device in a pod's sandbox: the claim's status, events on pod
and claim, the file in the container. A runtime of the test's own, an API server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device, no
from topobus.formats.messages.sandbox_messages import Attached, AttachReply, AttachRequest
from topobus.gateway.config import MetadataSettings, RuntimeSettings
from topobus.simulation.container_runtime import Refused, SimulatedRuntime
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER
from topobus.values.idset import CpuSet
from topobus.values.sandbox import AttachedInterface

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

NET1 = AttachedInterface(name="net1", mac="02:00:00:00:00:01", addresses=("10.1.2.3/24",), mtu=1400)
NETWORK = {"interfaceName": "net1", "hardwareAddress": "02:00:00:00:00:01", "ips": ["10.1.2.3/24"]}


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator) -> AsyncIterator[Rig]:
    """A NIC that goes into its pod's sandbox."""
    async with make_rig(nats_server.url, classes=("nic",)) as made:
        made.plane.to_attach = frozenset({"nic-0"})
        made.plane.attach_by = attach
        await made.plane.show("nic", device("nic-0", 0))
        made.join(server)
        made.settings = msgspec.structs.replace(
            made.settings,
            metadata=MetadataSettings(versions=("v1alpha1",)),
            runtime=RuntimeSettings(socket=str(made.root / "nri.sock"), attach_s=1.9),
        )
        yield made


@pytest.fixture
def runtime(rig: Rig) -> SimulatedRuntime:
    """A runtime; the test starts it."""
    return SimulatedRuntime(rig.root / "nri.sock", CpuSet(0, 1), cdi_dir=rig.cdi_dir)


async def attach(_: AttachRequest) -> AttachReply:
    """What the device service answers."""
    return AttachReply(result=Attached(interfaces={"nic-0": NET1}))


def allocated(server: ApiServerSimulator, *pods: str) -> ClaimReference:
    """Put a claim that is allocated and reserved for pods into the cluster."""
    consumers = [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods]
    spec = {"devices": {"requests": [{"name": "want-nic", "exactly": {"deviceClassName": "nic"}}]}}
    status = {**claim("net", "", "nic-0").status, "reservedFor": consumers}
    stored = server.put({"kind": "ResourceClaim", "metadata": {"name": "net"}, "spec": spec, "status": status})
    return ClaimReference(name="net", uid=stored["metadata"]["uid"], drivers=(DRIVER,))


def states(server: ApiServerSimulator) -> list[tuple[str, str, dict[str, Any] | None]]:
    """What stands in the claim's status: whether the device is ready, why, its interface."""
    entries: list[dict[str, Any]] = server.objects("ResourceClaim")[0]["status"].get("devices") or []
    return [
        (entry["conditions"][0]["status"], entry["conditions"][0]["reason"], entry.get("networkData"))
        for entry in entries
    ]


def events(server: ApiServerSimulator) -> list[tuple[str, str, int]]:
    """Events by kind of object, with their reason and how often they were said."""
    return sorted(
        (event["involvedObject"]["kind"], event["reason"], event["count"]) for event in server.objects("Event")
    )


async def prepared(rig: Rig, reference: ClaimReference) -> tuple[str, ...]:
    """Prepare a claim; gives the CDI names of its containers."""
    await rig.kubelet.wait_for_driver(DRIVER)
    (done,) = await rig.kubelet.prepare_claims([reference])
    assert done.error == ""
    return tuple(name for claim_device in done.devices for name in claim_device.cdi_devices)


async def test_interface_is_seen_in_status_events_and_container(
    rig: Rig, server: ApiServerSimulator, runtime: SimulatedRuntime
) -> None:
    """With the attachment; nothing is said before, and the status goes when the pod's sandbox does.

    A restart says nothing twice.
    """
    reference = allocated(server, "app")
    async with runtime.serving():
        async with rig.gateway(), rig.kubelet:
            await runtime.synchronized.wait()
            names = await prepared(rig, reference)
            before = states(server)
            pod = await runtime.run_pod("app")
            container = await runtime.create("main", pod="app", cdi=names)
            (file,) = (
                mount.source for mount in container.message.mounts if "dra-device-attributes" in mount.destination
            )
            described = json.loads(await asyncio.to_thread(Path(file).read_text, encoding="utf-8"))
            await server.until(
                lambda: states(server) == [("True", "Attached", NETWORK)], what="the interface in the claim's status"
            )
            await server.until(lambda: len(server.objects("Event")) == 2, what="events")
        runtime.synchronized.clear()
        async with rig.gateway(), rig.kubelet:
            await runtime.synchronized.wait()
            await rig.kubelet.wait_for_driver(DRIVER)
            await runtime.end(container)
            await runtime.stop_pod(pod)
            await server.until(lambda: states(server) == [], what="an empty status")
            errors = await rig.kubelet.unprepare_claims([reference])

    assert (before, errors) == ([], {})
    (device_shown,) = described["requests"][0]["devices"]
    assert (device_shown["name"], device_shown["networkData"]) == ("nic-0", NETWORK)
    assert events(server) == [("Pod", "DevicesAttached", 1), ("ResourceClaim", "DevicesAttached", 1)]
    assert not await asyncio.to_thread(Path(file).exists)
    (request,) = rig.plane.asks.requests("attach")
    assert "is not in the cluster" in request.sandbox.ports_unknown


async def test_refused_device_is_seen_with_its_reason_until_it_is_attached(
    rig: Rig, server: ApiServerSimulator, runtime: SimulatedRuntime
) -> None:
    """Not ready, with the service's reason and code.

    Kubelet's next try makes it ready, and a repeat is no second event.
    """
    reference = allocated(server, "app")
    refusal = no("interface-config-invalid", "mtu: got 99999, wanted at most 9000")

    async def refuse(_: AttachRequest) -> AttachReply:
        return AttachReply(result=refusal)

    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepared(rig, reference)
        rig.plane.attach_by = refuse
        await runtime.run_pod("app")
        for _ in range(3):
            with pytest.raises(Refused):
                await runtime.create("main", pod="app")
        await server.until(lambda: states(server) == [("False", "InterfaceConfigInvalid", None)], what="why not")
        await server.until(lambda: len(server.objects("Event")) == 2, what="events")
        rig.plane.attach_by = attach
        await runtime.create("main", pod="app")
        await server.until(lambda: states(server) == [("True", "Attached", NETWORK)], what="the interface")
        await server.until(lambda: len(server.objects("Event")) == 4, what="more events")

    (message,) = {event["message"] for event in server.objects("Event") if event["reason"] == "DevicesNotAttached"}
    assert "mtu: got 99999, wanted at most 9000 (interface-config-invalid); correct the configuration" in message


async def test_sandbox_starts_when_the_api_server_is_away(
    rig: Rig, server: ApiServerSimulator, runtime: SimulatedRuntime
) -> None:
    """Neither status nor events nor the pod's ports hold it up for longer than half a second.

    The status comes when the server does.
    """
    reference = allocated(server, "app")
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepared(rig, reference)
        await server.stop()
        await runtime.run_pod("app")
        attached = rig.plane.asks.requests("attach")
        await server.start()
        await server.until(lambda: states(server) == [("True", "Attached", NETWORK)], what="the interface")

    assert [request.sandbox.ports_unknown != "" for request in attached] == [True]
