"""A MIG node whose instances are made for claims, with the kit's journal and verbs around the
driver, one life of the service after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pynvml

from support.fake_mig import H100_80, MigModel, as_somebody
from support.mig_node import OWNER, MigNode, mig_node
from topobus.devicekit.driver import HostServices, PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.settings import PartitionSettings
from topobus.devicekit.verbs.journaled_verbs import JournaledVerbs, JournaledWork
from topobus.gpu.mig.nvml_mig import destroy_instance, read_mig, read_profiles
from topobus.gpu.mig.values import MigInstance
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["OTHER", "MigLife", "mig_life"]

OTHER = Owner(kind=OwnerKind.CLAIM, name="other", uid="u2")
_BOOT = "proc/sys/kernel/random/boot_id"


class MigLife:
    """The node, the driver's present life, and its journal."""

    def __init__(self, node: MigNode, folder: Path) -> None:
        self.node = node
        self.owner = OWNER
        self.folder = folder
        self._boots = 0
        self.driver: NvidiaDriver
        self.journal: Journal
        self._write_boot()
        self._start()

    @property
    def parent(self) -> str:
        """Name the GPU in MIG mode."""
        return self.node.parent

    def restart(self) -> None:
        """End the service's life, and begin another one."""
        self.journal.close()
        self._start()

    def reboot(self) -> None:
        """Remove all instances, as a reboot does, and start again."""
        with as_somebody(self.node.library.folder):
            for instance in self.instances():
                destroy_instance(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(self.node.first), instance.id)
        self._write_boot()
        self.restart()

    def discover(self) -> dict[str, Device]:
        """Look for devices."""
        return self.node.discover()

    def device(self, name: str) -> Device:
        """Find an instance of the first GPU by what follows `-mig-` in its name."""
        return self.discover()[f"{self.parent}-mig-{name}"]

    def instances(self) -> tuple[MigInstance, ...]:
        """Ask NVML which instances the first GPU has, whatever made them."""
        with as_somebody(self.node.library.folder):
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(self.node.first)
            return read_mig(pynvml, handle, read_profiles(pynvml, handle)).instances

    def prepare(self, *devices: Device, owner: Owner = OWNER) -> Mapping[str, ContainerEdits] | Refusal:
        """Prepare devices as the kit does, long work and all."""
        kept = [device.name for device in devices]
        context = PrepareContext(owner=owner)
        answer = JournaledVerbs(self.journal, self.driver, self.node.tree).prepare(devices, context, kept)
        return answer.run(lambda: True) if isinstance(answer, JournaledWork) else answer

    def unprepare(self, *devices: Device, owner: Owner = OWNER) -> None:
        """Give devices back as the kit does."""
        JournaledVerbs(self.journal, self.driver, self.node.tree).unprepare(devices, PrepareContext(owner=owner))

    def mend(self) -> None:
        """Undo what is half done, as each start of the service does, and before anybody gets the
        device.
        """
        for entry in list(self.journal.entries.values()):
            for owner in entry.half_done:
                JournaledVerbs(self.journal, self.driver, self.node.tree).undo_prepare(entry.device, owner.owner)

    def _start(self) -> None:
        self.driver = self.node.driver = NvidiaDriver()
        self.journal = Journal(self.folder)
        self.journal.load()
        self.driver.configure(
            HostServices(partitions=PartitionSettings(on_demand=True), recorded=self.journal.steps_of)
        )

    def _write_boot(self) -> None:
        self._boots += 1
        self.node.recorded.write(_BOOT, f"boot-{self._boots}\n")


@contextmanager
def mig_life(folder: Path, model: MigModel = H100_80) -> Iterator[MigLife]:
    """Build the node and begin."""
    with mig_node(folder, model) as node:
        life = MigLife(node, folder / "journal")
        try:
            yield life
        finally:
            life.journal.close()
