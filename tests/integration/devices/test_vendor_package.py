"""The example vendor packages, as their vendors would use them: built, installed, tested by the
shipped suites, and served by real processes.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import Struct

from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.health import HealthState

pytestmark = pytest.mark.integration

_EXAMPLES = Path(__file__).parent.parent.parent.parent / "examples"
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


class Vendor(Struct, frozen=True, kw_only=True):
    """An example package, and what a service sees of its recorded machine."""

    folder: str
    device_class: str
    driver: str
    devices: int
    tests: int
    """How many of its own tests pass at least."""
    fault: tuple[str, str]
    """A file of the first card's, and what it says when the card is sick."""
    sick: int
    """How many devices are sick then."""

    @property
    def command(self) -> tuple[str, ...]:
        """The module, and its arguments, that serves its class."""
        if self.device_class in DEVICE_SERVICES:
            return (f"topobus.{self.device_class}.main",)
        return ("topobus.device.main", "--class", self.device_class)

    @property
    def path(self) -> Path:
        """Where it is."""
        return _EXAMPLES / self.folder


ACME = Vendor(
    folder="acme-fpga", device_class="fpga", driver="acme", devices=2, tests=15, fault=("acme/state", "failed"), sick=1
)
NEXA = Vendor(
    folder="nexa-npu", device_class="npu", driver="nexa", devices=6, tests=28, fault=("nexa/fault", "parity"), sick=3
)


@pytest.fixture(params=[ACME, NEXA], ids=["acme", "nexa"])
def vendor(request: pytest.FixtureRequest) -> Vendor:
    """Give each example."""
    given = request.param
    assert isinstance(given, Vendor)
    return given


@pytest.fixture
async def environment(vendor: Vendor, tmp_path: Path) -> dict[str, str]:
    """Install the package into a folder of its own and give an environment that sees it."""
    # A copy: building leaves traces, and the working tree is not ours to change.
    source, target = tmp_path / "source", tmp_path / "installed"
    for file in vendor.path.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            (source / file.relative_to(vendor.path)).parent.mkdir(parents=True, exist_ok=True)
            (source / file.relative_to(vendor.path)).write_bytes(file.read_bytes())
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    await _run(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--target",
        str(target),
        str(source),
        env=env,
    )
    return {**env, "PYTHONPATH": str(target), "VENDOR_SOURCE": str(source)}


async def test_example_passes_the_contract_suite_when_installed(vendor: Vendor, environment: dict[str, str]) -> None:
    """The package's own tests, the shipped contract suite among them, pass with nothing but the
    installed packages.
    """
    output = await _run("-m", "pytest", "-q", "-p", "no:cacheprovider", environment["VENDOR_SOURCE"], env=environment)

    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output
    assert int(passed[1]) > vendor.tests, output


async def test_service_finds_the_vendors_card_when_the_package_is_installed(
    vendor: Vendor, environment: dict[str, str], bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """The real process loads the plugin by its entry point, publishes the cards, tells a fault of
    theirs, and stops cleanly.
    """
    recorded = build(vendor.path / "machine.toml", tmp_path / "machine")
    env = {
        **environment,
        "TOPOBUS_ALL__NODE": "n1",
        "TOPOBUS_ALL__NATS__URL": nats_server.url,
        "TOPOBUS_ALL__HARDWARE__ROOT": str(recorded.root),
        f"TOPOBUS_{vendor.device_class.upper()}__HEALTH__POLL_S": "0.1",
    }
    commands = (("topobus.discovery.main",), vendor.command)
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-m", *command, env=env) for command in commands]
    try:
        inventory = await _inventory(bus, vendor, lambda each_inventory: len(each_inventory.devices) == vendor.devices)
        file, text = vendor.fault
        recorded.write(f"{recorded.folder(str(inventory.devices[0].pci))}/{file}", text)
        last_inventory = await _inventory(bus, vendor, lambda each_inventory: len(_sick(each_inventory)) == vendor.sick)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_LIMIT_S):
            codes = [await process.wait() for process in processes]

    assert vendor.driver in inventory.drivers
    assert {device.driver for device in inventory.devices} == {vendor.driver}
    assert _sick(last_inventory) == {
        device.name for device in inventory.devices if device.pci == inventory.devices[0].pci
    }
    assert codes == [0, 0]


def test_example_with_hands_is_one_file_of_a_hundred_statements() -> None:
    """Attach, clean and partitions cost a vendor no more than that; how wide its lines are is another matter."""
    (module,) = NEXA.path.glob("*.py")
    tree = ast.parse(module.read_text(encoding="utf-8"))

    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) < 105


def _sick(inventory: Inventory) -> set[str]:
    return {device.name for device in inventory.devices if device.health.state is HealthState.UNHEALTHY}


async def _inventory(bus: Bus, vendor: Vendor, wanted: Callable[[Inventory], bool]) -> Inventory:
    async with asyncio.timeout(_LIMIT_S):
        async for change in bus.watch(INVENTORY, node="n1", device_class=vendor.device_class):
            if change.value is not None and wanted(change.value):
                return change.value
    raise AssertionError("the watch ended")
