"""A rolling update: the new gateway starts while the old one serves, stands by, and takes over: no
device vanishes, no call is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from support.gateway_rig import Rig, make_rig
from support.looks import next_turn, until
from support.node_plane import NODE, claim, device
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.process.clock import Clock
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import ManualClock
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
    Rejection,
)
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        async with made.kubelet:
            yield made


@asynccontextmanager
async def overlapping(rig: Rig, clock: Clock | None = None) -> AsyncIterator[asyncio.Task[None]]:
    """Run an old and a new gateway; the new one waits. Gives the old one's task."""
    async with rig.gateway(instance="pod-1", clock=clock) as old:
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.kubelet.wait_for_driver(DRIVER)
        async with rig.gateway(instance="pod-2", clock=clock):
            await rig.readiness.until(lambda report: "another gateway" in report.get("lock", ""))
            yield old


async def end(old: asyncio.Task[None]) -> None:
    """End the old one as SIGTERM does."""
    old.cancel()
    await asyncio.wait({old})


async def stop(sampling: asyncio.Task[None]) -> None:
    """End a task that goes on beside the test; what it died of before is the test's failure."""
    sampling.cancel()
    (outcome,) = await asyncio.gather(sampling, return_exceptions=True)
    if not isinstance(outcome, asyncio.CancelledError):
        raise AssertionError("it ended by itself") from outcome


async def until_both_are_registered(rig: Rig) -> None:
    """Wait until kubelet has taken the second gateway's driver, too."""
    await rig.kubelet.wait_for_event("NotifyRegistrationStatus", subject=DRIVER, count=2)


async def round_trip(rig: Rig, reference: ClaimReference) -> list[str]:
    """Prepare and unprepare once, as kubelet does, without a second try; whatever went wrong."""
    (answer,) = await rig.kubelet.prepare_claims([reference])
    errors = await rig.kubelet.unprepare_claims([reference])
    return [error for error in (answer.error, *errors.values()) if error]


async def test_kubelet_sees_no_device_vanish_when_a_new_gateway_takes_over(rig: Rig) -> None:
    """From before to after, every device stays allocatable, and a pod that comes in between is
    admitted.
    """
    with capture_logs() as logs:
        counts = await take_over(rig)

    assert len(counts) >= 2  # a list of each gateway
    assert set(counts) == {2}
    assert [log for log in logs if log["event"] == "twin.found" and "noun" in log] == []


async def take_over(rig: Rig) -> tuple[int, ...]:
    """Roll over with a pod in between; gives how many devices were ever allocatable.

    The old one ends by what happens: its clock stands still.
    """
    async with overlapping(rig, ManualClock()) as old:
        ending = asyncio.create_task(end(old))
        pod = Pod(name="p", uid="p", containers=(Container(name="c", resources={GPU: 1}),))
        answer = await rig.kubelet.admit(pod)
        if isinstance(answer, Rejection) and not answer.is_final:
            # kubelet itself cuts off a start of a container when it takes the new gateway's
            # registration, and starts it again.
            answer = await rig.kubelet.admit(pod)
        await ending
        await rig.readiness.until(lambda report: report.get("registration") == "ready")
        # Registered is not listed: kubelet opens the new gateway's list after
        # it has taken its registration.
        await until(lambda: len(rig.kubelet.healthy_counts(GPU)) >= 2)
        counts = rig.kubelet.healthy_counts(GPU)
        registered = len([event for event in rig.kubelet.events if event.event == "Register.ok"])

    assert registered == 2
    assert isinstance(answer, Admission)
    return counts


async def test_no_call_is_lost_when_a_new_gateway_takes_over(rig: Rig) -> None:
    """Kubelet prepares and unprepares without a pause, before, while and after the turn changes
    hands: not one call fails, none is repeated.
    """
    await rig.plane.store(claim("busy", "u-busy", "gpu-1"))
    busy = ClaimReference(name="busy", uid="u-busy", drivers=(DRIVER,))
    failures: list[str] = []
    rounds = {"before": 0, "during": 0, "after": 0}
    now = "before"

    async def work() -> None:
        while True:
            failures.extend(await round_trip(rig, busy))
            rounds[now] += 1

    async with overlapping(rig) as old:
        await until_both_are_registered(rig)
        working = asyncio.create_task(work())
        async with asyncio.timeout(60):
            await until(lambda: rounds["before"] >= 5 or working.done())
            now = "during"
            await end(old)
            # The call that was under way when the old one ended has its
            # answer before the next begins.
            await until(lambda: rounds["during"] >= 1 or working.done())
            now = "after"
            await until(lambda: rounds["after"] >= 5 or working.done())
        await stop(working)

    assert failures == []
    assert min(rounds.values()) >= 1


