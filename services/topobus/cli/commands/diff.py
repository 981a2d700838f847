"""`topobus diff`: what `topobus apply` of the same manifests would change, as a unified diff.

It writes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import yaml
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.objects.applying import Applied, apply_objects, plain_object
from topobus.cli.objects.sources import Files, Kustomization, Recursive, read_sources
from topobus.cli.objects.vendor_names import Profiles, stored_by_our_names
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, open_bus
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.messages.messages import ApiObject

__all__ = ["diff", "difference"]

_STYLES = {"+": "ok", "-": "fail", "@": "name"}
# What the store sets in a new object, different at each run.
_GIVEN = ("uid", "creationTimestamp", "generation")


async def diff(
    *,
    file: Files = (),
    kustomize: Kustomization = None,
    is_recursive: Recursive = False,
    profiles: Profiles = (),
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show what apply would change: exit code 0 nothing, 1 something, others for errors."""
    output = options.output()
    objects = read_sources("compare", file, kustomize, output.note, is_recursive=is_recursive)
    async with open_bus(options, NamesSystem.ALWAYS) as bus:
        objects = await stored_by_our_names(bus, objects, profiles, output.note)
        would = await apply_objects(bus, objects, is_dry_run=True)
    differences = [(applied, lines) for applied in would if (lines := difference(applied))]
    output.document({"differences": [_as_document(applied, lines) for applied, lines in differences]})
    for _, lines in differences:
        for line in lines:
            output.show(Text(line, _STYLES.get(line[:1], "")))
    return ExitCode.NO if differences else ExitCode.OK


def difference(applied: Applied) -> list[str]:
    """Compare an object as it is stored with what apply would store, without its status.

    No lines where they are equal.
    """
    name = name_of(applied.stored)
    before = _written(applied.previous) if applied.previous is not None else []
    after = _written(applied.stored, is_new=applied.previous is None)
    return list(
        difflib.unified_diff(
            before,
            after,
            fromfile=f"stored: {name}" if before else "stored: nothing",
            tofile=f"applied: {name}",
            lineterm="",
        )
    )


def _written(api_object: ApiObject, *, is_new: bool = False) -> list[str]:
    plain: dict[str, Any] = plain_object(api_object, is_brief=True)
    plain.pop("status", None)
    if is_new:
        plain["metadata"] = {key: value for key, value in plain["metadata"].items() if key not in _GIVEN}
    return yaml.safe_dump(plain, sort_keys=True, allow_unicode=True, width=120).splitlines()


def _as_document(applied: Applied, lines: Sequence[str]) -> dict[str, Any]:
    metadata = metadata_of(applied.stored)
    return {
        "kind": applied.stored.kind,
        "namespace": metadata.namespace,
        "name": metadata.name,
        "verb": applied.verb,
        "diff": "\n".join(lines),
    }
