"""A node with two NVIDIA GPUs of a recorded machine, the real driver, and the libnvidia-ml of a
profile in which the first one is in MIG mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.fake_mig import H100_80, MigModel, add_capabilities, make_instance, mig_gpu
from support.fake_nvml import FakeGpu, FakeNvml, fake_nvml
from topobus.devicekit.driver import PrepareContext
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.health import Observation
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["OWNER", "MigNode", "mig_node"]

OWNER = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")
_PROFILE = Path(__file__).parent.parent / "data" / "profiles" / "h100-pair.toml"


class MigNode:
    """The node, and what a test asks of its driver."""

    def __init__(self, recorded: RecordedMachine, library: FakeNvml, model: MigModel) -> None:
        self.recorded, self.library, self.model = recorded, library, model
        self.tree = Tree(HardwareSettings(root=str(recorded.root), library_path=str(library.folder)))
        self.first, self.second = recorded.pci("h100")
        self.driver = NvidiaDriver()

    @property
    def parent(self) -> str:
        """Name the first GPU as a device."""
        return f"gpu-{self.first.replace(':', '-').replace('.', '-')}"

    def make(self, name: str, start: int, *, computes: tuple[int, ...] | None = None) -> int:
        """Make an instance of the first GPU beside the driver; the GPU instance's id."""
        return make_instance(self.library.folder, self.first, self.model, name, start, computes=computes)

    def discover(self) -> dict[str, Device]:
        """Look for devices."""
        self.discovery = self.driver.discover(self.tree, read_machine(self.tree, "n1"))
        return {device.name: device for device in self.discovery.devices}

    def observe(self, devices: Sequence[Device]) -> dict[str, list[tuple[str, str]]]:
        """Look at their health: what is wrong, by device, with an Xid's number."""
        seen = self.driver.observe(self.tree, devices)
        return {
            name: [_short(observation) for observation in observations]
            for name, observations in seen.items()
            if observations
        }

    def prepare(self, *devices: Device) -> dict[str, ContainerEdits] | Refusal:
        """Prepare them for one claim."""
        answer = self.driver.prepare(self.tree, devices, PrepareContext(owner=OWNER))
        return answer if isinstance(answer, Refusal) else dict(answer)


@contextmanager
def mig_node(folder: Path, model: MigModel = H100_80, *, second: FakeGpu | None = None) -> Iterator[MigNode]:
    """Build the node. `second` describes the other GPU, which by default cannot be cut."""
    recorded = build(_PROFILE, folder / "machine")
    first, other = recorded.pci("h100")
    second = second or FakeGpu(address=other, name="NVIDIA L4", minor=1, uuid="GPU-l4")
    add_capabilities(recorded.root, 0)
    with fake_nvml(folder / "lib", mig_gpu(model, first), second) as library:
        yield MigNode(recorded, library, model)


def _short(observation: Observation) -> tuple[str, str]:
    return observation.reason, observation.evidence.get("xid", "")
