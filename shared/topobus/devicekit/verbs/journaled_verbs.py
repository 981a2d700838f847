"""Calls the verbs of a driver and records them in the journal: mark before, call, mark after.

A verb that is refused half way is undone at once. Everything here blocks and runs in a thread of
the driver's, so a call that came back too late for its caller still leaves a correct journal. An
error of the undoing never hides the error that it follows: what is left stays in the journal, half
done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from topobus.devicekit.device_record import RecordState
from topobus.devicekit.driver import DeviceDriver, LongWork, PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.journal.journal_values import DeviceEntry, OwnerEntry
from topobus.process.logging import get_logger
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["Edits", "JournaledWork", "attach", "clean", "detach", "prepare", "undo_prepare", "unprepare"]

Edits = Mapping[str, ContainerEdits]

_T = TypeVar("_T")


class JournaledWork(Struct, frozen=True, kw_only=True):
    """Long work that closes the journal when it ends."""

    limit_s: float
    what: str
    run: Callable[[Callable[[], bool]], Edits | Refusal]
    """Its argument returns whether a caller still waits. Work that ends too late is undone, and an
    error."""


def prepare(
    journal: Journal,
    driver: DeviceDriver,
    tree: Tree,
    devices: Sequence[Device],
    context: PrepareContext,
    kept: Collection[str],
) -> Edits | Refusal | JournaledWork:
    """Prepare devices. `kept` names those whose owner must be recorded before the first act.

    Errors: what the driver raises, after what it began is undone.
    """
    owner = context.owner
    entries = {device.name: journal.owner_entry(device.name, owner) or OwnerEntry(owner=owner) for device in devices}
    free = frozenset(device.name for device in devices if not _has_owner(journal, device))
    context = msgspec.structs.replace(_with_records(journal, devices, context), free=free)

    def close(answer: Edits | Refusal) -> Edits | Refusal:
        if isinstance(answer, Refusal):
            give_up()
            return answer
        for device in devices:
            journal.change_owner(
                device, owner, lambda entry: msgspec.structs.replace(entry, is_prepared=entry.prepare.steps != ())
            )
        return answer

    def give_up() -> None:
        # An entry that was complete before this call may be in use: it stays.
        begun = [
            device for device in devices if context.records[device.name].steps and not entries[device.name].is_prepared
        ]
        _try_undo("prepare", lambda: _unprepare_steps(journal, driver, tree, begun, context))
        _try_undo("prepare", let_go)

    def let_go() -> None:
        for device in devices:
            if not entries[device.name].is_kept:
                journal.change_owner(device, owner, lambda entry: msgspec.structs.replace(entry, is_kept=False))

    for device in devices:
        if device.name in kept:
            journal.change_owner(device, owner, lambda entry: msgspec.structs.replace(entry, is_kept=True))
    answer = _or_else(lambda: driver.prepare(tree, devices, context), give_up)
    if isinstance(answer, LongWork):
        work = answer

        def run(is_wanted: Callable[[], bool]) -> Edits | Refusal:
            edits = _or_else(work.work, give_up)
            if not is_wanted():
                give_up()
                raise HardwareError(
                    f"driver {driver.name}: {work.what} ended after its {work.limit_s:g} s, and was undone"
                )
            return close(edits)

        return JournaledWork(limit_s=work.limit_s, what=work.what, run=run)
    return close(answer)


def unprepare(
    journal: Journal, driver: DeviceDriver, tree: Tree, devices: Sequence[Device], context: PrepareContext
) -> None:
    """Undo `prepare` and remove the owner.

    A device that its last owner leaves is due for cleaning from then on, if its driver cleans.
    """
    _unprepare_steps(journal, driver, tree, devices, context)
    for device in devices:
        journal.change(device, lambda entry: _left(entry, context.owner, is_cleaned=driver.capabilities.cleans))


def undo_prepare(journal: Journal, driver: DeviceDriver, tree: Tree, device: Device, owner: Owner) -> None:
    """Undo a `prepare` that a crash has cut off, as if the owner had left."""
    unprepare(journal, driver, tree, [device], PrepareContext(owner=owner))


def attach(
    journal: Journal, driver: DeviceDriver, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox
) -> AttachedInterface | Refusal | None:
    """Attach a device once. The same sandbox gets the same answer. From another sandbox the device
    is detached first.
    """
    owner = context.owner
    entry = journal.owner_entry(device.name, owner)
    if (
        entry is not None
        and entry.is_attached
        and entry.attach.sandbox is not None
        and entry.attach.sandbox.id == sandbox.id
    ):
        return entry.interface
    if entry is not None and (entry.is_attached or entry.is_half_attached):
        detach(journal, driver, tree, device, owner, entry.attach.sandbox)
    begun = RecordState(owner=owner, sandbox=sandbox)
    journal.change_owner(
        device, owner, lambda each_entry: msgspec.structs.replace(each_entry, attach=begun, interface=None)
    )
    record = journal.attach_record(device, owner)
    context = _with_records(journal, [device], context)

    def give_up() -> None:
        _try_undo("attach", lambda: detach(journal, driver, tree, device, owner, sandbox))

    answer = _or_else(lambda: driver.attach(tree, device, context, sandbox, record), give_up)
    if isinstance(answer, Refusal):
        give_up()
        return answer
    journal.change_owner(
        device, owner, lambda each_entry: msgspec.structs.replace(each_entry, is_attached=True, interface=answer)
    )
    return answer


def detach(
    journal: Journal, driver: DeviceDriver, tree: Tree, device: Device, owner: Owner, sandbox: Sandbox | None
) -> None:
    """Detach a device. Does nothing when it is not attached."""
    entry = journal.owner_entry(device.name, owner)
    if entry is None or not (entry.is_attached or entry.is_half_attached):
        return
    journal.change_owner(device, owner, lambda each_entry: msgspec.structs.replace(each_entry, is_attached=False))
    record = journal.attach_record(device, owner)
    driver.detach(tree, device, sandbox, record)
    _check_empty(driver, "detach", {device.name: [step.name for step in record.steps]})
    journal.change_owner(
        device, owner, lambda each_entry: msgspec.structs.replace(each_entry, attach=RecordState(), interface=None)
    )


def clean(journal: Journal, driver: DeviceDriver, tree: Tree, device: Device) -> Refusal | None:
    """Clean a device after its last owner. One whose driver does not clean (any more) is clean."""
    if driver.capabilities.cleans:
        record = journal.clean_record(device)
        refusal = driver.clean(tree, device, record)
        if refusal is not None:
            return refusal
        _check_empty(driver, "clean", {device.name: [step.name for step in record.steps]})
    journal.change(device, lambda entry: msgspec.structs.replace(entry, to_clean=None))
    return None


def _unprepare_steps(
    journal: Journal, driver: DeviceDriver, tree: Tree, devices: Sequence[Device], context: PrepareContext
) -> None:
    if not devices:
        return
    for device in devices:
        # Before the first act: from here on it is half done.
        if journal.owner_entry(device.name, context.owner) is not None:
            journal.change_owner(device, context.owner, lambda entry: msgspec.structs.replace(entry, is_prepared=False))
    context = _with_records(journal, devices, context)
    driver.unprepare(tree, devices, context)
    _check_empty(
        driver, "unprepare", {name: [step.name for step in record.steps] for name, record in context.records.items()}
    )


def _has_owner(journal: Journal, device: Device) -> bool:
    entry = journal.entries.get(device.name)
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
    return msgspec.structs.replace(entry, owners=owners, to_clean=to_clean)


def _with_records(journal: Journal, devices: Sequence[Device], context: PrepareContext) -> PrepareContext:
    records = {device.name: journal.prepare_record(device, context.owner) for device in devices}
    names = frozenset(records)
    others = _others(journal, devices, context.owner)
    return msgspec.structs.replace(
        context, records=records, others=others, in_use=lambda: _in_use(journal, names, context.owner)
    )


def _others(journal: Journal, devices: Sequence[Device], owner: Owner) -> dict[str, tuple[RecordState, ...]]:
    entries = {device.name: journal.entries.get(device.name) for device in devices}
    return {
        name: tuple(
            msgspec.structs.replace(other.prepare, owner=other.owner)
            for other in entry.owners
            if other.owner.key != owner.key
        )
        for name, entry in entries.items()
        if entry is not None
    }


def _in_use(journal: Journal, names: frozenset[str], owner: Owner) -> frozenset[str]:
    """Find the devices that have an owner, or that are due for cleaning, besides those of a request
    that only its owner has.
    """
    return frozenset(
        name
        for name, entry in journal.entries.items()
        if any(other.owner.key != owner.key for other in entry.owners)
        or (name not in names and (entry.owners != () or entry.to_clean is not None))
    )


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


def _check_empty(driver: DeviceDriver, verb: str, left: Mapping[str, Sequence[str]]) -> None:
    """Refuse an undoing that reports success and left steps in its record.

    Errors: raises HardwareError.
    """
    names = {device: steps for device, steps in left.items() if steps}
    if names:
        text = "; ".join(f"{device}: {', '.join(steps)}" for device, steps in sorted(names.items()))
        raise HardwareError(
            f"driver {driver.name}: {verb} came back and left steps that are not undone ({text})",
            driver=driver.name,
            verb=verb,
        )
