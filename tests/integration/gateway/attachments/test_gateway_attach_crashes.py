"""A gateway killed (SIGKILL) at every single step of a claim that goes into its pod's sandbox:
prepare, attach, detach, unprepare. No container starts without the device, and it always comes
back.

The steps are counted while the call runs (see `support.mortal_gateway`). The device service and the
container runtime live on, as they do on a node; the service is strict: a device that is in a
sandbox goes into no other one, and is not undone there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.laws import steps
from support.lives import LIMIT_S, GatewayLives
from support.looks import next_look
from support.node_plane import claim, device
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.config import RuntimeSettings
from topobus.runtimepb.nri.v1alpha1 import api_pb2 as nri
from topobus.simulation.container_runtime import MadeContainer, NotStarted, Refused, SimulatedRuntime
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER
from topobus.values.idset import CpuSet

pytestmark = pytest.mark.integration

NIC = ClaimReference(name="net", uid="u-net", drivers=(DRIVER,))
CDI = ("topobus.dev/nic=claim-u-net-nic-0",)
# More than any call has: a loop that never ends would be a bug of the test.
MOST_STEPS = 60


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A NIC that goes into the sandbox of its pod."""
    async with make_rig(nats_server.url, classes=("nic",)) as made:
        made.plane.to_attach = frozenset({"nic-0"})
        await made.plane.show("nic", device("nic-0", 0))
        made.settings = msgspec.structs.replace(
            made.settings, runtime=RuntimeSettings(socket=str(made.root / "nri.sock"), attach_s=1.9)
        )
        yield made


@pytest_asyncio.fixture
async def runtime(rig: Rig) -> AsyncIterator[SimulatedRuntime]:
    """The container runtime, which goes on when its plugin dies."""
    async with SimulatedRuntime(
        rig.root / "nri.sock", CpuSet(0, 1), limit_s=LIMIT_S, cdi_dir=rig.cdi_dir
    ).serving() as made:
        yield made


@pytest_asyncio.fixture
async def lives(rig: Rig, runtime: SimulatedRuntime) -> AsyncIterator[GatewayLives]:
    """The gateway's processes, with a kubelet and a runtime beside them."""
    made = GatewayLives(rig)
    async with rig.kubelet:
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


async def reserve(rig: Rig, *pods: str) -> None:
    """Allocate the claim to the node and reserve it for pods."""
    value = claim("net", NIC.uid, "nic-0")
    consumers = [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods or ("app",)]
    await rig.plane.store(msgspec.structs.replace(value, status={**value.status, "reservedFor": consumers}))


async def insist(work: Callable[[], Awaitable[str]], at: str) -> None:
    """Ask as kubelet does: again after whatever went wrong."""
    error = ""
    try:
        async with asyncio.timeout(LIMIT_S):
            while error := await work():
                await next_look()
    except TimeoutError:
        raise AssertionError(f"{at}: {error}") from None


async def prepare(rig: Rig) -> str:
    """Prepare once; gives the error."""
    (prepared,) = await rig.kubelet.prepare_claims([NIC])
    return prepared.error


async def unprepare(rig: Rig) -> str:
    """Unprepare once; gives the errors."""
    return "; ".join((await rig.kubelet.unprepare_claims([NIC])).values())


async def start_container(rig: Rig, runtime: SimulatedRuntime, pod: nri.PodSandbox, at: str) -> MadeContainer:
    """Make the pod's container as kubelet does.

    Promise: one that started has its device in its sandbox, and nothing of the guard.
    """
    made: list[MadeContainer] = []

    async def once() -> str:
        try:
            made.append(await runtime.create("main", pod="app", cdi=CDI))
        except (Refused, NotStarted) as err:
            return str(err)
        assert rig.plane.attached == {(NIC.uid, "nic-0"): pod.id}, at
        return ""

    await insist(once, at)
    assert made[-1].mounts == (), at
    return made[-1]


async def end_pod(rig: Rig, runtime: SimulatedRuntime, pod: nri.PodSandbox, at: str) -> None:
    """End the pod and its claim. Promise: nothing is left."""
    for container in list(runtime.containers.values()):
        await runtime.end(container)
    await runtime.stop_pod(pod)
    await runtime.remove_pod(pod)
    await rig.plane.drop("net")
    await insist(lambda: unprepare(rig), at)
    check_nothing_left(rig, at)


def check_nothing_left(rig: Rig, at: str) -> None:
    """Promise: no sandbox, checkpoint, file or ledger knows the claim any more."""
    assert rig.plane.attached == {}, at
    assert Checkpoint.load(Path(rig.settings.checkpoint_path)).entries() == (), at
    assert list(rig.cdi_dir.iterdir()) == [], at
    assert rig.plane.ledger.allocations == {}, at


