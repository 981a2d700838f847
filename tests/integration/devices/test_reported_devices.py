"""What a device service does with verdicts of others: they withhold a device as far as their source
is trusted, over restarts, until the source or an operator takes them back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from support.asking import ask_patiently
from support.device_bench import NODE, POLL_S, DeviceBench, has_state, states
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import PERFORM, REPORT
from topobus.formats.messages.operation_messages import Operated, PerformRequest
from topobus.formats.messages.report_messages import ReportRequest, Taken
from topobus.process.config import NatsSettings
from topobus.values.health import HealthState
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Refusal
from topobus.values.verdict import Verdict, VerdictState

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

TRUSTING = HealthSettings(poll_s=POLL_S, hold_s=0.2, sources={"dcgm": "evidence", "scout": "advice"})
FIRST, SECOND = "gpu-toy-0", "gpu-toy-1"


@asynccontextmanager
async def _bus(bench: DeviceBench, name: str) -> AsyncIterator[Bus]:
    async with Bus.session(NatsSettings(url=bench.url), name=name) as bus:
        yield bus


async def _report(
    bus: Bus, state: VerdictState, *, source: str = "dcgm", device: str = FIRST, observed_at: str = ""
) -> Taken | Refusal:
    verdict = Verdict(source=source, state=state, device=device, code="XID-79", observed_at=observed_at)
    return (await ask_patiently(bus, REPORT, ReportRequest(verdict=verdict), node=NODE, device_class="gpu")).result


async def test_device_is_withheld_over_a_restart_until_its_source_says_healthy(bench: DeviceBench) -> None:
    """It is Unhealthy when the answer comes. The source falls silent, the service starts again, and
    it is Unhealthy still; its neighbour never was.
    """
    await bench.publish_machine()
    async with _bus(bench, "verdicts") as bus:
        async with bench.service(ToyDriver(count=2), health=TRUSTING):
            await bench.inventory(has_state(HealthState.HEALTHY, FIRST))
            taken = await _report(bus, VerdictState.UNHEALTHY)
            at_once = await bench.inventory(lambda _: True)
            again = await _report(bus, VerdictState.UNHEALTHY, observed_at="2026-01-02T03:04:05Z")
        async with bench.service(ToyDriver(count=2), health=TRUSTING):
            event = await bench.event(lambda event: event.device == FIRST and bool(event.health.conditions))
            back = await _report(bus, VerdictState.HEALTHY)
            recovered = await bench.inventory(has_state(HealthState.HEALTHY, FIRST))
            await bench.event(lambda event: event.device == FIRST and event.previous is HealthState.RECOVERING)
        history = [event.health.state for event in await bench.events(FIRST)]

    assert taken == Taken(devices=(FIRST,))
    assert states(at_once) == {FIRST: HealthState.UNHEALTHY, SECOND: HealthState.HEALTHY}
    # Seen before the one that is kept.
    assert again == Taken(devices=(FIRST,), is_newest=False)
    assert [(each.source, each.reason, each.message) for each in event.health.conditions] == [
        ("dcgm", "reported-by-source", "dcgm: XID-79")
    ]
    assert back == Taken(devices=(FIRST,))
    assert states(recovered)[SECOND] is HealthState.HEALTHY
    assert history == [
        HealthState.HEALTHY,
        HealthState.UNHEALTHY,
        HealthState.RECOVERING,
        HealthState.HEALTHY,
    ]


async def test_advice_degrades_and_an_unlisted_source_is_refused(bench: DeviceBench) -> None:
    """Of all devices of the class at once, and nothing changes by what is refused."""
    await bench.publish_machine()
    async with _bus(bench, "verdicts") as bus, bench.service(ToyDriver(count=2), health=TRUSTING):
        await bench.inventory(has_state(HealthState.HEALTHY, FIRST))
        refused = [
            await _report(bus, VerdictState.UNHEALTHY, source="npd"),
            await _report(bus, VerdictState.UNHEALTHY, device="gpu-toy-7"),
        ]
        unchanged = await bench.inventory(lambda _: True)
        advised = await _report(bus, VerdictState.UNHEALTHY, source="scout/fans", device="")
        degraded = await bench.inventory(lambda _: True)

    assert [each.reasons[0].code for each in refused if isinstance(each, Refusal)] == [
        "source-unlisted",
        "device-unknown",
    ]
    assert set(states(unchanged).values()) == {HealthState.HEALTHY}
    assert advised == Taken(devices=(FIRST, SECOND))
    assert set(states(degraded).values()) == {HealthState.DEGRADED}


async def test_device_recovers_when_an_operator_forgives_what_a_source_said(bench: DeviceBench) -> None:
    """For the device that was forgiven; the verdict on all still counts for its neighbour."""
    await bench.publish_machine()
    operation = DeviceOperation(device_class="gpu", device=FIRST, verb=DeviceVerb.FORGIVE, who="ada")
    request = PerformRequest(op_id="op-1", operation=operation, time="2026-01-02T03:04:05.000000Z")
    async with (
        _bus(bench, "verdicts") as bus,
        _bus(bench, "topology") as topology,
        bench.service(ToyDriver(count=2), health=TRUSTING),
    ):
        await bench.inventory(has_state(HealthState.HEALTHY, FIRST))
        await _report(bus, VerdictState.UNHEALTHY, device="")
        forgiven = (await topology.ask(PERFORM, request, node=NODE, device_class="gpu")).result
        recovered = await bench.inventory(has_state(HealthState.HEALTHY, FIRST))

    assert isinstance(forgiven, Operated)
    assert (forgiven.is_changed, forgiven.health.state) == (True, HealthState.RECOVERING)
    assert states(recovered)[SECOND] is HealthState.UNHEALTHY
