"""The gpu service that owns the control daemons of MPS: claims and shares as their owners see them,
daemons that die, and lives of the service that are cut off at any step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.device_bench import has_state
from support.fake_mps import is_alive, is_cut, needs_gcc
from support.laws import steps
from support.mps_lives import OTHER, OWNER, MpsLives, check_prepared
from topobus.bus.bus import Bus
from topobus.devicekit.sharing.shared_devices import SharedPool
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.health import HealthState
from topobus.values.outcome import Refusal
from topobus.values.pools import Condition
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, needs_gcc]

# More than any verb has: a loop that never ends would be a bug of the test.
MOST_STEPS = 150


@pytest_asyncio.fixture
async def lives(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[MpsLives]:
    """A service with two GPUs; what a failed test leaves running is ended."""
    async with Bus.session(NatsSettings(url=nats_server.url), name="gateway") as gateway:
        made = MpsLives(gateway, nats_server.url, tmp_path, **getattr(request, "param", {}))
        await made.publish_machine(bus)
        try:
            await made.start()
            inventory = await made.inventory(has_state(HealthState.HEALTHY, made.second))
            for device in inventory.devices:
                made.mps.add_gpu(device.uuid)
            yield made
        finally:
            await made.stop()
            made.mps.end_all()


REPLICA = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/gpu-shared", uid="r1")
SHARED = {"sharing": (SharedPool(name="gpu-shared", where=(Condition(field="driver", equals="nvidia"),), replicas=4),)}

REPLICAS = {
    "sharing": (
        SharedPool(name="gpu-shared", where=(Condition(field="driver", equals="nvidia"),), replicas=4, strategy="MPS"),
    )
}


async def test_claim_of_two_gpus_gets_one_daemon_and_leaves_nothing(lives: MpsLives) -> None:
    """Its containers reach the daemon by a folder and shared memory of the host.

    When it is given back nothing is left, and the daemon was no dirt meanwhile.
    """
    prepared = check_prepared(await lives.prepare())

    common = prepared.common
    pipes = str(lives.mps.state_dir / lives.first / "pipe")
    assert common.env["CUDA_MPS_PIPE_DIRECTORY"] == pipes
    assert [(mount.host_path, mount.container_path) for mount in common.mounts] == [
        (pipes, pipes),
        ("/dev/shm", "/dev/shm"),
    ]
    assert lives.mps.modes() == {"Exclusive_Process"}
    assert len(lives.mps.pids()) == 1
    lives.mps.client(lives.first)
    assert await lives.unprepare() is None
    lives.check_nothing_left()


@pytest.mark.parametrize("lives", [SHARED], indirect=True)
async def test_owners_of_one_gpu_share_its_daemon_until_the_last_one_leaves(lives: MpsLives) -> None:
    """Each has the limits of its part, the second joins the first one's daemon, and one who leaves
    cuts nobody off.
    """
    quarter, half = ({"memory": 20 << 30, "shares": 1}, {"memory": 40 << 30, "shares": 2})
    first = check_prepared(await lives.prepare(OWNER, lives.first, shares={lives.first: quarter}))
    daemon = lives.mps.pids()
    client = lives.mps.client(lives.first)
    second = check_prepared(await lives.prepare(OTHER, lives.first, shares={lives.first: half}))

    variables = [
        (it.common.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], it.common.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"])
        for it in (first, second)
    ]
    assert variables == [("25", "0=20480M"), ("50", "0=40960M")]
    assert lives.mps.ask(lives.first, "get_default_device_pinned_mem_limit 0") == "40960M"
    assert await lives.unprepare(OWNER, lives.first) is None
    assert set(daemon) < set(lives.mps.pids())
    assert is_alive(client)
    assert await lives.unprepare(OTHER, lives.first) is None
    assert is_cut(client)
    lives.check_nothing_left()


@pytest.mark.parametrize("lives", [SHARED], indirect=True)
async def test_owner_is_refused_when_others_share_the_gpu_in_another_way(lives: MpsLives) -> None:
    """A process past the daemon would have the GPU for itself; the refusal names who has it."""
    part = {lives.first: {"memory": 1 << 30, "shares": 1}}
    check_prepared(await lives.prepare(OWNER, lives.first, shares=part))

    refused = await lives.prepare(OTHER, lives.first, strategy="Exclusive", shares=part)

    assert isinstance(refused, Refusal)
    assert [reason.code for reason in refused.reasons] == ["mps-mixed"]
    assert str(OWNER) in refused.reasons[0].message
    assert await lives.unprepare(OWNER, lives.first) is None
    lives.check_nothing_left()


@pytest.mark.parametrize("lives", [REPLICAS], indirect=True)
async def test_replica_has_its_daemon_with_the_first_answer(lives: MpsLives) -> None:
    """Kubelet's Allocate cannot ask again, so it waits.

    The strategy is the operator's, the limits are those of a replica.
    """
    part = {lives.first: {"memory": 20 << 30, "shares": 1}}

    common = check_prepared(await lives.prepare(REPLICA, lives.first, strategy="", shares=part)).common

    assert (common.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], common.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]) == (
        "25",
        "0=20480M",
    )
    assert (common.hooks, common.additional_gids) == ((), ())
    assert len(lives.mps.pids()) == 1
    assert await lives.unprepare(REPLICA, lives.first) is None
    lives.check_nothing_left()


async def test_claim_gets_a_new_daemon_when_the_node_was_rebooted(lives: MpsLives) -> None:
    """Kubelet prepares it again; the journal outlives the reboot, what it speaks of does not."""
    check_prepared(await lives.prepare())
    await lives.stop()
    lives.reboot()

    await lives.start()
    check_prepared(await lives.prepare())

    assert len(lives.mps.pids()) == 1
    assert lives.mps.modes() == {"Exclusive_Process"}
    assert await lives.unprepare() is None
    lives.check_nothing_left()


async def test_daemon_that_was_killed_is_told_and_back_without_being_asked(lives: MpsLives) -> None:
    """An event with the code of its own, then Healthy with a new process in the same folder."""
    check_prepared(await lives.prepare())
    (killed,) = lives.mps.pids()

    lives.mps.kill(killed)

    event = await lives.event(
        lambda event: event.health.worst is not None and event.health.worst.reason == "mps-daemon-gone"
    )
    assert event.health.state is HealthState.DEGRADED
    await lives.inventory(has_state(HealthState.HEALTHY, event.device))
    again = lives.mps.pids()
    assert len(again) == 1
    assert again != [killed]
    assert await lives.unprepare() is None
    lives.check_nothing_left()


async def test_client_notices_nothing_when_the_service_is_killed_and_started_again(lives: MpsLives) -> None:
    """The daemon is adopted: the claim is prepared in the same one, and ended by the life that did
    not start it.
    """
    check_prepared(await lives.prepare())
    client, before = lives.mps.client(lives.first), lives.mps.pids()

    await lives.stop()
    await lives.start()
    check_prepared(await lives.prepare())

    assert lives.mps.pids() == before
    assert is_alive(client)
    assert await lives.unprepare() is None
    lives.check_nothing_left()


@pytest.mark.law
async def test_nothing_is_left_when_killed_at_any_step_of_prepare(lives: MpsLives) -> None:
    """Asked again, as after every second death, the claim has one daemon that serves.

    Given up, as after the others, there is nothing: whatever the step was.
    """
    for step in steps(MOST_STEPS):
        lives.doom("prepare", step)
        await lives.prepare_once()
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        if step % 2:
            check_prepared(await lives.prepare(), at)
            assert is_alive(lives.mps.client(lives.first)), at
            assert len(lives.mps.pids()) == 2, at
        assert await lives.unprepare() is None, at
        lives.check_nothing_left(at)

    assert 25 <= step - 1 < MOST_STEPS - 2, f"{step - 1} steps"


@pytest.mark.law
async def test_nothing_is_left_when_killed_at_any_step_of_unprepare(lives: MpsLives) -> None:
    """The next start goes on with what was begun, and the repeated question finds nothing to do."""
    for step in steps(MOST_STEPS):
        check_prepared(await lives.prepare(), "before")
        lives.mps.client(lives.first)
        lives.doom("unprepare", step)
        await lives.unprepare_once()
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        assert await lives.unprepare() is None, at
        lives.check_nothing_left(at)

    assert 15 <= step - 1 < MOST_STEPS - 2, f"{step - 1} steps"


@pytest.mark.law
async def test_daemon_serves_when_the_start_that_runs_it_again_is_killed_at_any_step(lives: MpsLives) -> None:
    """The daemon died with the service, as in a pod: the next start runs one again, in however many
    lives, and what is left at the end is nothing.
    """
    check_prepared(await lives.prepare())
    for step in steps(MOST_STEPS):
        await lives.stop()
        lives.mps.end_all()
        if await lives.start_doomed(step):
            await lives.prepare_once()
            if not await lives.died():
                break
        at = f"killed at {lives.where()} of a start"
        await lives.start()
        check_prepared(await lives.prepare(), at)
        assert is_alive(lives.mps.client(lives.first)), at
        assert len(lives.mps.pids()) == 2, at

    assert 8 <= step - 1 < MOST_STEPS - 2, f"{step - 1} steps"
    # The last life goes on counting its steps.
    await lives.stop()
    await lives.start()
    assert await lives.unprepare() is None
    lives.check_nothing_left()
