"""Topobus on several nodes of one cluster, and what befalls it there: as processes of the suite (the
services on each node, one NATS and one controller beside them), or as pods of the manifests.

The nodes are containers or namespaces of this machine, so that its kernel shows all of them (see
tests/e2e/cluster/test_nodes.py).
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path

from support.installation import Processes, command, setting
from support.real_hands import HandsInstallation, Interface, host_interfaces, make_bench, remove_bench

__all__ = ["INTERFACES", "Befall", "NodeFleet"]

INTERFACES = 3
# A node is NotReady 40 s after its last word (kube-controller-manager's
# node-monitor-grace-period), which is another story.
_CUT_OFF_S = (5.0, 20.0)
Befall = Callable[[random.Random], Coroutine[None, None, None]]


class _Center(Processes):
    """NATS, and the controller."""

    services = ("controller",)

    def _prepare(self) -> None:
        """It has no hardware."""
        if setting("NATS_PORT"):
            self._nats = int(setting("NATS_PORT"))

    def _service_settings(self) -> dict[str, str]:
        return {"TOPOBUS_CONTROLLER__HOME": "cluster", "TOPOBUS_CONTROLLER__CLUSTER__KUBECONFIG": str(self._kubeconfig)}


class NodeFleet:
    """The nodes of a cluster with Topobus on them.

    Shapes: addresses — where each node is reached from here.
    """

    def __init__(
        self, machines: Mapping[str, str], addresses: Mapping[str, str], kubelet: Path, kubeconfig: Path
    ) -> None:
        """Take the nodes, each with `this` (its own interfaces and CPUs) or the name of a recorded
        machine.
        """
        self.machines = machines
        self.on = {node: shlex.split(setting("ON").format(node=node)) for node in machines}
        self._center = _Center("center", kubelet, kubeconfig)
        self._settings = {
            "TOPOBUS_NIC__INTERFACES__OFFER": json.dumps([{"name": "tbh[0-9]*"}]),
            "TOPOBUS_GATEWAY__EXPOSURE": json.dumps({"cpu": "dra", "nic": "both"}),
        }
        self._kubelet, self._kubeconfig, self._addresses = kubelet, kubeconfig, addresses
        self.nodes: dict[str, Processes] = {}
        # Interfaces that may be handed out, as they are before anything happens to them.
        self._bench: dict[str, dict[str, Interface]] = {}
        # When the runtime of a node began to be without its gateway, seconds since 1970.
        self._left_s: dict[str, list[float]] = {node: [] for node in machines}

    async def install(self) -> None:
        """Bring it up."""
        await self._center.install()
        for node, machine in self.machines.items():
            where = {
                "on": self.on[node],
                "address": self._addresses[node] if self.on[node] else "127.0.0.1",
                "nats_url": self._center.nats_url,
            }
            if machine == "this":
                await self._make_bench(node)
                self.nodes[node] = HandsInstallation(
                    node, self._kubelet, self._kubeconfig, settings=self._settings, **where
                )
            else:
                self.nodes[node] = Processes(node, self._kubelet, self._kubeconfig, machine=machine, **where)
        await asyncio.gather(*(node.install() for node in self.nodes.values()))

    def close(self) -> None:
        """End all of it."""
        for installation in (*self.nodes.values(), self._center):
            installation.close()
        for node in self._bench:
            remove_bench(INTERFACES, self.on[node])

    def faults(self, chance: random.Random) -> dict[str, Callable[[], Coroutine[None, None, None]]]:
        """What may befall, by name: each ends when all is there again.

        Those whose command the environment does not name are left out.
        """
        return {
            name: partial(befall, chance)
            for name, (needed, befall) in self._every_fault().items()
            if not needed or setting(needed)
        }

    def _every_fault(self) -> dict[str, tuple[str, Befall]]:
        return {
            "service killed": ("", self._kill_service),
            "gateway killed": ("", self._kill_gateway),
            "gateway replaced": ("", self._replace_gateway),
            "controller killed": ("", partial(self._kill_center, "controller")),
            "NATS killed": ("", partial(self._kill_center, "nats")),
            "kubelet restarted": ("RESTART_KUBELET", self._restart_kubelet),
            "runtime restarted": ("RESTART_RUNTIME", self._restart_runtime),
            "node rebooted": ("REBOOT", self._reboot),
            "node cut off": ("CUT_OFF", self._cut_off),
        }

    def away(self, node: str) -> list[tuple[float, float]]:
        """When a node's runtime had no gateway: from each time that it lost it until it has shown
        the next one what there is.
        """
        text = (self.nodes[node].folder / "gateway.log").read_text()
        lines = [json.loads(line) for line in text.splitlines() if '"nri.synchronized"' in line]
        back_s = [datetime.fromisoformat(line["ts"]).timestamp() for line in lines]
        return [
            (since_s, min((until_s for until_s in back_s if until_s > since_s), default=time.time()))
            for since_s in self._left_s[node]
        ]

    def left(self) -> list[str]:
        """What pods have left behind on any node: CDI files of claims, and interfaces that are not
        as they were before.
        """
        remains = []
        for node, on in self.on.items():
            listed = subprocess.run(
                [*on, "ls", setting("CDI_DIR", "/var/run/cdi")], capture_output=True, text=True, timeout=20, check=False
            )
            remains += [f"{node}: {name}" for name in listed.stdout.split() if name.startswith("topobus.dev-")]
        for node, bench in self._bench.items():
            now = host_interfaces(self.on[node])
            remains += [
                f"{node}: {now.get(name)} instead of {before}"
                for name, before in bench.items()
                if now.get(name) != before
            ]
        return remains

    async def _make_bench(self, node: str) -> None:
        self._bench[node] = await asyncio.to_thread(make_bench, INTERFACES, self.on[node])

    def _any(self, chance: random.Random) -> str:
        return chance.choice(sorted(self.machines))

    async def _kill_service(self, chance: random.Random) -> None:
        node = self.nodes[self._any(chance)]
        name = chance.choice([name for name in node.services if name != "gateway"])
        await _kill(node, name, chance)

    async def _kill_gateway(self, chance: random.Random) -> None:
        node = self._any(chance)
        self._left_s[node].append(time.time())
        await _kill(self.nodes[node], "gateway", chance)

    async def _kill_center(self, name: str, chance: random.Random) -> None:
        await _kill(self._center, name, chance)
        await self._until_ready()

    async def _replace_gateway(self, chance: random.Random) -> None:
        node = self._any(chance)
        self._left_s[node].append(time.time())
        await self.nodes[node].update(surge=chance.choice((True, False)))

    async def _restart_kubelet(self, chance: random.Random) -> None:
        await command("RESTART_KUBELET", NODE=self._any(chance))

    async def _restart_runtime(self, chance: random.Random) -> None:
        node = self._any(chance)
        self._left_s[node].append(time.time())
        await command("RESTART_RUNTIME", NODE=node)
        await self._until_ready()

    async def _reboot(self, chance: random.Random) -> None:
        node = self._any(chance)
        self._left_s[node].append(time.time())
        await command("REBOOT", NODE=node)
        if self.machines[node] == "this":
            await self._make_bench(node)
        for name in self.nodes[node].services:
            await asyncio.to_thread(self.nodes[node].kill, name)
            self.nodes[node].start(name)
        await self._until_ready()

    async def _cut_off(self, chance: random.Random) -> None:
        node = self._any(chance)
        await command("CUT_OFF", NODE=node)
        try:
            await asyncio.sleep(chance.uniform(*_CUT_OFF_S))
        finally:
            await command("JOIN", NODE=node)
        await self._until_ready()

    async def _until_ready(self) -> None:
        await asyncio.gather(*(node.until_ready() for node in self.nodes.values()))


async def _kill(installation: Processes, name: str, chance: random.Random) -> None:
    await asyncio.to_thread(installation.kill, name)
    await asyncio.sleep(chance.choice((0.0, 0.5, 2.0)))
    installation.start(name)
    # Else a slow machine would be without it for most of the time.
    await installation.until_ready()
