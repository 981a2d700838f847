"""Calls the verbs of a driver and records them in the journal: mark before, call, mark after.

A verb that is refused half way is undone at once. Everything here blocks and runs in a thread of
the driver's, so a call that came back too late for its caller still leaves a correct journal. An
error of the undoing never hides the error that it follows: what is left stays in the journal, half
done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.devicekit.driver import DeviceDriver, LongWork, PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.journal.journal_values import DeviceEntry
from topobus.process.logging import get_logger
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["Edits", "JournaledVerbs", "JournaledWork"]

Edits = Mapping[str, ContainerEdits]

_T = TypeVar("_T")


class JournaledWork(Struct, frozen=True, kw_only=True):
    """Long work that closes the journal when it ends."""

    limit_s: float
    what: str
    run: Callable[[Callable[[], bool]], Edits | Refusal]
    """Its argument returns whether a caller still waits. Work that ends too late is undone, and an
    error."""


class JournaledVerbs:
    """The verbs of one driver on a journal's devices."""

    def __init__(self, journal: Journal, driver: DeviceDriver, tree: Tree) -> None:
        self._journal = journal
        self._driver = driver
        self._tree = tree

    def prepare(
        self, devices: Sequence[Device], context: PrepareContext, kept: Collection[str]
    ) -> Edits | Refusal | JournaledWork:
        """Prepare devices. `kept` names those whose owner must be recorded before the first act.

        Errors: what the driver raises, after what it began is undone.
        """
        owner = context.owner
        entries = {device.name: self._journal.owner_entry(device.name, owner) for device in devices}
        free = frozenset(device.name for device in devices if not self._has_owner(device))
        context = replace(self._with_records(devices, context), free=free)

        def close(answer: Edits | Refusal) -> Edits | Refusal:
            if isinstance(answer, Refusal):
                give_up()
                return answer
            for device in devices:
                self._journal.change_owner(
                    device, owner, lambda entry: replace(entry, is_prepared=entry.prepare.steps != ())
                )
            return answer

        def give_up() -> None:
            # An entry that was complete before this call may be in use: it stays.
            begun = [
                device
                for device in devices
                if context.records[device.name].steps and not entries[device.name].is_prepared
            ]
            _try_undo("prepare", lambda: self._unprepare_steps(begun, context))
            _try_undo("prepare", let_go)

        def let_go() -> None:
            for device in devices:
                if not entries[device.name].is_kept:
                    self._journal.change_owner(device, owner, lambda entry: replace(entry, is_kept=False))

        for device in devices:
            if device.name in kept:
                self._journal.change_owner(device, owner, lambda entry: replace(entry, is_kept=True))
        answer = _or_else(lambda: self._driver.prepare(self._tree, devices, context), give_up)
        if isinstance(answer, LongWork):
            work = answer

            def run(is_wanted: Callable[[], bool]) -> Edits | Refusal:
                edits = _or_else(work.work, give_up)
                if not is_wanted():
                    give_up()
                    raise HardwareError(
                        f"driver {self._driver.name}: {work.what} ended after its {work.limit_s:g} s, and was undone"
                    )
                return close(edits)

            return JournaledWork(limit_s=work.limit_s, what=work.what, run=run)
        return close(answer)

    def unprepare(self, devices: Sequence[Device], context: PrepareContext) -> None:
        """Undo `prepare` and remove the owner.

        A device that its last owner leaves is due for cleaning from then on, if its driver cleans.
        """
        self._unprepare_steps(devices, context)
        for device in devices:
            self._journal.change(
                device, lambda entry: _left(entry, context.owner, is_cleaned=self._driver.capabilities.cleans)
            )

    def undo_prepare(self, device: Device, owner: Owner) -> None:
        """Undo a `prepare` that a crash has cut off, as if the owner had left."""
        self.unprepare([device], PrepareContext(owner=owner))

    def attach(self, device: Device, context: PrepareContext, sandbox: Sandbox) -> AttachedInterface | Refusal | None:
        """Attach a device once. The same sandbox gets the same answer. From another sandbox the device
        is detached first.
        """
        owner = context.owner
        entry = self._journal.owner_entry(device.name, owner)
        if entry.is_attached and entry.attach.sandbox is not None and entry.attach.sandbox.id == sandbox.id:
            return entry.interface
        if entry.is_away:
            self.detach(device, owner, entry.attach.sandbox)
        begun = RecordState(owner=owner, sandbox=sandbox)
        self._journal.change_owner(device, owner, lambda entry: replace(entry, attach=begun, interface=None))
        record = self._journal.attach_record(device, owner)
        context = self._with_records([device], context)

        def give_up() -> None:
            _try_undo("attach", lambda: self.detach(device, owner, sandbox))

        answer = _or_else(lambda: self._driver.attach(self._tree, device, context, sandbox, record), give_up)
        if isinstance(answer, Refusal):
            give_up()
            return answer
        self._journal.change_owner(device, owner, lambda entry: replace(entry, is_attached=True, interface=answer))
        return answer

    def detach(self, device: Device, owner: Owner, sandbox: Sandbox | None) -> None:
        """Detach a device. Does nothing when it is not attached."""
        if not self._journal.owner_entry(device.name, owner).is_away:
            return
        self._journal.change_owner(device, owner, lambda entry: replace(entry, is_attached=False))
        record = self._journal.attach_record(device, owner)
        self._driver.detach(self._tree, device, sandbox, record)
        self._check_empty("detach", {device.name: record})
        self._journal.change_owner(device, owner, lambda entry: replace(entry, attach=RecordState(), interface=None))

    def clean(self, device: Device) -> Refusal | None:
        """Clean a device after its last owner. One whose driver does not clean (any more) is clean."""
        if self._driver.capabilities.cleans:
            record = self._journal.clean_record(device)
            refusal = self._driver.clean(self._tree, device, record)
            if refusal is not None:
                return refusal
            self._check_empty("clean", {device.name: record})
        self._journal.change(device, lambda entry: replace(entry, to_clean=None))
        return None

    def _unprepare_steps(self, devices: Sequence[Device], context: PrepareContext) -> None:
        if not devices:
            return
        for device in devices:
            # Before the first act: from here on it is half done.
            if not self._journal.owner_entry(device.name, context.owner).is_empty:
                self._journal.change_owner(device, context.owner, lambda entry: replace(entry, is_prepared=False))
        context = self._with_records(devices, context)
        self._driver.unprepare(self._tree, devices, context)
        self._check_empty("unprepare", context.records)

    def _check_empty(self, verb: str, records: Mapping[str, DeviceRecord]) -> None:
        """Refuse an undoing that reports success and left steps in its records.

        Errors: raises HardwareError.
        """
        left = [
            f"{device}: {', '.join(step.name for step in record.steps)}"
            for device, record in sorted(records.items())
            if record.steps
        ]
        if left:
            raise HardwareError(
                f"driver {self._driver.name}: {verb} came back and left steps that are not undone ({'; '.join(left)})",
                driver=self._driver.name,
                verb=verb,
            )

    def _with_records(self, devices: Sequence[Device], context: PrepareContext) -> PrepareContext:
        records = {device.name: self._journal.prepare_record(device, context.owner) for device in devices}
        names = frozenset(records)
        others = self._others(devices, context.owner)
        return replace(context, records=records, others=others, in_use=lambda: self._in_use(names, context.owner))

    def _others(self, devices: Sequence[Device], owner: Owner) -> dict[str, tuple[RecordState, ...]]:
        entries = {device.name: self._journal.entries.get(device.name) for device in devices}
        return {
            name: tuple(
                replace(other.prepare, owner=other.owner) for other in entry.owners if other.owner.key != owner.key
            )
            for name, entry in entries.items()
            if entry is not None
        }

    def _in_use(self, names: frozenset[str], owner: Owner) -> frozenset[str]:
        """Find the devices that have an owner, or that are due for cleaning, besides those of a request
        that only its owner has.
        """
        return frozenset(
            name
            for name, entry in self._journal.entries.items()
            if any(other.owner.key != owner.key for other in entry.owners)
            or (name not in names and (entry.owners != () or entry.to_clean is not None))
        )

    def _has_owner(self, device: Device) -> bool:
        entry = self._journal.entries.get(device.name)
        return entry is not None and entry.owners != ()


def _left(entry: DeviceEntry, owner: Owner, *, is_cleaned: bool) -> DeviceEntry:
    """Remove an owner. One that has no entry leaves nothing behind.

    Kubelet's allocations have no entry, because Allocate writes nothing, and the caller that undoes
    one knows of it.
    """
    if entry.of(owner) is None and owner.kind is not OwnerKind.DEVICE_PLUGIN:
        return entry
    owners = tuple(other for other in entry.owners if other.owner.key != owner.key)
    to_clean = owner if is_cleaned and not owners else entry.to_clean
    return replace(entry, owners=owners, to_clean=to_clean)


def _or_else(call: Callable[[], _T], give_up: Callable[[], None]) -> _T:
    try:
        return call()
    except BaseException:
        give_up()
        raise


def _try_undo(verb: str, undo: Callable[[], None]) -> None:
    """Undo what a refused verb began.

    What cannot be undone now stays in the journal, and is tried again.
    """
    try:
        undo()
    except Exception as err:  # noqa: BLE001 - boundary: vendor code, after an error that counts more
        get_logger().warning("undo.failed", verb=verb, why=str(err), next_step="it is tried again until it succeeds")
