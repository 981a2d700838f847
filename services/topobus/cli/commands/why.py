"""`topobus why`: why a pod of any cluster has no node, read-only, for any DRA driver and scheduler;
and `topobus snapshot`, which saves what it reads.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from topobus.cli.cluster_questions import CLUSTER_DEFAULTS, SNAPSHOT_DEFAULTS, ClusterOptions, SnapshotOptions, ask
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.render.output import Output, TextOrJson
from topobus.cli.render.picture import recording_console, save_picture
from topobus.cli.render.verdict import verdict_view
from topobus.values.cluster_answers import Verdict

__all__ = ["snapshot", "why"]

_KINDS = {
    "pod": "Pod",
    "pods": "Pod",
    "po": "Pod",
    "claim": "ResourceClaim",
    "claims": "ResourceClaim",
    "resourceclaim": "ResourceClaim",
    "resourceclaims": "ResourceClaim",
}
_PLACED = ("scheduled", "fits", "allocated")
# A cluster is read as a whole each time.
_PAUSE_S = 5.0


def why(
    subject: Annotated[str, Parameter(name="OBJECT", help="`pod/NAME`, or NAME for a pod, or `claim/NAME`.")],
    /,
    *,
    watch: Annotated[bool, Parameter(help="Ask again every five seconds until it fits.")] = False,
    svg: Annotated[Path | None, Parameter(help="Also save the answer as a picture.")] = None,
    output: TextOrJson = "text",
    options: SnapshotOptions = SNAPSHOT_DEFAULTS,
) -> int:
    """Explain why a pod of any cluster has no node, and the smallest change that helps.

    It reads and writes nothing, needs nothing in the cluster, and knows any DRA driver.
    """
    kind, name = _subject(subject)
    if watch and options.snapshot is not None:
        raise UsageError(
            "got --watch and --snapshot, wanted one of them", next_step="a file does not change: leave --watch out"
        )
    out = Output(is_json=output == "json")
    arguments = ["explain", *options.arguments(), "--kind", kind, "--name", name]
    shown = None
    while True:
        verdict = msgspec.convert(ask(arguments, out), Verdict)
        if verdict != shown:
            (out.line if watch else out.document)(verdict)
            out.show(verdict_view(verdict))
            if svg is not None:
                picture = recording_console()
                picture.print(verdict_view(verdict))
                save_picture(picture, svg, title=f"topobus why {subject}")
            shown = verdict
        if not watch or verdict.code in _PLACED or verdict.code in ("ended", "absent"):
            return ExitCode.OK if verdict.code in _PLACED else ExitCode.NO
        time.sleep(_PAUSE_S)


def snapshot(
    file: Annotated[Path, Parameter(name="FILE", help="Where to write; .gz at the end compresses it.")],
    /,
    *,
    replace_names: Annotated[
        bool,
        Parameter(
            help="Replace the names of nodes, namespaces, pods, claims, owners and the like, and your own values of "
            "labels. FILE.names says what each stands for."
        ),
    ] = False,
    options: ClusterOptions = CLUSTER_DEFAULTS,
) -> int:
    """Save what `topobus why` reads of a cluster to a file: nodes, pods, claims, classes, slices.

    Images, commands, environment and mounts of containers are left out. With --replace-names the file
    gives the same answers, and can be passed on: devices, classes and drivers stay as they are.
    """
    out = Output()
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", next_step="name a file in a folder that exists")
    arguments = ["save", *options.arguments(), "--file", str(file)]
    saved = ask([*arguments, *(["--replace-names"] if replace_names else [])], out)
    for unseen in saved["unseen"]:
        out.note(f"left out: {unseen['kind']} objects ({unseen['why']})")
    if replace_names:
        out.note(f"{file}.names: what each name stands for; keep it to yourself")
    out.note(f"{file}: {saved['objects']} objects; `topobus why pod/NAME --snapshot {file}` reads it")
    return ExitCode.OK


def _subject(text: str) -> tuple[str, str]:
    word, _, name = text.rpartition("/")
    kind = _KINDS.get(word.lower() or "pod")
    if kind is None or not name:
        raise UsageError(f"got {text!r}, wanted pod/NAME or claim/NAME", next_step="topobus why pod/NAME -n NAMESPACE")
    return kind, name
