"""Variables by which the gateway sees which of a claim's devices a container has: runtimes before NRI 0.10 do not say its CDI devices.

Flows in: the edits of one device. Flows out: the same with a variable whose value is the device's name in CDI. Of a user's making it proves nothing; the guard
(`container_guard`) tells whose claim it is.
"""

from __future__ import annotations

from msgspec.structs import replace

from topobus.domain.edits import ContainerEdits

__all__ = ["ADJUST_VARIABLE", "CPUSET_VARIABLE", "naming"]

ADJUST_VARIABLE = "TOPOBUS_ADJUST_"
"""Beginning of the variables that name devices whose service is asked when a container is made."""
CPUSET_VARIABLE = "TOPOBUS_CPUSET_"
"""Beginning of the variables that name devices that bring CPUs."""


def naming(edits: ContainerEdits, device: str, cdi_name: str, *, is_adjusted: bool) -> ContainerEdits:
    """Name a device that matters when its container is made; the edits of others stay as they are.

    >>> naming(ContainerEdits(), "card-0", "claim-3cec-card-0", is_adjusted=True).env
    {'TOPOBUS_ADJUST_CARD_0': 'claim-3cec-card-0'}
    """
    prefixes = [prefix for prefix, is_wanted in ((CPUSET_VARIABLE, edits.cpuset is not None), (ADJUST_VARIABLE, is_adjusted)) if is_wanted]
    added = {f"{prefix}{device.upper().replace('-', '_')}": cdi_name for prefix in prefixes}
    return replace(edits, env={**edits.env, **added}) if added else edits
