"""Pods that are deleted by force while a container of theirs runs on: their devices are nobody
else's until the container runtime has told that it has ended.

The simulated kubelet forgets such a pod at once, as the real one does, and has its claims undone at
its next comparison; the simulated runtime has containers that nobody can stop.
`docs/explanation/double-hand-out.md` has what was measured on a real node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.attachments import prepare
from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from topobus.gateway.config import RuntimeSettings
from topobus.simulation.container_runtime import MadeContainer, NotStarted, NotStopped, SimulatedRuntime
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Admission, ClaimReference, Container, Pod, Rejection
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
FIRST = ClaimReference(name="first", uid="u-first", drivers=(DRIVER,))
SECOND = ClaimReference(name="second", uid="u-second", drivers=(DRIVER,))
CDI = ("topobus.dev/gpu=claim-u-first-gpu-0",)


def claiming(name: str, reference: ClaimReference) -> Pod:
    """A pod with a claim."""
    return Pod(name=name, uid=f"uid-{name}", containers=(Container(name="main"),), claims=(reference,))


def asking(name: str, uid: str = "") -> Pod:
    """A pod that asks for one GPU by its resource."""
    return Pod(name=name, uid=uid or f"uid-{name}", containers=(Container(name="main", resources={GPU: 1}),))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """One GPU, and two claims for it."""
    async with make_rig(nats_server.url, classes=("gpu",)) as made:
        await made.plane.show("gpu", device("gpu-0", 0))
        await made.plane.store(claim("first", FIRST.uid, "gpu-0"))
        await made.plane.store(claim("second", SECOND.uid, "gpu-0"))
        yield made


async def fail() -> None:
    """Fail a container's start, as the runtime does with a command that does not exist."""
    raise NotStarted('exec: "/no/such/command": no such file or directory')


async def start_claiming(rig: Rig, runtime: SimulatedRuntime) -> MadeContainer:
    """Run a pod with the first claim whose container nothing can stop."""
    await rig.kubelet.wait_for_driver(DRIVER)
    admission = await rig.kubelet.admit(claiming("a", FIRST))
    assert isinstance(admission, Admission), admission
    await runtime.run_pod("a")
    container = await runtime.create("main", pod="a", cdi=CDI)
    runtime.hung.add(container.id)
    return container


async def start_asking(rig: Rig, runtime: SimulatedRuntime) -> MadeContainer:
    """Run a pod with the GPU by its resource whose container nothing can stop.

    Kubelet has said which pod it is.
    """
    await rig.kubelet.wait_for_resource(GPU, allocatable=1)
    admission = await rig.kubelet.admit(asking("a"))
    assert isinstance(admission, Admission), admission
    await rig.plane.asks.wait_for("named")
    await runtime.run_pod("a")
    container = await runtime.create("main", pod="a")
    runtime.hung.add(container.id)
    return container


async def remove_claiming(rig: Rig, runtime: SimulatedRuntime, container: MadeContainer) -> dict[str, str]:
    """Delete the pod by force.

    Kubelet tries to stop its container, and has the claim undone all the same.
    Gives what the driver said to that.
    """
    rig.kubelet.remove_by_force(claiming("a", FIRST))
    with pytest.raises(NotStopped):
        await runtime.end(container)
    await rig.plane.drop("first")
    return await rig.kubelet.compare_claims()


async def end(runtime: SimulatedRuntime, container: MadeContainer) -> None:
    """Let the container end after all."""
    runtime.hung.clear()
    await runtime.end(container)


