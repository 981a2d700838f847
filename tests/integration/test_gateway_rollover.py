"""A rolling update: the new gateway starts while the old one serves, waits for its turn, and takes over without a device vanishing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from topobus.gateway.checkpoint import Checkpoint
from topobus.testing.kubelet import Admission, ClaimReference, Container, Pod
from topobus.testing.nats import NatsServer

pytestmark = pytest.mark.integration

GPU = "topobus.dev/gpu"
DRIVER = "gpu.topobus.dev"


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        async with made.kubelet:
            yield made


@asynccontextmanager
async def overlapping(rig: Rig) -> AsyncIterator[asyncio.Task[None]]:
    """Run an old and a new gateway; the new one waits. Gives the old one's task."""
    async with rig.gateway() as old:
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.kubelet.wait_for_driver(DRIVER)
        async with rig.gateway():
            await rig.readiness.until(lambda report: "another gateway" in report.get("lock", ""))
            yield old


async def end(old: asyncio.Task[None]) -> None:
    """End the old one as SIGTERM does."""
    old.cancel()
    await asyncio.wait({old})


async def prepared(rig: Rig, reference: ClaimReference) -> tuple[str, ...]:
    """Prepare as kubelet does, again until it works: the devices. Between two gateways nobody may be there for a moment."""
    async with asyncio.timeout(5):
        while True:
            (answer,) = await rig.kubelet.prepare_claims([reference])
            if not answer.error:
                return tuple(one.device for one in answer.devices)
            assert "not registered" in answer.error or "Unavailable" in answer.error or "Canceled" in answer.error, answer.error
            await asyncio.sleep(0.02)


async def test_kubelet_sees_no_device_vanish_when_a_new_gateway_takes_over(rig: Rig) -> None:
    """From before to after, every device stays allocatable, and a pod that comes in between is admitted."""
    seen: set[int] = set()
    with capture_logs() as logs:
        await take_over(rig, seen)

    assert seen == {2}
    assert [one for one in logs if one["event"] == "twin.found" and "noun" in one] == []


async def take_over(rig: Rig, seen: set[int]) -> None:
    """Roll over with a pod in between; collects how many devices were ever allocatable."""
    async with overlapping(rig) as old:

        async def watch() -> None:
            while True:
                seen.add(rig.kubelet.capacity()[GPU].allocatable)
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        ending = asyncio.create_task(end(old))
        pod = Pod(name="p", uid="p", containers=(Container(name="c", resources={GPU: 1}),))
        answer = await rig.kubelet.admit(pod)
        await asyncio.wait_for(ending, 1.5)
        await rig.readiness.until(lambda report: report.get("registration") == "ready")
        watching.cancel()
        registered = len([one for one in rig.kubelet.events if one.event == "Register.ok"])

    assert registered == 2
    assert isinstance(answer, Admission)


async def test_claims_are_prepared_all_the_time_when_a_new_gateway_takes_over(rig: Rig) -> None:
    """A claim prepared by the old one is known to the new one, one that comes in between is prepared, and the checkpoint has both."""
    first, second = (ClaimReference(name=name, uid=f"u-{name}", drivers=(DRIVER,)) for name in ("first", "second"))
    await rig.plane.store(claim("first", "u-first", "gpu-0"))
    await rig.plane.store(claim("second", "u-second", "gpu-1"))
    async with overlapping(rig) as old:
        before = await prepared(rig, first)
        ending = asyncio.create_task(end(old))
        between = await prepared(rig, second)
        await ending
        again = await prepared(rig, first)
        asked = len(rig.plane.requests("prepare"))
        entries = Checkpoint.load(Path(rig.settings.checkpoint_path)).entries()

    assert (before, between, again) == (("gpu-0",), ("gpu-1",), ("gpu-0",))
    assert asked >= 2
    assert [one.uid for one in entries if one.is_prepared] == ["u-first", "u-second"]


async def test_gateway_ends_at_once_when_nobody_takes_over(rig: Rig) -> None:
    """Only a gateway that is awaited leaves its lists up: an ordinary stop waits for nobody."""
    async with rig.gateway() as only:
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await asyncio.wait_for(end(only), 1.0)

    assert list(rig.kubelet.device_plugin_dir.glob("topobus-*.sock")) == []
