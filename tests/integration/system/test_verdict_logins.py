"""Verdicts by the shipped ways, at a server with accounts: the example program and `topobus device
report` with NATS' login `verdicts`, and an operator's own login.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from support.launched_layout import launched_layout
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY
from topobus.local_system.system import System, start_system
from topobus.simulation.machines import build
from topobus.values.health import HealthState

pytestmark = [pytest.mark.integration, pytest.mark.real_start, pytest.mark.timeout(180)]

_ROOT = Path(__file__).parents[3]
_PROFILE = _ROOT / "tests" / "data" / "profiles" / "h100-pair.toml"
_LIMIT_S = 60.0
_SOURCES = {"TOPOBUS_GPU__HEALTH__SOURCES": '{"dcgm": "evidence"}', "TOPOBUS_GPU__HEALTH__HOLD_S": "0.1"}


async def test_verdicts_are_taken_by_each_shipped_way(
    tmp_path: Path, short_folder: Path, nats_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program names the device by its PCI address and the command by its name, which is one
    device to the service. A source that is not listed is refused with exit code 1.
    """
    recorded = build(_PROFILE, tmp_path / "machine")
    layout = launched_layout(short_folder, nats_binary, monkeypatch)
    address = str(recorded.pci("h100")[0])
    name = f"gpu-{address.replace(':', '-').replace('.', '-')}"
    async with start_system(layout.state, hardware_root=recorded.root, node="n1", environment=_SOURCES) as system:
        await system.until_ready(timeout_s=_LIMIT_S)
        await _until(system, name, HealthState.HEALTHY)
        by_program = await _run(
            system, "", _ROOT / "examples" / "report_verdict.py", _login_url(system), "n1", "gpu",
            "source=dcgm/diag", f"device={address}", "state=unhealthy", "code=diag-r1",
        )  # fmt: skip
        await _until(system, name, HealthState.UNHEALTHY)
        healthy = ("device", "report", name, "--source", "dcgm/diag", "--state", "healthy", "--json")
        by_reporter = await _run(system, "verdicts", "-m", "topobus.cli.main", *healthy, "--node", "n1")
        await _until(system, name, HealthState.HEALTHY)
        by_operator = await _run(system, "cli", "-m", "topobus.cli.main", *healthy)
        refused = await _run(
            system, "verdicts", "-m", "topobus.cli.main", "device", "report", "--class", "gpu", "--node", "n1",
            "--source", "npd", "--state", "unhealthy",
        )  # fmt: skip

    taken = {"outcome": "taken", "devices": [name], "is_newest": True}
    assert [code for code, _ in (by_program, by_reporter, by_operator, refused)] == [0, 0, 0, 1]
    assert json.loads(by_program[1]) == taken
    assert [json.loads(text)["reply"]["result"] for _, text in (by_reporter, by_operator)] == [taken, taken]
    assert "refused: source 'npd' is not believed on this node: health.sources of the gpu service lists dcgm" in (
        " ".join(refused[1].split())
    )


def _login_url(system: System) -> str:
    password = system.password_file("verdicts").read_text().strip()
    return system.nats_url.replace("nats://", f"nats://verdicts:{password}@")


async def _until(system: System, name: str, state: HealthState) -> None:
    async with asyncio.timeout(_LIMIT_S), Bus.session(system.settings_of("cli"), name="topobus-cli") as bus:
        async for change in bus.watch(INVENTORY, node="n1", device_class="gpu"):
            device = change.value.device(name) if change.value is not None else None
            if device is not None and device.health.state is state:
                return


async def _run(system: System, login: str, *arguments: str | Path) -> tuple[int | None, str]:
    """Run a program to its end, with the login of one user for the command; its exit code and what it
    printed.
    """
    environment = dict(os.environ)
    if login:
        environment |= {
            "TOPOBUS_ALL__NATS__URL": system.nats_url,
            "TOPOBUS_CLI__NATS__USER": login,
            "TOPOBUS_CLI__NATS__PASSWORD_FILE": str(system.password_file(login)),
        }
    process = await asyncio.create_subprocess_exec(
        sys.executable, *map(str, arguments), env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()
