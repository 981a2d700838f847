"""What Intel's drivers tell of a card as a whole: an event of the kernel's when they give it up,
and the health indicator.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.wedge_events import WedgeEvents
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.sysfs.uevent import Uevent, UeventsUnavailable, parse_uevent
from topobus.values.device import Device
from topobus.values.health import HealthState, RecoveryAction


class Laptop:
    """A laptop's graphics, its driver, and a kernel that sends what the test says."""

    def __init__(self, root: Path) -> None:
        self.machine: RecordedMachine = build("laptop", root)
        self.tree = Tree(HardwareSettings(root=str(root)))
        self._sent: list[Uevent] = []
        self.driver = IntelDriver(WedgeEvents(lambda _: self))
        self.devices: tuple[Device, ...] = tuple(self.driver.discover(self.tree, read_machine(self.tree, "n")).devices)
        self.folder = self.machine.folder(str(self.devices[0].pci))

    def pending(self) -> list[Uevent]:
        """Give what the kernel sent, once."""
        sent, self._sent = self._sent, []
        return sent

    def send(self, wedged: str, path: str = "") -> None:
        """Send an event as Linux does since 6.15."""
        path = path or f"/{self.folder.removeprefix('sys/')}/drm/card0"
        event = parse_uevent(
            f"change@{path}\0ACTION=change\0DEVPATH={path}\0SUBSYSTEM=drm\0WEDGED={wedged}\0DEVNAME=dri/card0\0".encode()
        )
        assert event is not None
        self._sent.append(event)

    def see(self) -> list[tuple[str, HealthState, RecoveryAction, bool]]:
        """Look once."""
        seen = self.driver.observe(self.tree, self.devices)[self.devices[0].name]
        return [(sign.reason, sign.state, sign.action, sign.is_sticky) for sign in seen]


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    """A laptop without a fault."""
    made = Laptop(tmp_path / "machine")
    assert made.see() == []
    return made


@pytest.mark.parametrize(
    ("methods", "action"),
    [
        ("rebind,bus-reset", RecoveryAction.RESET_DEVICE),
        ("bus-reset", RecoveryAction.RESET_DEVICE),
        ("unknown", RecoveryAction.REBOOT_NODE),
        ("vendor-specific", RecoveryAction.REBOOT_NODE),
    ],
)
def test_intel_gpu_is_wedged_until_its_driver_is_bound_anew_when_the_kernel_says_so(
    laptop: Laptop, methods: str, action: RecoveryAction
) -> None:
    """The event comes once, so the sign stays at later looks.

    A driver that is bound anew makes the card's folder anew, and the sign ends.
    """
    laptop.send(methods)

    first, second = laptop.see(), laptop.see()
    cards = laptop.machine.root / laptop.folder / "drm"
    shutil.copytree(cards, cards.with_name("anew"), symlinks=True)
    shutil.rmtree(cards)
    cards.with_name("anew").rename(cards)

    assert first == second == [("wedged", HealthState.UNHEALTHY, action, True)]
    assert laptop.see() == []


@pytest.mark.parametrize(
    ("methods", "path"),
    [
        ("none", ""),
        ("rebind", "/devices/pci0000:00/0000:00:1f.0/drm/card7"),
        ("rebind", "/devices/virtual/drm/card9"),
        ("", ""),
    ],
    ids=["the driver helped itself", "another card", "no card on PCI", "another event"],
)
def test_intel_gpu_is_well_when_the_kernel_speaks_of_something_else(laptop: Laptop, methods: str, path: str) -> None:
    """Only the card that the event names, and only when it is given up."""
    laptop.send(methods, path)

    assert laptop.see() == []


def test_intel_inventory_warns_when_the_kernel_gives_no_events(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs the service in a user namespace of its own learns that this sign is missing.

    Of a recorded machine nobody expects it.
    """
    driver = IntelDriver(WedgeEvents(lambda _: UeventsUnavailable(reason="no uevent socket: Permission denied")))
    machine = read_machine(laptop.tree, "n")
    recorded = driver.discover(laptop.tree, machine).warnings
    monkeypatch.setattr(Tree, "is_recorded", False)
    blind = IntelDriver(WedgeEvents(lambda _: UeventsUnavailable(reason="no uevent socket: Permission denied")))

    assert recorded == ()
    assert blind.discover(laptop.tree, machine).warnings == (
        "a wedged GPU is not noticed: no uevent socket: Permission denied",
    )


@pytest.mark.parametrize(
    ("text", "signs"),
    [
        ("ok", []),
        ("warning", [("health-indicator", HealthState.DEGRADED, RecoveryAction.NONE, False)]),
        ("critical", [("health-indicator", HealthState.UNHEALTHY, RecoveryAction.RESET_DEVICE, False)]),
        ("fine", [("tree-unreadable", HealthState.UNKNOWN, RecoveryAction.NONE, False)]),
    ],
)
def test_intel_gpu_is_as_its_indicator_says(
    laptop: Laptop, text: str, signs: list[tuple[str, HealthState, RecoveryAction, bool]]
) -> None:
    """Xe's words are three; another one is no news about the card."""
    laptop.machine.write(f"{laptop.folder}/gpu_health", text)

    assert laptop.see() == signs
