"""A device class of somebody's own: its package is installed, `topobus up --class` serves it as a
NATS user of its own, and claims get its devices.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from support.launched_layout import launched_layout
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY, OPERATE, PREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.formats.messages.operation_messages import OperateRequest
from topobus.local_system.system import System, start_system
from topobus.simulation.machines import RecordedMachine, build
from topobus.values.device import Inventory
from topobus.values.health import HealthState
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.real_start, pytest.mark.timeout(180)]

_NEXA = Path(__file__).parents[3] / "examples" / "nexa-npu"
_LIMIT_S = 60.0
_CARD = "npu-0000-16-00-0"


@pytest.fixture
async def package(tmp_path: Path) -> Path:
    """The example vendor's package, installed into a folder of its own."""
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "topobus_nexa_npu.py"):
        (source / name).write_bytes((_NEXA / name).read_bytes())
    install = (
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
    )
    process = await asyncio.create_subprocess_exec(sys.executable, *install)
    assert await process.wait() == 0
    return target


async def test_class_of_ones_own_is_served_beside_ours(
    package: Path, tmp_path: Path, short_folder: Path, nats_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its devices are found, prepared, operated and seen sick, with users and accounts as `topobus
    up` makes them.

    Its user cannot speak for class gpu.
    """
    layout = launched_layout(short_folder, nats_binary, monkeypatch)
    recorded = build(_NEXA / "machine.toml", tmp_path / "machine")
    environment = {"PYTHONPATH": str(package), "TOPOBUS_NPU__HEALTH__POLL_S": "0.1"}
    async with start_system(
        layout.state, hardware_root=recorded.root, node="n1", environment=environment, classes=("npu",)
    ) as system:
        await system.until_ready(timeout_s=_LIMIT_S)
        async with Bus.session(system.settings_of("gateway"), name="gateway") as gateway:
            inventory = await _inventory(gateway, lambda each: len(each.devices) == 6)
            request = PrepareRequest(
                op_id="", owner=Owner(kind=OwnerKind.CLAIM, name="c", namespace="default", uid="u"), devices=(_CARD,)
            )
            prepared = await gateway.ask(PREPARE, request, node="n1", device_class="npu")
            await _operate(system)
            kept = await _inventory(gateway, lambda each: any(device.maintenance for device in each.devices))
            _break(recorded)
            sick = await _inventory(gateway, lambda each: _state(each, _CARD) is HealthState.UNHEALTHY)
        denials = await _denials(
            system, "$KV.topobus_inventories_gpu.n1.gpu", "$KV.topobus_inventories.n1.gpu", "topobus.v1.health.n1.gpu.x"
        )

    assert inventory.drivers == ("nexa",)
    assert isinstance(prepared.result, Prepared)
    assert [node.path for node in prepared.result.edits[_CARD].device_nodes] == ["/dev/nexa0-0", "/dev/nexa0-1"]
    assert [device.name for device in kept.devices if device.maintenance] == ["npu-0000-17-00-0"]
    assert _state(kept, _CARD) is HealthState.HEALTHY
    assert _state(sick, _CARD) is HealthState.UNHEALTHY
    assert denials == 3


def _break(recorded: RecordedMachine) -> None:
    recorded.write(f"{recorded.folder('0000:16:00.0')}/nexa/fault", "parity")


def _state(inventory: Inventory, name: str) -> HealthState:
    device = inventory.device(name)
    assert device is not None
    return device.health.state


async def _operate(system: System) -> None:
    """Keep a card back, as `topobus device maintain` does."""
    operation = DeviceOperation(
        device_class="npu", device="npu-0000-17-00-0", verb=DeviceVerb.MAINTAIN, who="somebody", why="fan"
    )
    async with Bus.session(system.settings_of("cli"), name="topobus-cli") as bus:
        await bus.ask(OPERATE, OperateRequest(op_id="op-1", operation=operation), node="n1")


async def _denials(system: System, *subjects: str) -> int:
    """Publish as the class's own user where only others may; count what the server refuses."""
    refused: list[str] = []

    async def note(err: Exception) -> None:
        if "permissions violation" in str(err).lower():
            refused.append(str(err))

    login: dict[str, Any] = {"user": "npu", "password": system.password_file("npu").read_text().strip()}
    client = await nats.connect(system.nats_url, **login, error_cb=note, inbox_prefix=b"_INBOX.npu.npu")
    try:
        for subject in subjects:
            await client.publish(subject, b"{}")
        echo = await client.subscribe(client.new_inbox())
        await client.publish(echo.subject)
        await echo.next_msg(_LIMIT_S)
    finally:
        await client.close()
    return len(refused)


async def _inventory(bus: Bus, wanted: Callable[[Inventory], bool]) -> Inventory:
    async with asyncio.timeout(_LIMIT_S), aclosing(bus.watch(INVENTORY, node="n1", device_class="npu")) as changes:
        async for change in changes:
            if change.value is not None and wanted(change.value):
                return change.value
    raise AssertionError("the watch ended")
