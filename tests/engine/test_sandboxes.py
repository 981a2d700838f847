"""An interface of a claim in the network namespace of a real containerd 2's sandbox: there before
the first container starts, back before the namespace is gone, and no container without it.

The device service is the test's own and moves a veth by `ip`; the roads that are rare are held by
`tests/integration/gateway/attachments` on a simulated runtime.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import msgspec
import pytest
import pytest_asyncio

from engine.containerd import Containerd
from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device, no
from topobus.formats.messages.sandbox_messages import Attached, AttachReply, AttachRequest
from topobus.gateway.config import RuntimeSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER
from topobus.values.sandbox import AttachedInterface, Sandbox

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CLAIM = ClaimReference(name="net", uid="0d1f3c52-52a4-4be3-9a53-6f0c6d4d5a01", drivers=(DRIVER,))
POD_UID = "uid-of-the-pod"
CDI = [f"topobus.dev/nic=claim-{CLAIM.uid}-nic-0"]
HOST, PEER = "tb-gate0", "tb-gate1"
INSIDE = "net1"
LOOK = f"grep -c {INSIDE}: /proc/net/dev; grep -c topobus /proc/self/mounts"


def ip(*words: str) -> str:
    """Run ip."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def veth() -> Iterator[None]:
    """A pair of interfaces on the host; the second one goes into the pod."""
    ip("link", "add", HOST, "type", "veth", "peer", "name", PEER)
    yield
    ip("link", "del", HOST)


class VethService:
    """What the device service does: moves the interface, and notes how it found things."""

    def __init__(self, rig: Rig) -> None:
        self._plane = rig.plane
        self.sandboxes: list[Sandbox] = []
        self.was_there: list[bool] = []
        """At each detach: was the namespace still there?"""
        self._plane.attach_by = self._attach
        self._plane.detach_by = self._detach

    async def _attach(self, request: AttachRequest) -> AttachReply:
        self.sandboxes.append(request.sandbox)
        name = Path(request.sandbox.network_namespace).name
        await asyncio.to_thread(ip, "link", "set", PEER, "netns", name, "name", INSIDE)
        self._plane.attached[request.owner.uid, "nic-0"] = request.sandbox.id
        return AttachReply(result=Attached(interfaces={"nic-0": AttachedInterface(name=INSIDE)}))

    async def _detach(self, sandbox: Sandbox) -> None:
        name = Path(sandbox.network_namespace).name
        is_there = name in await asyncio.to_thread(ip, "netns", "list")
        self.was_there.append(is_there)
        if is_there:
            await asyncio.to_thread(ip, "-n", name, "link", "set", INSIDE, "netns", "1", "name", PEER)


@pytest_asyncio.fixture
async def rig(folder: Path, containerd: Containerd, veth: None) -> AsyncIterator[Rig]:
    """A gateway's surroundings, with containerd's socket and CDI folder, and a claim for the
    interface.
    """
    async with NatsServer() as server, make_rig(server.url, classes=("nic",)) as made:
        made.plane.to_attach = frozenset({"nic-0"})
        # Its edits name no node of the host: an interface has none.
        made.plane.nodeless.add("nic-0")
        await made.plane.show("nic", device("nic-0", 0))
        value = claim("net", CLAIM.uid, "nic-0")
        reserved_for = [{"resource": "pods", "name": "app", "uid": POD_UID}]
        await made.plane.store(msgspec.structs.replace(value, status={**value.status, "reservedFor": reserved_for}))
        socket = str(folder / "c" / "nri.sock")
        made.settings = msgspec.structs.replace(
            made.settings, cdi_dir=str(folder / "cdi"), runtime=RuntimeSettings(socket=socket)
        )
        yield made


async def prepare(rig: Rig) -> None:
    """Prepare the claim as kubelet does, with the gateway connected to the runtime."""
    await rig.readiness.until(lambda report: report.get("nri") == "ready")
    await rig.kubelet.wait_for_driver(DRIVER)
    (prepared,) = await rig.kubelet.prepare_claims([CLAIM])
    assert prepared.error == ""


async def test_interface_is_in_a_real_sandbox_before_its_containers_and_back_before_the_namespace_is_gone(
    rig: Rig, containerd: Containerd
) -> None:
    """The runtime tells the pod and its namespace.

    A refusal holds its containers back with the reason, and the next try goes on.
    """

    async def refuse(_: AttachRequest) -> AttachReply:
        return AttachReply(result=no("name-taken", "interface.name: net1 is taken in the pod"))

    async with rig.kubelet, rig.gateway():
        await prepare(rig)
        rig.plane.attach_by = refuse
        with ExitStack() as pods:
            sandbox = await asyncio.to_thread(pods.enter_context, containerd.sandbox("app", uid=POD_UID))
            with pytest.raises(grpc.RpcError) as refused:
                await asyncio.to_thread(sandbox.run, LOOK, CDI)
            service = VethService(rig)
            ended = await asyncio.to_thread(sandbox.run, LOOK, CDI)
            await asyncio.to_thread(pods.close)
        unprepared = await rig.kubelet.unprepare_claims([CLAIM])

    (attached_sandbox,) = service.sandboxes
    assert "of pod default/app cannot start: claim default/net: interface.name: net1 is taken in the pod" in str(
        refused.value
    )
    assert (attached_sandbox.id, attached_sandbox.uid, attached_sandbox.namespace) == (sandbox.id, POD_UID, "default")
    assert ended.lines == ["1", "0"]
    assert (service.was_there, unprepared) == ([True], {})
    assert PEER in ip("link", "show")


async def test_container_waits_for_its_interface_when_the_gateway_was_away_on_a_real_containerd(
    rig: Rig, containerd: Containerd
) -> None:
    """The sandbox starts without the gateway, no container of the claim does.

    When it is back, the interface is there and the container starts.
    """
    service = VethService(rig)
    with ExitStack() as pods:
        async with rig.kubelet:
            async with rig.gateway():
                await prepare(rig)
            sandbox = await asyncio.to_thread(pods.enter_context, containerd.sandbox("app", uid=POD_UID))
            with pytest.raises(grpc.RpcError, match="topobus-gateway-has-not-seen-this-container"):
                await asyncio.to_thread(sandbox.run, LOOK, CDI)
            before = len(service.sandboxes)
            async with rig.gateway():
                await rig.plane.asks.wait_for("attach")
                ended = await asyncio.to_thread(sandbox.run, LOOK, CDI)
                await asyncio.to_thread(pods.close)

    assert (before, len(service.sandboxes), ended.lines) == (0, 1, ["1", "0"])
    assert service.was_there == [True]


async def test_container_sees_what_its_service_gives_it_on_a_real_containerd(rig: Rig, containerd: Containerd) -> None:
    """Each container of the claim has a variable of its own, by the runtime's hand.

    The guard is gone from both.
    """
    rig.plane.to_attach, rig.plane.to_adjust = frozenset(), frozenset({"nic-0"})
    look = "echo $CARD_OF; grep -c topobus /proc/self/mounts"
    async with rig.kubelet, rig.gateway():
        await prepare(rig)
        with ExitStack() as pods:
            sandbox = await asyncio.to_thread(pods.enter_context, containerd.sandbox("app", uid=POD_UID))
            ended = [await asyncio.to_thread(sandbox.run, look, CDI) for _ in range(2)]
            await asyncio.to_thread(pods.close)

    names = [request.container for request in rig.plane.asks.requests("adjust")]
    assert [name.pod_uid for name in names] == [POD_UID, POD_UID]
    assert [each.lines for each in ended] == [[str(name), "0"] for name in names]
