"""What one look saw is shown until readers could see it: a counter tells its rise at one look alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from support.toy_driver import ToyDriver
from topobus.devicekit.host.driver_poller import DriverPoller
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.host.metrics import DeviceSeries
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.settings import DeviceServiceSettings, DriverSettings
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.machine import Machine

MACHINE = Machine(node="n", generation=1, numa_nodes=(), cpus=())
RISE = Observation(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="aer-fatal")
HOT = Observation(dimension=Dimension.THERMAL, state=HealthState.DEGRADED, reason="throttled")


class Polled:
    """A driver with one device, looked at when the test says so."""

    def __init__(self, root: Path) -> None:
        self.driver = ToyDriver(count=1)
        settings = DeviceServiceSettings(
            node="n", hardware=HardwareSettings(root=str(root)), drivers=DriverSettings(timeout_s=60.0)
        )
        self.clock = clock = ManualClock()
        metrics = DeviceSeries(CollectorRegistry()).of("toy")
        isolated = IsolatedDriver(self.driver, timeout_s=60.0, clock=clock)
        journal = Journal(root / "journal")
        self.poller = DriverPoller(isolated, Tree(settings.hardware), settings, clock, metrics, journal)

    async def look(self, *faults: Observation) -> tuple[str, ...]:
        """Look once at a device with these faults, and give what is shown of it."""
        self.driver.faults = {"gpu-toy-0": faults}
        await self.poller.poll(MACHINE, ())
        return self.shown

    def publish(self, after_s: float = 5.0) -> None:
        """Publish what is shown after so long."""
        self.clock.advance(after_s)
        self.poller.note_published(self.poller.shown())

    @property
    def shown(self) -> tuple[str, ...]:
        """Reasons that are shown of the device."""
        return tuple(observation.reason for observation in self.poller.shown().observations.get("gpu-toy-0", ()))


@pytest.fixture
def polled(tmp_path: Path) -> Polled:
    """One, which nobody has looked at."""
    return Polled(tmp_path)


async def test_evidence_of_one_look_stays_shown_until_it_is_published(polled: Polled) -> None:
    """NATS may be away for as long as it likes: an error that was counted meanwhile is told
    afterwards, once.
    """
    seen = [await polled.look(), await polled.look(RISE), await polled.look(), await polled.look(HOT)]
    polled.publish()

    assert seen == [(), ("aer-fatal",), ("aer-fatal",), ("throttled", "aer-fatal")]
    assert (polled.shown, await polled.look()) == (("throttled",), ())


async def test_evidence_that_came_while_the_older_was_published_stays_shown(polled: Polled) -> None:
    """What a publication did not have is news for the next one, however the two looks fell."""
    await polled.look(RISE)
    taken = polled.poller.shown()
    polled.clock.advance(5.0)
    await polled.look(HOT)
    polled.poller.note_published(taken)
    between = polled.shown

    assert (between, await polled.look()) == (("throttled",), ("throttled",))
    polled.publish()
    assert polled.shown == ()


async def test_evidence_of_one_look_stays_shown_when_it_was_published_at_once(polled: Polled) -> None:
    """A reader that looks each second or two sees it, however often others are published meanwhile."""
    await polled.look(RISE)
    polled.publish(after_s=0.0)
    seen = [await polled.look()]
    polled.publish(after_s=4.9)
    seen.append(await polled.look())
    polled.publish(after_s=0.1)

    assert (seen, polled.shown) == ([("aer-fatal",), ("aer-fatal",)], ())


async def test_evidence_that_lasts_is_shown_once_when_it_was_seen_often(polled: Polled) -> None:
    """The same sign at each look is one sign, before its publication and after it."""
    seen = [await polled.look(HOT), await polled.look(RISE, HOT), await polled.look(HOT)]
    polled.publish()

    assert [sorted(names) for names in (*seen, polled.shown)] == [
        ["throttled"],
        ["aer-fatal", "throttled"],
        ["aer-fatal", "throttled"],
        ["throttled"],
    ]


async def test_evidence_of_a_look_that_was_given_up_is_shown(polled: Polled) -> None:
    """A look whose answer came too late, or that was interrupted, has taken the rise with it: what
    it saw is not lost.
    """
    await polled.look()
    polled.driver.faults = {"gpu-toy-0": (RISE,)}
    # As the driver's thread does when nobody waits for it any more.
    await asyncio.to_thread(polled.poller._observe, polled.poller.view.devices or ())

    assert (polled.shown, await polled.look()) == (("aer-fatal",), ("aer-fatal",))
