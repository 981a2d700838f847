"""Recorded machines: sysfs and procfs trees on disk, built from readable profiles, with changes and
faults on demand.
"""

from topobus.simulation.machines.memory_tree import MemoryTree
from topobus.simulation.machines.profile import (
    PROFILES,
    Fault,
    Profile,
    load_profile,
)
from topobus.simulation.machines.recorded import RecordedMachine, build, content_of

__all__ = ["PROFILES", "Fault", "MemoryTree", "Profile", "RecordedMachine", "build", "content_of", "load_profile"]
