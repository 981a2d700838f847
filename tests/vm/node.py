"""Topobus' own services on the guest's hardware, as processes.

The test takes the place of the gateway.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.asking import ask_patiently
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import (
    ADOPT,
    ATTACH,
    DETACH,
    INVENTORY,
    MACHINE,
    PERFORM,
    PREPARE,
    RELEASE,
    UNPREPARE,
)
from topobus.formats.messages.messages import AdoptRequest, PrepareRequest, UnprepareRequest
from topobus.formats.messages.operation_messages import Operated, PerformRequest
from topobus.formats.messages.release_messages import ReleaseRequest
from topobus.formats.messages.sandbox_messages import Accepted, AttachRequest, DetachRequest
from topobus.process.config import NatsSettings
from topobus.values.device import Device, Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.machine import Machine
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import Sandbox

NAME = "guest"
JOB = Path("/job")
# On machine `node` it runs on the host.
URL = (JOB / "nats-url").read_text() if (JOB / "nats-url").exists() else "nats://127.0.0.1:4222"
# What a service logs when it is ready; a device service that it knows the machine.
_READY = {
    "discovery": "machine.published",
    "topology": "machine.heard",
    "gateway": "driver.registered",
    "controller": "controller.ready",
}
# An emulated processor is slow; on an idle machine each wait ends after a tenth of that.
PATIENCE_S = 240.0
_TIME = "2026-01-02T03:04:05.000000Z"


class Node:
    """Services that run, and the bus as the gateway sees it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._processes: dict[str, tuple[subprocess.Popen[bytes], Mapping[str, str]]] = {}
        # By device and claim: the pod that it was last attached to.
        self._held: dict[tuple[str, str], str] = {}
        self._operations = 0

    async def start(self, name: str, **settings: str) -> None:
        """Start a service (again, with other settings), and wait until it is ready."""
        self.kill(name)
        log = JOB / f"{name}.log"
        at = log.stat().st_size if log.exists() else 0
        own = {} if name in _READY else {f"TOPOBUS_{name.upper()}__DRIVERS__TIMEOUT_S": "60"}
        common = {"TOPOBUS_ALL__LOG__FORMAT": "json", "TOPOBUS_ALL__NATS__URL": URL, "TOPOBUS_ALL__NODE": NAME}
        environment = {**os.environ, **common, **own, **settings}
        with log.open("ab") as out:
            started = subprocess.Popen(
                [f"/opt/topobus/bin/topobus-{name}"], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
            )
        self._processes[name] = started, settings
        await self.logged(name, _READY.get(name, "machine.received"), at=at)

    async def restart(self, name: str) -> None:
        """End a service as a crash does, and start it again."""
        await self.start(name, **self._processes[name][1])

    def kill(self, name: str) -> None:
        """End a service as a crash does; nothing when it does not run."""
        process, _ = self._processes.pop(name, (None, {}))
        if process is not None:
            process.kill()
            process.wait()

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Let a service stand still meanwhile."""
        process, _ = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def check(self) -> None:
        """All that were started still run."""
        assert {name: process.poll() for name, (process, _) in self._processes.items()} == dict.fromkeys(
            self._processes
        )

    def end(self) -> None:
        """End all."""
        for name in [*self._processes]:
            self.kill(name)

    async def logged(self, name: str, event: str, *, at: int = 0) -> None:
        """Wait until a service has logged an event, from a place in its log on."""
        log, process = JOB / f"{name}.log", self._processes[name][0]
        end = time.monotonic() + PATIENCE_S
        while event.encode() not in log.read_bytes()[at:]:
            lines = log.read_bytes()[at:][-3000:].decode(errors="replace")
            assert process.poll() is None, f"{name} ended with {process.returncode}:\n{lines}"
            assert time.monotonic() < end, f"{name} has not logged {event} after {PATIENCE_S} s:\n{lines}"
            await asyncio.sleep(0.1)

    async def machine(self, fits: Callable[[Machine], bool] = bool) -> Machine:
        """Wait until the machine that discovery publishes fits."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                async for change in self.bus.watch(MACHINE, node=NAME):
                    if change.value is not None and fits(change.value):
                        return change.value
        except TimeoutError:
            pass
        raise AssertionError(f"discovery has not told that after {PATIENCE_S} s")

    async def inventory(self, device_class: str, fits: Callable[[Inventory], bool] = bool) -> Inventory:
        """Wait until a class' inventory is so."""
        newest = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                async for change in self.bus.watch(INVENTORY, node=NAME, device_class=device_class):
                    newest = change.value
                    if newest is not None and fits(newest):
                        return newest
        except TimeoutError:
            pass
        shown = (
            [
                f"{device.name} {device.health.state.value} {[each.reason for each in device.health.conditions]}"
                for device in newest.devices
            ]
            if newest
            else []
        )
        raise AssertionError(
            f"inventory of {device_class} after {PATIENCE_S} s: {shown} {newest.warnings if newest else ''}"
        )

    async def device(self, name: str, state: str = "healthy", reason: str = "") -> Device:
        """Wait until a device, whose class is the first part of its name, has a state, for a reason
        where one is given.
        """

        def has_it(inventory: Inventory) -> bool:
            device = inventory.device(name)
            return (
                device is not None
                and device.health.state.value == state
                and (not reason or any(each.reason == reason for each in device.health.conditions))
            )

        device = (await self.inventory(name.split("-")[0], has_it)).device(name)
        assert device is not None
        return device

    async def ask(
        self, verb: str, device: str, *configs: Mapping[str, Any], pod: str = "pod", claim: str = "claim-1"
    ) -> Any:
        """Ask a device service what the gateway asks, until the work has ended.

        Its result or its refusal. `pod` names a network namespace.
        """
        owner = Owner(kind=OwnerKind.CLAIM, namespace="vm", name=claim, uid=claim)
        sandbox = Sandbox(id=f"sandbox-{pod}", uid=pod, namespace="vm", name=pod, network_namespace=f"/run/netns/{pod}")
        config, names = tuple(dict(each) for each in configs), (device,)
        where = {"node": NAME, "device_class": device.split("-")[0]}
        contract, request = {
            "prepare": (PREPARE, PrepareRequest(op_id="", owner=owner, devices=names, config=config)),
            "unprepare": (UNPREPARE, UnprepareRequest(op_id="", owner=owner, devices=names)),
            "attach": (ATTACH, AttachRequest(op_id="", owner=owner, devices=names, sandbox=sandbox, config=config)),
            "detach": (DETACH, DetachRequest(op_id="", owner=owner, devices=names, sandbox=sandbox)),
        }[verb]
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                reply: Any = await self.bus.ask(contract, request, timeout_s=90.0, **where)
            except PeerUnavailable:
                # It has just been started.
                assert time.monotonic() < end, f"{verb} {device}: nobody answers"
                await asyncio.sleep(0.2)
                continue
            result = reply.result if hasattr(reply, "result") else reply.refusal
            is_busy = isinstance(result, Refusal) and result.reasons[0].code == "device-busy"
            if not isinstance(result, Accepted) and not is_busy:
                return result
            assert time.monotonic() < end, f"{verb} {device}: {result}"
            await asyncio.sleep(0.5)

    async def do(
        self,
        verb: str,
        device: str,
        *configs: Mapping[str, Any],
        pod: str = "pod",
        claim: str = "claim-1",
        waits_for: str = "",
    ) -> Any:
        """Ask, and want it done.

        Again, as kubelet does, while it is refused for the reason `waits_for`.
        """
        if verb != "unprepare":
            self._held[device, claim] = pod
        end = time.monotonic() + PATIENCE_S
        while isinstance(result := await self.ask(verb, device, *configs, pod=pod, claim=claim), Refusal):
            if result.reasons[0].code != waits_for or time.monotonic() > end:
                break
            await asyncio.sleep(1)
        assert not isinstance(result, Refusal), f"{verb} {device}: {result}"
        if verb == "unprepare":
            self._held.pop((device, claim), None)
        return result

    async def let_go(self) -> None:
        """Give back what a failed test holds, so that it is the only one that fails."""
        for (device, claim), pod in [*self._held.items()]:
            for verb in ("detach", "unprepare"):
                await self.ask(verb, device, pod=pod, claim=claim)
        self._held.clear()

    async def adopt(self, device: str, *pods: Owner) -> Owner:
        """Write into the ledger that a claim, which some pods use, has a device."""
        self._operations += 1
        claim = Owner(kind=OwnerKind.CLAIM, namespace="vm", name="claim", uid="claim")
        adoption = AdoptRequest(
            op_id=f"adopt-{self._operations}", owner=claim, devices={device.split("-")[0]: (device,)}, pods=pods
        )
        await ask_patiently(self.bus, ADOPT, adoption, limit_s=PATIENCE_S, node=NAME)
        return claim

    async def release(self, claim: Owner) -> None:
        """Write into the ledger that a claim has nothing any more."""
        self._operations += 1
        request = ReleaseRequest(op_id=f"release-{self._operations}", owner=claim)
        await ask_patiently(self.bus, RELEASE, request, limit_s=PATIENCE_S, node=NAME)

    async def operate(self, verb: DeviceVerb, device: str) -> Operated | Refusal:
        """Ask what topology asks when an operator wants an operation, until it has ended."""
        self._operations += 1
        operation = DeviceOperation(device_class=device.split("-")[0], device=device, verb=verb, why="test", who="vm")
        request = PerformRequest(op_id=f"operation-{self._operations}", operation=operation, time=_TIME)
        # Only topology may ask.
        async with Bus.session(NatsSettings(url=URL), name="topology") as bus:
            reply = await ask_patiently(
                bus, PERFORM, request, limit_s=PATIENCE_S, node=NAME, device_class=operation.device_class
            )
        return reply.result

    async def refused(
        self, verb: str, device: str, *configs: Mapping[str, Any], pod: str = "pod", claim: str = "claim-1"
    ) -> Refusal:
        """Ask, and want a refusal."""
        result = await self.ask(verb, device, *configs, pod=pod, claim=claim)
        assert isinstance(result, Refusal), f"{verb} {device} was not refused: {result}"
        return result
