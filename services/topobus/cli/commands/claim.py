"""`topobus claim`: device classes, claims and pods of the stand-alone API: applied, looked at, deleted."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich import box
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode, NotFoundError, UsageError
from topobus.cli.manifests import parse_namespaced, read_objects
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus
from topobus.contracts.catalogue import OBJECT
from topobus.contracts.kubernetes.objects import admit, ask_deletion, metadata_of, name_of, object_parts
from topobus.contracts.messages import ApiObject
from topobus.domain.errors import PeerUnavailable
from topobus.runtime.bus import Bus, Conflict, Entry
from topobus.runtime.clock import SystemClock, rfc3339

__all__ = ["apply_object", "claim_app", "delete_object", "is_allocated"]

claim_app = App(name="claim", help="Device classes, claims and pods of the stand-alone API.")

# The controller writes status at the same time; each try reads anew, and more losses than this in a row mean that something spins.
_TRIES = 8
# The controller answers within milliseconds; five seconds are a busy machine, or no controller.
_WORD_S = 5.0
# Kind to the condition in which the controller says whether it can use the object.
_CONDITIONS = {"DeviceClass": "Valid", "ResourceClaim": "Allocated"}
# Reasons that only another manifest mends; whatever else a claim waits for may come by itself.
_WRONG = ("Malformed", "Invalid")


@claim_app.command(name="apply")
def apply(
    *,
    file: Annotated[Path, Parameter(name=("--file", "-f"), help="A manifest; - reads standard input.")],
    waits: Annotated[
        bool, Parameter(name="--wait", negative="--no-wait", help="Wait for the controller's first word on each object.")
    ] = True,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Create or replace the objects of a manifest, and say what the controller says of them."""
    return asyncio.run(_apply(file, waits, options))


