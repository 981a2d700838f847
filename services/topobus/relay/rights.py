"""What the relay needs of the machine: nothing.

It reads its node's NATS server and writes to the hub through it.
"""

from topobus.devicekit.rights import Right

__all__ = ["RIGHTS"]

RIGHTS: tuple[Right, ...] = ()
