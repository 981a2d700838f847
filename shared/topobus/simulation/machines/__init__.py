"""Recorded machines: sysfs and procfs trees on disk, built from readable profiles, with changes and faults on demand."""

from topobus.simulation.machines.profile import (
    PROFILES,
    Fault,
    Profile,
    load_profile,
)
from topobus.simulation.machines.recorded import RecordedMachine, build

__all__ = ["PROFILES", "Fault", "Profile", "RecordedMachine", "build", "load_profile"]
