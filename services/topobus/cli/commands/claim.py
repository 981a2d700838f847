"""`topobus claim`: device classes, claims and pods of the stand-alone API: applied, looked at, deleted."""

from __future__ import annotations

import asyncio
import uuid
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


@claim_app.command(name="apply")
def apply(
    *,
    file: Annotated[Path, Parameter(name=("--file", "-f"), help="A manifest; - reads standard input.")],
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Create or replace the objects of a manifest."""
    return asyncio.run(_apply(file, options))


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


async def _apply(file: Path, options: BusOptions) -> int:
    output = options.output()
    objects = read_objects(file)
    async with open_bus(options) as bus:
        applied = [await apply_object(bus, one) for one in objects]
    if output.is_json:
        output.document({"applied": [stored for stored, _ in applied]})
    for stored, verb in applied:
        output.show(Text.assemble((name_of(stored), "name"), f" {verb}"))
    return ExitCode.OK


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
