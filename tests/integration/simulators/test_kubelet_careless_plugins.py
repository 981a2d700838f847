"""The kubelet simulator before plugins whose authors were careless: it refuses what kubelet
refuses, and says what kubelet keeps to itself.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.pluginregistration.v1 import api_pb2 as registration
from topobus.kubeletpb.pluginregistration.v1 import api_pb2_grpc as registration_rpc
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
from topobus.testing.kubelet.recorder import RecordingDriver, RecordingPlugin, device
from topobus.values.idset import NodeSet
from topobus.values.request import Policy
from topobus.values.view import AlignmentOptions

pytestmark = pytest.mark.integration

X = "rec.example.com/x"
DRIVER = "dra.rec.example.com"
LIST = (device("dev-0", 0), device("dev-1", 0))
NOWHERE = pb.Device(ID="dev-0", health="Healthy", topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=-1)]))


def pod(count: int = 1) -> Pod:
    """One container that asks for so many."""
    return Pod(name="p", uid="p-1", containers=(Container(name="main", resources={X: count}),))


def doubts(kubelet: KubeletSimulator) -> list[str]:
    """What the simulator found odd in lists."""
    return [
        text for event in kubelet.events if event.event == "ListAndWatch.doubtful" for text in event.detail["doubts"]
    ]


async def test_registration_is_refused_when_the_endpoint_is_a_whole_path(short_folder: Path) -> None:
    """Kubelet joins it to its own folder, where no such socket is.

    A simulator that took it would let the plugin fail on a node.
    """
    timings = KubeletTimings(dial_s=0.2)
    async with (
        KubeletSimulator(short_folder, timings=timings) as kubelet,
        RecordingPlugin(kubelet.device_plugin_dir, X, LIST) as plugin,
    ):
        refusal = await plugin.register(endpoint=str(kubelet.device_plugin_dir / "rec.sock"))

    assert "failed to dial device plugin" in refusal


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (
            pb.Device(ID="dev-0", health="healthy"),
            "dev-0: health 'healthy' counts as unhealthy: only 'Healthy' is healthy",
        ),
        (NOWHERE, "dev-0: NUMA node -1: send no topology when the node is not known; this device fits no hint"),
        (pb.Device(ID="d" * 64, health="Healthy"), f"{'d' * 64!r}: 64 characters; the API promises 1 to 63"),
    ],
    ids=["health", "numa", "long"],
)
async def test_list_is_doubted_when_kubelet_would_take_it_otherwise_than_meant(
    short_folder: Path, sent: pb.Device, said: str
) -> None:
    """Kubelet says nothing; whoever reads the events learns why pods do not fit."""
    async with (
        KubeletSimulator(short_folder) as kubelet,
        RecordingPlugin(kubelet.device_plugin_dir, X, [sent]) as plugin,
    ):
        await plugin.register()
        await kubelet.wait_for_event("ListAndWatch.doubtful")
        found_doubts = doubts(kubelet)

    assert found_doubts == [said]


async def test_pod_fits_no_node_when_its_device_is_on_node_minus_one(short_folder: Path) -> None:
    """Such a device is listed and healthy, and no policy that insists on a place ever admits it.

    PodResources tells the -1 on.
    """
    strict = AlignmentOptions(policy=Policy.RESTRICTED)
    async with (
        KubeletSimulator(short_folder, numa_nodes=NodeSet(0, 1), options=strict) as kubelet,
        RecordingPlugin(kubelet.device_plugin_dir, X, [NOWHERE]) as plugin,
    ):
        await plugin.register()
        capacity = await kubelet.wait_for_resource(X, allocatable=1)
        answer = await kubelet.admit(pod())

    assert capacity == Capacity(capacity=1, allocatable=1)
    assert isinstance(answer, Rejection), answer
    assert answer.reason == "TopologyAffinityError"


async def test_resource_is_known_with_nothing_when_its_first_list_is_too_large(short_folder: Path) -> None:
    """More than 4 MiB ends the stream: a capacity of 0, and the event
    says what kubelet only logs.
    """
    many = [device(f"{number:063d}") for number in range(60_000)]
    async with KubeletSimulator(short_folder) as kubelet, RecordingPlugin(kubelet.device_plugin_dir, X, many) as plugin:
        await plugin.register()
        closed = await kubelet.wait_for_event("ListAndWatch.closed", timeout_s=30)
        capacity = kubelet.capacity()

    assert "code = ResourceExhausted" in closed.detail["error"]
    assert capacity == {X: Capacity(capacity=0, allocatable=0)}


@pytest.mark.parametrize(
    ("listed", "count", "message"),
    [
        ([], 1, f"no healthy devices present; cannot allocate unhealthy devices {X}"),
        (
            [device("dev-1", 0)],
            1,
            f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {X}",
        ),
        (LIST, 2, f'pod "p-1" container "main" changed request for resource "{X}" from 1 to 2'),
    ],
    ids=["none", "other", "changed"],
)
async def test_pod_fails_after_a_reboot_when_what_it_held_is_not_there(
    short_folder: Path, listed: list[pb.Device], count: int, message: str
) -> None:
    """Another kubelet finds the checkpoint and admits the pod again: a plugin that is late, or lost
    the device, loses it the pod.
    """
    async with KubeletSimulator(short_folder) as kubelet, RecordingPlugin(kubelet.device_plugin_dir, X, LIST) as plugin:
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=2)
        assert isinstance(await kubelet.admit(pod()), Admission)
    async with (
        KubeletSimulator(short_folder) as later,
        RecordingPlugin(later.device_plugin_dir, X, listed, socket="rec-2.sock") as plugin,
    ):
        await plugin.register()
        await later.wait_for_event("ListAndWatch.send")
        answer = await later.admit(pod(count))

    assert isinstance(answer, Rejection), answer
    assert (answer.reason, answer.is_final) == ("UnexpectedAdmissionError", True)
    assert answer.message == f"Allocate failed due to {message}, which is unexpected"


async def test_pod_waits_for_its_next_try_when_the_machine_was_booted_and_kubelet_comes_first(
    short_folder: Path,
) -> None:
    """Its claim counts as prepared no more, and its driver is not there yet.

    A change of the pod has kubelet look before its 90 s are over.
    """
    claimed = Pod(
        name="p",
        uid="p-1",
        containers=(Container(name="main"),),
        claims=(ClaimReference(name="c", uid="u-1", drivers=(DRIVER,)),),
    )
    async with KubeletSimulator(short_folder) as kubelet:
        async with RecordingDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER):
            await kubelet.wait_for_driver(DRIVER)
            before = await kubelet.admit(claimed)
        await kubelet.reboot()
        early = await kubelet.admit(claimed)
        worker = asyncio.create_task(kubelet.admit_with_retries(claimed))
        async with RecordingDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER):
            await kubelet.wait_for_driver(DRIVER)
            kubelet.pod_changed("p-1")
            after = await worker

    assert isinstance(before, Admission)
    assert isinstance(early, Rejection)
    assert early.message == f"u-1: DRA driver {DRIVER} is not registered"
    assert isinstance(after, Admission)


async def test_container_does_not_start_when_its_pod_was_never_admitted(short_folder: Path) -> None:
    """Nothing was asked of the plugin, so it is no success."""
    async with KubeletSimulator(short_folder) as kubelet:
        said = await kubelet.restart_container(pod(), "main")

    assert said == "no admitted pod of uid p-1 has a container main: there is nothing to start"


async def test_registration_says_why_when_the_driver_hangs(short_folder: Path) -> None:
    """A GetInfo that does not answer in kubelet's second is in the events with its error, not only
    asked again.
    """
    async with KubeletSimulator(short_folder, timings=KubeletTimings(get_info_s=0.1)) as kubelet:
        driver = RecordingDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER)
        driver.hangs = lambda event: event == "GetInfo"
        async with driver:
            failed = await kubelet.wait_for_event("GetInfo.failed")

    assert "RegisterPlugin error -- GetInfo at socket" in failed.detail["error"]
    assert "code = DeadlineExceeded" in failed.detail["error"]


async def test_second_registration_is_refused_when_it_names_the_same_endpoint(short_folder: Path) -> None:
    """Two instances of a rolling update need a service socket each."""
    async with (
        KubeletSimulator(short_folder) as kubelet,
        RecordingDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER),
    ):
        await kubelet.wait_for_driver(DRIVER)
        (endpoint,) = kubelet.plugins_dir.rglob("*.sock")
        server = grpc.aio.server()
        registration_rpc.add_RegistrationServicer_to_server(_Copy(endpoint), server)
        server.add_insecure_port(f"unix:{kubelet.plugins_registry_dir / 'copy.sock'}")
        await server.start()
        await kubelet.wait_for_event("NotifyRegistrationStatus", count=2)
        errors = [
            event.detail.get("error", "") for event in kubelet.events if event.event == "NotifyRegistrationStatus"
        ]
        await server.stop(None)

    assert errors[0] == ""
    assert f"already registered for DRA driver plugin {DRIVER}" in errors[1]


class _Copy(registration_rpc.RegistrationServicer):
    """A second registration socket that names the first one's service."""

    def __init__(self, endpoint: Path) -> None:
        self._endpoint = endpoint

    async def GetInfo(self, request: registration.InfoRequest, context: Any) -> registration.PluginInfo:  # noqa: N802  (gRPC's name)
        return registration.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self._endpoint), supported_versions=["v1.DRAPlugin"]
        )

    async def NotifyRegistrationStatus(  # noqa: N802  (gRPC's name)
        self, request: registration.RegistrationStatus, context: Any
    ) -> registration.RegistrationStatusResponse:
        return registration.RegistrationStatusResponse()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Container(name="main", resources={X: -1}),
        lambda: Container(name="main", cpus=-1),
        lambda: Pod(name="p", uid="u", containers=(Container(name="main"), Container(name="main"))),
    ],
    ids=["count", "cpus", "names"],
)
def test_pod_is_no_value_when_an_api_server_would_not_take_it(make: Any) -> None:
    """Garbage is refused where it is written."""
    with pytest.raises(ValueError, match=r"wanted 0 or more|two containers of one name"):
        make()


