"""A DFL card on a recorded machine with a store and a journal, and the verbs as the device service
calls them, for tests of functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.fpga_cards import FileDflProgrammer, dfl_machine, port_file
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.journaled_verbs import JournaledVerbs, JournaledWork
from topobus.fpga.config import FunctionSettings
from topobus.fpga.host_services import FpgaServices
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import AttributeValue, Device
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["DflBench", "asking", "claim"]


def claim(name: str, namespace: str = "team-a") -> Owner:
    """Name an owner."""
    return Owner(kind=OwnerKind.CLAIM, namespace=namespace, name=name, uid=f"uid-{name}")


def asking(function: str) -> tuple[dict[str, Any], ...]:
    """Write a claim's configuration."""
    return ({"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": function},)


class DflBench:
    """A card, a store, a journal, and the verbs as the device service calls them; `restart` is a
    new life of the service.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "machine"
        self.store = folder / "store"
        self.recorded = dfl_machine(self.root)
        self.programmer = FileDflProgrammer(self.root)
        self.folder = folder / "journal"
        self.journal = Journal(self.folder)
        self.can_program = True
        self.tree = Tree(HardwareSettings(root=str(self.root)))
        self.restart()

    def restart(self) -> None:
        """End this life and begin the next."""
        self.journal.close()
        self.journal = Journal(self.folder)
        self.journal.load()
        self.driver = IntelDflDriver(self.programmer)
        self.driver.configure(
            FpgaServices(functions=FunctionSettings(store=str(self.store)), can_program=self.can_program)
        )

    def devices(self) -> tuple[Device, ...]:
        """Find the card."""
        return tuple(self.driver.discover(self.tree, read_machine(self.tree, "n")).devices)

    def attributes(self) -> Mapping[str, AttributeValue]:
        """Return the card's attributes for selectors."""
        return self.devices()[0].attributes

    def prepare(
        self, function: str, owner: Owner | None = None, *, looks_only: bool = False
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Prepare the card with a function, long work to its end.

        Bad configuration is refused before.
        """
        devices = self.devices()
        looked_at = frozenset(device.name for device in devices) if looks_only else frozenset()
        context = PrepareContext(
            owner=owner or claim("one"), config=asking(function) if function else (), looked_at=looked_at
        )
        refusal = self.driver.check(self.tree, devices, context)
        if refusal is not None:
            return refusal
        kept = [] if looks_only else [device.name for device in devices]
        answer = JournaledVerbs(self.journal, self.driver, self.tree).prepare(devices, context, kept)
        return answer.run(lambda: True) if isinstance(answer, JournaledWork) else answer

    def refusal(self, function: str, owner: Owner | None = None) -> tuple[str, str]:
        """Prepare what cannot be; gives the reason's code and message."""
        answer = self.prepare(function, owner)
        assert isinstance(answer, Refusal), answer
        return answer.reasons[0].code, answer.reasons[0].message

    def unprepare(self, owner: Owner | None = None) -> None:
        """Let an owner go, and clean the card."""
        devices = self.devices()
        JournaledVerbs(self.journal, self.driver, self.tree).unprepare(
            devices, PrepareContext(owner=owner or claim("one"))
        )

    def clean(self) -> Refusal | None:
        """Clean the card."""
        return JournaledVerbs(self.journal, self.driver, self.tree).clean(self.devices()[0])

    def recover(self) -> None:
        """Undo what is half done, as a start does."""
        self.restart()
        for entry in [entry for device in self.journal.entries.values() for entry in device.half_done]:
            JournaledVerbs(self.journal, self.driver, self.tree).undo_prepare(self.devices()[0], entry.owner)

    def afu_id(self) -> str:
        """Give what the port shows."""
        return port_file(self.root, "dfl-port.0", "afu_id").read_text(encoding="ascii")
