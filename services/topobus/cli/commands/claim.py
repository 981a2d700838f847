"""`topobus claim`: the commands `apply`, `get` and `delete` for claims, kept for older scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.text import Text

from topobus.cli.commands.objects import apply_and_show, delete_places
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.listing.list_options import LIST_DEFAULTS, Lister, ListOptions
from topobus.cli.objects.applying import find_object, plain_object
from topobus.cli.objects.manifests import parse_namespaced, read_mixed
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.cli.render.tables import nodes_of, state_of
from topobus.formats.kubernetes.classic.classic_handles import shown
from topobus.formats.kubernetes.objects import metadata_of, name_of, object_parts
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject

__all__ = ["claim_app"]

claim_app = App(name="claim", help="Short for apply, get and delete of claims.")


@claim_app.command(name="apply")
def apply(
    *,
    file: Annotated[Path, Parameter(name=("--file", "-f"), help="A manifest; - reads standard input.")],
    waits: Annotated[
        bool,
        Parameter(
            name="--wait", negative="--no-wait", help="Wait for the controller's first condition on each object."
        ),
    ] = True,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Create or replace the objects of a manifest: `topobus apply -f FILE`."""
    return asyncio.run(apply_and_show(read_mixed([file], options.output().note), options, waits=waits))


@claim_app.command(name="get")
def get(
    name: Annotated[str | None, Parameter(name="NAMESPACE/NAME", help="One claim. Without it: all objects.")] = None,
    /,
    *,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show claims with their allocation. `topobus describe claim NAME` shows more of one claim."""
    return asyncio.run(_get(name, listing.lister(is_json=options.json), options))


@claim_app.command(name="delete")
def delete(
    name: Annotated[str | None, Parameter(name="NAMESPACE/NAME", help="One claim.")] = None,
    /,
    *,
    file: Annotated[Path | None, Parameter(name=("--file", "-f"), help="All objects of a manifest.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Delete objects.

    A claim that holds devices releases them first: `topobus delete claim NAME`.
    """
    if (name is None) == (file is None):
        raise UsageError("wanted what to delete: either NAMESPACE/NAME or -f FILE")
    places = (
        [object_parts(api_object) for api_object in reversed(read_mixed([file], options.output().note))]
        if file is not None
        else [_place(str(name))]
    )
    return asyncio.run(delete_places(places, options))


async def _get(name: str | None, lister: Lister, options: BusOptions) -> int:
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            objects = (
                [await find_object(bus, _place(name))]
                if name is not None
                else [entry.value for entry in await bus.list(OBJECT)]
            )
            return [claims_listing(objects)]

        if lister.options.watch:
            await lister.follow(bus, [(OBJECT, {})], collect)
            return ExitCode.OK
        listings = await collect()

    def document(rows: Sequence[Row]) -> Any:
        plain = [plain_object(row.document) for row in rows]
        return plain[0] if name is not None and plain else {"items": plain}

    lister.show(listings, document, thing="claim")
    return ExitCode.OK


def _place(name: str) -> dict[str, str]:
    namespace, plain = parse_namespaced(name)
    return {"kind": "resourceclaim", "namespace": namespace, "name": plain}


def claims_listing(objects: Sequence[ApiObject]) -> Listing:
    """List objects of all kinds: claims with node and devices, or with the reason why they wait."""
    return Listing(
        columns=(
            Column(title="object", fit=Fit.NAME),
            Column(title="state"),
            Column(title="node", fit=Fit.NAME),
            Column(title="devices", fit=Fit.NAME),
            Column(title="labels", is_wide=True),
        ),
        rows=tuple(map(_row, objects)),
    )


def _row(api_object: ApiObject) -> Row:
    allocation = shown(api_object).status.get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or []
    nodes = nodes_of(results) or [str(api_object.spec.get("nodeName") or "-")]
    devices = "\n".join(f"{result.get('request')}: {result.get('device')}" for result in results)
    metadata = metadata_of(api_object)
    labels = dict(metadata.labels or {})
    return Row(
        name=f"{api_object.kind.lower()}/{metadata.name}",
        cells=(
            Text(name_of(api_object), "name"),
            state_of(api_object),
            ", ".join(nodes),
            devices or "-",
            ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-",
        ),
        document=api_object,
        labels=labels,
    )
