"""CPUs that claims have for themselves: the gateway at the container runtime's door (NRI), with a
runtime of the test's own.

`tests/engine/test_cpus.py` runs the main road on a real containerd with real CPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from support.attachments import prepare
from support.gateway_rig import Rig, make_rig
from support.node_plane import claim
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import PrepareContext
from topobus.formats.containers.cdi import parse
from topobus.formats.messages.messages import Prepared, PrepareReply, PrepareRequest
from topobus.gateway.config import CpuSettings
from topobus.simulation.container_runtime import NotStarted, Refused, SimulatedRuntime
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.kubelet import ClaimReference, KubeletSimulator
from topobus.values.device import Device
from topobus.values.dra_names import DRIVER
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

ALL = CpuSet(0, 1, 2, 3)
FIRST = ClaimReference(name="first", uid="u-first", drivers=(DRIVER,))
SECOND = ClaimReference(name="second", uid="u-second", drivers=(DRIVER,))


def cpu(number: int) -> Device:
    """One CPU; two share a NUMA node."""
    return Device(name=f"cpu-{number}", device_class="cpu", cpu=number, numa_nodes=NodeSet(number // 2))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Four CPUs of two NUMA nodes; one claim for CPU 1, another for CPUs 2 and 3."""
    async with make_rig(nats_server.url, classes=("cpu",)) as made:
        (made.root / "sys/devices/system/node").mkdir(parents=True)
        (made.root / "sys/devices/system/node/has_memory").write_text("0-1\n")
        driver, tree = LinuxCpuDriver(), Tree(HardwareSettings(root=str(made.root)))

        async def prepare(request: PrepareRequest) -> PrepareReply:
            devices = [cpu(int(name.removeprefix("cpu-"))) for name in request.devices]
            answer = driver.prepare(tree, devices, PrepareContext(owner=request.owner))
            assert not isinstance(answer, Refusal)
            return PrepareReply(
                result=Prepared(edits={device.name: answer[device.name] for device in devices}, common=answer[""])
            )

        made.plane.prepare_by = prepare
        await made.plane.show("cpu", *map(cpu, ALL))
        await made.plane.store(claim("first", "u-first", "cpu-1"))
        await made.plane.store(claim("second", "u-second", "cpu-2", "cpu-3"))
        made.settings = msgspec.structs.replace(
            made.settings,
            cpus=CpuSettings(owned="all"),
            hardware=HardwareSettings(root=str(made.root)),
        )
        yield made


@pytest.fixture(params=["methods", "state-change"])
def runtime(rig: Rig, request: pytest.FixtureRequest) -> SimulatedRuntime:
    """A runtime of either generation, whose containers have control groups; the test starts it."""
    return SimulatedRuntime(
        rig.root / "nri.sock", ALL, dialect=request.param, cdi_dir=rig.cdi_dir, control_groups=rig.root
    )