def check_deaths(last_step: int, least: int) -> None:
    """Promise: the call had as many steps as it has to have.

    Fewer would mean that steps were missed.
    """
    assert least <= last_step - 1 < MOST_STEPS - 2, f"{last_step - 1} steps"


@pytest.mark.law
async def test_device_is_attached_when_the_gateway_was_killed_at_any_step_of_prepare(
    rig: Rig, lives: GatewayLives, runtime: SimulatedRuntime
) -> None:
    """Asked again, the claim is whole, and its pod gets the device."""
    for step in steps(MOST_STEPS):
        await reserve(rig)
        await rig.kubelet.wait_for_driver(DRIVER)
        lives.doom(f"NodePrepareResources/{DRIVER}", step)
        await rig.kubelet.prepare_claims([NIC])
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        await insist(lambda: prepare(rig), at)
        await runtime.until(runtime.synchronized.is_set)
        pod = await runtime.run_pod("app")
        await start_container(rig, runtime, pod, at)
        await end_pod(rig, runtime, pod, at)

    check_deaths(step, 12)


@pytest.mark.law
async def test_no_container_starts_without_its_device_when_the_gateway_was_killed_at_any_step_of_attach(
    rig: Rig, lives: GatewayLives, runtime: SimulatedRuntime
) -> None:
    """The runtime starts the sandbox all the same.

    The next gateway brings the device there before any container of the claim.
    """
    for step in steps(MOST_STEPS):
        await reserve(rig)
        await insist(lambda: prepare(rig), "")
        await runtime.until(runtime.synchronized.is_set)
        lives.doom("RunPodSandbox/nri", step)
        pod = await runtime.run_pod("app")
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        with pytest.raises(NotStarted):
            await runtime.create("main", pod="app", cdi=CDI)
        await lives.start()
        await start_container(rig, runtime, pod, at)
        await end_pod(rig, runtime, pod, at)

    check_deaths(step, 12)


@pytest.mark.law
async def test_no_container_starts_without_its_device_when_the_gateway_was_killed_at_any_step_of_a_late_attach(
    rig: Rig, lives: GatewayLives, runtime: SimulatedRuntime
) -> None:
    """A pod that came after the claim was prepared gets the device with its first container: that
    one is tried again, and starts only with it.
    """
    for step in steps(MOST_STEPS):
        await reserve(rig, "first")
        await insist(lambda: prepare(rig), "")
        await runtime.until(runtime.synchronized.is_set)
        await reserve(rig, "first", "app")
        pod = await runtime.run_pod("app")
        lives.doom("CreateContainer/nri", step)
        with suppress(NotStarted):
            await runtime.create("main", pod="app", cdi=CDI)
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        await start_container(rig, runtime, pod, at)
        await end_pod(rig, runtime, pod, at)

    check_deaths(step, 14)


@pytest.mark.law
@pytest.mark.parametrize("is_started_anew", [True, False], ids=["pod-anew", "pod-ends"])
async def test_device_comes_back_when_the_gateway_was_killed_at_any_step_of_detach(
    rig: Rig, lives: GatewayLives, runtime: SimulatedRuntime, is_started_anew: bool
) -> None:
    """The pod's next sandbox gets it.

    Without one the claim is undone, and the device is out of the sandbox before that.
    """
    for step in steps(MOST_STEPS):
        await reserve(rig)
        await insist(lambda: prepare(rig), "")
        await runtime.until(runtime.synchronized.is_set)
        pod = await runtime.run_pod("app")
        assert rig.plane.attached == {(NIC.uid, "nic-0"): pod.id}
        lives.doom("StopPodSandbox/nri", step)
        await runtime.stop_pod(pod)
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        if is_started_anew:
            await runtime.until(runtime.synchronized.is_set)
            await runtime.remove_pod(pod)
            pod = await runtime.run_pod("app")
            await start_container(rig, runtime, pod, at)
        await end_pod(rig, runtime, pod, at)

    check_deaths(step, 8)


@pytest.mark.law
async def test_device_is_out_of_the_sandbox_when_the_gateway_was_killed_at_any_step_of_unprepare(
    rig: Rig, lives: GatewayLives, runtime: SimulatedRuntime
) -> None:
    """Nobody told of the sandbox's end: the claim is undone all the same, the device detached
    before (the service refuses the other order).
    """
    for step in steps(MOST_STEPS):
        await reserve(rig)
        await insist(lambda: prepare(rig), "")
        await runtime.until(runtime.synchronized.is_set)
        pod = await runtime.run_pod("app")
        await rig.plane.drop("net")
        lives.doom(f"NodeUnprepareResources/{DRIVER}", step)
        await rig.kubelet.unprepare_claims([NIC])
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        await insist(lambda: unprepare(rig), at)
        check_nothing_left(rig, at)
        await runtime.remove_pod(pod)

    check_deaths(step, 20)
