"""The journal's entries of one device, as frozen values, and the questions that a start asks of
them.

Pure. A file holds one `DeviceEntry`. Each owner of the device has an `OwnerEntry` in it, because a
shared device has several. The closing marks (`is_prepared`, `is_attached`) are written after the
last act and removed before the first act of undoing, so an entry with steps and without its mark is
half done.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from topobus.devicekit.device_record import RecordState
from topobus.values.device import Device
from topobus.values.request import Owner
from topobus.values.sandbox import AttachedInterface

__all__ = ["PASSTHROUGH", "REBIND", "DeviceEntry", "OwnerEntry"]

PASSTHROUGH = "passthrough"
"""The host's own step in a `prepare` record: the function goes to VFIO, and the step has
its earlier driver. No driver has a step of this name."""
REBIND = "rebind"
"""The step of an operator's rebind, with the function's kernel driver: gone when that has it again."""


class OwnerEntry(Struct, frozen=True, kw_only=True):
    """The acts on a device for one owner."""

    owner: Owner
    prepare: RecordState = RecordState()
    is_prepared: bool = False
    """True: what `prepare` did is whole."""
    attach: RecordState = RecordState()
    """With its sandbox from before the first act until all is undone."""
    is_attached: bool = False
    """True: what `attach` did is whole."""
    interface: AttachedInterface | None = None
    """What `attach` answered; None also for a device that is no interface."""
    is_kept: bool = False
    """True: the owner uses the device, so the entry stays until `unprepare` even without a step:
    its last owner must be known when it is cleaned."""

    @property
    def is_half_attached(self) -> bool:
        """Say whether an attach or a detach has begun and not ended."""
        return not self.is_attached and (self.attach.sandbox is not None or self.attach.steps != ())

    @property
    def is_away(self) -> bool:
        """Say whether the owner's sandbox has the device, or may have it."""
        return self.is_attached or self.is_half_attached

    @property
    def is_half_prepared(self) -> bool:
        """Say whether a prepare or an unprepare that changes something has begun and not ended."""
        return not self.is_prepared and self.prepare.steps != ()

    @property
    def is_passed_through(self) -> bool:
        """Say whether the device is switched to VFIO for this owner, or may be."""
        return any(step.name == PASSTHROUGH for step in self.prepare.steps)

    @property
    def is_empty(self) -> bool:
        """Say whether there is nothing to keep."""
        return not self.is_kept and not self.prepare.steps and not self.is_away


class DeviceEntry(Struct, frozen=True, kw_only=True):
    """The journal's content for one device."""

    device: Device
    """As it was when the entry began: a device in a pod may be invisible to its driver."""
    format: Literal[1] = 1
    """Raised when an earlier release would misread this or drop what must be kept. It leaves the
    device out of use then, and the file as it is."""
    owners: tuple[OwnerEntry, ...] = ()
    to_clean: Owner | None = None
    """The owner that left the device last; set until it is clean."""
    clean: RecordState = RecordState()
    operation: RecordState = RecordState()
    """With a step while what an operator wants is done to the device; it has no owner then."""

    def of(self, owner: Owner) -> OwnerEntry | None:
        """Find an owner's entry."""
        return next((entry for entry in self.owners if entry.owner.key == owner.key), None)

    def with_owner(self, entry: OwnerEntry) -> DeviceEntry:
        """Add an owner's entry, in place of the one before. An empty one is left out."""
        others = [other for other in self.owners if other.owner.key != entry.owner.key]
        owners = others if entry.is_empty else sorted([*others, entry], key=lambda each_entry: each_entry.owner.key)
        return msgspec.structs.replace(self, owners=tuple(owners))

    @property
    def half_done(self) -> tuple[OwnerEntry, ...]:
        """The owners for whom a verb has begun and not ended."""
        return tuple(entry for entry in self.owners if entry.is_half_attached or entry.is_half_prepared)

    @property
    def is_away(self) -> bool:
        """Return whether some sandbox has it, or may have it."""
        return any(entry.is_away for entry in self.owners)

    @property
    def is_passed_through(self) -> bool:
        """Say whether it is switched to VFIO for some owner, or may be."""
        return any(entry.is_passed_through for entry in self.owners)

    @property
    def is_unbound(self) -> bool:
        """Say whether its function is without its kernel driver, or may be, after a rebind."""
        return any(step.name == REBIND for step in self.operation.steps)

    @property
    def is_due_for_cleaning(self) -> bool:
        """Say whether the last owner has gone and it is not clean yet."""
        return self.to_clean is not None and not self.owners

    @property
    def is_empty(self) -> bool:
        """Say whether there is nothing to keep."""
        return not self.owners and self.to_clean is None and not self.clean.steps and not self.operation.steps
