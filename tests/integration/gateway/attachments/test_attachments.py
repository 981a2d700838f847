"""Devices that go into a pod's sandbox: the gateway between a container runtime of the test's own
(NRI) and a device service that attaches by rule.

`tests/engine/test_sandboxes.py` runs the main road on a real containerd.
"""

from __future__ import annotations

import asyncio

import pytest

from support.attachments import (
    CDI,
    IMPATIENT,
    NIC,
    PLAIN,
    configured,
    prepare,
    reserved,
    until_attached,
    verbs,
)
from support.gateway_rig import Rig
from support.node_plane import claim, no
from topobus.formats.messages.sandbox_messages import Accepted, Attached, AttachReply, AttachRequest
from topobus.gateway.config import RuntimeSettings
from topobus.simulation.container_runtime import NotStarted, Refused, SimulatedRuntime
from topobus.values.dra_names import DRIVER
from topobus.values.errors import PeerUnavailable
from topobus.values.sandbox import AttachedInterface

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_device_is_in_the_sandbox_before_a_container_starts_and_out_of_it_before_it_is_undone(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """The device service hears of the sandbox with its network namespace, and the claim's
    parameters.

    Each verb comes once, in order.
    """
    await rig.plane.store(reserved(configured(claim("net", NIC.uid, "nic-0"), {"mtu": 1400}), "app"))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        error = await prepare(rig)
        pod = await runtime.run_pod("app")
        inside = dict(rig.plane.attached)
        container = await runtime.create("main", pod="app", cdi=CDI)
        await runtime.end(container)
        await runtime.stop_pod(pod)
        outside = dict(rig.plane.attached)
        await runtime.remove_pod(pod)
        unprepared = await rig.kubelet.unprepare_claims([NIC])

    (request,) = rig.plane.asks.requests("attach")
    assert (error, unprepared, outside, container.mounts) == ("", {}, {}, ())
    assert inside == {(NIC.uid, "nic-0"): pod.id}
    assert verbs(rig) == ["prepare", "attach", "detach", "unprepare"]
    assert (request.sandbox.uid, request.sandbox.network_namespace) == ("uid-app", pod.linux.namespaces[1].path)
    assert request.config == ({"mtu": 1400},)


async def test_containers_are_refused_with_the_services_reason(rig: Rig, runtime: SimulatedRuntime) -> None:
    """Kubelet shows why at the pod.

    Its next try gets the device when the reason is gone, and pods without the claim are not
    held up. The sandbox itself is not refused: containerd before 2.2.6 would leave a process
    behind, and end at its next restart.
    """
    refusal = no("mtu-too-large", "mtu: got 99999, wanted at most 9000")

    async def refuse_all(_: AttachRequest) -> AttachReply:
        return AttachReply(result=refusal)

    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        rig.plane.attach_by = refuse_all
        pod = await runtime.run_pod("app")
        with pytest.raises(Refused) as refused:
            await runtime.create("main", pod="app", cdi=CDI)
        await runtime.create("main", pod="other")
        rig.plane.attach_by = None
        await runtime.create("main", pod="app", cdi=CDI)

    assert (
        "container main of pod default/app cannot start: claim default/net: mtu: got 99999, wanted at most 9000"
        in str(refused.value)
    )
    assert rig.plane.attached == {(NIC.uid, "nic-0"): pod.id}


async def test_containers_wait_when_the_service_needs_longer_than_the_runtime_waits(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """The sandbox starts and its containers are refused until the device is there.

    The service is asked once, and other pods start meanwhile.
    """
    settings = RuntimeSettings(socket=str(runtime.socket), attach_s=IMPATIENT)
    gate = rig.plane.asks.hold("attach")
    async with runtime.serving(), rig.kubelet, rig.gateway(runtime=settings):
        await runtime.synchronized.wait()
        await prepare(rig)
        pod = await runtime.run_pod("app")
        # On a busy machine the runtime's wait may be over before the service is asked.
        await rig.plane.asks.wait_for("attach")
        with pytest.raises(
            Refused, match=r"nic-0 is not in the pod yet \(the nic service is at work\); kubelet tries again"
        ):
            await runtime.create("main", pod="app", cdi=CDI)
        with pytest.raises(Refused, match="nic-0 is not in the pod yet"):
            await runtime.create("sidecar", pod="app")
        other = await runtime.create("main", pod="other")
        gate.set()
        await rig.plane.asks.wait_for("attach")
        async with asyncio.timeout(30):
            while not runtime.containers.keys() - {other.id}:
                try:
                    await runtime.create("main", pod="app", cdi=CDI)
                except Refused:
                    continue

    assert rig.plane.attached == {(NIC.uid, "nic-0"): pod.id}
    assert verbs(rig) == ["prepare", "attach"]


async def test_service_is_asked_again_when_it_has_accepted_the_work(rig: Rig, runtime: SimulatedRuntime) -> None:
    """By the same operation, until it is done.

    What it works at stands in the container's refusal.
    """
    answers = [AttachReply(result=Accepted(retry_after_s=0.0, limit_s=60.0, what="waiting for a DHCP server"))] * 2

    async def work(_: AttachRequest) -> AttachReply | None:
        return answers.pop() if answers else None

    rig.plane.attach_by = work
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        await runtime.run_pod("app")
        container = await runtime.create("main", pod="app", cdi=CDI)

    operations = {request.op_id for request in rig.plane.asks.requests("attach")}
    assert (container.mounts, len(rig.plane.asks.requests("attach")), len(operations)) == ((), 3, 1)


async def test_containers_are_refused_when_the_service_is_away(rig: Rig, runtime: SimulatedRuntime) -> None:
    """The reason names it; the sandbox gets the device as soon as it is back."""

    async def fail(_: AttachRequest) -> AttachReply:
        raise PeerUnavailable("the nic service restarts")

    settings = RuntimeSettings(socket=str(runtime.socket), attach_s=0.5)
    async with runtime.serving(), rig.kubelet, rig.gateway(runtime=settings):
        await runtime.synchronized.wait()
        await prepare(rig)
        rig.plane.attach_by = fail
        pod = await runtime.run_pod("app")
        with pytest.raises(
            Refused, match=r"nic-0 could not be brought into the pod in time: .*the nic service restarts"
        ):
            await runtime.create("main", pod="app", cdi=CDI)
        rig.plane.attach_by = None
        await until_attached(rig)
        await runtime.create("main", pod="app", cdi=CDI)

    assert rig.plane.attached == {(NIC.uid, "nic-0"): pod.id}


async def test_second_pod_of_a_claim_is_refused_until_the_first_has_ended(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A device that is attached serves one pod at a time: the reason names the pod that has it, and
    what to do.
    """
    await rig.plane.store(reserved(claim("net", NIC.uid, "nic-0"), "app", "twin"))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        first = await runtime.run_pod("app")
        second = await runtime.run_pod("twin")
        with pytest.raises(Refused) as refused:
            await runtime.create("main", pod="twin", cdi=CDI)
        await runtime.stop_pod(first)
        await runtime.create("main", pod="twin", cdi=CDI)

    assert "nic-0 is in pod default/app (uid uid-app)" in str(refused.value)
    assert "give each pod a claim of its own (resourceClaimTemplateName)" in str(refused.value)
    assert rig.plane.attached == {(NIC.uid, "nic-0"): second.id}


async def test_second_pod_of_a_claim_disturbs_nothing_while_the_first_is_on_the_way(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """What the service works at for one pod is not given up for another one."""
    await rig.plane.store(reserved(claim("net", NIC.uid, "nic-0"), "app", "twin"))
    gate = rig.plane.asks.hold("attach")
    async with (
        runtime.serving(),
        rig.kubelet,
        rig.gateway(runtime=RuntimeSettings(socket=str(runtime.socket), attach_s=IMPATIENT)),
    ):
        await runtime.synchronized.wait()
        await prepare(rig)
        pod = await runtime.run_pod("app")
        await runtime.run_pod("twin")
        with pytest.raises(Refused, match="nic-0 is in pod default/app"):
            await runtime.create("main", pod="twin", cdi=CDI)
        gate.set()
        await until_attached(rig)

    assert verbs(rig) == ["prepare", "attach"]
    assert rig.plane.attached == {(NIC.uid, "nic-0"): pod.id}


async def test_pod_gets_the_device_with_its_first_container_when_it_came_after_the_claim_was_prepared(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Kubelet prepares a shared claim once: whose pod it is by now is read when a container names
    it.

    A pod that it is not reserved for is refused.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        await rig.plane.store(reserved(claim("net", NIC.uid, "nic-0"), "app", "late"))
        await runtime.run_pod("stranger")
        with pytest.raises(Refused, match=r"claim default/net: it is not reserved for pod default/stranger"):
            await runtime.create("main", pod="stranger", cdi=CDI)
        late = await runtime.run_pod("late")
        container = await runtime.create("main", pod="late", cdi=CDI)

    assert container.mounts == ()
    assert rig.plane.attached == {(NIC.uid, "nic-0"): late.id}


async def test_pod_on_the_hosts_network_is_refused(rig: Rig, runtime: SimulatedRuntime) -> None:
    """There is no network namespace to move anything into."""
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        await runtime.run_pod("app", is_on_host_network=True)
        with pytest.raises(Refused, match="pod default/app has none of its own: leave hostNetwork out, or the claim"):
            await runtime.create("main", pod="app", cdi=CDI)

    assert verbs(rig) == ["prepare"]


async def test_pod_of_another_namespace_is_refused(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A name of CDI that somebody has learnt opens nothing."""
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        await runtime.run_pod("app", namespace="elsewhere")
        with pytest.raises(Refused, match="claim default/net: it is of another namespace than pod elsewhere/app"):
            await runtime.create("main", pod="app", cdi=CDI)

    assert verbs(rig) == ["prepare"]


async def test_pod_that_is_made_anew_gets_the_device_from_its_former_sandbox(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Nobody was told of the former one's end: the device is taken out of it first."""
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        former = await runtime.run_pod("app")
        pod = await runtime.run_pod("app")
        await runtime.remove_pod(former)

    assert rig.plane.attached == {(NIC.uid, "nic-0"): pod.id}
    assert verbs(rig) == ["prepare", "attach", "detach", "attach"]


async def test_no_container_starts_without_its_device_when_the_gateway_was_away(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A sandbox that was started without the gateway gets its device as soon as it is back.

    No container of the claim starts before.
    """
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig)
        await runtime.until(lambda: not runtime.synchronized.is_set())
        pod = await runtime.run_pod("app")
        with pytest.raises(NotStarted):
            await runtime.create("main", pod="app", cdi=CDI)
        async with rig.gateway():
            await rig.plane.asks.wait_for("attach")
            container = await runtime.create("main", pod="app", cdi=CDI)

    assert container.mounts == ()
    assert rig.plane.attached == {(NIC.uid, "nic-0"): pod.id}


@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "stopped"])
async def test_device_comes_back_when_its_sandbox_ended_while_the_gateway_was_away(
    rig: Rig, runtime: SimulatedRuntime, is_removed: bool
) -> None:
    """Of a sandbox that is gone the device is taken back at once, of one that is only stopped
    before the claim is undone.
    """
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig)
            pod = await runtime.run_pod("app")
        await runtime.until(lambda: not runtime.synchronized.is_set())
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        await runtime.stop_pod(pod)
        if is_removed:
            await runtime.remove_pod(pod)
        async with rig.gateway():
            await runtime.synchronized.wait()
            if is_removed:
                await until_attached(rig, wanted=False)
            await rig.kubelet.wait_for_driver(DRIVER)
            unprepared = await rig.kubelet.unprepare_claims([NIC])

    assert (unprepared, rig.plane.attached) == ({}, {})
    assert verbs(rig) == ["prepare", "attach", "detach", "unprepare"]


async def test_stopped_sandbox_gets_nothing_when_the_gateway_comes_back(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A runtime lists stopped sandboxes like those that live."""
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig)
            await runtime.stop_pod(await runtime.run_pod("app"))
        await runtime.until(lambda: not runtime.synchronized.is_set())
        async with rig.gateway():
            await runtime.synchronized.wait()
            # Whatever it begins with, it has begun when the runtime may go on.
            await runtime.create("main", pod="other")

    assert verbs(rig) == ["prepare", "attach", "detach"]


async def test_claim_is_not_undone_before_its_device_is_out_of_the_sandbox(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A refusal to detach is the claim's error, and kubelet asks again."""
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        await runtime.run_pod("app")
        rig.plane.detach_refusal = no("driver-hung", "the driver does not answer")
        errors = await rig.kubelet.unprepare_claims([NIC])
        still_there = dict(rig.plane.attached)
        rig.plane.detach_refusal = None
        again = await rig.kubelet.unprepare_claims([NIC])

    assert "the driver does not answer" in errors[NIC.uid]
    assert (len(still_there), again, rig.plane.attached) == (1, {}, {})


async def test_only_claims_that_need_the_runtime_are_refused_when_it_is_not_there(rig: Rig) -> None:
    """Kubelet hears what is missing and what to do.

    A claim whose device stays on the host is prepared.
    """
    async with rig.kubelet, rig.gateway():
        absent = await prepare(rig)
        plain = await prepare(rig, PLAIN)
    async with rig.kubelet, rig.gateway(runtime=RuntimeSettings(socket="")):
        not_asked_for = await prepare(rig)

    assert (
        "needs the container runtime's plugin interface (NRI) to bring nic-0 into its pod: no container "
        "runtime answers at" in absent
    )
    assert "set TOPOBUS_GATEWAY__RUNTIME__SOCKET" in not_asked_for
    assert plain == ""


async def test_containers_are_refused_when_the_answer_cannot_be_true(rig: Rig, runtime: SimulatedRuntime) -> None:
    """What the service says goes into the claim's status for everybody to read: it is looked at
    first.
    """

    async def lie(_: AttachRequest) -> AttachReply:
        return AttachReply(
            result=Attached(interfaces={"nic-0": AttachedInterface(name="../../etc", addresses=("10.0.0.1/24",))})
        )

    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig)
        rig.plane.attach_by = lie
        await runtime.run_pod("app")
        with pytest.raises(Refused, match=r"its device service answers for nic-0 the interface name '\.\./\.\./etc'"):
            await runtime.create("main", pod="app", cdi=CDI)

    assert rig.plane.attached == {}