async def test_claims_device_stays_held_when_its_pod_is_deleted_by_force_and_a_container_runs_on(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Kubelet is told that the claim is undone, so that it forgets it.

    The next claim hears which container has the device, and gets it as soon as that has ended.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        container = await start_claiming(rig, runtime)
        said = await remove_claiming(rig, runtime, container)
        refused = await prepare(rig, SECOND)
        undone_before = rig.plane.asks.requests("unprepare")
        await end(runtime, container)
        await rig.plane.asks.wait_for("released")
        prepared = await prepare(rig, SECOND)

    assert (said, undone_before) == ({}, [])
    assert "claim default/first holds gpu-0: container main of pod default/a has not ended and has gpu-0" in refused
    assert prepared == ""


async def test_claims_device_stays_held_when_the_runtime_does_not_tell_cdi_names(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Containerd 2.0 and 2.1: the container is known by its pod, for
    which the claim was reserved.
    """
    stored = claim("first", FIRST.uid, "gpu-0")
    consumers = [{"resource": "pods", "name": "a", "uid": "uid-a"}]
    await rig.plane.store(msgspec.structs.replace(stored, status={**stored.status, "reservedFor": consumers}))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.admit(claiming("a", FIRST))
        await runtime.run_pod("a")
        container = await runtime.create("main", pod="a")
        runtime.hung.add(container.id)
        await remove_claiming(rig, runtime, container)
        refused = await prepare(rig, SECOND)

    assert "container main of pod default/a has not ended" in refused


@pytest.mark.parametrize("is_told", [True, False], ids=["runtime-there", "runtime-away"])
async def test_claims_device_stays_held_when_the_gateway_is_killed_meanwhile(
    rig: Rig, runtime: SimulatedRuntime, is_told: bool
) -> None:
    """The next gateway is told of the container by the runtime.

    Until it is, it goes by what the one before it has written down.
    """
    away = RuntimeSettings(socket=str(rig.root / "away.sock"))
    async with rig.kubelet, runtime.serving():
        async with rig.gateway():
            await runtime.synchronized.wait()
            container = await start_claiming(rig, runtime)
            await remove_claiming(rig, runtime, container)
        await runtime.until(lambda: not runtime.synchronized.is_set())
        async with rig.gateway() if is_told else rig.gateway(runtime=away):
            await rig.kubelet.wait_for_event("NotifyRegistrationStatus", subject=DRIVER, count=2)
            if is_told:
                await runtime.synchronized.wait()
            refused = await prepare(rig, SECOND)
        await runtime.until(lambda: not runtime.synchronized.is_set())
        await end(runtime, container)
        async with rig.gateway():
            await rig.kubelet.wait_for_event("NotifyRegistrationStatus", subject=DRIVER, count=3)
            await rig.plane.asks.wait_for("released")
            prepared = await prepare(rig, SECOND)

    reason = (
        "container main of pod default/a has not ended"
        if is_told
        else "whether its containers have ended is not known: no container runtime"
    )
    assert f"claim default/first holds gpu-0: {reason}" in refused
    assert prepared == ""


async def test_hold_ends_when_the_container_vanished_while_the_runtime_was_away(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A runtime that was killed tells nothing, and that ends no container.

    When it is back it tells which there are.
    """
    async with rig.kubelet, rig.gateway():
        async with runtime.serving():
            await runtime.synchronized.wait()
            container = await start_claiming(rig, runtime)
            await remove_claiming(rig, runtime, container)
        refused = await prepare(rig, SECOND)
        del runtime.containers[container.id]
        async with runtime.serving():
            await rig.plane.asks.wait_for("released")
            prepared = await prepare(rig, SECOND)

    assert "container main of pod default/a has not ended" in refused
    assert prepared == ""


async def test_device_stays_held_when_a_runtime_that_was_killed_does_not_list_the_container_any_more(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shim that hangs: the new runtime cannot read the container's state and leaves it out, but
    processes are in its control group.
    """
    alive: set[str] = set()
    monkeypatch.setattr(
        "topobus.gateway.containers.live_containers.with_processes", lambda ids, _: frozenset(alive.intersection(ids))
    )
    async with rig.kubelet, rig.gateway():
        async with runtime.serving():
            await runtime.synchronized.wait()
            container = await start_claiming(rig, runtime)
            await remove_claiming(rig, runtime, container)
        alive.add(container.id)
        runtime.unlisted.add(container.id)
        async with runtime.serving():
            await runtime.synchronized.wait()
            refused = await prepare(rig, SECOND)
            alive.clear()
            await rig.plane.asks.wait_for("released")
            prepared = await prepare(rig, SECOND)

    assert "container main of pod default/a has not ended" in refused
    assert prepared == ""


async def test_claims_device_is_the_next_ones_when_the_container_of_a_pod_that_is_kept_could_not_be_started(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A wrong command with `restartPolicy: Never`: the runtime tells of no end, and the container
    stays for as long as the pod's object; its sandbox ends.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.admit(claiming("a", FIRST))
        sandbox = await runtime.run_pod("a")
        runtime.while_starting = fail
        with pytest.raises(NotStarted):
            await runtime.create("main", pod="a", cdi=CDI)
        await runtime.stop_pod(sandbox)
        await rig.plane.drop("first")
        await rig.kubelet.unprepare_claims([FIRST])
        prepared = await prepare(rig, SECOND)

    assert prepared == ""


async def test_device_of_a_resource_is_the_next_pods_when_the_container_of_a_pod_that_is_kept_could_not_be_started(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet gives the device to the next pod at once, and that pod is not turned away."""
    monkeypatch.setattr("topobus.gateway.device_plugins.device_plugin._ENDING_S", 0.0)
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        await rig.kubelet.admit(asking("a"))
        await rig.plane.asks.wait_for("named")
        sandbox = await runtime.run_pod("a")
        runtime.while_starting = fail
        with pytest.raises(NotStarted):
            await runtime.create("main", pod="a")
        await runtime.stop_pod(sandbox)
        rig.kubelet.remove_by_force(asking("a"))
        admitted = await rig.kubelet.admit(asking("b"))

    assert isinstance(admitted, Admission), admitted


async def test_claims_device_stays_held_when_the_sandbox_cannot_be_stopped(rig: Rig, runtime: SimulatedRuntime) -> None:
    """The runtime ends a sandbox after its containers only, so nothing is told as long as one of
    them cannot be stopped.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        container = await start_claiming(rig, runtime)
        await remove_claiming(rig, runtime, container)
        with pytest.raises(NotStopped):
            await runtime.stop_pod(runtime.sandboxes[container.message.pod_sandbox_id])
        refused = await prepare(rig, SECOND)

    assert "container main of pod default/a has not ended" in refused


async def test_claim_is_undone_as_ever_when_its_container_ends_with_the_pod(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Nothing is held longer than its container runs: kubelet's answer comes when all is undone."""
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        container = await start_claiming(rig, runtime)
        await end(runtime, container)
        await rig.plane.drop("first")
        said = await rig.kubelet.remove(claiming("a", FIRST))
        prepared = await prepare(rig, SECOND)

    assert (said, prepared) == ({}, "")


async def test_allocate_waits_when_the_container_of_a_forgotten_pod_is_about_to_end(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ignores TERM is killed two seconds after a deletion by force: the next pod is not
    turned away for that.
    """
    monkeypatch.setattr("topobus.gateway.device_plugins.device_plugin._ENDING_S", 60.0)
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        container = await start_asking(rig, runtime)
        runtime.hung.clear()
        runtime.ignores_term.add(container.id)
        rig.kubelet.remove_by_force(asking("a"))
        with pytest.raises(NotStopped):
            await runtime.end(container, is_killed=False)
        admitting = asyncio.create_task(rig.kubelet.admit(asking("b")))
        await rig.kubelet.wait_for_event("Allocate", subject=GPU, count=2)
        adopted_before = len(rig.plane.asks.requests("adopted"))
        await runtime.end(container)
        answer = await admitting

    assert adopted_before == 1
    assert isinstance(answer, Admission), answer


async def test_allocate_is_refused_when_the_container_of_a_forgotten_pod_runs_on(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a pod of the same name.

    The device leaves the node's allocatable, so that no more pods are sent there, and is back at
    once when the container has ended.
    """
    monkeypatch.setattr("topobus.gateway.device_plugins.device_plugin._ENDING_S", 0.0)
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        container = await start_asking(rig, runtime)
        rig.kubelet.remove_by_force(asking("a"))
        refused = await rig.kubelet.admit(asking("a", "uid-of-the-next"))
        await rig.kubelet.wait_for_resource(GPU, allocatable=0)
        await end(runtime, container)
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        admitted = await rig.kubelet.admit(asking("b"))

    assert isinstance(refused, Rejection), refused
    assert (
        f"{GPU}: gpu-0 cannot be given to another container yet: container main of pod default/a has it and "
        "has not ended" in refused.message
    )
    assert isinstance(admitted, Admission), admitted


async def test_allocate_is_refused_when_the_gateway_was_killed_meanwhile(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger knows the pod, and the runtime tells its containers anew."""
    monkeypatch.setattr("topobus.gateway.device_plugins.device_plugin._ENDING_S", 0.0)
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await start_asking(rig, runtime)
        await runtime.until(lambda: not runtime.synchronized.is_set())
        rig.kubelet.remove_by_force(asking("a"))
        async with rig.gateway():
            await runtime.synchronized.wait()
            # Not one that is offered any more: kubelet refuses by itself, for the
            # reconciliation has seen it, too.
            await rig.kubelet.wait_for_resource(GPU, allocatable=0)
            refused = await rig.kubelet.admit(asking("b"))

    assert isinstance(refused, Rejection), refused


async def test_reconciliation_frees_nothing_for_a_claim_when_the_container_of_a_forgotten_pod_runs_on(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Kubelet lists active pods only.

    The device is the claim's when the container has ended, and not at the second
    look that does not find the pod.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        container = await start_asking(rig, runtime)
        rig.kubelet.remove_by_force(asking("a"))
        looks = sum(event.event == "PodResources.List" for event in rig.kubelet.events)
        await rig.kubelet.wait_for_event("PodResources.List", count=looks + 4)
        refused = await prepare(rig, SECOND)
        released_before = rig.plane.asks.requests("released")
        await end(runtime, container)
        await rig.plane.asks.wait_for("released")
        prepared = await prepare(rig, SECOND)

    assert f"device-plugin kubelet/{GPU} holds gpu-0" in refused
    assert (released_before, prepared) == ([], "")


@pytest.mark.parametrize("socket", ["", "nri.sock"], ids=["switched-off", "not-there"])
async def test_kubelet_is_believed_when_no_runtime_tells_of_containers(rig: Rig, socket: str) -> None:
    """Without NRI there is nothing to go by: a pod that kubelet has forgotten is over, as the page
    says.
    """
    settings = RuntimeSettings(socket=str(rig.root / socket) if socket else "")
    async with rig.kubelet, rig.gateway(runtime=settings):
        await rig.kubelet.wait_for_driver(DRIVER)
        first = await rig.kubelet.admit(claiming("a", FIRST))
        rig.kubelet.remove_by_force(claiming("a", FIRST))
        await rig.plane.drop("first")
        said = await rig.kubelet.compare_claims()
        second = await rig.kubelet.admit(claiming("b", SECOND))

    assert isinstance(first, Admission)
    assert said == {}
    assert isinstance(second, Admission), second
