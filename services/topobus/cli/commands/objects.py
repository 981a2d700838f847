"""`topobus apply` and `delete`: objects of the stand-alone API, in Kubernetes' YAML as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.exits import ExitCode, NotFoundError, UsageError
from topobus.cli.listing.list_options import Namespace
from topobus.cli.objects.applying import (
    CONDITIONS,
    WRONG,
    Applied,
    apply_objects,
    condition_of,
    delete_object,
    find_object,
    is_allocated,
    is_scheduled,
    parts_of,
    plain_object,
    wait_for_condition,
)
from topobus.cli.objects.kinds import plural_of, read_target
from topobus.cli.objects.sources import Files, Kustomization, Recursive, read_sources
from topobus.cli.objects.vendor_names import Profiles, stored_by_our_names
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, open_bus
from topobus.cli.render.output import Output
from topobus.formats.kubernetes.classic.classic import is_classic
from topobus.formats.kubernetes.objects import (
    metadata_of,
    name_of,
    object_parts,
)
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ConfigError, ContractError

__all__ = ["apply", "delete"]

# The controller answers within milliseconds. Five seconds mean a busy machine, or no controller.
_CONDITION_S = 5.0


async def apply(
    *,
    file: Files = (),
    kustomize: Kustomization = None,
    is_recursive: Recursive = False,
    is_dry_run: Annotated[
        bool, Parameter(name="--dry-run", help="Check, and print what would change; store nothing.")
    ] = False,
    waits: Annotated[
        bool,
        Parameter(
            name="--wait", negative="--no-wait", help="Wait for the controller's first condition on each object."
        ),
    ] = True,
    profiles: Profiles = (),
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Create or replace the objects of manifests, all or none of them, and show the controller's
    conditions.
    """
    output = options.output()
    objects = read_sources("apply", file, kustomize, output.note, is_recursive=is_recursive)
    waits = waits and not is_dry_run
    async with open_bus(options, NamesSystem.ALWAYS) as bus:
        objects = await stored_by_our_names(bus, objects, profiles, output.note)
        applied = await apply_objects(bus, objects, is_dry_run=is_dry_run)
        answers = await _would_fit(bus, applied, output) if is_dry_run else []
        async with asyncio.TaskGroup() as group:
            waits_for = [
                group.create_task(wait_for_condition(bus, applied_object.stored, _CONDITION_S))
                for applied_object in applied
                if waits
            ]
    outcomes = [wait.result() for wait in waits_for] or [applied_object.stored for applied_object in applied]
    document = {"applied": [plain_object(api_object) for api_object in outcomes]}
    output.document(document | {"dry_run": True, "answers": answers} if is_dry_run else document)
    codes = [
        _show_result(output, applied_object, now, waits=waits, is_dry_run=is_dry_run)
        for applied_object, now in zip(applied, outcomes, strict=True)
    ]
    if answers:
        from topobus.cli.commands.allocate import show_answer

        for answer in answers:
            show_answer(output, answer)
    return max(codes, default=ExitCode.OK)


