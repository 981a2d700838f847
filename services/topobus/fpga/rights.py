"""What the fpga service needs of the machine: to read it. No capability."""

from topobus.devicekit.rights import HARDWARE_RIGHTS as RIGHTS

__all__ = ["RIGHTS"]
