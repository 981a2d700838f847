"""The kubelet simulator when things go wrong or come twice: absent and hung drivers, retries,
restarts, device plugins that the watcher finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from support.looks import next_turn
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

pytestmark = pytest.mark.integration

X = "rec.example.com/x"
DRIVER = "dra.rec.example.com"
CLAIM = ClaimReference(name="c", uid="u-1", drivers=(DRIVER,))
WITH_CLAIM = Pod(name="p", uid="p-1", containers=(Container(name="main"),), claims=(CLAIM,))
PLAIN = Pod(name="x", uid="x-1", containers=(Container(name="main", resources={X: 1}),))
LIST = (device("dev-0", 0), device("dev-1", 0))


def driver_of(kubelet: KubeletSimulator, instance: str = "") -> RecordingDriver:
    """A driver of ours, perhaps one of several."""
    return RecordingDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER, instance=instance)


async def test_slices_go_when_a_driver_loses_its_connection_and_keeps_its_sockets(short_folder: Path) -> None:
    """A killed driver leaves its sockets behind.

    Kubelet watches the connection, and wipes when it is not back in time.
    """
    wiped: list[str] = []
    async with (
        KubeletSimulator(short_folder, timings=KubeletTimings(wipe_s=0.1), wipe_slices=wiped.append) as kubelet,
        driver_of(kubelet) as driver,
    ):
        await kubelet.wait_for_driver(DRIVER)
        await driver.drop_service()
        await kubelet.wait_for_event("Disconnected", subject=DRIVER)
        await kubelet.wait_for_event("WipeSlices", subject=DRIVER)
        still = kubelet.drivers()

    assert wiped == ["", DRIVER]
    assert still == (DRIVER,)


async def test_slices_stay_when_another_instance_is_connected(short_folder: Path) -> None:
    """In a rolling update the old instance goes and the new one serves: nothing is wiped, calls
    reach the newest that is connected.
    """
    wiped: list[str] = []
    async with KubeletSimulator(short_folder, timings=KubeletTimings(wipe_s=0.05), wipe_slices=wiped.append) as kubelet:
        async with driver_of(kubelet, "a") as old:
            await kubelet.wait_for_event("NotifyRegistrationStatus")
            async with driver_of(kubelet, "b") as new:
                await kubelet.wait_for_event("NodeWatchResources.open", count=2)
                await kubelet.admit(WITH_CLAIM)
                await new.drop_service()
                await kubelet.wait_for_event("Disconnected")
                await kubelet.remove(WITH_CLAIM)
            await kubelet.wait_for_event("Deregistered")
            late = await kubelet.prepare_claims([CLAIM])
        calls = [
            [call["event"] for call in it.calls if "PrepareResources" in call["event"] or "Unprepare" in call["event"]]
            for it in (old, new)
        ]

    assert calls == [["NodeUnprepareResources", "NodePrepareResources"], ["NodePrepareResources"]]
    assert late[0].error == ""
    assert DRIVER not in wiped


async def test_slices_stay_when_a_driver_is_back_in_time_and_away_again(short_folder: Path) -> None:
    """Each absence is counted by itself: the end of an earlier one's patience wipes nothing in the
    middle of a later one.
    """
    wiped: list[str] = []
    async with KubeletSimulator(short_folder, timings=KubeletTimings(wipe_s=0.6), wipe_slices=wiped.append) as kubelet:
        for count in (1, 2, 3, 4):
            async with driver_of(kubelet):
                await kubelet.wait_for_event("NotifyRegistrationStatus", count=count)
                await kubelet.wait_for_driver(DRIVER)
            await kubelet.wait_for_event("Deregistered", count=count)
        before = list(wiped)
        await kubelet.wait_for_event("WipeSlices", subject=DRIVER)

    assert before == [""]
    assert wiped == ["", DRIVER]


class _Slow(RecordingDriver):
    """A driver that unprepares when it is told to, and counts how many calls run at once."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.go_on = asyncio.Event()
        self.running = 0
        self.most = 0

    async def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802  (gRPC's name)
        """Wait, then answer."""
        self.running += 1
        self.most = max(self.most, self.running)
        await self.go_on.wait()
        self.running -= 1
        return await super().NodeUnprepareResources(request, context)


async def test_claim_is_unprepared_once_when_its_driver_is_slow(short_folder: Path) -> None:
    """What a call runs for is asked for by nobody else meanwhile.

    What another driver owes is asked for again as ever.
    """
    other = f"z.{DRIVER}"
    timings = KubeletTimings(reconcile_s=0.01)
    async with (
        KubeletSimulator(short_folder, timings=timings) as kubelet,
        _Slow(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER) as slow,
        RecordingDriver(kubelet.plugins_registry_dir, kubelet.plugins_dir, other) as failing,
    ):
        failing.unprepare_error = "not now"
        await kubelet.wait_for_driver(DRIVER)
        await kubelet.wait_for_driver(other)
        await kubelet.admit(WITH_CLAIM)
        removed = asyncio.create_task(kubelet.remove(WITH_CLAIM))
        await kubelet.wait_for_event("NodeUnprepareResources", subject=DRIVER)
        await kubelet.unprepare_claims([ClaimReference(name="d", uid="u-2", drivers=(other,))])
        await kubelet.wait_for_event("NodeUnprepareResources", subject=other, count=4)
        slow.go_on.set()
        errors = await removed

    assert errors == {}
    assert slow.most == 1


async def test_comparison_ends_with_the_answer_when_a_call_for_the_claim_runs_already(short_folder: Path) -> None:
    """Kubelet asks of its own accord, too, as a moment after a registration: whoever compares finds
    the claim undone all the same.
    """
    async with (
        KubeletSimulator(short_folder) as kubelet,
        _Slow(kubelet.plugins_registry_dir, kubelet.plugins_dir, DRIVER) as slow,
    ):
        await kubelet.wait_for_driver(DRIVER)
        await kubelet.admit(WITH_CLAIM)
        kubelet.remove_by_force(WITH_CLAIM)
        first = asyncio.create_task(kubelet.compare_claims())
        await kubelet.wait_for_event("NodeUnprepareResources", subject=DRIVER)
        second = asyncio.create_task(kubelet.compare_claims())
        await next_turn()
        was_done = second.done()
        slow.go_on.set()
        errors = [await first, await second]

    assert (was_done, errors, slow.most) == (False, [{}, {}], 1)


async def test_claim_fails_in_time_when_a_driver_hangs(short_folder: Path) -> None:
    """Prepare and unprepare end with kubelet's deadline.

    The pod is tried again until it works, the unprepare is owed and repeated.
    """
    timings = KubeletTimings(dra_s=0.2, pod_retry_s=0.05, reconcile_s=0.05)
    async with KubeletSimulator(short_folder, timings=timings) as kubelet, driver_of(kubelet) as driver:
        await kubelet.wait_for_driver(DRIVER)
        hung = {"NodePrepareResources": 2, "NodeUnprepareResources": 1}

        def hangs(event: str) -> bool:
            hung[event] = hung.get(event, 0) - 1
            return hung[event] >= 0

        driver.hangs = hangs
        first = await kubelet.admit(WITH_CLAIM)
        then = await kubelet.admit_with_retries(WITH_CLAIM)
        errors = await kubelet.remove(WITH_CLAIM)
        await kubelet.wait_for_event("NodeUnprepareResources", count=2)

    assert isinstance(first, Rejection)
    assert "NodePrepareResources failed: rpc error: code = DeadlineExceeded" in first.message
    assert not first.is_final
    assert isinstance(then, Admission), then
    assert "code = DeadlineExceeded" in errors["u-1"]


async def test_registration_is_tried_again_when_get_info_hangs(short_folder: Path) -> None:
    """GetInfo has a deadline of its own; the socket is asked again with back-off."""
    async with KubeletSimulator(short_folder, timings=KubeletTimings(get_info_s=0.1)) as kubelet:
        driver = driver_of(kubelet)
        asked: list[str] = []

        def hangs(event: str) -> bool:
            asked.append(event)
            return len(asked) < 3

        driver.hangs = hangs
        async with driver:
            await kubelet.wait_for_driver(DRIVER)

    events = [event.event for event in kubelet.events if event.event.startswith("GetInfo")]
    # A busy machine may be too slow once more than the driver hangs.
    assert events == ["GetInfo", "GetInfo.failed"] * events.count("GetInfo.failed") + ["GetInfo"]
    assert len(asked) >= 3


async def test_health_is_unknown_when_it_is_not_refreshed(short_folder: Path) -> None:
    """A device that was healthy counts as Unknown after its time-out, without another word from
    anybody.
    """
    now = [0.0]
    async with KubeletSimulator(short_folder, monotonic=lambda: now[0]) as kubelet, driver_of(kubelet):
        await kubelet.wait_for_health(DRIVER, "node", "dev-0", "Healthy")
        now[0] = 30.0
        within = kubelet.device_health(DRIVER, "node", "dev-0").state
        now[0] = 30.1
        beyond = kubelet.device_health(DRIVER, "node", "dev-0").state

    assert (within, beyond) == ("Healthy", "Unknown")


async def test_plugin_is_asked_only_what_its_options_say(short_folder: Path) -> None:
    """Neither preference nor pre-start without the option.

    What the registration request says of options counts for nothing.
    """
    async with KubeletSimulator(short_folder) as kubelet, RecordingPlugin(kubelet.device_plugin_dir, X, LIST) as plugin:
        plugin.options = pb.DevicePluginOptions()
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=2)
        admitted = await kubelet.admit(PLAIN)
        asked = [call["event"] for call in plugin.calls]

    assert isinstance(admitted, Admission), admitted
    assert "Allocate" in asked
    assert not {"GetPreferredAllocation", "PreStartContainer"} & set(asked)


