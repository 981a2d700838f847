"""`topobus demo`: starts the system, runs the steps, checks their results, and cleans up in every
case.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.config import CliSettings
from topobus.cli.demo.fault import show_fault
from topobus.cli.demo.hands import show_hands
from topobus.cli.demo.kubelet import show_claim, show_kubelet, show_pair
from topobus.cli.demo.placing import show_node, show_placement, show_refusal, show_release
from topobus.cli.demo.scene import Scene
from topobus.cli.demo.stage import ExpectationError, Stage
from topobus.cli.exits import ExitCode, code_of
from topobus.cli.options import cancel_at
from topobus.cli.render.output import Output
from topobus.cli.render.picture import save_picture
from topobus.cli.render.program_status import log_text, status_table
from topobus.formats.messages.catalogue import MACHINE
from topobus.local_system.state_folder import state_folder
from topobus.local_system.supervision import is_alive
from topobus.local_system.system import (
    DEMO_NODE,
    SERVICES,
    Layout,
    System,
    start_system,
)
from topobus.process.logging import setup_logging
from topobus.simulation.kubelet.simulator import KubeletSimulator
from topobus.simulation.machines import RecordedMachine, build
from topobus.values.errors import TopobusError
from topobus.values.request import Policy
from topobus.values.view import AlignmentOptions

__all__ = ["run_demo"]

# The demo has no 30 seconds to wait until a recovered device counts as healthy, nor for the
# periodic reads of the tree.
_QUICK = {
    "TOPOBUS_ALL__HARDWARE__RESCAN_S": "1",
    "TOPOBUS_GPU__HEALTH__POLL_S": "0.2",
    "TOPOBUS_GPU__HEALTH__HOLD_S": "1.5",
    "TOPOBUS_GATEWAY__DEADLINES__RECONCILE_S": "0.5",
    # The demo's kubelet lists its pods from the first moment on.
    "TOPOBUS_GATEWAY__DEADLINES__KUBELET_GRACE_S": "0",
}
_READY_S = 40.0
_TAIL_LINES = 12


def run_demo(svg: Path | None) -> int:
    """Run the demo and return its exit code. `svg` is the file for a picture of the central
    steps.
    """
    output = Output()
    stage = Stage(output.console)
    stage.show(
        Panel(
            "NATS and eight services start as processes of their own on a recorded machine: 2 sockets, 8 GPUs, "
            "8 RDMA NICs, 2 FPGAs, 4 PCIe switches. Then pods are placed, refused, allocated by kubelet and "
            "by claim, and a GPU fails.",
            title="Topobus",
            title_align="left",
            border_style="name",
        )
    )
    with state_folder(None) as state:
        code = asyncio.run(_demo(state, stage, output))
    if state.exists():
        output.error(ExpectationError(f"the state folder {state} is still there", next_step=f"rm -r {state}"))
        return ExitCode.NO
    if code == ExitCode.OK:
        stage.show(_summary(stage))
        if svg is not None:
            save_picture(stage.picture, svg, title="topobus demo")
    return code


async def _demo(state: Path, stage: Stage, output: Output) -> int:
    cancel_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    setup_logging(CliSettings().log, service="demo")
    running = AsyncExitStack()
    system: System | None = None
    try:
        async with running:
            with stage.step("A NATS server and eight services start, each a process of its own", "topobus up"):
                hardware = await asyncio.to_thread(build, "dgx", Layout(state=state).machine)
                starting = start_system(
                    state, hardware_root=hardware.root, node=DEMO_NODE, environment=_QUICK, say=stage.show_text
                )
                system = await running.enter_async_context(starting)
                try:
                    await system.until_ready(timeout_s=_READY_S)
                finally:
                    stage.show(status_table(system.supervisor.statuses))
                stage.expect(
                    len(system.supervisor.statuses) == len(SERVICES) + 1, "nats-server and eight services are ready"
                )
            await _run_scenes(stage, system, state)
            with stage.step("Everything stops"):
                pids = [status.pid for status in system.supervisor.statuses if status.pid is not None]
                await running.aclose()
                left = [pid for pid in pids if is_alive(pid)]
                stage.expect(not left, f"all {len(pids)} processes are gone", left)
    except asyncio.CancelledError:
        stage.show_text("interrupted; everything is stopped and removed")
        return ExitCode.INTERRUPTED
    except TopobusError as err:
        # The folder that the error may name is removed: the ends of the logs are shown instead.
        output.error(
            ExpectationError(err.message, next_step=err.next_step if isinstance(err, ExpectationError) else "")
        )
        _show_logs(stage, system)
        return ExitCode.NO if isinstance(err, ExpectationError) else code_of(err)
    except TimeoutError as err:
        output.error(ExpectationError(f"the demo waited without result: {err}"))
        _show_logs(stage, system)
        return ExitCode.NO
    return ExitCode.OK


async def _run_scenes(stage: Stage, system: System, state: Path) -> None:
    """Run the steps on a running system."""
    hardware = RecordedMachine.open(Layout(state=state).machine)
    async with Bus.session(system.settings_of("cli"), name="topobus-cli") as bus:
        scene = Scene(stage=stage, system=system, bus=bus, hardware=hardware)
        await show_node(scene)
        trainer = await show_placement(scene)
        sequencer = await show_refusal(scene, trainer)
        await show_release(scene, trainer, sequencer)
        machine = await bus.get(MACHINE, node=system.node)
        if machine is None:
            raise ExpectationError("the machine was there and is gone")
        async with KubeletSimulator(
            system.layout.kubelet,
            numa_nodes=machine.value.node_set,
            options=AlignmentOptions(policy=Policy.SINGLE_NUMA_NODE),
            distances=machine.value.distances,
            cpus={node.id: node.cpus for node in machine.value.numa_nodes},
        ) as kubelet:
            await show_kubelet(scene, kubelet)
            await show_claim(scene, kubelet)
            await show_pair(scene, kubelet)
            await show_fault(scene, kubelet)
    await show_hands(stage, state / "hands", hardware)


def _summary(stage: Stage) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="faint")
    grid.add_column()
    grid.add_column(justify="right")
    for number, (title, took_s) in enumerate(stage.steps, start=1):
        grid.add_row(str(number), title, f"{took_s:.2f} s")
    return Panel(
        grid,
        title=f"done: {stage.checks} checks in {stage.elapsed_s:.1f} s; nothing is left running",
        title_align="left",
        border_style="ok",
    )


def _show_logs(stage: Stage, system: System | None) -> None:
    """Show the last lines of those services that are not well, else the warnings and errors
    of all.
    """
    statuses = system.supervisor.statuses if system is not None else ()
    ill = [status for status in statuses if status.restarts or status.ready_after_s is None]
    for status in ill or statuses:
        lines = [log_text(line) for line in status.tail]
        if not ill:
            lines = [line for line in lines if line.startswith(("WARNING", "ERROR", "CRITICAL"))]
        if lines:
            stage.show(
                Panel(
                    Text("\n".join(lines[-_TAIL_LINES:])),
                    title=f"log of {status.name}",
                    title_align="left",
                    border_style="fail",
                )
            )
