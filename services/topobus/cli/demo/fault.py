"""The last part of the demo: a GPU falls off the bus, a subscriber gets the event, kubelet gets one
device less, and the GPU comes back.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from topobus.cli.commands.health import WatchedEvent, event_line
from topobus.cli.demo.kubelet import as_kubelet_pod, resource
from topobus.cli.demo.placing import EXPECTED_DEVICES, TRAINER
from topobus.cli.demo.scene import Scene, manifest
from topobus.cli.demo.stage import ExpectationError
from topobus.cli.objects.manifests import read_pod
from topobus.cli.render.device_listings import device_listing
from topobus.engine.drawing.letters import holders_of
from topobus.formats.messages.catalogue import LEDGER
from topobus.formats.messages.codec import decode
from topobus.process.config import NatsSettings
from topobus.simulation.kubelet.simulator import Admission, KubeletSimulator
from topobus.values.health import HealthState
from topobus.values.ledger import Ledger
from topobus.values.request import OwnerKind

__all__ = ["show_fault"]

_WAIT_S = 15.0


class Subscriber:
    """A `topobus health watch` in a process of its own, as a user would run it.

    Its lines are read one by one.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def started(cls, nats: NatsSettings) -> AsyncIterator[Subscriber]:
        """Run the subscriber as long as the block lasts."""
        # No preexec_fn here: it makes Python fork in full, and gRPC, which runs in this process by
        # now, complains about every fork on stderr.
        code = (
            "import sys; from topobus.cli.application import run; from topobus.local_system.supervision "
            "import die_with_parent; "
            "die_with_parent(); sys.exit(run(sys.argv[1:]))"
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, "health", "watch", "--class", "gpu", "--json", "--nats", nats.url),
            env={
                **os.environ,
                "TOPOBUS_CLI__NATS__USER": nats.user,
                "TOPOBUS_CLI__NATS__PASSWORD_FILE": nats.password_file,
            },
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            yield cls(process)
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(_WAIT_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()

    async def next(self) -> WatchedEvent:
        """Wait for the next line.

        Errors: raises ExpectationError when none comes.
        """
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ExpectationError("the subscriber ended", next_step="its message is above")
        return decode(line, WatchedEvent, where="topobus health watch --json")

    async def until(self, holds: Callable[[WatchedEvent], bool], what: str) -> WatchedEvent:
        """Read lines until one satisfies `holds`.

        Errors: raises ExpectationError when none does.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    watched_event = await self.next()
                    if holds(watched_event):
                        return watched_event
        except TimeoutError as err:
            raise ExpectationError(f"the subscriber waited {_WAIT_S:.0f} s for: {what}") from err


def _is_every_user_known(ledger: Ledger) -> bool:
    """Say whether each allocation through the device plugin names its pod.

    Allocations by kubelet's CPU manager have names of their own.
    """
    by_plugin = [
        allocation for allocation in ledger.allocations.values() if allocation.owner.kind is OwnerKind.DEVICE_PLUGIN
    ]
    return bool(by_plugin) and all(allocation.user is not None for allocation in by_plugin)


async def show_fault(scene: Scene, kubelet: KubeletSimulator) -> None:
    """Let a GPU that is in use fail, and recover.

    Errors: raises ExpectationError when a promise is broken.
    """
    stage = scene.stage
    with stage.step("A GPU falls off the bus, and a subscriber is notified", "topobus health watch --class gpu"):
        for device_class in ("gpu", "nic"):
            # The gateway offers the claim's devices to kubelet again a moment after the ledger
            # released them.
            await kubelet.wait_for_resource(resource(device_class), allocatable=EXPECTED_DEVICES[device_class])
        admitted = await kubelet.admit(as_kubelet_pod(read_pod(manifest(TRAINER))))
        if not isinstance(admitted, Admission):
            raise ExpectationError(
                "the demo expected: kubelet admits the trainer again",
                next_step=f"{admitted.reason}: {admitted.message}",
            )
        victim = admitted.containers[0].devices[resource("gpu")][0]
        # Allocate names no pod. PodResources does, a moment later.
        await scene.ledger(_is_every_user_known, "kubelet to report which pod has the devices")
        address = str((await scene.devices())[victim].pci)
        async with Subscriber.started(scene.system.settings_of("cli")) as subscriber:
            present = [
                await subscriber.until(lambda watched_event: True, "the present state")
                for _ in range(EXPECTED_DEVICES["gpu"])
            ]
            names = {watched_event.event.device for watched_event in present}
            stage.expect(
                len(names) == EXPECTED_DEVICES["gpu"]
                and all(watched_event.is_present_state for watched_event in present),
                f"a late subscriber first gets the present state: {len(names)} GPUs",
                names,
            )
            await _fail(scene, kubelet, subscriber, victim, address)
            await _recover(scene, kubelet, subscriber, victim, address)
        await kubelet.remove(admitted.pod)


async def _fail(scene: Scene, kubelet: KubeletSimulator, subscriber: Subscriber, victim: str, address: str) -> None:
    stage = scene.stage
    stage.show_text(f"the kernel loses {address} now")
    started_at = time.monotonic()
    await asyncio.to_thread(scene.hardware.remove_pci, address)
    unhealthy = await subscriber.until(
        lambda watched_event: not watched_event.event.health.is_allocatable, f"{victim} to be reported"
    )
    after_ms = (time.monotonic() - started_at) * 1000
    stage.show(event_line(unhealthy), indent=4)
    stage.expect(
        unhealthy.event.device == victim,
        f"the subscriber receives the change of {victim} after {after_ms:.0f} ms",
        unhealthy.event.device,
    )
    stage.expect(
        unhealthy.event.health.state is HealthState.UNHEALTHY,
        f"it is unhealthy: {reason_of(unhealthy)}",
        unhealthy.event.health,
    )
    affected = ", ".join(map(str, unhealthy.event.affected))
    stage.expect(affected == "pod default/trainer", f"the event names who is affected: {affected}", affected)
    all_but_one = EXPECTED_DEVICES["gpu"] - 1
    inventory = await scene.inventory(
        "gpu",
        lambda each_inventory: sum(device.health.is_allocatable for device in each_inventory.devices) == all_but_one,
        f"{all_but_one} allocatable GPUs in the inventory",
    )
    ledger = await scene.bus.get(LEDGER, node=scene.node)
    stage.show(device_listing(inventory, holders_of(ledger.value if ledger else None)))
    capacity = await kubelet.wait_for_resource(resource("gpu"), allocatable=all_but_one)
    stage.expect(
        capacity.allocatable == all_but_one,
        f"kubelet's allocatable {resource('gpu')} falls to {capacity.allocatable} of {capacity.capacity}",
    )


async def _recover(scene: Scene, kubelet: KubeletSimulator, subscriber: Subscriber, victim: str, address: str) -> None:
    stage = scene.stage
    stage.show_text(f"{address} comes back")
    started_at = time.monotonic()
    await asyncio.to_thread(scene.hardware.restore_pci, address)
    steps: list[WatchedEvent] = []
    while not steps or steps[-1].event.health.state is not HealthState.HEALTHY:
        steps.append(
            await subscriber.until(lambda watched_event: watched_event.event.device == victim, f"{victim} to recover")
        )
        stage.show(event_line(steps[-1]), indent=4)
    took_s = time.monotonic() - started_at
    stage.expect(
        len(steps) > 1, f"not at once but after it stayed well for a while: healthy after {took_s:.1f} s", len(steps)
    )
    capacity = await kubelet.wait_for_resource(resource("gpu"), allocatable=EXPECTED_DEVICES["gpu"])
    stage.expect(
        capacity.allocatable == EXPECTED_DEVICES["gpu"],
        f"kubelet's allocatable {resource('gpu')} is {capacity.allocatable} again",
    )


def reason_of(watched: WatchedEvent) -> str:
    """Name the condition that decides the health."""
    worst = watched.event.health.worst
    return f"{worst.reason}, {worst.message}" if worst is not None else "no reason given"