async def test_container_does_not_start_when_its_plugin_hangs_before_the_start(short_folder: Path) -> None:
    """PreStartContainer has a deadline of its own.

    That is no final rejection, and nothing is allocated again.
    """
    async with (
        KubeletSimulator(short_folder, timings=KubeletTimings(pre_start_s=2.0)) as kubelet,
        RecordingPlugin(kubelet.device_plugin_dir, X, LIST) as plugin,
    ):
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=2)
        plugin.hangs = lambda event: event == "PreStartContainer"
        hung = await kubelet.admit(PLAIN)
        plugin.hangs = lambda event: False
        then = await kubelet.admit(PLAIN)

    assert isinstance(hung, Rejection)
    assert (hung.reason, hung.is_final) == ("CreateContainerConfigError", False)
    assert "PreStartContainer rpc failed with err: rpc error: code = DeadlineExceeded" in hung.message
    assert isinstance(then, Admission), then
    assert [call["event"] for call in plugin.calls].count("Allocate") == 1


async def test_stored_answer_is_used_when_another_kubelet_finds_the_checkpoint(short_folder: Path) -> None:
    """A new process over the same folder: what pods hold is not free, and Allocate is not called
    again for them.

    Others go when all pods are known.
    """
    async with KubeletSimulator(short_folder) as kubelet, RecordingPlugin(kubelet.device_plugin_dir, X, LIST) as plugin:
        plugin.env = {"KEPT": "yes"}
        await plugin.register()
        await kubelet.wait_for_resource(X, allocatable=2)
        before = await kubelet.admit(PLAIN)
        await kubelet.admit(Pod(name="gone", uid="gone", containers=PLAIN.containers))
    async with (
        KubeletSimulator(short_folder) as later,
        RecordingPlugin(later.device_plugin_dir, X, LIST, socket="rec-2.sock") as plugin,
    ):
        empty = later.capacity()[X]
        await plugin.register()
        await later.wait_for_resource(X, allocatable=2)
        after = await later.admit(PLAIN)
        full = await later.admit(Pod(name="new", uid="new", containers=PLAIN.containers))
        later.sources_ready()
        new = await later.admit(Pod(name="new", uid="new", containers=PLAIN.containers))
        asked = [call["event"] for call in plugin.calls].count("Allocate")

    assert isinstance(before, Admission), before
    assert isinstance(after, Admission), after
    assert after.containers == before.containers
    assert empty == Capacity(capacity=0, allocatable=0)
    assert isinstance(full, Rejection), full
    assert isinstance(new, Admission), new
    assert new.container("main").devices == {X: ("dev-1",)}
    assert asked == 1