async def test_pool_shrinks_before_the_pod_starts_and_grows_back_when_a_claim_ends(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """When kubelet has its answer no other container runs on the claim's CPU.

    When the claim is undone all have it again, without any container being made.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour", pod="other")
        before = neighbour.cpus
        error = await prepare(rig, FIRST)
        at_the_answer = neighbour.cpus
        pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-first-cpu-1",))
        late = await runtime.create("late", pod="other")
        await runtime.end(pinned)
        await rig.kubelet.unprepare_claims([FIRST])
        afterwards = (neighbour.cpus, late.cpus)

    assert (error, before, at_the_answer, afterwards) == ("", ALL, CpuSet(0, 2, 3), (ALL, ALL))
    assert (pinned.cpus, pinned.mems, pinned.quota) == (CpuSet(1), "0", -1)


async def test_container_is_known_by_its_variables_when_the_runtime_does_not_tell_its_cdi_devices(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Containerd 2.0 and 2.1 leave the CDI devices out of what they tell.

    Each CPU brings a variable that names it.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig, SECOND)
        (file,) = rig.cdi_dir.glob("*.json")
        spec = parse(file.read_bytes())
        env = tuple(f"{key}={value}" for device in spec.devices for key, value in device.edits.env.items())
        pinned = await runtime.create("main", env=env)
        stranger = await runtime.create("stranger", pod="other", env=("TOPOBUS_CPUSET_CPU_2=claim-u-guessed-cpu-2",))

    assert (pinned.cpus, pinned.mems) == (CpuSet(2, 3), "1")
    assert stranger.cpus == CpuSet(0, 1)


async def test_claim_is_refused_with_the_reason_when_there_is_no_runtime(rig: Rig) -> None:
    """Nothing was promised to a container that would run without it: kubelet hears what is missing
    and what to do.
    """
    async with rig.kubelet, rig.gateway():
        error = await prepare(rig, FIRST)
        connection = (await rig.pods()).runtime

    assert connection is not None
    assert connection.why_not.startswith("no container runtime answers at")
    assert "needs the container runtime's plugin interface (NRI) for its CPUs: no container runtime answers at" in error
    assert "switch NRI on" in error


async def test_claim_is_refused_when_it_would_empty_the_shared_pool(rig: Rig, runtime: SimulatedRuntime) -> None:
    """An empty set would mean "no change" to a runtime: the last CPU of the pool is nobody's alone,
    and nothing was changed.
    """
    await rig.plane.store(claim("all", "u-all", "cpu-0", "cpu-1", "cpu-2", "cpu-3"))
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour")
        error = await prepare(rig, ClaimReference(name="all", uid="u-all", drivers=(DRIVER,)))

    assert "CPUs 0-3 are the last of the shared pool (0-3)" in error
    assert neighbour.cpus == ALL


async def test_claim_is_refused_when_its_cpus_are_kubelets(rig: Rig, runtime: SimulatedRuntime) -> None:
    """What the setting leaves to kubelet no claim gets."""
    async with runtime.serving(), rig.kubelet, rig.gateway(cpus=CpuSettings(owned="2-3")):
        await runtime.synchronized.wait()
        error = await prepare(rig, FIRST)

    assert "CPUs 1 are not Topobus' to give: the gateway's setting cpus.owned is 2-3" in error


async def test_claim_is_refused_when_kubelets_manager_may_give_its_cpu_as_well(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """Two owners of one CPU are a contradiction of settings, told with both sides' words before
    anything was changed.

    A reserved CPU of kubelet's is ours.
    """
    kubelet = KubeletSimulator(rig.kubelet.root, cpus={0: CpuSet(0, 1)})
    async with runtime.serving(), kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour")
        await kubelet.wait_for_driver(DRIVER)
        (contradicted,) = await kubelet.prepare_claims([FIRST])
        unchanged = neighbour.cpus
        (reserved,) = await kubelet.prepare_claims([SECOND])

    assert (
        "CPUs 1 are both sides' to give: the gateway's setting cpus.owned is all, and kubelet's CPU manager, "
        "with policy static, may give 0-1" in contradicted.error
    )
    assert "Name in cpus.owned only what kubelet reserves" in contradicted.error
    assert (unchanged, reserved.error, neighbour.cpus) == (ALL, "", CpuSet(0, 1))


async def test_kubelets_pinned_containers_keep_their_cpus_when_the_pool_changes(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """CPUs that kubelet's manager gave are out of the pool and are left alone."""
    await rig.plane.hold(Owner(kind=OwnerKind.CONTAINER, namespace="default", name="db", uid="main"), cpu=("cpu-3",))
    # This kubelet lists no such container: the reconciliation would let go of its CPU.
    deadlines = msgspec.structs.replace(rig.settings.deadlines, reconcile_s=3600.0)
    async with runtime.serving(), rig.kubelet, rig.gateway(deadlines=deadlines):
        await runtime.synchronized.wait()
        kubelets = await runtime.create("main", pod="db", cpus="3")
        neighbour = await runtime.create("neighbour")
        await runtime.until(lambda: neighbour.cpus == CpuSet(0, 1, 2))
        await prepare(rig, FIRST)
        rivals = await prepare(rig, SECOND)

    assert (kubelets.cpus, neighbour.cpus) == (CpuSet(3), CpuSet(0, 2))
    assert "container main of pod default/db holds cpu-3" in rivals


async def test_sets_are_right_when_the_gateway_comes_back(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A container that was made while the gateway was away is put right when it connects again.

    Pinned ones stay as they are.
    """
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig, FIRST)
            pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-first-cpu-1",))
        await runtime.until(lambda: not runtime.synchronized.is_set())
        meanwhile = await runtime.create("meanwhile", pod="other")
        at_first = meanwhile.cpus
        async with rig.gateway():
            await runtime.synchronized.wait()

    assert (at_first, meanwhile.cpus, pinned.cpus) == (ALL, CpuSet(0, 2, 3), CpuSet(1))


async def test_sets_are_right_when_the_runtime_comes_back(rig: Rig, runtime: SimulatedRuntime) -> None:
    """After a restart of the runtime the gateway connects again by itself, and what changed in
    between is made up for.

    Meanwhile it tries no update.
    """
    with capture_logs() as logs:
        await change_the_pool_while_the_runtime_is_away(rig, runtime)

    assert [log for log in logs if log["event"] == "cpusets.not-updated"] == []


async def change_the_pool_while_the_runtime_is_away(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A claim ends between two lives of the runtime."""
    async with rig.kubelet, rig.gateway():
        async with runtime.serving():
            await runtime.synchronized.wait()
            neighbour = await runtime.create("neighbour", pod="other")
            await prepare(rig, FIRST)
        await rig.kubelet.unprepare_claims([FIRST])
        stale = neighbour.cpus
        async with runtime.serving():
            await runtime.synchronized.wait()

    assert (stale, neighbour.cpus) == (CpuSet(0, 2, 3), ALL)
    assert runtime.registered == ["90-topobus"] * 2


async def test_claim_fails_and_gives_its_cpus_back_when_a_container_cannot_be_changed(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A CPU that another container still runs on is not exclusive: kubelet is told so."""
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        stubborn = await runtime.create("stubborn", pod="other")
        neighbour = await runtime.create("neighbour", pod="other")
        runtime.refuses_updates.add(stubborn.id)
        error = await prepare(rig, FIRST)
        runtime.refuses_updates.clear()
        await runtime.until(lambda: neighbour.cpus == ALL)
        again = await prepare(rig, FIRST)

    assert (
        "the container runtime could not change the CPUs of container stubborn of pod default/other "
        f"({stubborn.id[:12]}): it refuses" in error
    )
    assert (again, stubborn.cpus, neighbour.cpus) == ("", CpuSet(0, 2, 3), CpuSet(0, 2, 3))


async def test_refusals_of_the_runtime_are_told_once_until_they_change(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again, for days if need be, and a log is for people."""
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._RETRY_S", 0.01)
    enough = asyncio.Event()

    class Refusing(set[str]):
        """Counts who asks."""

        tries = 0

        def __contains__(self, name: object) -> bool:
            self.tries += 1
            if self.tries > 5:
                enough.set()
            return super().__contains__(name)

    with capture_logs() as logs:
        async with runtime.serving(), rig.kubelet, rig.gateway():
            await runtime.synchronized.wait()
            stubborn = await runtime.create("stubborn", pod="other")
            await prepare(rig, FIRST)
            runtime.refuses_updates = Refusing({stubborn.id})
            await rig.kubelet.unprepare_claims([FIRST])
            await enough.wait()
            runtime.refuses_updates = set()
            await runtime.until(lambda: stubborn.cpus == ALL)

    said = [log["event"] for log in logs if log["event"].startswith("cpusets.")]
    assert said == ["cpusets.not-updated"]


async def test_container_has_the_smaller_pool_when_a_claim_comes_while_it_is_made(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A runtime drops updates of a container that is not there yet: the claim's answer waits until
    it is, and has been changed.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway(), asyncio.TaskGroup() as group:
        await runtime.synchronized.wait()
        await rig.kubelet.wait_for_driver(DRIVER)
        neighbour = await runtime.create("neighbour", pod="other")
        answers: list[asyncio.Task[str]] = []

        async def take_a_cpu() -> None:
            answers.append(group.create_task(prepare(rig, FIRST)))
            await runtime.until(lambda: neighbour.cpus == CpuSet(0, 2, 3))
            too_early.append(answers[0].done())

        too_early: list[bool] = []
        runtime.while_making = take_a_cpu
        half_made = await runtime.create("half-made", pod="other")
        error = await answers[0]
        at_the_answer = (half_made.cpus, neighbour.cpus)

    assert too_early == [False]
    assert (error, at_the_answer) == ("", (CpuSet(0, 2, 3), CpuSet(0, 2, 3)))


async def test_container_keeps_its_cpus_when_kubelet_updates_it(rig: Rig, runtime: SimulatedRuntime) -> None:
    """An in-place resize, or kubelet's own manager, writes the cgroup anew.

    Exclusive stays exclusive, and nobody gets its CPU back by it.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig, FIRST)
        pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-first-cpu-1",))
        neighbour = await runtime.create("neighbour", pod="other")
        await runtime.resize(pinned, cpus="0-3")
        await runtime.resize(neighbour, cpus="0-3")

    assert (pinned.cpus, neighbour.cpus) == (CpuSet(1), CpuSet(0, 2, 3))


async def test_gateway_pins_nothing_when_no_cpus_are_its_own(rig: Rig, runtime: SimulatedRuntime) -> None:
    """The default: the node's CPUs are kubelet's, and the gateway hears of containers alone."""
    async with runtime.serving(), rig.kubelet, rig.gateway(cpus=CpuSettings()):
        await runtime.synchronized.wait()
        error = await prepare(rig, FIRST)
        neighbour = await runtime.create("neighbour")

    assert (error, neighbour.cpus) == ("", ALL)


async def test_container_starts_only_past_the_gateway_when_its_claim_has_cpus(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A runtime goes on without its plugins: a container of the claim starts only when the gateway
    has pinned it, and nothing of the guard is in it.
    """
    async with runtime.serving(), rig.kubelet:
        async with rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig, FIRST)
            pinned = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-first-cpu-1",))
        await runtime.until(lambda: not runtime.synchronized.is_set())
        with pytest.raises(NotStarted, match="stat /proc/topobus-gateway-has-not-seen-this-container"):
            await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-first-cpu-1",))
        async with rig.gateway():
            await runtime.synchronized.wait()
            again = await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-first-cpu-1",))

    assert (pinned.cpus, pinned.mounts) == (again.cpus, again.mounts) == (CpuSet(1), ())


async def test_container_is_refused_when_its_claim_is_not_prepared(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A file that was left, or a guard that somebody wrote: the reason names the claim, and nothing
    is pinned.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig, FIRST)
        (file,) = rig.cdi_dir.glob("*.json")
        left = file.read_bytes()
        await rig.kubelet.unprepare_claims([FIRST])
        file.write_bytes(left)
        with pytest.raises(Refused, match=r"of a claim \(uid u-first\) that is not prepared on this node"):
            await runtime.create("main", cdi=("topobus.dev/cpu=claim-u-first-cpu-1",))


async def test_container_has_the_smaller_pool_when_a_claim_comes_while_it_is_started(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A runtime changes only its notes of a container whose start is under way: the claim's answer
    waits until it runs, and has been changed.
    """
    runtime.control_groups = None  # the kernel would tell
    async with runtime.serving(), rig.kubelet, rig.gateway(), asyncio.TaskGroup() as group:
        await runtime.synchronized.wait()
        await rig.kubelet.wait_for_driver(DRIVER)
        neighbour = await runtime.create("neighbour", pod="other")
        answers: list[asyncio.Task[str]] = []
        too_early: list[bool] = []

        async def take_a_cpu() -> None:
            answers.append(group.create_task(prepare(rig, FIRST)))
            await runtime.until(lambda: neighbour.cpus == CpuSet(0, 2, 3))
            too_early.append(answers[0].done())

        runtime.while_starting = take_a_cpu
        starting = await runtime.create("starting", pod="other")
        error = await answers[0]
        at_the_answer = (starting.cpus, neighbour.cpus)

    assert too_early == [False]
    assert (error, at_the_answer) == ("", (CpuSet(0, 2, 3), CpuSet(0, 2, 3)))


async def test_container_has_the_larger_pool_when_a_claim_ends_while_it_is_started(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """What the pool gained in the moment of its start is made up for as soon as it runs."""
    runtime.control_groups = None  # the kernel would tell
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        await prepare(rig, FIRST)

        async def give_back() -> None:
            await rig.kubelet.unprepare_claims([FIRST])

        runtime.while_starting = give_back
        started = await runtime.create("started", pod="other")
        await runtime.until(lambda: started.cpus == ALL)


async def test_container_is_waited_for_when_a_gateway_comes_while_it_is_started(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """What the runtime shows of a container that does not run yet need not be what its start has
    read.
    """
    go = asyncio.Event()

    async def wait() -> None:
        await go.wait()

    async with runtime.serving(), rig.kubelet, asyncio.TaskGroup() as group:
        neighbour = await runtime.create("neighbour", pod="other")
        runtime.while_starting = wait
        starting = group.create_task(runtime.create("starting", pod="other"))
        async with rig.gateway():
            await runtime.synchronized.wait()
            answer = group.create_task(prepare(rig, FIRST))
            await runtime.until(lambda: neighbour.cpus == CpuSet(0, 2, 3))
            is_early = answer.done()
            go.set()
            error = await answer
            at_the_answer = (await starting).cpus

    assert (is_early, error, at_the_answer) == (False, "", CpuSet(0, 2, 3))


async def fail() -> None:
    """A start that fails, of which the runtime tells its plugins nothing."""
    raise NotStarted("exec: not found")


async def test_claim_is_prepared_when_a_container_could_not_be_started(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that a start has failed: claims wait for a while, not for ever, and the log
    names the container.
    """
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._START_S", 0.2)
    with capture_logs() as logs:
        async with runtime.serving(), rig.kubelet, rig.gateway():
            await runtime.synchronized.wait()
            runtime.while_starting = fail
            with pytest.raises(NotStarted):
                await runtime.create("broken", pod="other")
            errors = (await prepare(rig, FIRST), await prepare(rig, SECOND))

    said = [log["container"] for log in logs if log["event"] == "container.start-overdue"]
    assert errors == ("", "")
    assert len(said) == 1
    assert "container broken of pod default/other" in said[0]


async def test_claim_waits_for_no_container_that_kubelet_has_made_anew(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with the name of one that never ran is its successor, and a sandbox that ends
    takes its containers along.
    """
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._START_S", 3600.0)
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        pod, other = await runtime.run_pod("again"), await runtime.run_pod("over")
        runtime.while_starting = fail
        for name in (pod.name, other.name):
            with pytest.raises(NotStarted):
                await runtime.create("main", pod=name)
        runtime.while_starting = None
        again = await runtime.create("main", pod=pod.name)
        await runtime.stop_pod(other)
        error = await prepare(rig, FIRST)

    assert (error, again.cpus) == ("", CpuSet(0, 2, 3))


async def test_no_cpu_is_shared_when_the_runtime_has_done_a_part_of_an_update(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """One container that hangs makes a whole call an error: what it changed is changed again, the
    hanging one is named, and nobody runs on a claim's CPU.
    """
    runtime.control_groups = None  # the kernel would tell
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour", pod="other")
        hanging = await runtime.create("hanging", pod="hung")
        await prepare(rig, FIRST)
        runtime.hung.add(hanging.id)
        await rig.kubelet.unprepare_claims([FIRST])
        await runtime.until(lambda: neighbour.cpus == ALL)
        refused = await prepare(rig, FIRST)
        runtime.hung.clear()
        error = await prepare(rig, FIRST)
        at_the_answer = (neighbour.cpus, hanging.cpus)

    assert f"could not change the CPUs of container hanging of pod default/hung ({hanging.id[:12]})" in refused
    assert "neighbour" not in refused
    assert (error, at_the_answer) == ("", (CpuSet(0, 2, 3), CpuSet(0, 2, 3)))


async def test_hanging_container_stands_in_nobodys_way_when_it_cannot_be_on_a_claims_cpus(
    rig: Rig, runtime: SimulatedRuntime
) -> None:
    """A container that is on other CPUs is no reason to refuse a claim, and is not named in the
    calls for the others.
    """
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour", pod="other")
        await prepare(rig, FIRST)
        hanging = await runtime.create("main", pod="hung", cpus="3")
        runtime.hung.add(hanging.id)
        await runtime.resize(hanging, cpus="0,3")
        await runtime.until(lambda: any(hanging.id in update for update in runtime.updates))
        await rig.plane.store(claim("third", "u-third", "cpu-2"))
        before = len(runtime.updates)
        error = await prepare(rig, ClaimReference(name="third", uid="u-third", drivers=(DRIVER,)))
        named = {name for update in runtime.updates[before:] for name in update}

    assert (error, neighbour.cpus, named) == ("", CpuSet(0, 3), {neighbour.id})


async def test_no_cpu_is_shared_when_the_runtime_has_done_an_update_without_an_answer(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was sent may have been done: the next claim is not promised a CPU by what was
    believed before.
    """
    runtime.control_groups = None  # the kernel would tell
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._TOGETHER_S", 0.2)
    # A second try would tell, too.
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._RETRY_S", 3600.0)
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._LONGEST_RETRY_S", 3600.0)
    async with runtime.serving(), rig.kubelet, rig.gateway():
        await runtime.synchronized.wait()
        neighbour = await runtime.create("neighbour", pod="other")
        await prepare(rig, FIRST)
        runtime.silent = True
        await rig.kubelet.unprepare_claims([FIRST])
        await runtime.until(lambda: neighbour.cpus == ALL)
        runtime.silent = False
        error = await prepare(rig, FIRST)
        at_the_answer = neighbour.cpus

    assert (error, at_the_answer) == ("", CpuSet(0, 2, 3))


async def test_slow_growth_of_the_pool_is_no_trouble(
    rig: Rig, runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet does not wait for long until everybody has a claim's CPUs again, and nothing is wrong
    when that takes a little longer.
    """
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._GROWTH_S", 0.0)
    with capture_logs() as logs:
        async with runtime.serving(), rig.kubelet, rig.gateway():
            await runtime.synchronized.wait()
            neighbour = await runtime.create("neighbour", pod="other")
            await prepare(rig, FIRST)
            await rig.kubelet.unprepare_claims([FIRST])
            await runtime.until(lambda: neighbour.cpus == ALL)

    assert [log for log in logs if log["event"] == "cpusets.not-updated"] == []


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the gateway look at the kernel's cpusets every moment."""
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._LOOK_S", 0.05)
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._SECOND_LOOK_S", 0.01)


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("version", [1, 2])
async def test_kernels_cpuset_is_put_right_when_somebody_else_changed_it(
    rig: Rig, runtime: SimulatedRuntime, version: int
) -> None:
    """What the kernel says is compared with what was promised.

    A container on a claim's CPU loses it again, which is told with both names and counted.
    """
    runtime.cgroup_version = version
    with capture_logs() as logs:
        async with runtime.serving(), rig.kubelet, rig.gateway():
            await runtime.synchronized.wait()
            await prepare(rig, FIRST)
            neighbour = await runtime.create("neighbour", pod="other")
            file = runtime.control_group(neighbour)
            file.write_text("0-3\n")
            await runtime.until(lambda: file.read_text() == "0,2-3\n")
            connection = (await rig.pods()).runtime
        counted = rig.registry.get_sample_value("topobus_gateway_cpuset_differences_total", {"kind": "shared"})

    differed = [log for log in logs if log["event"] == "cpuset.differed"]
    assert [
        (log["pod"], log["container"], log["has"], log["wanted"], log["claims"], log["error"]) for log in differed
    ] == [("default/other", "neighbour", "0-3", "0,2-3", ["default/first"], "")]
    assert connection is not None
    assert (counted, connection.cpusets_unseen) == (1.0, "")


@pytest.mark.usefixtures("quick_looks")
async def test_readiness_says_so_when_the_kernels_cpusets_cannot_be_read(rig: Rig, runtime: SimulatedRuntime) -> None:
    """A gateway that cannot look is as ready as before, and readiness and doctor's ask say what it
    cannot see, and where it looked.
    """
    elsewhere = HardwareSettings(root=str(rig.root / "nowhere"))
    async with runtime.serving(), rig.kubelet, rig.gateway(hardware=elsewhere):
        await runtime.synchronized.wait()
        await runtime.create("neighbour", pod="other")
        report = await rig.readiness.until(lambda parts: "cpusets" in parts)
        connection = (await rig.pods()).runtime

    why = f"none of 1 containers has its control group below {rig.root}/nowhere/sys/fs/cgroup"
    assert why in report["cpusets"]
    assert connection is not None
    assert connection.cpusets_unseen == why
