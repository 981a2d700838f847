"""The demo on this machine's own hardware: a real interface moves into a real network namespace, a
real process is pinned, and both are undone.

A second system runs for it, on the running kernel instead of the recorded machine. Kubelet and the
container runtime are simulated, but their sockets are real. The interface, the namespace and the
processes are the kernel's. Where this machine does not allow it, one line gives the reason.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from topobus.bus.bus import Bus
from topobus.cli.demo.real_pod import (
    POD_ADDRESS,
    Interface,
    echo_through,
    make_pair,
    pod_process,
    read_interface,
    remove_pair,
    why_not,
)
from topobus.cli.demo.scene import Scene, manifest
from topobus.cli.demo.stage import ExpectationError, Stage
from topobus.cli.objects.applying import apply_object, delete_object, is_allocated
from topobus.cli.objects.manifests import read_objects
from topobus.formats.kubernetes.objects import metadata_of, object_parts
from topobus.formats.messages.catalogue import OBJECT
from topobus.local_system.system import start_system
from topobus.simulation.container_runtime import MadeContainer, NotStarted, Refused, SimulatedRuntime
from topobus.simulation.kubelet.simulator import ClaimReference, KubeletSimulator
from topobus.simulation.machines import RecordedMachine
from topobus.values.idset import CpuSet

__all__ = ["show_hands"]

_TITLE = "Hands: an interface moves into a pod, a CPU becomes its own, and both come back"
_COMMAND = "topobus apply -f examples/claims/nic-and-cpu.yaml"
_NODE = "this-machine"
_CLASSES, _CLAIM = "claims/classes.yaml", "claims/nic-and-cpu.yaml"
_READY_S, _WAIT_S = 40.0, 15.0
_LOOK_S = 0.01


async def show_hands(stage: Stage, state: Path, hardware: RecordedMachine) -> None:
    """Show this part, or the reason why it cannot be shown here."""
    with stage.step(_TITLE, _COMMAND):
        why = await asyncio.to_thread(why_not)
        if why:
            stage.show_text(f"not shown here: {why}")
            return
        async with AsyncExitStack() as running:
            interface = await asyncio.to_thread(make_pair)
            running.push_async_callback(asyncio.to_thread, remove_pair, interface)
            pod, neighbour = running.enter_context(pod_process()), running.enter_context(pod_process())
            await asyncio.to_thread(state.mkdir)
            socket = state / "nri.sock"
            runtime = SimulatedRuntime(socket=socket, online=CpuSet.of(os.sched_getaffinity(0)), cdi_dir=state / "cdi")
            await running.enter_async_context(runtime.serving())
            environment = {
                "TOPOBUS_NIC__INTERFACES__OFFER": json.dumps([{"name": interface.name}]),
                "TOPOBUS_GATEWAY__CPUS__OWNED": "all",
                "TOPOBUS_GATEWAY__RUNTIME__SOCKET": str(socket),
                "TOPOBUS_GATEWAY__EXPOSURE": json.dumps({"cpu": "dra", "nic": "dra"}),
            }
            system = await running.enter_async_context(
                start_system(state, hardware_root=Path("/"), node=_NODE, environment=environment)
            )
            await system.until_ready(timeout_s=_READY_S)
            bus = await running.enter_async_context(Bus.session(system.settings_of("cli"), name="topobus-cli"))
            kubelet = await running.enter_async_context(KubeletSimulator(system.layout.kubelet))
            scene = Scene(stage=stage, system=system, bus=bus, hardware=hardware)
            await _hand_over(scene, kubelet, runtime, interface, pod, neighbour)


async def _hand_over(
    scene: Scene, kubelet: KubeletSimulator, runtime: SimulatedRuntime, interface: Interface, pod: int, neighbour: int
) -> None:
    stage = scene.stage
    pids: dict[str, int] = {}
    runtime.when_applied = partial(_pin, pids)
    beside = await runtime.create("neighbour", pod="neighbour")
    pids[beside.id] = neighbour
    all_cpus = _cpus_of(neighbour)
    reference = await _allocate(scene, kubelet, interface)
    (prepared,) = await kubelet.prepare_claims([reference])
    stage.expect(not prepared.error, "kubelet prepared the claim; the neighbour has left its CPU", prepared.error)
    names = tuple(dict.fromkeys(name for device in prepared.devices for name in device.cdi_devices))
    sandbox = await runtime.run_pod("web", network_namespace=f"/proc/{pod}/ns/net")
    container = await _create(runtime, names)
    pids[container.id] = pod
    _pin(pids, container)
    inside = await asyncio.to_thread(read_interface, "net1", pod)
    stage.expect(inside is not None and inside.mac == interface.mac, f"the pod has {inside}", inside)
    on_host = await asyncio.to_thread(read_interface, interface.name)
    stage.expect(on_host is None, f"{interface.name} is not on the host any more", on_host)
    echoed = await asyncio.to_thread(echo_through, POD_ADDRESS, "hello")
    stage.expect(
        echoed == "hello", f"the process behind {POD_ADDRESS} answers over TCP, through that interface", echoed
    )
    alone, rest = _cpus_of(pod), _cpus_of(neighbour)
    stage.expect(
        len(alone) == 1 and alone | rest == all_cpus and alone.isdisjoint(rest),
        f"it runs on CPU {alone} alone",
        (alone, rest),
    )

    await runtime.end(container)
    await runtime.stop_pod(sandbox)
    await runtime.remove_pod(sandbox)
    errors = await kubelet.unprepare_claims([reference])
    stage.expect(not any(errors.values()), "the pod is gone and its claim is unprepared", errors)
    await _until(lambda: _cpus_of(neighbour) == all_cpus, f"the neighbour to have CPUs {all_cpus} again")
    after = await asyncio.to_thread(read_interface, interface.name)
    stage.expect(after == interface, f"{interface.name} is back as it was, and the neighbour has all CPUs", after)
    stage.show(_table(interface, inside, after, all_cpus, alone, rest), indent=2)
    await delete_object(scene.bus, object_parts(read_objects(manifest(_CLAIM))[-1]))


async def _allocate(scene: Scene, kubelet: KubeletSimulator, interface: Interface) -> ClaimReference:
    for device_class in ("nic", "cpu"):
        await scene.inventory(
            device_class, lambda inventory: bool(inventory.devices), f"{device_class} devices of this machine"
        )
    for api_object in (*read_objects(manifest(_CLASSES)), *read_objects(manifest(_CLAIM))):
        await apply_object(scene.bus, api_object)
    parts = object_parts(read_objects(manifest(_CLAIM))[-1])
    claim = await scene.until(OBJECT, is_allocated, "the controller to allocate the claim", parts)
    results = claim.status["allocation"]["devices"]["results"]
    chosen = ", ".join(sorted(result["device"] for result in results))
    scene.stage.expect(
        any(interface.name in result["device"] for result in results), f"the controller chose {chosen}", results
    )
    drivers = tuple(sorted({result["driver"] for result in results}))
    for driver in drivers:
        await kubelet.wait_for_driver(driver)
    return ClaimReference(namespace=parts["namespace"], name=parts["name"], uid=metadata_of(claim).uid, drivers=drivers)


async def _create(runtime: SimulatedRuntime, names: tuple[str, ...]) -> MadeContainer:
    """Create the container as kubelet does: it tries again while its interface is not ready and the
    runtime refuses.
    """
    why = ""
    try:
        async with asyncio.timeout(_WAIT_S):
            while True:
                try:
                    return await runtime.create("web", pod="web", cdi=names)
                except (Refused, NotStarted) as err:
                    why = str(err)
                await asyncio.sleep(_LOOK_S)
    except TimeoutError as err:
        raise ExpectationError(f"the demo expected: the container starts within {_WAIT_S:g} s", next_step=why) from err


def _pin(pids: dict[str, int], made: MadeContainer) -> None:
    """Pin the process, as a runtime does by its cgroup."""
    if made.id in pids:
        os.sched_setaffinity(pids[made.id], set(made.cpus))


def _cpus_of(pid: int) -> CpuSet:
    return CpuSet.of(os.sched_getaffinity(pid))


async def _until(holds: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(_WAIT_S):
            while not holds():  # noqa: ASYNC110 - the kernel sends no notice
                await asyncio.sleep(_LOOK_S)
    except TimeoutError as err:
        raise ExpectationError(f"waited {_WAIT_S:g} s for {what}") from err


def _table(
    before: Interface, inside: Interface | None, after: Interface | None, every: CpuSet, alone: CpuSet, rest: CpuSet
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    for title in ("", "before", "while the pod runs", "after"):
        table.add_column(title, overflow="fold")
    table.add_row("interface", str(before), f"{inside} (in the pod)", str(after))
    table.add_row("CPUs of the pod's process", "", str(alone), "")
    table.add_row("CPUs of its neighbour", str(every), str(rest), str(every))
    return table