async def test_claims_of_the_old_gateway_are_known_to_the_new_one_when_it_takes_over(rig: Rig) -> None:
    """One prepared before, one passed on by the gateway that stands by, and one prepared
    afterwards: the checkpoint has all of them once.
    """
    names = {"first": "gpu-0", "second": "gpu-1"}
    references = {name: ClaimReference(name=name, uid=f"u-{name}", drivers=(DRIVER,)) for name in names}
    for name, held in names.items():
        await rig.plane.store(claim(name, f"u-{name}", held))
    async with overlapping(rig) as old:
        (before,) = await rig.kubelet.prepare_claims([references["first"]])
        await until_both_are_registered(rig)
        (passed_on,) = await rig.kubelet.prepare_claims([references["second"]])
        await end(old)
        again = await rig.kubelet.prepare_claims(references.values())
        asked = len(rig.plane.asks.requests("prepare"))
        await rig.readiness.until(lambda report: report.get("lock") == "ready")
        entries = Checkpoint.load(Path(rig.settings.checkpoint_path)).entries()

    assert (before.error, passed_on.error) == ("", "")
    assert again == (before, passed_on)
    assert asked == 2
    assert [claim_entry.uid for claim_entry in entries if claim_entry.is_running] == ["u-first", "u-second"]


async def test_gateway_that_stands_by_is_ready_when_kubelet_knows_its_drivers(rig: Rig) -> None:
    """A roll-over that starts the new pod first ends the old one only when the new one is ready: so
    it is, with sockets of its own, and says why.
    """
    async with overlapping(rig):
        report = await rig.readiness.until(lambda _: rig.readiness.is_ready)
        registered = [
            event.detail["plugin_registered"]
            for event in rig.kubelet.events
            if event.event == "NotifyRegistrationStatus"
        ]
        sockets = sorted(path.name for path in rig.kubelet.plugins_registry_dir.iterdir())
        services = sorted(path.name for path in (rig.kubelet.plugins_dir / DRIVER).iterdir())

    assert report["lock"].startswith("ready: standby: another gateway runs on this node (process ")
    assert registered == [True, True]
    assert sockets == ["topobus.dev-pod-1-reg.sock", "topobus.dev-pod-2-reg.sock"]
    assert services == ["dra-pod-1.sock", "dra-pod-2.sock"]


async def test_kubelet_goes_on_with_the_old_gateway_when_the_new_one_ends_first(rig: Rig) -> None:
    """A roll-over that is taken back costs nothing: the new one's sockets go, and the old one never
    stopped working.
    """
    await rig.plane.store(claim("first", "u-first", "gpu-0"))
    first = ClaimReference(name="first", uid="u-first", drivers=(DRIVER,))
    async with rig.gateway(instance="pod-1"):
        await rig.kubelet.wait_for_driver(DRIVER)
        async with rig.gateway(instance="pod-2") as new:
            await until_both_are_registered(rig)
            (passed_on,) = await rig.kubelet.prepare_claims([first])
            await end(new)
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        left = sorted(path.name for path in rig.kubelet.plugins_registry_dir.iterdir())
        held = [allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()]

    assert passed_on.error == ""
    assert left == ["topobus.dev-pod-1-reg.sock"]
    assert held == [{"gpu": ("gpu-0",)}]


async def test_health_is_told_again_when_a_new_gateway_has_the_turn(rig: Rig) -> None:
    """Kubelet forgets a driver's health with the stream of the one that ends: the other says it
    again at once, and not after its ten seconds.
    """
    events = ("NodeWatchResources.closed", "NodeWatchResources.send")
    slow = msgspec.structs.replace(rig.settings.deadlines, health_refresh_s=29.0)
    rig.settings = msgspec.structs.replace(rig.settings, deadlines=slow)
    async with overlapping(rig) as old:
        await until_both_are_registered(rig)
        await rig.kubelet.wait_for_event("NodeWatchResources.send", subject=DRIVER, count=2)
        await end(old)
        async with asyncio.timeout(60):
            await until(
                lambda: (
                    [event.event for event in rig.kubelet.events if event.event in events and event.subject == DRIVER][
                        -2:
                    ]
                    == list(events)
                )
            )
        device_health = rig.kubelet.device_health(DRIVER, NODE, "gpu-0")

    assert device_health.state == "Healthy"


async def test_stop_lets_a_claim_come_to_its_end_when_one_is_under_way(rig: Rig) -> None:
    """A call cut off is repeated by kubelet after a minute and more, so a gateway that ends answers
    it first.
    """
    await rig.plane.store(claim("first", "u-first", "gpu-0"))
    first = ClaimReference(name="first", uid="u-first", drivers=(DRIVER,))
    async with rig.gateway() as only:
        await rig.kubelet.wait_for_driver(DRIVER)
        gate = rig.plane.asks.hold("prepare")
        preparing = asyncio.create_task(rig.kubelet.prepare_claims([first]))
        await rig.plane.asks.wait_for("prepare")
        ending = asyncio.create_task(end(only))
        await next_turn()
        gate.set()
        (answer,) = await preparing
        await ending

    assert answer.error == ""


async def test_gateway_ends_at_once_when_nobody_takes_over(rig: Rig) -> None:
    """Only a gateway that is awaited leaves its lists up: an ordinary stop waits for nobody, nor
    for the time, which stands still.
    """
    async with rig.gateway(clock=ManualClock()) as only:
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await end(only)

    assert list(rig.kubelet.device_plugin_dir.glob("topobus-*.sock")) == []
