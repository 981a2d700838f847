"""How often services are asked whether they are there."""

from __future__ import annotations

from typing import cast

import pytest

from topobus.bus.bus import Bus
from topobus.bus.liveness import ServiceLiveness
from topobus.engine.health.silence import Answered, SilenceSettings, Silent, SilentBecause
from topobus.formats.messages.catalogue import HINT
from topobus.testing.clock import ManualClock

SETTINGS = SilenceSettings(every_s=1.0, timeout_s=1.0, gone_s=5.0, hung_s=15.0)


class Peers:
    """A bus with services that answer, or not; counts how often each class was asked."""

    def __init__(self) -> None:
        self.is_connected = True
        self.classes = ["gpu", "nic"]
        self.away: set[str] = set()
        self.asked: list[str] = []

    async def is_answered(self, _: object, *, device_class: str, **__: object) -> Answered | Silent:
        """Answer for a service."""
        self.asked.append(device_class)
        if not self.is_connected:
            return Silent(because=SilentBecause.NO_BUS)
        return Silent(because=SilentBecause.NOBODY) if device_class in self.away else Answered()


@pytest.fixture
def peers() -> Peers:
    """Two services, both there."""
    return Peers()


@pytest.fixture
def clock() -> ManualClock:
    """Time under the test's hand."""
    return ManualClock()


@pytest.fixture
def liveness(peers: Peers, clock: ManualClock) -> ServiceLiveness:
    """What is tested."""
    return ServiceLiveness(
        cast("Bus", peers),
        HINT,
        node="n",
        clock=clock,
        settings=SETTINGS,
        classes=lambda: peers.classes,
        on_change=lambda: None,
    )


async def looks(liveness: ServiceLiveness, clock: ManualClock, seconds: int) -> str:
    """Let seconds pass, as `run` does: for each `x` where it looked, `.` where it did not."""
    marks = ""
    for _ in range(seconds):
        is_due = liveness.is_due()
        if is_due:
            await liveness.check_all()
        marks += "x" if is_due else "."
        clock.advance(1.01)
    return marks


async def test_look_is_due_every_third_time_when_all_answer(liveness: ServiceLiveness, clock: ManualClock) -> None:
    """While all is well a look costs messages for nothing."""
    assert await looks(liveness, clock, 8) == "x..x..x."


async def test_look_is_due_each_time_when_one_does_not_answer(
    liveness: ServiceLiveness, peers: Peers, clock: ManualClock
) -> None:
    """From the first look without an answer on, and until all answer again."""
    await looks(liveness, clock, 1)
    peers.away = {"nic"}

    row = await looks(liveness, clock, 8)
    peers.away = set()

    assert row == "..xxxxxx"
    assert await looks(liveness, clock, 4) == "x..x"


async def test_service_is_silent_in_time_when_it_ends_right_after_a_look(
    liveness: ServiceLiveness, peers: Peers, clock: ManualClock
) -> None:
    """The worst moment to end: three seconds until it is missed, `gone_s`, and one look's pause."""
    await looks(liveness, clock, 1)
    peers.away = {"gpu"}
    began = clock.monotonic()

    while not liveness.silent:
        await looks(liveness, clock, 1)

    assert set(liveness.silent) == {"gpu"}
    assert clock.monotonic() - began <= 3 + SETTINGS.gone_s + 2


async def test_look_is_due_at_once_when_a_class_is_new(
    liveness: ServiceLiveness, peers: Peers, clock: ManualClock
) -> None:
    """A new class is judged as soon as it is there: kubelet waits for it."""
    await looks(liveness, clock, 1)
    peers.classes = [*peers.classes, "fpga"]

    assert await looks(liveness, clock, 1) == "x"
    assert liveness.is_judged("fpga")


async def test_look_is_due_at_once_when_nats_is_away(
    liveness: ServiceLiveness, peers: Peers, clock: ManualClock
) -> None:
    """An absence of NATS is seen also when it is short: afterwards services come back one by one,
    and are given the longer time.
    """
    await looks(liveness, clock, 1)
    peers.is_connected = False
    away = await looks(liveness, clock, 1)
    peers.is_connected, peers.away = True, {"gpu"}

    back = await looks(liveness, clock, 10)

    assert (away, back) == ("x", "x" * 10)
    assert not liveness.silent
