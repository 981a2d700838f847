"""The kubelet simulator against kubelet's allocation rules.

The recorded transcript is done again in test_kubelet_replay.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.kubelet_plugins import TrivialDriver, TrivialPlugin, device
from topobus.kubeletpb.podresources.v1 import api_pb2 as podresources
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as podresources_rpc
from topobus.testing.kubelet import (
    Admission,
    Capacity,
    ClaimReference,
    Container,
    KubeletSimulator,
    KubeletTimings,
    Pod,
    Rejection,
)
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.request import ContainerKind, Policy, Scope
from topobus.values.view import AlignmentOptions

pytestmark = pytest.mark.integration

X = "rec.example.com/x"
Y = "rec.example.com/y"
DRIVER = "dra.rec.example.com"
LIST = (device("dev-0", 0), device("dev-1", 0), device("dev-2"))


@pytest.fixture
async def kubelet(short_folder: Path) -> AsyncIterator[KubeletSimulator]:
    """A kubelet with one NUMA node whose dial gives up early, as the refused registration would
    take 10 s.
    """
    async with KubeletSimulator(short_folder, timings=KubeletTimings(dial_s=2.0)) as started:
        yield started


def pod(*containers: Container, uid: str = "p-1", claims: Iterable[ClaimReference] = ()) -> Pod:
    """A pod with these containers."""
    return Pod(name=f"pod-{uid}", uid=uid, containers=containers, claims=tuple(claims))


def wants(name: str = "main", kind: ContainerKind = ContainerKind.APP, cpus: int = 0, **resources: int) -> Container:
    """A container; `x=2` asks two devices of X."""
    return Container(
        name=name, kind=kind, cpus=cpus, resources={{"x": X, "y": Y}[key]: count for key, count in resources.items()}
    )


async def admitted(kubelet: KubeletSimulator, wanted: Pod) -> Admission:
    """Admit a pod that must be admitted."""
    answer = await kubelet.admit(wanted)
    assert isinstance(answer, Admission), answer
    return answer


async def rejected(kubelet: KubeletSimulator, wanted: Pod) -> Rejection:
    """Admit a pod that must be rejected."""
    answer = await kubelet.admit(wanted)
    assert isinstance(answer, Rejection), answer
    return answer


async def test_simulator_repeats_an_owed_unprepare_when_the_driver_returns(kubelet: KubeletSimulator) -> None:
    """What an absent driver could not undo is asked again as soon as it is registered, as in
    session b of the transcript.
    """
    claim = ClaimReference(name="c", uid="u-1", drivers=(DRIVER,))
    wanted = pod(Container(name="main"), claims=[claim])
    async with TrivialDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER):
        await kubelet.wait_for_driver(DRIVER)
        await admitted(kubelet, wanted)
    await kubelet.wait_for_event("Deregistered")
    errors = await kubelet.remove(wanted)
    async with TrivialDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER) as returned:
        await kubelet.wait_for_event("NodeUnprepareResources.answered")

        calls = [call["event"] for call in returned.calls]

    assert errors == {"u-1": f"DRA driver {DRIVER} is not registered"}
    assert calls[:4] == ["GetInfo", "NotifyRegistrationStatus", "NodeWatchResources.open", "NodeUnprepareResources"]


async def test_simulator_counts_an_unhealthy_device_in_capacity_alone_when_the_list_changes(
    kubelet: KubeletSimulator,
) -> None:
    """Allocatable falls from 3 to 2 while capacity stays 3, and a device that left the list is
    gone.
    """
    async with TrivialPlugin(kubelet.device_plugin_dir, X, LIST) as plugin:
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=3)
        plugin.show((device("dev-0", 0, "Unhealthy"), *LIST[1:]))
        sick = await kubelet.wait_for_resource(X, allocatable=2)
        plugin.show(LIST[1:2])
        gone = await kubelet.wait_for_resource(X, allocatable=1)

    assert (sick, gone) == (Capacity(capacity=3, allocatable=2), Capacity(capacity=1, allocatable=1))


async def test_simulator_makes_devices_unhealthy_when_the_plugin_stops(short_folder: Path) -> None:
    """Capacity stays for five minutes with nothing allocatable, then falls to 0 while the resource
    stays listed.
    """
    now = [0.0]
    async with KubeletSimulator(short_folder, monotonic=lambda: now[0]) as kubelet:
        async with TrivialPlugin(kubelet.device_plugin_dir, X, LIST) as plugin:
            await plugin.register()
            await kubelet.wait_for_resource(X, allocatable=3)
        await kubelet.wait_for_event("ListAndWatch.closed")
        early = kubelet.capacity()[X]
        now[0] = 301.0
        late = kubelet.capacity()[X]

    assert (early, late) == (Capacity(capacity=3, allocatable=0), Capacity(capacity=0, allocatable=0))


async def test_simulator_forgets_capacity_and_deletes_sockets_when_restarted(kubelet: KubeletSimulator) -> None:
    """After a restart nothing is allocatable until the plugin registers on a new socket.

    The old socket is gone, holdings stay.
    """
    async with TrivialPlugin(kubelet.device_plugin_dir, X, LIST) as plugin:
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=3)
        await admitted(kubelet, pod(wants(x=1)))
        await kubelet.restart()
        after = kubelet.capacity()[X]
        refusal = await plugin.register()
    async with TrivialPlugin(kubelet.device_plugin_dir, X, LIST, socket="rec-2.sock") as plugin:
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=3)
        second = await admitted(kubelet, pod(wants(x=1), uid="p-2"))

    assert after == Capacity(capacity=0, allocatable=0)
    assert refusal == "failed to dial device plugin: context deadline exceeded"
    assert second.container("main").devices == {X: ("dev-1",)}


@pytest.mark.parametrize(
    ("has_race", "counts"), [(False, (3, 3)), (True, (3, 3, 0))], ids=["kubelet-1.36", "older-kubelet"]
)
async def test_simulator_lets_the_newest_registration_win_when_the_old_stream_ends(
    short_folder: Path, *, has_race: bool, counts: tuple[int, ...]
) -> None:
    """From 1.36 on the old stream is closed and the newest plugin serves.

    Before, it stayed open, and its end cut the newest one off.
    """
    timings = KubeletTimings(has_reregister_race=has_race)
    async with KubeletSimulator(short_folder, timings=timings) as kubelet, AsyncExitStack() as old:
        await (await old.enter_async_context(TrivialPlugin(kubelet.device_plugin_dir, X, LIST))).register()
        await kubelet.wait_for_event("ListAndWatch.send")
        async with TrivialPlugin(kubelet.device_plugin_dir, X, LIST, socket="rec-2.sock") as new:
            await new.register()
            await kubelet.wait_for_event("ListAndWatch.send", count=2)
            await old.aclose()
            # The old stream's end, and with the race that of the new one.
            await kubelet.wait_for_event("ListAndWatch.closed", count=2 if has_race else 1)

            counted = kubelet.healthy_counts(X)

    assert counted == counts


def two_nodes(short_folder: Path, policy: Policy, scope: Scope = Scope.CONTAINER) -> KubeletSimulator:
    """A kubelet with two NUMA nodes and four CPUs on each."""
    return KubeletSimulator(
        short_folder,
        numa_nodes=NodeSet(0, 1),
        options=AlignmentOptions(policy=policy, scope=scope),
        cpus={0: CpuSet.parse("0-3"), 1: CpuSet.parse("4-7")},
    )


async def test_simulator_rejects_with_kubelets_reason_when_nothing_fits_one_node(short_folder: Path) -> None:
    """Under single-numa-node a pod over two nodes is turned away with TopologyAffinityError, and
    nothing is asked of the plugin.
    """
    async with (
        two_nodes(short_folder, Policy.SINGLE_NUMA_NODE) as kubelet,
        TrivialPlugin(kubelet.device_plugin_dir, X, (device("a", 0), device("b", 1))) as plugin,
    ):
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=2)

        answer = await rejected(kubelet, pod(wants(x=2)))

    assert (answer.reason, answer.message) == (
        "TopologyAffinityError",
        "Resources cannot be allocated with Topology locality",
    )
    assert not [event for event in kubelet.events if event.event == "Allocate"]


async def test_simulator_aligns_cpus_and_devices_when_both_are_asked(short_folder: Path) -> None:
    """Exclusive CPUs come from the node where the devices are."""
    async with (
        two_nodes(short_folder, Policy.SINGLE_NUMA_NODE) as kubelet,
        TrivialPlugin(kubelet.device_plugin_dir, X, (device("a", 0), device("b", 1), device("c", 1))) as plugin,
    ):
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=3)

        answer = await admitted(kubelet, pod(wants(x=2, cpus=2)))

    granted = answer.container("main")
    assert (granted.devices, granted.cpus, granted.alignment.nodes) == ({X: ("b", "c")}, CpuSet(4, 5), NodeSet(1))


async def test_simulator_merges_one_hint_for_the_pod_when_scope_is_pod(short_folder: Path) -> None:
    """Two containers that each fit one node, but not together, are refused in pod scope."""
    devices = (device("a", 0), device("b", 1))
    pod_of_two = pod(wants("one", x=1), wants("two", x=1))
    async with (
        two_nodes(short_folder, Policy.SINGLE_NUMA_NODE, Scope.POD) as kubelet,
        TrivialPlugin(kubelet.device_plugin_dir, X, devices) as plugin,
    ):
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=2)

        answer = await rejected(kubelet, pod_of_two)

    assert answer.reason == "TopologyAffinityError"


async def test_simulator_asks_no_preference_when_all_aligned_devices_are_needed(short_folder: Path) -> None:
    """The plugin's preference counts only where there is a choice, and
    only within what is aligned.
    """
    devices = (device("a", 0), device("b", 0), device("c", 1), device("d", 1), device("e", 1))
    async with (
        two_nodes(short_folder, Policy.BEST_EFFORT) as kubelet,
        TrivialPlugin(kubelet.device_plugin_dir, X, devices) as plugin,
    ):
        plugin.prefers = ["e", "c", "d"]
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=5)

        exact = await admitted(kubelet, pod(wants(x=2), uid="exact"))
        choice = await admitted(kubelet, pod(wants(x=1), uid="choice"))

    asked = [
        event.detail["container_requests"][0] for event in kubelet.events if event.event == "GetPreferredAllocation"
    ]
    assert exact.container("main").devices == {X: ("a", "b")}
    assert choice.container("main").devices == {X: ("c",)}
    assert asked == [{"available_deviceIDs": ["c", "d", "e"], "allocation_size": 1}]


async def test_simulator_reuses_init_containers_devices_when_app_containers_start(short_folder: Path) -> None:
    """An app container gets what an ended init container had; a sidecar keeps its own."""
    devices = (device("a", 0), device("b", 0), device("c", 0))
    containers = (
        wants("init", ContainerKind.INIT, x=1),
        wants("sidecar", ContainerKind.SIDECAR, x=1),
        wants("app", x=2),
    )
    async with (
        two_nodes(short_folder, Policy.BEST_EFFORT) as kubelet,
        TrivialPlugin(kubelet.device_plugin_dir, X, devices) as plugin,
    ):
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=3)

        answer = await admitted(kubelet, pod(*containers))

    assert [container.devices[X] for container in answer.containers] == [("a",), ("a",), ("b", "c")]


async def test_simulator_keeps_earlier_resources_until_collected_when_a_later_one_fails(
    kubelet: KubeletSimulator,
) -> None:
    """No rollback over resources, as in kubelet.

    The dead pod's devices are free at the next admission.
    """
    async with (
        TrivialPlugin(kubelet.device_plugin_dir, X, (device("a"),)) as x,
        TrivialPlugin(kubelet.device_plugin_dir, Y, (device("b"),), socket="rec-2.sock") as y,
    ):
        await x.register()
        await y.register()
        await kubelet.wait_for_resource(X, allocatable=1)
        await kubelet.wait_for_resource(Y, allocatable=1)
        y.allocate_error = "the card fell off"
        failed = await rejected(kubelet, pod(wants(x=1, y=1)))
        y.allocate_error = ""
        answer = await admitted(kubelet, pod(wants(x=1, y=1), uid="p-2"))

    assert failed.reason == "UnexpectedAdmissionError"
    assert (
        failed.message
        == "Allocate failed due to rpc error: code = Unavailable desc = the card fell off, which is unexpected"
    )
    assert answer.container("main").devices == {X: ("a",), Y: ("b",)}


async def test_simulator_refuses_in_kubelets_words_when_devices_run_out(kubelet: KubeletSimulator) -> None:
    """Too few, all sick, and never registered are three different messages."""
    async with TrivialPlugin(kubelet.device_plugin_dir, X, LIST[:1]) as plugin:
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=1)
        await admitted(kubelet, pod(wants(x=1), uid="first"))
        few = await rejected(kubelet, pod(Container(name="main", resources={X: 1}), uid="few"))
        plugin.show([device("dev-0", 0, "Unhealthy")])
        await kubelet.wait_for_resource(X, allocatable=0)
        sick = await rejected(kubelet, pod(wants(x=1), uid="sick"))
        absent = await rejected(kubelet, pod(wants(y=1), uid="absent"))

    assert "requested number of devices unavailable for rec.example.com/x. Requested: 1, Available: 0" in few.message
    assert "no healthy devices present; cannot allocate unhealthy devices rec.example.com/x" in sick.message
    assert "cannot allocate unregistered device rec.example.com/y" in absent.message


async def test_simulator_keeps_the_first_edit_when_two_plugins_set_the_same_key(kubelet: KubeletSimulator) -> None:
    """The second value is dropped as kubelet drops it, and the conflict is reported to the test."""
    async with (
        TrivialPlugin(kubelet.device_plugin_dir, X, (device("a"),)) as x,
        TrivialPlugin(kubelet.device_plugin_dir, Y, (device("b"),), socket="rec-2.sock") as y,
    ):
        x.env, x.cdi_devices = {"VISIBLE": "a", "ONLY_X": "1"}, ["v/c=a"]
        y.env, y.cdi_devices = {"VISIBLE": "b"}, ["v/c=b", "v/c=a"]
        await x.register()
        await y.register()
        await kubelet.wait_for_resource(X, allocatable=1)
        await kubelet.wait_for_resource(Y, allocatable=1)

        answer = (await admitted(kubelet, pod(wants(x=1, y=1)))).container("main")

    assert answer.edits.env == {"ONLY_X": "1", "VISIBLE": "a"}
    assert answer.cdi_devices == ("v/c=a", "v/c=b")
    assert len(answer.conflicts) == 1
    assert "VISIBLE" in answer.conflicts[0]


async def test_simulator_waits_with_the_pod_when_a_driver_fails_to_prepare(kubelet: KubeletSimulator) -> None:
    """A claim that fails is no final rejection: asked again, the same devices go on and nothing is
    allocated twice.
    """
    claim = ClaimReference(name="c", uid="u-1", drivers=(DRIVER,))
    wanted = pod(wants(x=1), claims=[claim])
    async with (
        TrivialPlugin(kubelet.device_plugin_dir, X, LIST) as plugin,
        TrivialDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER) as driver,
    ):
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=3)
        await kubelet.wait_for_driver(DRIVER)
        driver.prepare_error = "not yet"
        first = await rejected(kubelet, wanted)
        driver.prepare_error = ""
        second = await admitted(kubelet, wanted)

    assert (first.reason, first.message, first.is_final) == ("FailedPrepareDynamicResources", "u-1: not yet", False)
    assert second.claims[0].devices[0].cdi_devices == ("v/c=u-1",)
    assert [event.event for event in kubelet.events].count("Allocate") == 1


async def test_simulator_tells_a_driver_its_error_when_it_offers_no_service(kubelet: KubeletSimulator) -> None:
    """A driver that names wire packages instead of service labels is refused with a text."""
    async with TrivialDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER, versions=("v1",)) as driver:
        # The second call proves that the first was answered.
        await kubelet.wait_for_event("NotifyRegistrationStatus", count=2)

    assert driver.status is not None
    assert not driver.status.plugin_registered
    assert "none of the DRA gRPC services are supported" in driver.status.error


async def test_simulator_lists_pod_resources_when_asked(short_folder: Path) -> None:
    """One entry a device and NUMA node, claims with their CDI names, active pods only.

    Calls beyond the rate are refused.
    """
    claim = ClaimReference(name="c", uid="u-1", drivers=(DRIVER,))
    wanted = pod(wants(x=2, cpus=1), claims=[claim])
    async with (
        KubeletSimulator(short_folder, cpus={0: CpuSet.parse("0-3")}, monotonic=lambda: 0.0) as kubelet,
        TrivialPlugin(kubelet.device_plugin_dir, X, (device("a", 0), device("b"))) as plugin,
        TrivialDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER),
        grpc.aio.insecure_channel(f"unix:{kubelet.pod_resources_socket}") as channel,
    ):
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=2)
        await kubelet.wait_for_driver(DRIVER)
        await admitted(kubelet, wanted)
        stub = podresources_rpc.PodResourcesListerStub(channel)
        held = await stub.List(podresources.ListPodResourcesRequest())
        await kubelet.remove(wanted)
        after = await stub.List(podresources.ListPodResourcesRequest())
        for _ in range(8):
            await stub.List(podresources.ListPodResourcesRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.List(podresources.ListPodResourcesRequest())

    (container,) = held.pod_resources[0].containers
    assert [
        (container_devices.device_ids[0], [node.ID for node in container_devices.topology.nodes])
        for container_devices in container.devices
    ] == [("a", [0]), ("b", [])]
    assert list(container.cpu_ids) == [0]
    assert container.dynamic_resources[0].claim_resources[0].cdi_devices[0].name == "v/c=u-1"
    assert not after.pod_resources
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