@claim_app.command(name="get")
def get(
    name: Annotated[str | None, Parameter(name="NAMESPACE/NAME", help="One claim. Without it: all objects.")] = None,
    /,
    *,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show claims with their allocation."""
    return asyncio.run(_get(name, options))


@claim_app.command(name="delete")
def delete(
    name: Annotated[str | None, Parameter(name="NAMESPACE/NAME", help="One claim.")] = None,
    /,
    *,
    file: Annotated[Path | None, Parameter(name=("--file", "-f"), help="All objects of a manifest.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Delete objects; a claim that holds devices lets go of them first."""
    return asyncio.run(_delete(name, file, options))


async def _apply(file: Path, waits: bool, options: BusOptions) -> int:
    output = options.output()
    # Classes first, whatever the manifest's order: the word on a claim must not be that its class is missing.
    objects = sorted(read_objects(file), key=lambda one: one.kind != "DeviceClass")
    async with open_bus(options) as bus:
        applied = [await apply_object(bus, one) for one in objects]
        async with asyncio.TaskGroup() as group:
            words = [group.create_task(_first_word(bus, stored)) for stored, _ in applied if waits]
    heard = [word.result() for word in words] or [stored for stored, _ in applied]
    if output.is_json:
        output.document({"applied": heard})
    code = ExitCode.OK
    for (stored, verb), now in zip(applied, heard, strict=True):
        output.show(Text.assemble((name_of(stored), "name"), f" {verb}"))
        word = _word(now) if waits else None
        if word is None:
            if waits and now.kind in _CONDITIONS:
                output.note(
                    f"{name_of(stored)}: no word from the controller within {_WORD_S:g} s; is it running? `topobus claim get` shows it later"
                )
            continue
        is_wrong = word.get("reason") in _WRONG
        code = ExitCode.NO if is_wrong else code
        if is_wrong:
            output.show(Text.assemble("  ", (str(word.get("reason")), "fail")))
            wrong = NotFoundError(
                f"{name_of(stored)} cannot be used: {word.get('message')}", next_step="correct the manifest and apply it again"
            )
            output.error(wrong)
        elif now.kind == "ResourceClaim":
            style = "ok" if word.get("status") == "True" else "warn"
            output.show(Text.assemble("  ", (str(word.get("reason")), style), f": {word.get('message')}"))
    return code


async def _first_word(bus: Bus, stored: ApiObject) -> ApiObject:
    """Wait until the controller has said something of this very spec; the object with it, or as it was when nothing comes in time."""
    newest = stored
    if stored.kind not in _CONDITIONS or _word(stored) is not None:
        return stored
    try:
        async with asyncio.timeout(_WORD_S), aclosing(bus.watch(OBJECT, **object_parts(stored))) as changes:
            async for change in changes:
                newest = change.value or newest
                if _word(newest) is not None:
                    break
    except TimeoutError:
        pass
    return newest


def _word(one: ApiObject) -> dict[str, Any] | None:
    """Find what the controller says of an object as it is now; a word on an older spec is none."""
    conditions = one.status.get("conditions")
    for condition in conditions if isinstance(conditions, list) else []:
        if not isinstance(condition, dict) or condition.get("type") != _CONDITIONS.get(one.kind):
            continue
        if condition.get("observedGeneration") == (metadata_of(one).generation or None):
            return dict(condition)
    return None


async def apply_object(bus: Bus, wanted: ApiObject) -> tuple[ApiObject, str]:
    """Write an object's spec; what the controller wrote into status stays. Says `created`, `changed` or `unchanged`."""
    parts = object_parts(wanted)
    for _ in range(_TRIES):
        found: Entry[ApiObject] | None = await bus.get(OBJECT, **parts)
        previous = found.value if found else None
        stored = admit(wanted, uid=str(uuid.uuid4()), now=rfc3339(SystemClock().now()), previous=previous)
        if stored == previous:
            return stored, "unchanged"
        if not isinstance(await bus.compare_and_set(OBJECT, stored, found.revision if found else 0, **parts), Conflict):
            return stored, "changed" if previous else "created"
    raise PeerUnavailable(f"{name_of(wanted)}: somebody else keeps changing it", next_step="try again")


async def delete_object(bus: Bus, parts: dict[str, str]) -> ApiObject:
    """Ask for an object's end, or end it when nothing holds it.

    Errors: raises NotFoundError when there is none.
    """
    for _ in range(_TRIES):
        found: Entry[ApiObject] | None = await bus.get(OBJECT, **parts)
        if found is None:
            raise NotFoundError(
                f"there is no {parts['kind']} {parts['namespace']}/{parts['name']}", next_step="`topobus claim get` lists what there is"
            )
        marked = ask_deletion(found.value, now=rfc3339(SystemClock().now()))
        if marked is None:
            await bus.delete(OBJECT, **parts)
            return found.value
        if not isinstance(await bus.compare_and_set(OBJECT, marked, found.revision, **parts), Conflict):
            return marked
    raise PeerUnavailable(f"{parts['kind']} {parts['name']}: somebody else keeps changing it", next_step="try again")


def is_allocated(one: ApiObject) -> bool:
    """Say whether a claim has its devices."""
    return bool(one.status.get("allocation"))


async def _get(name: str | None, options: BusOptions) -> int:
    output = options.output()
    async with open_bus(options) as bus:
        objects = [entry.value for entry in await bus.list(OBJECT)]
    if name is not None:
        namespace, plain = parse_namespaced(name)
        wanted = {"kind": "resourceclaim", "namespace": namespace, "name": plain}
        objects = [one for one in objects if object_parts(one) == wanted]
        if not objects:
            raise NotFoundError(f"there is no claim {namespace}/{plain}", next_step="`topobus claim get` lists what there is")
    if output.is_json:
        output.document(objects[0] if name is not None else {"items": objects})
    else:
        output.show(objects_table(objects))
    return ExitCode.OK


def objects_table(objects: list[ApiObject]) -> Table:
    """List objects: claims with node and devices, or with why they wait."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    for title in ("object", "state", "node", "devices"):
        table.add_column(title, overflow="fold")
    for one in objects:
        allocation = one.status.get("allocation") or {}
        results: list[dict[str, Any]] = (allocation.get("devices") or {}).get("results") or []
        nodes = sorted({str(result.get("pool", "")) for result in results})
        devices = "\n".join(f"{result.get('request')}: {result.get('device')}" for result in results)
        table.add_row(Text(name_of(one), "name"), _state(one), ", ".join(nodes) or "-", devices or "-")
    return table


def _state(one: ApiObject) -> Text:
    if metadata_of(one).deletion_timestamp:
        return Text("going", "warn")
    if one.kind != "ResourceClaim":
        word = _word(one)
        if word is not None and word.get("reason") in _WRONG:
            return Text(f"cannot be used: {word.get('message')}", "fail")
        return Text("stored")
    if is_allocated(one):
        return Text("allocated", "ok")
    waits = [
        str(condition.get("message") or condition.get("reason"))
        for condition in one.status.get("conditions") or []
        if condition.get("status") == "False"
    ]
    return Text("pending" + (": " + "; ".join(waits) if waits else ""), "warn")


async def _delete(name: str | None, file: Path | None, options: BusOptions) -> int:
    output = options.output()
    if (name is None) == (file is None):
        raise UsageError("say what to delete: either NAMESPACE/NAME or -f FILE")
    if file is not None:
        wanted = [object_parts(one) for one in read_objects(file)]
    else:
        namespace, plain = parse_namespaced(str(name))
        wanted = [{"kind": "resourceclaim", "namespace": namespace, "name": plain}]
    async with open_bus(options) as bus:
        # Claims before the classes that they name: the reverse of the order in which a manifest lists them.
        gone = [await delete_object(bus, parts) for parts in reversed(wanted)]
    if output.is_json:
        output.document({"deleted": [object_parts(one) for one in gone]})
    for one in gone:
        output.show(Text.assemble((name_of(one), "name"), " deletion asked" if metadata_of(one).finalizers else " deleted"))
    return ExitCode.OK
