"""`topobus migrate`: converts classic DRA manifests to structured ones, and lists on stderr what
has no counterpart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.objects.input_files import MANIFEST_BYTES, read_text, shown_name
from topobus.cli.render.output import Output
from topobus.formats.kubernetes.classic.classic_migration import CLASSIC_VERSION_TEXTS, Migration, Severity
from topobus.formats.kubernetes.classic.classic_migration import migrate as migrate_objects
from topobus.formats.kubernetes.manifest import parse_some
from topobus.formats.kubernetes.objects import CLASSIC_VERSIONS
from topobus.formats.messages.messages import ApiObject

__all__ = ["migrate"]

_STYLES = {Severity.INFO: "faint", Severity.LOST: "warn", Severity.OMITTED: "fail"}


def _no_option(_: object, files: Sequence[Path]) -> None:
    """Accept `-` as a name, and no other word with a dash."""
    for file in files:
        if str(file).startswith("-") and str(file) != "-":
            raise ValueError(f"there is no option {file}")


def migrate(
    files: Annotated[
        list[Path],
        Parameter(
            name="FILE",
            help="Manifests, read together; - reads standard input.",
            consume_multiple=True,
            allow_leading_hyphen=True,
            validator=_no_option,
        ),
    ],
    /,
    *,
    is_json: Annotated[bool, Parameter(name="--json", help="Objects and notes as one JSON document.")] = False,
) -> int:
    """Convert classic DRA objects to structured ones. Exits with 1 when something was lost."""
    output = Output(is_json=is_json)
    objects = [api_object for file in files for api_object in _read(file)]
    done = migrate_objects(objects)
    if output.is_json:
        notes = [
            {"object": note.object, "path": note.path, "severity": note.severity.value, "message": note.message}
            for note in done.notes
        ]
        output.document({"objects": list(done.objects), "notes": notes, "isComplete": done.is_complete})
    elif done.objects:
        sys.stdout.write(as_yaml(done))
    # JSON has them in the document.
    for note in () if output.is_json else done.notes:
        output.errors.print(Text.assemble((note.severity.value, _STYLES[note.severity]), f" {note}"))
    return ExitCode.OK if done.is_complete else ExitCode.NO


def as_yaml(done: Migration) -> str:
    """Write the objects as documents of one manifest, in Kubernetes' order of fields.

    An expression stays on one line.
    """
    return "---\n".join(
        yaml.safe_dump(api_object, sort_keys=False, allow_unicode=True, width=1 << 20) for api_object in done.objects
    )


def _read(file: Path) -> tuple[ApiObject | dict[str, Any], ...]:
    """Read a manifest: classic objects strictly, others as they are.

    Errors: raises InputError for a file that cannot be read,
    ContractError for one that is no manifest.
    """
    text = read_text(file, limit_bytes=MANIFEST_BYTES, next_step="give manifests with classic DRA objects")
    return parse_some(text, where=shown_name(file), choose=_choose)


def _choose(value: dict[str, Any]) -> dict[str, Any] | None:
    """Select classic objects and parameters, which are read strictly.

    An older version of the same shape counts as the one that we read.
    """
    kind, version = str(value.get("kind")), str(value.get("apiVersion"))
    if kind in CLASSIC_VERSIONS and version in CLASSIC_VERSION_TEXTS:
        return value | {"apiVersion": CLASSIC_VERSIONS[kind]}
    return value if kind.endswith("Parameters") and not version.startswith("resource.k8s.io/") else None
