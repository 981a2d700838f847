"""What the cpu service needs of the machine: read access, and no capability."""

from topobus.devicekit.rights import HARDWARE_RIGHTS as RIGHTS

__all__ = ["RIGHTS"]
