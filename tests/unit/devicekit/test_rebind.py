"""A rebind: the kernel's driver releases a PCI function and takes it again, and whatever happens in
between, the function ends with its driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.kernel_writes import KernelWrites
from support.mortal_switch import mortal
from support.passthrough_bench import ALLOWED, BUS, FIRST, PassthroughBench, codes
from support.sysfs_trees import write
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.passthrough.function_switch import FunctionSwitch
from topobus.devicekit.passthrough.function_users import OpenNodes
from topobus.devicekit.verbs.operator_verbs import rebind_device
from topobus.testing.drivers.deaths import deaths
from topobus.values.device import Device
from topobus.values.outcome import Refusal

# Longer than anything here takes. And as short as a driver that never takes a function is waited for,
# but longer than the thread that plays the kernel needs to take it from its driver, on a busy machine as well.
SWITCH_S, SHORT_S = 10.0, 0.5


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PassthroughBench]:
    """Give four GPUs."""
    (tmp_path / "machine").mkdir()
    with KernelWrites(tmp_path / "machine") as kernel:
        yield PassthroughBench(kernel.root, kernel)


def rebind(bench: PassthroughBench, journal: Journal, *, limit_s: float = SWITCH_S) -> Refusal | None:
    """Do what the service does when an operator wants the first GPU bound again."""
    switch = FunctionSwitch(bench.tree, limit_s=limit_s)
    return rebind_device(journal, bench.driver, switch, bench.devices[bench.name(FIRST)])


def test_driver_leaves_and_takes_the_function_when_nothing_uses_it(bench: PassthroughBench) -> None:
    """The same driver has it again, no override is left, and the journal has nothing of it."""
    bench.drivers.log.clear()
    journal = Journal(bench.journal_folder)

    refusal = rebind(bench, journal)

    assert refusal is None
    assert bench.is_home
    assert bench.drivers.log == [f"i915 leaves {FIRST}", f"i915 takes {FIRST}"]
    assert journal.entries == {}


@pytest.mark.parametrize(
    ("obstacle", "code", "named"),
    [
        ("open", "rebind-busy", "process 4711 (python3) has /dev/dri/renderD128 open"),
        ("unseen", "rebind-busy", "1 processes cannot be seen"),
        ("parts", "rebind-unsupported", "4 virtual functions"),
        ("unbound", "rebind-unsupported", f"no kernel driver has PCI function {FIRST}"),
    ],
)
def test_rebind_is_refused_and_the_driver_stays_when_more_than_the_driver_would_end(
    bench: PassthroughBench, monkeypatch: pytest.MonkeyPatch, obstacle: str, code: str, named: str
) -> None:
    """The reason names it, and the kernel is asked for nothing."""
    if obstacle == "open":
        bench.open_node(4711, "python3", "dri/renderD128")
    elif obstacle == "unseen":
        monkeypatch.setattr("topobus.devicekit.passthrough.function_users.openers", lambda *_: OpenNodes(unseen=1))
    elif obstacle == "parts":
        write(bench.root, {f"{BUS}/devices/{FIRST}/sriov_numvfs": "4"})
    else:
        (bench.root / BUS / "drivers/i915/unbind").write_text(FIRST)
    bench.kernel.settle()
    bench.drivers.log.clear()
    journal = Journal(bench.journal_folder)

    refusal = rebind(bench, journal)

    assert codes(refusal) == [code]
    assert refusal is not None
    assert named in refusal.reasons[0].message
    bench.kernel.settle()
    assert bench.drivers.log == []
    assert journal.entries == {}


def test_rebind_is_refused_when_the_device_is_no_pci_function(bench: PassthroughBench) -> None:
    """It has no kernel driver of its own."""
    switch = FunctionSwitch(bench.tree, limit_s=SWITCH_S)
    device = Device(name="gpu-0", device_class="gpu", driver=bench.driver.name)

    refusal = rebind_device(Journal(bench.journal_folder), bench.driver, switch, device)

    assert codes(refusal) == ["rebind-unsupported"]


async def test_function_is_bound_by_a_later_try_when_its_driver_does_not_take_it(bench: PassthroughBench) -> None:
    """A driver that is unloaded in between: the rebind fails, the device is given to nobody, and it
    has its driver again when that is loaded.
    """
    bench.drivers.refuse("i915")
    bench.passthrough = msgspec.structs.replace(ALLOWED, switch_s=SHORT_S)
    journal = Journal(bench.journal_folder)
    refusal = rebind(bench, journal, limit_s=SHORT_S)
    journal.close()
    async with bench.life(), bench.hands.turn([bench.name(FIRST)]) as obstacle:
        pass
    bench.drivers.accept("i915")
    bench.passthrough = ALLOWED
    async with bench.life(), bench.hands.turn([bench.name(FIRST)]) as later:
        pass

    assert codes(refusal) == ["rebind-failed"]
    assert codes(obstacle) == ["undo-failed"]
    assert later is None
    assert bench.is_home
    assert bench.journal_of(FIRST) is None


async def test_function_has_its_driver_after_the_next_start_when_the_service_dies_at_any_step(
    bench: PassthroughBench,
) -> None:
    """The journal's writes and the kernel's alike; nothing is rebound again."""
    seen = []
    for step in deaths(bench.journal_folder, mortal(lambda journal: rebind(bench, journal))):
        bench.kernel.settle()
        seen.append(bench.drivers.driver_of(FIRST))
        bench.drivers.log.clear()
        async with bench.life(), bench.hands.turn([bench.name(FIRST)]) as obstacle:
            assert obstacle is None
        assert bench.is_home, step
        assert bench.journal_of(FIRST) is None, step
        assert f"i915 leaves {FIRST}" not in bench.drivers.log, step

    # Intent, unbind, bind and its end, each before and after.
    assert len(seen) == 8
    assert "" in seen
