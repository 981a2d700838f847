"""Recorded machines by the test kit's name. They are in `topobus.simulation.machines`, because
`topobus up` runs on them as well.
"""

from topobus.simulation.machines import PROFILES, Fault, Profile, RecordedMachine, build, load_profile

__all__ = ["PROFILES", "Fault", "Profile", "RecordedMachine", "build", "load_profile"]