async def delete(
    *target: Annotated[str, Parameter(name="KIND NAME...", help="Such as claim fast, or claim/fast.")],
    file: Files = (),
    kustomize: Kustomization = None,
    is_recursive: Recursive = False,
    is_dry_run: Annotated[
        bool, Parameter(name="--dry-run", help="Print what would be deleted; delete nothing.")
    ] = False,
    namespace: Namespace = "default",
    force: Annotated[
        bool,
        Parameter(
            help="Remove objects past their finalizers. Their devices stay in quarantine until the node has "
            "released them."
        ),
    ] = False,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Delete objects. Objects that hold devices release them first."""
    is_of_manifests = bool(file) or kustomize is not None
    if bool(target) == is_of_manifests:
        raise UsageError(
            "wanted what to delete: KIND NAME, -f FILE or -k FOLDER", next_step="such as `topobus delete claim fast`"
        )
    if is_of_manifests:
        # Objects that name others are deleted before those: the reverse of the order in a manifest.
        objects = read_sources("delete", file, kustomize, options.output().note, is_recursive=is_recursive)
        places = [object_parts(api_object) for api_object in reversed(objects)]
    else:
        kinds, names = read_target(target, verb="delete")
        if len(kinds) != 1 or not names:
            raise UsageError(
                "wanted an object to delete, by name",
                next_step=f"write `topobus delete {plural_of(kinds[0])[:-1]} NAME`",
            )
        places = [parts_of(kinds[0], namespace, name) for name in names]
    return await _delete(places, options, is_forced=force, is_dry_run=is_dry_run)


async def _delete(places: list[dict[str, str]], options: BusOptions, *, is_forced: bool, is_dry_run: bool) -> int:
    """Delete objects by their keys.

    Missing ones are reported after the others are done.
    """
    output = options.output()
    gone: list[ApiObject] = []
    missing: list[NotFoundError] = []
    async with open_bus(options, NamesSystem.ALWAYS) as bus:
        for parts in places:
            try:
                gone.append(
                    await (find_object(bus, parts) if is_dry_run else delete_object(bus, parts, is_forced=is_forced))
                )
            except NotFoundError as err:
                missing.append(err)
    output.document({"deleted": [object_parts(api_object) for api_object in gone]})
    for api_object in gone:
        holds = bool(metadata_of(api_object).finalizers)
        if is_dry_run:
            output.show(Text.assemble((name_of(api_object), "name"), " would be deleted (dry run)"))
            continue
        verb = "deletion asked" if holds and not is_forced else "deleted by force" if holds else "deleted"
        output.show(Text.assemble((name_of(api_object), "name"), f" {verb}"))
        if not api_object.api_version:
            output.note(
                f"{name_of(api_object)}: it could not be read; `topobus machine` shows what it holds, "
                "`topobus release` releases that"
            )
        if holds and is_forced:
            output.note(
                f"{name_of(api_object)}: what it holds stays in quarantine until its node has released "
                "it; `topobus decisions` shows when"
            )
    for error in missing:
        output.error(error)
    return ExitCode.NO if missing else ExitCode.OK


async def _would_fit(bus: Bus, applied: Sequence[Applied], output: Output) -> list[dict[str, Any]]:
    """Return where new or changed objects would be allocated, as `topobus allocate` does.

    Empty where its engine is not installed.
    """
    changed = [
        applied_object.stored
        for applied_object in applied
        if applied_object.verb != "unchanged"
        and not (
            is_classic(applied_object.stored)
            or is_allocated(applied_object.stored)
            or is_scheduled(applied_object.stored)
        )
    ]
    if not any(api_object.kind in ("ResourceClaim", "Pod") for api_object in changed):
        return []
    # Imported here, as it loads the dry run.
    from topobus.cli.commands.allocate import answers_of_system

    try:
        return await answers_of_system(bus, changed)
    except (ConfigError, ContractError) as err:
        output.note(f"it is not known whether it would fit: {err.message}")
        return []


def _show_result(output: Output, applied: Applied, now: ApiObject, *, waits: bool, is_dry_run: bool) -> ExitCode:
    """Print the outcome for one object, and the controller's condition."""
    name = name_of(applied.stored)
    output.show(Text.assemble((name, "name"), f" {applied.verb}{' (dry run)' if is_dry_run else ''}"))
    condition = condition_of(now) if waits else None
    if condition is None:
        if waits and now.kind in CONDITIONS and not is_classic(now):
            output.note(
                f"{name}: no condition from the controller within {_CONDITION_S:g} s; is it running? `topobus get "
                f"{now.kind.lower()}` shows it later"
            )
        return ExitCode.OK
    if condition.get("reason") in WRONG:
        output.show(Text.assemble("  ", (str(condition.get("reason")), "fail")))
        way = (
            "correct the manifest and apply it again"
            if now.kind == "DeviceClass"
            else "delete it, correct the manifest and apply it again"
        )
        output.error(NotFoundError(f"{name} cannot be used: {condition.get('message')}", next_step=way))
        return ExitCode.NO
    if now.kind != "DeviceClass":
        style = "ok" if condition.get("status") == "True" else "warn"
        output.show(Text.assemble("  ", (str(condition.get("reason")), style), f": {condition.get('message')}"))
    return ExitCode.OK
