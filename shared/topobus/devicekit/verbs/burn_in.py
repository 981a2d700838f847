"""Tests a device by the operator's program, which the service's own settings name.

The program runs without a shell, in a process group of its own, with a time limit, and gets the
device in variables. What it prints last is part of the reason when the device does not pass. The
journal has the test until its end; the next start reports one that was cut off, and repeats none.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.passthrough.function_users import function_nodes
from topobus.devicekit.settings import BurnInSettings
from topobus.process.clock import Clock
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.maintenance import DeviceVerb
from topobus.values.outcome import Refusal, refuse

__all__ = ["begin_burn_in", "run_burn_in"]

# What is kept of its output, for one reason that people read.
_KEPT_BYTES, _KEPT_LINES = 1024, 5


def begin_burn_in(journal: Journal, driver: DeviceDriver, tree: Tree, device: Device, op_id: str) -> tuple[str, ...]:
    """Record in the journal that a device is tested, and name its nodes, relative to dev. Blocks,
    and runs in the driver's thread.

    Errors: raises HardwareError when the journal cannot be written.
    """
    nodes = function_nodes(tree, device.pci) if device.pci is not None else ()
    own = driver.own_nodes(tree, device)
    journal.operation_record(device).intend(DeviceVerb.BURN_IN.value, {"op_id": op_id})
    return tuple(sorted({*nodes, *own}))


async def run_burn_in(
    settings: BurnInSettings, device: Device, nodes: Sequence[str], *, clock: Clock
) -> Refusal | None:
    """Run the program. None when the device passes: it has ended with 0 within its time.

    Shapes: nodes — the device's, relative to dev.
    Errors: raises nothing; Refusal code burn-in-failed.
    """
    program = settings.command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            *settings.command,
            # Nothing else of the service's own: that may hold a password.
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "DEVICE_NAME": device.name,
                "DEVICE_CLASS": device.device_class,
                "DEVICE_PCI": str(device.pci or ""),
                "DEVICE_NODES": " ".join(f"/dev/{node}" for node in nodes),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as err:
        return _failed(device, f"{program} cannot be started: {err.strerror or err}")
    output = bytearray()
    is_over = False
    try:
        async with clock.timeout(settings.timeout_s):
            await _read_end(process, output)
            code = await process.wait()
            is_over = True
    except TimeoutError:
        return _failed(device, f"{program} has not ended after {settings.timeout_s:g} s", output)
    finally:
        if not is_over:
            # With what it has started: it still works on the device.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return _failed(device, f"{program} ended with {code}", output, exit=code) if code else None


async def _read_end(process: asyncio.subprocess.Process, output: bytearray) -> None:
    """Read a program's output until it closes it, and keep the end."""
    assert process.stdout is not None
    while chunk := await process.stdout.read(_KEPT_BYTES):
        output += chunk
        del output[:-_KEPT_BYTES]


def _failed(device: Device, what: str, output: bytes | bytearray = b"", **facts: int) -> Refusal:
    lines = [
        "".join(letter for letter in line if letter.isprintable()).strip()
        for line in output.decode("utf-8", errors="replace").splitlines()
    ]
    said = " | ".join([line for line in lines if line][-_KEPT_LINES:])
    text = f"{device.name} has not passed its burn-in: {what}{f': {said}' if said else ''}"
    return refuse("burn-in-failed", text, device=device.name, **facts)
