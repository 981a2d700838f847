"""Pods and controllers that die: a pod is scheduled with all that it was promised, or holds
nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from random import Random

import pytest

from support.controllers import controller
from support.mortal_bus import died_or, mortal_controller
from support.reading import Reader
from support.scheduling_home import TEMPLATE, Place, claim, condition, pod
from topobus.bus.bus import Change
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

SMALL_TEMPLATE = TEMPLATE.replace("two-gpus", "one-gpu").replace("count: 2", "count: 1")


@pytest.mark.parametrize("seed", range(6))
async def test_pods_are_whole_or_gone_when_replicas_die_after_any_write(
    home: Place, nats_server: NatsServer, seed: int
) -> None:
    """Eight times two replicas are cut off after some writes, while pods come and go.

    In the end each pod has all and nothing is left of the others.
    """
    random = Random(seed)
    await home.apply(SMALL_TEMPLATE)
    names = [
        f"p{index}" for index in range(3)
    ]  # three pods, the last one and the shared claim fill a node: all of them are bound to the claim's

    async def change() -> None:
        name = random.choice(names)
        if random.random() < 0.35:
            await home.delete("pod", name)
        else:
            await home.apply(claim("shared", 1, allocation_mode="WaitForFirstConsumer"))
            await home.apply(pod(name, "shared", gpus=1, template="one-gpu"))

    for _ in range(8):
        steps = (random.randrange(1, 12), random.randrange(1, 12))
        await change()
        async with (
            mortal_controller(nats_server.url, steps[0]) as first,
            mortal_controller(nats_server.url, steps[1]) as second,
        ):
            # Who of the two does the work is chance: one that lives when all
            # is settled is given more of it.
            while not await died_or(_settled(home), first, second):
                await change()

    async with controller(nats_server.url), controller(nats_server.url):
        await home.apply(claim("shared", 1, allocation_mode="WaitForFirstConsumer"))
        await home.apply(pod("last", "shared", gpus=1))
        await home.scheduled("last")
        pods = await _settled(home)
        await _agreed(home, pods)

    held = {owner: devices for node in home.nodes for owner, devices in home.held(node).items()}
    wanted = {"claim/default/shared": 1} | {f"pod/default/{api_object.metadata['name']}": 1 for api_object in pods}
    made = {
        f"claim/default/{status['resourceClaimName']}": 1
        for api_object in pods
        for status in api_object.status.get("resourceClaimStatuses") or ()
    }
    assert {owner: len(devices) for owner, devices in held.items()} == wanted | made
    assert {user["uid"] for user in (await home.claim("shared")).status["reservedFor"]} == {
        api_object.metadata["uid"] for api_object in pods
    }
    everything = [(node, device) for node in home.nodes for devices in home.held(node).values() for device in devices]
    assert len(set(everything)) == len(everything) == sum((wanted | made).values())


class Replicas:
    """Controllers as processes of their own, killed without notice and started again."""

    def __init__(self, url: str) -> None:
        self._environment = {**os.environ, "TOPOBUS_ALL__NATS__URL": url, "TOPOBUS_CONTROLLER__RETRY_S": "0.2"}
        self._running: list[asyncio.subprocess.Process] = []
        self._reading: list[asyncio.Task[bytes]] = []

    async def start(self) -> None:
        """Start one more, and wait until it works."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "topobus.controller.main",
            env=self._environment | {"TOPOBUS_ALL__LOG__FORMAT": "json", "TOPOBUS_ALL__HTTP__PORT": "0"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._running.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            async for line in process.stdout:
                if b"controller.ready" in line:
                    break
        # A full pipe would stop it.
        self._reading.append(asyncio.create_task(process.stdout.read()))

    async def kill(self, index: int) -> None:
        """Kill one as the kernel does when memory is short."""
        process = self._running.pop(index)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def stop(self) -> None:
        """Kill all."""
        while self._running:
            await self.kill(0)
        await asyncio.gather(*self._reading)


@pytest.mark.real_server
async def test_pods_are_whole_or_gone_when_three_processes_are_killed_in_turn(
    home: Place, nats_server: NatsServer
) -> None:
    """Three controllers as real processes, one of them killed with each change: pods and ledgers
    agree in the end, and no device is held twice.
    """
    random = Random(7)
    await home.apply(SMALL_TEMPLATE)
    replicas = Replicas(nats_server.url)
    try:
        for _ in range(3):
            await replicas.start()
        for turn in range(6):
            name = f"p{turn % 3}"
            await home.apply(claim("shared", 1, allocation_mode="WaitForFirstConsumer"))
            if turn >= 3:
                await home.delete("pod", name)
            else:
                await home.apply(pod(name, "shared", gpus=1, template="one-gpu"))
            await replicas.kill(random.randrange(3))
            await replicas.start()
        await home.apply(pod("last", "shared", gpus=1, template="one-gpu"))
        await home.scheduled("last")
        pods = await _settled(home)
        await home.until(
            "resourceclaim",
            "shared",
            lambda value: value is not None and len(value.status.get("reservedFor") or ()) == 1,
        )
        await _agreed(home, pods)
    finally:
        await replicas.stop()

    (last,) = pods
    made = last.status["resourceClaimStatuses"][0]["resourceClaimName"]
    held = {owner: len(devices) for node in home.nodes for owner, devices in home.held(node).items()}
    assert held == {"pod/default/last": 1, "claim/default/shared": 1, f"claim/default/{made}": 1}


async def _settled(home: Place) -> list[ApiObject]:
    """Wait until no pod waits or goes and each claim belongs to one that stays; gives the pods."""

    def newest(items: list[Change[ApiObject]], kind: str) -> list[ApiObject]:
        api_objects = {change.parts["name"]: change.value for change in items if change.parts.get("kind") == kind}
        return [api_object for api_object in api_objects.values() if api_object is not None]

    def is_settled(items: list[Change[ApiObject]]) -> bool:
        pods = newest(items, "pod")
        uids = {api_object.metadata["uid"] for api_object in pods}
        is_whole = all(
            not api_object.metadata.get("deletionTimestamp") and condition(api_object).get("status") == "True"
            for api_object in pods
        )
        owners = {
            owner["uid"]
            for api_object in newest(items, "resourceclaim")
            for owner in api_object.metadata.get("ownerReferences") or ()
        }
        users = {
            user["uid"]
            for api_object in newest(items, "resourceclaim")
            for user in api_object.status.get("reservedFor") or ()
        }
        return is_whole and owners <= uids and users <= uids

    await home.objects.until(is_settled, timeout_s=60)
    return newest(home.objects.items, "pod")


async def _agreed(home: Place, pods: list[ApiObject]) -> None:
    """Wait until the ledgers name nobody else than these pods and their claims: what was placed for
    a pod that went meanwhile is let go after it.
    """
    owners = {"claim/default/shared", *(f"pod/default/{api_object.metadata['name']}" for api_object in pods)}
    owners |= {
        f"claim/default/{status['resourceClaimName']}"
        for api_object in pods
        for status in api_object.status.get("resourceClaimStatuses") or ()
    }
    async with Reader(home.bus.watch(catalogue.LEDGER)) as ledgers:
        await ledgers.until(
            lambda _: {owner for node in home.nodes for owner in home.held(node)} == owners, timeout_s=60
        )