async def test_kubelet_does_not_start_when_its_checkpoint_is_corrupt(short_folder: Path) -> None:
    """As the real one: an error that names the file, never an empty start."""
    kubelet = KubeletSimulator(short_folder)
    (kubelet.device_plugin_dir / "kubelet_internal_checkpoint").write_text("{")

    with pytest.raises(ValueError, match="kubelet_internal_checkpoint cannot be read"):
        await kubelet.start()


class _Registrar(registration_rpc.RegistrationServicer):
    """The registration socket of a device plugin that waits to be found."""

    def __init__(self, info: registration.PluginInfo) -> None:
        self.info = info
        self.status: registration.RegistrationStatus | None = None

    async def GetInfo(self, request: registration.InfoRequest, context: Any) -> registration.PluginInfo:  # noqa: N802  (gRPC's name)
        return self.info

    async def NotifyRegistrationStatus(  # noqa: N802  (gRPC's name)
        self, request: registration.RegistrationStatus, context: Any
    ) -> registration.RegistrationStatusResponse:
        self.status = request
        return registration.RegistrationStatusResponse()


@asynccontextmanager
async def watched(
    kubelet: KubeletSimulator, *, versions: tuple[str, ...] = ("v1beta1",)
) -> AsyncIterator[tuple[RecordingPlugin, _Registrar]]:
    """A device plugin in plugins_registry instead of on kubelet.sock."""
    async with RecordingPlugin(kubelet.plugins_dir, X, LIST) as plugin:
        info = registration.PluginInfo(
            type="DevicePlugin", name=X, endpoint=str(kubelet.plugins_dir / plugin.socket), supported_versions=versions
        )
        registrar = _Registrar(info)
        server = grpc.aio.server()
        registration_rpc.add_RegistrationServicer_to_server(registrar, server)
        server.add_insecure_port(f"unix:{kubelet.plugins_registry_dir / 'x-reg.sock'}")
        await server.start()
        try:
            yield plugin, registrar
        finally:
            await server.stop(None)


async def test_device_plugin_serves_when_the_watcher_finds_it(short_folder: Path) -> None:
    """The other door for device plugins: taken over with its resource, and let go when its
    registration socket goes.
    """
    async with KubeletSimulator(short_folder) as kubelet:
        async with watched(kubelet):
            await kubelet.wait_for_resource(X, allocatable=2)
            admitted = await kubelet.admit(PLAIN)
        gone = await kubelet.wait_for_resource(X, allocatable=0)

    assert isinstance(admitted, Admission), admitted
    assert gone.capacity == 2


async def test_device_plugin_is_told_why_when_the_watcher_refuses_it(short_folder: Path) -> None:
    """A version that kubelet does not have comes back as the registration's status."""
    async with KubeletSimulator(short_folder) as kubelet, watched(kubelet, versions=("v2",)) as (_, registrar):
        await kubelet.wait_for_event("NotifyRegistrationStatus", count=2)

    assert registrar.status is not None
    assert "manager version, v1beta1, is not among plugin supported versions [v2]" in registrar.status.error
