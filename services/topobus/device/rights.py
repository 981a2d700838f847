"""What the service of a class of your own needs of the machine: to read it.

What a driver needs beside that stands where the driver is described.
"""

from topobus.devicekit.rights import HARDWARE_RIGHTS as RIGHTS

__all__ = ["RIGHTS"]
