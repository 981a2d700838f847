"""Containers that are adjusted when they are made: the gateway between a container runtime of the
test's own (NRI) and a device service that says what each container gets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.attachments import NIC, prepare
from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device, no
from topobus.formats.messages.adjust_messages import Adjusted, AdjustReply, AdjustRequest
from topobus.gateway.config import RuntimeSettings
from topobus.gateway.containers.rules.edit_limits import EditRights
from topobus.simulation.container_runtime import NotStarted, Refused, SimulatedRuntime
from topobus.simulation.nats_server import NatsServer
from topobus.values.edits import ContainerEdits, DeviceNode, Mount

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

CDI = ("topobus.dev/nic=claim-u-net-nic-0",)
BESIDE = ("topobus.dev/nic=claim-u-net-nic-1",)
SHORT_S = 0.2


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """One claim with two NICs, of which one adjusts its containers."""
    async with make_rig(nats_server.url, classes=("nic",)) as made:
        made.plane.to_adjust = frozenset({"nic-0"})
        await made.plane.show("nic", device("nic-0", 0), device("nic-1", 0))
        await made.plane.store(claim("net", NIC.uid, "nic-0", "nic-1"))
        made.settings = msgspec.structs.replace(
            made.settings, runtime=RuntimeSettings(socket=str(made.root / "nri.sock"))
        )
        yield made


def answering(edits: ContainerEdits, *, of: str = "nic-0") -> AdjustReply:
    """An answer for one device."""
    return AdjustReply(result=Adjusted(edits={of: edits}))


async def test_container_gets_what_its_service_says_when_it_is_made(rig: Rig, runtime: SimulatedRuntime) -> None:
    """The service hears which container it is, and each gets its own answer; the guard is gone.

    A container that has only the claim's other device is not asked about.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        error = await prepare(rig)
        await runtime.run_pod("app")
        first = await runtime.create("main", pod="app", cdi=CDI)
        second = await runtime.create("side", pod="app", cdi=CDI)
        beside = await runtime.create("beside", pod="app", cdi=BESIDE)

    assert error == ""
    assert (first.env, second.env) == ({"CARD_OF": "default/app/main"}, {"CARD_OF": "default/app/side"})
    assert (first.mounts, beside.env, beside.mounts) == ((), {}, ())
    assert [request.devices for request in rig.plane.asks.requests("adjust")] == [("nic-0",), ("nic-0",)]


async def test_mounts_and_annotations_reach_the_container_when_the_class_may_bring_them(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """What the operator allows for the class arrives beside the variables."""

    async def adjust(_: AdjustRequest) -> AdjustReply:
        mount = Mount(host_path="/usr/share", container_path="/card")
        return answering(ContainerEdits(mounts=(mount,), annotations={"card.example/slot": "7"}))

    rig.plane.adjust_by = adjust
    rights = {"nic": EditRights(device_nodes=("/dev/nic-",), mounts=("/usr/share",), annotations=("card.example/",))}
    async with runtime.serving(), rig.kubelet, rig.gateway(edits=rights):
        await runtime.synchronized.wait()
        await prepare(rig)
        await runtime.run_pod("app")
        made = await runtime.create("main", pod="app", cdi=CDI)

    assert (made.mounts, made.annotations) == (("/card",), {"card.example/slot": "7"})


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        pytest.param(
            AdjustReply(result=no("no-slot", "card nic-0 has no slot left")),
            "claim default/net: card nic-0 has no slot left",
            id="refused",
        ),
        pytest.param(
            answering(ContainerEdits(env={"LD_PRELOAD": "/x.so"})), "which the gateway forbids", id="forbidden-variable"
        ),
        pytest.param(
            answering(ContainerEdits(mounts=(Mount(host_path="/etc", container_path="/card"),))),
            "which the gateway forbids",
            id="forbidden-mount",
        ),
        pytest.param(
            answering(ContainerEdits(device_nodes=(DeviceNode(path="/dev/vfio/7"),))),
            "more than variables, bind mounts and annotations",
            id="no-words",
        ),
        pytest.param(answering(ContainerEdits(), of="nic-1"), "its service answers for nic-1", id="another-device"),
    ],
)
async def test_container_is_refused_with_the_reason_and_made_at_the_next_try(
    rig: Rig, runtime: SimulatedRuntime, reply: AdjustReply, said: str
) -> None:
    """Nothing that the gateway would not let `prepare` bring comes in by this door.

    When the reason is gone the same container is made.
    """

    async def adjust(_: AdjustRequest) -> AdjustReply:
        return reply

    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        await runtime.run_pod("app")
        rig.plane.adjust_by = adjust
        with pytest.raises(Refused) as refused:
            await runtime.create("main", pod="app", cdi=CDI)
        rig.plane.adjust_by = None
        made = await runtime.create("main", pod="app", cdi=CDI)

    assert "container main of pod default/app cannot start: claim default/net" in str(
        refused.value
    ) or "the nic service wants" in str(refused.value)
    assert said in str(refused.value)
    assert made.env == {"CARD_OF": "default/app/main"}


async def test_container_waits_for_kubelets_next_try_when_the_service_is_silent(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """The runtime waits for the limit and no longer, so the gateway stays its plugin.

    The next try gets the answer.
    """
    settings = RuntimeSettings(socket=str(runtime.socket), adjust_s=SHORT_S)
    gate = rig.plane.asks.hold("adjust")
    async with runtime.serving(), rig.kubelet, rig.gateway(runtime=settings):
        await runtime.synchronized.wait()
        await prepare(rig)
        await runtime.run_pod("app")
        with pytest.raises(Refused, match=r"what the container gets of nic-0 is not known: .*; kubelet tries again"):
            await runtime.create("main", pod="app", cdi=CDI)
        is_still_plugin = runtime.synchronized.is_set()
        gate.set()
        made = await runtime.create("main", pod="app", cdi=CDI)

    assert is_still_plugin
    assert made.env == {"CARD_OF": "default/app/main"}


async def test_claim_is_refused_at_prepare_when_the_runtime_is_not_there(rig: Rig) -> None:
    """Nobody would adjust its containers, and a pod is told before one is made."""
    async with rig.kubelet, rig.gateway():
        error = await prepare(rig)

    assert "needs the container runtime's plugin interface (NRI) to give containers what is theirs of nic-0" in error


async def test_container_cannot_start_while_the_gateway_is_away(rig: Rig, runtime: SimulatedRuntime) -> None:
    """The guard holds it back, and the checkpoint tells the next gateway that its service must be
    asked.
    """
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig)
            await runtime.run_pod("app")
        with pytest.raises(NotStarted):
            await runtime.create("main", pod="app", cdi=CDI)
        runtime.synchronized.clear()
        async with rig.gateway():
            await runtime.synchronized.wait()
            made = await runtime.create("main", pod="app", cdi=CDI)

    assert made.env == {"CARD_OF": "default/app/main"}


async def test_container_is_refused_when_nobody_answers_for_the_class(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A service that is away holds its claims' containers back, and no others."""
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        await runtime.run_pod("app")
        await rig.plane.bus.stop_answering()
        with pytest.raises(Refused, match=r"what the container gets of nic-0 is not known: .*; kubelet tries again"):
            await runtime.create("main", pod="app", cdi=CDI)
        other = await runtime.create("main", pod="other")

    assert other.env == {}
