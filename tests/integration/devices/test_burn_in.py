"""A burn-in through the whole device service: only of a device that is withheld and free, once for one
id, and reported when the service ends in the middle.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.device_bench import LIMIT_S, NODE, DeviceBench, has_state
from support.looks import until
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.maintenance import device_operator
from topobus.devicekit.settings import BurnInSettings
from topobus.formats.messages.catalogue import LEDGER, PERFORM
from topobus.formats.messages.operation_messages import Operated, PerformRequest
from topobus.process.config import NatsSettings
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.errors import UnderWay
from topobus.values.health import HealthState
from topobus.values.ledger import Ledger
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Refusal, refuse

pytestmark = pytest.mark.integration

PASSES = BurnInSettings(command=("/bin/sh", "-c", 'test "$DEVICE_NAME" = gpu-toy-0'))
MAINTAIN, RETURN, BURN_IN = DeviceVerb.MAINTAIN, DeviceVerb.RETURN, DeviceVerb.BURN_IN


class _TestingToy(ToyDriver):
    """Tests its devices itself, and lets none pass."""

    def burn_in(self, tree: Tree, device: Device) -> Refusal | None:
        """Test."""
        return refuse("memory-bad", f"{device.name}: 3 cells", device=device.name)


class _Service:
    """A gpu service, and topology that asks it."""

    def __init__(self, topology: Bus) -> None:
        self._topology = topology

    async def do(self, verb: DeviceVerb, op_id: str, device: str = "gpu-toy-0") -> Operated | Refusal:
        """Ask once."""
        operation = DeviceOperation(device_class="gpu", device=device, verb=verb, why="fan", who="ada")
        request = PerformRequest(op_id=op_id, operation=operation, time="2026-01-02T03:04:05.000000Z")
        return (await self._topology.ask(PERFORM, request, node=NODE, device_class="gpu")).result


@asynccontextmanager
async def _serve(
    bench: DeviceBench, burn_in: BurnInSettings, driver: ToyDriver | None = None
) -> AsyncIterator[_Service]:
    await bench.publish_machine()
    await bench.bus.put(LEDGER, Ledger(node=NODE), node=NODE)
    async with (
        Bus.session(NatsSettings(url=bench.url), name="topology") as topology,
        bench.service(driver or ToyDriver(count=2), burn_in=burn_in),
    ):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        yield _Service(topology)


def _code(result: Operated | Refusal) -> str:
    assert isinstance(result, Refusal)
    return result.reasons[0].code


async def test_device_passes_only_when_it_is_withheld_and_the_program_says_so(bench: DeviceBench) -> None:
    """The program gets the device's name; the journal has nothing of a test that has ended."""
    async with _serve(bench, PASSES) as service:
        offered = await service.do(BURN_IN, "op-1")
        for number, device in enumerate(("gpu-toy-0", "gpu-toy-1")):
            await service.do(MAINTAIN, f"maintain-{number}", device)
        passed = await service.do(BURN_IN, "op-2")
        again = await service.do(BURN_IN, "op-2")
        failed = await service.do(BURN_IN, "op-3", "gpu-toy-1")

    assert _code(offered) == "not-maintained"
    assert isinstance(passed, Operated)
    assert passed.maintenance is not None
    assert again == passed
    assert _code(failed) == "burn-in-failed"
    assert list(bench.journal.glob("*.json")) == []


async def test_burn_in_is_refused_when_there_is_no_test(bench: DeviceBench) -> None:
    """The driver has none, and the operator has set none."""
    async with _serve(bench, BurnInSettings()) as service:
        await service.do(MAINTAIN, "op-1")
        result = await service.do(BURN_IN, "op-2")

    assert _code(result) == "burn-in-unsupported"


async def test_drivers_own_test_counts_before_the_program(bench: DeviceBench) -> None:
    """A device that fails the driver's does not pass."""
    async with _serve(bench, PASSES, _TestingToy(count=2)) as service:
        await service.do(MAINTAIN, "op-1")
        result = await service.do(BURN_IN, "op-2")

    assert _code(result) == "memory-bad"


async def test_test_continues_without_its_asker_and_the_device_stays_withheld(
    bench: DeviceBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it ends it is not known, the device cannot be returned or reset, and it is tested once."""
    monkeypatch.setattr(device_operator, "_ANSWER_S", 0.2)
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    os.mkfifo(gate)
    command = ("/bin/sh", "-c", f"echo run >> {runs}; read _ < {gate}")
    async with _serve(bench, BurnInSettings(command=command)) as service:
        await service.do(MAINTAIN, "op-1")
        with pytest.raises(UnderWay, match="burn-in of gpu-toy-0 is under way"):
            await service.do(BURN_IN, "op-2")
        returned = await service.do(RETURN, "op-3")
        reset = await service.do(DeviceVerb.RESET, "op-4")
        monkeypatch.setattr(device_operator, "_ANSWER_S", LIMIT_S)
        await asyncio.to_thread(gate.write_text, "go\n", encoding="utf-8")
        result = await service.do(BURN_IN, "op-2")
        later = await service.do(RETURN, "op-3")

    assert [_code(returned), _code(reset)] == ["device-busy", "device-busy"]
    assert isinstance(result, Operated)
    assert isinstance(later, Operated)
    assert _lines(runs) == ["run"]


async def test_test_is_ended_and_not_repeated_when_the_service_ends(
    bench: DeviceBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program ends with it; the next service finds it in the journal, once, and the device is still
    withheld.
    """
    monkeypatch.setattr(device_operator, "_ANSWER_S", 0.2)
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    os.mkfifo(gate)
    settings = BurnInSettings(command=("/bin/sh", "-c", f"echo $$ >> {runs}; read _ < {gate}"))
    async with _serve(bench, settings) as service:
        await service.do(MAINTAIN, "op-1")
        with pytest.raises(UnderWay):
            await service.do(BURN_IN, "op-2")
        await until(lambda: _lines(runs) != [])
    journal = Journal(bench.journal)
    journal.load()
    left = [step.name for step in journal.entries["gpu-toy-0"].operation.steps]
    journal.close()
    (pid,) = _lines(runs)
    is_gone = not _lines(Path(f"/proc/{pid}/comm"))
    async with _serve(bench, settings):
        # The stored inventory may still be the first service's.
        await until(lambda: list(bench.journal.glob("*.json")) == [])
        inventory = await bench.inventory(lambda inventory: inventory.device("gpu-toy-0") is not None)
        # The inventory of before is there at once, the journal is read next.
        await until(lambda: list(bench.journal.glob("*.json")) == [])

    device = inventory.device("gpu-toy-0")
    assert left == ["burn-in"]
    assert is_gone
    assert device is not None
    assert device.maintenance is not None
    assert _lines(runs) == [pid]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
