"""The example vendor package, as its vendor would use it: built, installed, tested by the shipped suite, and served by a real process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from topobus.contracts.catalogue import INVENTORY
from topobus.domain.device import Inventory
from topobus.domain.health import HealthState
from topobus.runtime.bus import Bus
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

_PACKAGE = Path(__file__).parent.parent.parent / "examples" / "acme-fpga"
# Installing, a pytest run and two starts of Python on a busy machine.
_LIMIT_S = 60.0


async def _run(*command: str, env: dict[str, str]) -> str:
    """Run a command to its end; AssertionError with its output when it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(_LIMIT_S):
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    return output


@pytest.fixture
async def environment(tmp_path: Path) -> dict[str, str]:
    """Install the package into a folder of its own and give an environment that sees it."""
    # A copy: building leaves traces, and the working tree is not ours to change.
    source, target = tmp_path / "source", tmp_path / "installed"
    for file in _PACKAGE.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            (source / file.relative_to(_PACKAGE)).parent.mkdir(parents=True, exist_ok=True)
            (source / file.relative_to(_PACKAGE)).write_bytes(file.read_bytes())
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    await _run(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target), str(source), env=env
    )
    return {**env, "PYTHONPATH": str(target), "ACME_SOURCE": str(source)}


async def test_example_passes_the_contract_suite_when_installed(environment: dict[str, str]) -> None:
    """The package's own tests, the shipped contract suite among them, pass with nothing but the installed packages."""
    output = await _run("-m", "pytest", "-q", "-p", "no:cacheprovider", environment["ACME_SOURCE"], env=environment)

    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output
    assert int(passed[1]) > 15, output


async def test_fpga_service_finds_the_vendors_card_when_the_package_is_installed(
    environment: dict[str, str], bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """The real fpga process loads the plugin by its entry point, publishes the cards, tells a fault of theirs, and stops cleanly."""
    recorded = build(_PACKAGE / "machine.toml", tmp_path / "machine")
    env = {
        **environment,
        "TOPOBUS_ALL__NODE": "n1",
        "TOPOBUS_ALL__NATS__URL": nats_server.url,
        "TOPOBUS_ALL__HARDWARE__ROOT": str(recorded.root),
        "TOPOBUS_FPGA__HEALTH__POLL_S": "0.1",
    }
    commands = ("topobus.discovery.main", "topobus.fpga.main")
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-m", command, env=env) for command in commands]
    try:
        inventory = await _inventory(bus, lambda each_inventory: len(each_inventory.devices) == 2)
        sick, well = (device.name for device in inventory.devices)
        recorded.write(f"{recorded.folder(str(inventory.devices[0].pci))}/acme/state", "failed")
        last_inventory = await _inventory(
            bus, lambda each_inventory: any(device.health.state is HealthState.UNHEALTHY for device in each_inventory.devices)
        )
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_LIMIT_S):
            codes = [await process.wait() for process in processes]

    assert "acme" in inventory.drivers
    assert {device.driver for device in inventory.devices} == {"acme"}
    assert {device.name: device.health.state for device in last_inventory.devices} == {
        sick: HealthState.UNHEALTHY,
        well: HealthState.HEALTHY,
    }
    assert codes == [0, 0]


async def _inventory(bus: Bus, wanted: Callable[[Inventory], bool]) -> Inventory:
    async with asyncio.timeout(_LIMIT_S):
        async for change in bus.watch(INVENTORY, node="n1", device_class="fpga"):
            if change.value is not None and wanted(change.value):
                return change.value
    raise AssertionError("the watch ended")
