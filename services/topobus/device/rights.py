"""What the service of a class of your own needs of the machine: read access.

A driver's further needs are documented with the driver.
"""

from topobus.devicekit.rights import HARDWARE_RIGHTS as RIGHTS

__all__ = ["RIGHTS"]
