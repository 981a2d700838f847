"""What an operator requests for one device: maintenance, exclusion, their end, forgiveness, a
reset, a new start of its kernel driver, a test.

Maintenance does not change a device's health: no new owner gets the device, and its present owners
keep it. It is the operator's decision and no evidence, so it is not part of the device's health.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

__all__ = ["DeviceOperation", "DeviceVerb", "Maintenance"]


class DeviceVerb(StrEnum):
    """What an operator does with a device."""

    MAINTAIN = "maintain"
    """No new owner gets it; its owners keep it, unless it is drained."""
    EXCLUDE = "exclude"
    """As if it were not there, for everybody new."""
    RETURN = "return"
    """The end of both."""
    FORGIVE = "forgive"
    """Its sticky faults heal from now on as others do."""
    RESET = "reset"
    """Its driver resets it, while it has no owner."""
    REBIND = "rebind"
    """The kernel's driver releases its PCI function and takes it again, while it has no owner."""
    BURN_IN = "burn-in"
    """It must pass a test, while it is withheld and has no owner."""

    @property
    def needs_no_owner(self) -> bool:
        """Say whether the device must have no owner while it is done."""
        return self in (DeviceVerb.RESET, DeviceVerb.REBIND, DeviceVerb.BURN_IN)

    @property
    def is_lasting(self) -> bool:
        """Say whether it stays in force until the operator takes it back."""
        return self in (DeviceVerb.MAINTAIN, DeviceVerb.EXCLUDE)


class Maintenance(Struct, frozen=True, kw_only=True):
    """Why no new owner gets a device: an operator withheld it.

    It stays in force until the operator returns the device.
    """

    verb: DeviceVerb
    """`maintain` or `exclude`."""
    why: str
    """The operator's reason, for people."""
    who: str
    """The operator, as named by the operator's program: a name for people, not a proof."""
    since: str = ""
    """RFC 3339, UTC."""
    is_draining: bool = False
    """True: the claims that have it are drained as well."""
    op_id: str = ""
    """The operation that set it."""


class DeviceOperation(Struct, frozen=True, kw_only=True):
    """One operation that an operator requests for one device."""

    device_class: str
    device: str
    verb: DeviceVerb
    why: str = ""
    who: str = ""
    is_draining: bool = False
    """For `maintain` and `exclude`: the claims that have it are drained."""
    expects: str | None = None
    """The operation whose maintenance must be in force, or empty: none may be. Another is refused:
    what a policy does must not undo what a person did. None: whatever is in force."""

    @property
    def text(self) -> str:
        """Write the operation as its command line, with who requests it and why.

        >>> DeviceOperation(device_class="gpu", device="gpu-0", verb=DeviceVerb.MAINTAIN, why="fan", who="ada", is_draining=True).text
        'maintain --drain gpu-0 by ada (fan)'
        """  # noqa: E501
        drain = " --drain" if self.is_draining else ""
        why = f" ({self.why})" if self.why else ""
        return f"{self.verb.value}{drain} {self.device} by {self.who}{why}"
