"""What the console needs of the machine: nothing. It reads the bus and answers browsers."""

from topobus.devicekit.rights import Right

__all__ = ["RIGHTS"]

RIGHTS: tuple[Right, ...] = ()
