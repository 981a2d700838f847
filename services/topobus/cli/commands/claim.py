"""`topobus claim`: the commands `apply`, `get` and `delete` for claims, kept for older scripts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich import box
from rich.table import Table
from rich.text import Text

from topobus.cli.commands.objects import apply_files, delete_places, plain_object
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.objects.applying import find_object
from topobus.cli.objects.manifests import parse_namespaced, read_objects
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus
from topobus.cli.render.tables import state_of
from topobus.contracts.catalogue import OBJECT
from topobus.contracts.messages import ApiObject
from topobus.kubernetes.api.classic_handles import shown
from topobus.kubernetes.api.objects import name_of, object_parts

__all__ = ["claim_app"]

claim_app = App(name="claim", help="Short for apply, get and delete of claims.")


@claim_app.command(name="apply")
def apply(
    *,
    file: Annotated[Path, Parameter(name=("--file", "-f"), help="A manifest; - reads standard input.")],
    waits: Annotated[
        bool, Parameter(name="--wait", negative="--no-wait", help="Wait for the controller's first word on each object.")
    ] = True,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Create or replace the objects of a manifest: `topobus apply -f FILE`."""
    return asyncio.run(apply_files((file,), options, waits=waits))


@claim_app.command(name="get")
def get(
    name: Annotated[str | None, Parameter(name="NAMESPACE/NAME", help="One claim. Without it: all objects.")] = None,
    /,
    *,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show claims with their allocation; `topobus describe claim NAME` tells more of one."""
    return asyncio.run(_get(name, options))


@claim_app.command(name="delete")
def delete(
    name: Annotated[str | None, Parameter(name="NAMESPACE/NAME", help="One claim.")] = None,
    /,
    *,
    file: Annotated[Path | None, Parameter(name=("--file", "-f"), help="All objects of a manifest.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Delete objects; a claim that holds devices lets go of them first: `topobus delete claim NAME`."""
    if (name is None) == (file is None):
        raise UsageError("say what to delete: either NAMESPACE/NAME or -f FILE")
    places = [object_parts(api_object) for api_object in reversed(read_objects(file))] if file is not None else [_place(str(name))]
    return asyncio.run(delete_places(places, options))


async def _get(name: str | None, options: BusOptions) -> int:
    output = options.output()
    async with open_bus(options) as bus:
        objects = [await find_object(bus, _place(name))] if name is not None else [entry.value for entry in await bus.list(OBJECT)]
    if output.is_json:
        plain = [plain_object(api_object) for api_object in objects]
        output.document(plain[0] if name is not None else {"items": plain})
    else:
        output.show(_table(objects))
    return ExitCode.OK


def _place(name: str) -> dict[str, str]:
    namespace, plain = parse_namespaced(name)
    return {"kind": "resourceclaim", "namespace": namespace, "name": plain}


def _table(objects: list[ApiObject]) -> Table:
    """List objects of all kinds: claims with node and devices, or with why they wait."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    for title in ("object", "state", "node", "devices"):
        table.add_column(title, overflow="fold")
    for api_object in objects:
        allocation = shown(api_object).status.get("allocation") or {}
        results = (allocation.get("devices") or {}).get("results") or []
        nodes = sorted({str(result.get("pool", "")) for result in results}) or [str(api_object.spec.get("nodeName") or "-")]
        devices = "\n".join(f"{result.get('request')}: {result.get('device')}" for result in results)
        table.add_row(Text(name_of(api_object), "name"), state_of(api_object), ", ".join(nodes), devices or "-")
    return table