def serve(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """Run the simulator as a program and say something to it."""
    command = [sys.executable, "-m", "topobus.testing.kubelet", "serve", "--root", str(folder)]
    return subprocess.run(command, input=words, capture_output=True, text=True, timeout=60, check=False)


def test_program_says_what_to_do_when_its_folder_does_not_do(short_folder: Path) -> None:
    """Too long for a socket, not to be made, or with a corrupt checkpoint: a sentence, never a
    traceback.
    """
    (short_folder / "bad" / "device-plugins").mkdir(parents=True)
    (short_folder / "bad" / "device-plugins" / "kubelet_internal_checkpoint").write_text("{")
    (short_folder / "file").touch()
    answers = [
        serve(path, "") for path in (short_folder / ("x" * 110), short_folder / "file" / "below", short_folder / "bad")
    ]

    assert [answer.returncode for answer in answers] == [64, 64, 64]
    assert [answer.stderr.count("\n") for answer in answers] == [1, 1, 1]
    assert "take a shorter folder" in answers[0].stderr
    assert "remove it to start without it" in answers[2].stderr


def test_program_says_which_pods_there_are_when_one_is_unknown(short_folder: Path) -> None:
    """A typing error in a command is told, and the next command is obeyed.

    A pod that was turned away is none.
    """
    answer = serve(short_folder, "admit p rec.example.com/x=1\nremove p\nrestart-container p\ncapacity\nquit\n")

    assert answer.returncode == 0
    assert answer.stderr == "remove p: no such pod; there are none\nrestart-container p: no such pod; there are none\n"
    assert '{"capacity": {}}' in answer.stdout
