"""`topobus what-if`: what would change for the pods of a cluster with other nodes, classes or slices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.text import Text

from topobus.cli.cluster_questions import SNAPSHOT_DEFAULTS, SnapshotOptions, ask
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.objects.manifests import manifest_files, read_mixed
from topobus.cli.render.grids import plain_table
from topobus.cli.render.output import Output, TextOrJson
from topobus.values.cluster_answers import PodChange, PodState

__all__ = ["what_if"]

_KINDS = {
    "node": "Node",
    "class": "DeviceClass",
    "deviceclass": "DeviceClass",
    "slice": "ResourceSlice",
    "resourceslice": "ResourceSlice",
    "pod": "Pod",
    "claim": "ResourceClaim",
    "resourceclaim": "ResourceClaim",
}
_OF_NAMESPACE = ("Pod", "ResourceClaim")


def what_if(
    *,
    put: Annotated[
        tuple[Path, ...],
        Parameter(
            name=("--file", "-f"),
            help="Objects that would be there, or would be so: nodes, slices (`topobus slices` prints those of a "
            "recorded machine), classes, claims, pods.",
        ),
    ] = (),
    without: Annotated[
        tuple[str, ...],
        Parameter(
            help="An object that would be gone: node/NAME, class/NAME, slice/NAME, "
            "pod/NAMESPACE/NAME, claim/NAMESPACE/NAME."
        ),
    ] = (),
    output: TextOrJson = "text",
    options: SnapshotOptions = SNAPSHOT_DEFAULTS,
) -> int:
    """Show which pods of a cluster would have a node, or lose theirs, with other objects.

    It reads and writes nothing, needs nothing in the cluster, and knows any DRA driver.
    """
    if not put and not without:
        raise UsageError(
            "nothing would be otherwise: wanted -f FILE or --without KIND/NAME",
            next_step="topobus what-if --without node/NAME",
        )
    out = Output(is_json=output == "json")
    objects = read_mixed(manifest_files(put), out.note, has_nodes=True) if put else []
    arguments = ["what-if", *options.arguments()]
    answer = ask([*arguments, *(word for each in without for word in ("--without", _place(each)))], out, objects)
    out.document(answer)
    _show(out, msgspec.convert(answer["pods"], list[PodChange]))
    return ExitCode.OK


def _place(text: str) -> str:
    word, *namespace, name = text.split("/") if "/" in text else ("", "")
    kind = _KINDS.get(word.lower())
    if kind is None or not name or (len(namespace) == 1) is not (kind in _OF_NAMESPACE):
        raise UsageError(
            f"got {text!r}, wanted node/NAME, class/NAME, slice/NAME, pod/NAMESPACE/NAME or claim/NAMESPACE/NAME",
            next_step="topobus what-if --without node/NAME",
        )
    return "/".join((kind, *namespace, name))


def _show(out: Output, pods: list[PodChange]) -> None:
    if not pods:
        out.show(Text("no pod would be otherwise", "ok"))
        return
    table = plain_table("pod", "is", "would be")
    for pod in pods:
        table.add_row(f"{pod.namespace}/{pod.name}", _state(pod.before), _state(pod.after))
    out.show(table)


def _state(state: PodState) -> Text:
    match state.code:
        case "scheduled":
            return Text(f"on {state.node}")
        case "fits":
            return Text(f"placed, on {state.node} or another node", "ok")
        case _:
            return Text(state.message, "fail")
