"""Replays a recorded conversation: repeats its actions on the kubelet simulator with a recording
plugin, and compares the calls.

A session ends early when kubelet sends no further call within the time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.simulation.kubelet.simulator import (
    ClaimReference,
    Container,
    KubeletSimulator,
    KubeletTimings,
    Pod,
)
from topobus.testing.kubelet.recorder import Record, RecordingDriver, RecordingPlugin
from topobus.testing.kubelet.transcript import (
    Action,
    Line,
    Session,
    Step,
    differences,
)

__all__ = ["replay"]

_DRIVER = "recorder.example.com"
_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")


async def replay(
    sessions: tuple[Session, ...], root: Path, *, timings: KubeletTimings | None = None, patience_s: float = 5.0
) -> list[str]:
    """Do all sessions again on one simulated kubelet. Return the differences, empty when there are
    none.

    Units: patience_s — how long kubelet may be silent where the transcript has a line, in addition
    to a dial's limit.
    """
    timings = timings or KubeletTimings()
    mismatches: list[str] = []
    async with KubeletSimulator(root, timings=timings) as kubelet:
        stage = _Stage(kubelet, patience_s + timings.dial_s)
        for session in sessions:
            mismatches += [
                f"session {session.name}: {difference}"
                for difference in differences(session.lines, await stage.play(session))
            ]
        await stage.leave()
    return mismatches


class _Stage:
    """The kubelet, with the running plugins."""

    def __init__(self, kubelet: KubeletSimulator, patience_s: float) -> None:
        self._kubelet = kubelet
        self._patience_s = patience_s
        self._pods: list[Pod] = []
        self._made = 0
        self._players = AsyncExitStack()

    async def play(self, session: Session) -> list[Line]:
        """Do one session, and return what was recorded."""
        await self.leave()
        if session.owes:
            await self._delete_pods()
        calls: list[Record] = []
        plugin = RecordingPlugin(
            self._kubelet.device_plugin_dir,
            session.resource,
            _devices(session.devices),
            socket=session.socket,
            calls=calls,
        )
        await self._players.enter_async_context(plugin)
        running: asyncio.Task[object] | None = None
        try:
            for index, line in enumerate(session.lines):
                for step in session.steps:
                    if step.before == index:
                        if running is not None:
                            await running
                        running = asyncio.ensure_future(self._act(step, plugin, calls))
                if line["event"] == "marker":
                    if running is not None:
                        await running
                    calls.append({"event": "marker", "what": line["what"]})
                async with asyncio.timeout(self._patience_s):
                    while len(calls) <= index:  # noqa: ASYNC110  (the recorders append to a plain list)
                        await asyncio.sleep(0.005)
            if running is not None:
                await running
        except TimeoutError:
            calls.append(
                {
                    "event": "silence",
                    "what": f"nothing for {self._patience_s:g} s where the transcript has line {len(calls) + 1}",
                }
            )
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        # Calls after the players leave are no part of the session.
        return list(calls)

    async def leave(self) -> None:
        """End plugin and driver, as a killed process does: kubelet finds their sockets gone."""
        drivers = len([event for event in self._kubelet.events if event.event == "Deregistered"])
        has_driver = _DRIVER in self._kubelet.drivers()
        await self._players.aclose()
        if has_driver:
            await self._kubelet.wait_for_event("Deregistered", count=drivers + 1)

    async def _act(self, step: Step, plugin: RecordingPlugin, calls: list[Record]) -> None:
        kubelet = self._kubelet
        deeds: dict[Action, Callable[[], Awaitable[object]]] = {
            Action.REGISTER: lambda: _register(plugin, step.request),
            Action.START_DRIVER: lambda: self._players.enter_async_context(
                RecordingDriver(
                    kubelet.plugins_registry_dir, kubelet.plugins_dir, _DRIVER, versions=_VERSIONS, calls=calls
                )
            ),
            Action.CREATE_PODS: lambda: self._create_pods(step, plugin.resource),
            Action.RESTART_CONTAINER: lambda: kubelet.restart_container(self._pods[0], "main"),
            Action.STOP_KUBELET: kubelet.stop,
            Action.START_KUBELET: lambda: kubelet.start(is_restart=True),
            Action.DELETE_PODS: self._delete_pods,
            Action.STOP_PLUGIN: self._players.aclose,
        }
        if step.action is Action.SHOW:
            plugin.show(_devices(step.devices))
        else:
            await deeds[step.action]()

    async def _create_pods(self, step: Step, resource: str) -> None:
        """Bind two pods at once, as in the recording: one requests devices, one has the claims."""
        self._made += 1
        plain = Pod(
            name="pod", uid=f"pod-{self._made}", containers=(Container(name="main", resources={resource: step.count}),)
        )
        pods = [plain]
        if step.claims:
            claims = tuple(ClaimReference(drivers=(_DRIVER,), **claim) for claim in step.claims)
            pods.append(
                Pod(name="drapod", uid=f"drapod-{self._made}", containers=(Container(name="main"),), claims=claims)
            )
        self._pods = pods
        await self._kubelet.admit_together(pods)

    async def _delete_pods(self) -> None:
        pods, self._pods = self._pods, []
        for pod in pods:
            await self._kubelet.remove(pod)


async def _register(plugin: RecordingPlugin, wrongly: dict[str, str]) -> None:
    if wrongly:
        await plugin.register(
            version=wrongly.get("version", ""), endpoint=wrongly["endpoint"], resource=wrongly["resource_name"]
        )
    else:
        await plugin.register()


def _devices(lines: tuple[Line, ...]) -> list[pb.Device]:
    devices = []
    for line in lines:
        nodes = line.get("topology", {}).get("nodes")
        topology = (
            None if nodes is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=int(node.get("ID", 0))) for node in nodes])
        )
        devices.append(pb.Device(ID=line["ID"], health=line["health"], topology=topology))
    return devices
