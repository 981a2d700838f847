"""`topobus why`: why a pod of any cluster has no node, read-only, for any DRA driver and scheduler;
and `topobus snapshot`, which saves what it reads.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from rich.progress import Progress, SpinnerColumn, TextColumn

from topobus.cli.engine_process import ask_snapshot
from topobus.cli.exits import ExitCode, InputError, UsageError
from topobus.cli.kubeconfigs import find_kubeconfig, namespace_of
from topobus.cli.objects.manifests import Note, read_wanted
from topobus.cli.render.output import Output
from topobus.cli.render.picture import recording_console, save_picture
from topobus.cli.render.verdict import verdict_view
from topobus.formats.kubernetes.objects import name_of
from topobus.formats.messages.messages import ApiObject
from topobus.values.cluster_answers import Verdict

__all__ = ["SNAPSHOT_DEFAULTS", "SnapshotOptions", "ask", "read_one", "snapshot", "why"]

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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which cluster a command reads."""

    kubeconfig: Annotated[
        Path | None,
        Parameter(name="--kubeconfig", help="Default: $KUBECONFIG, ~/.kube/config, else the pod's service account."),
    ] = None
    kube_context: Annotated[
        str, Parameter(name="--kube-context", help="Context of the kubeconfig. Default: its current one.")
    ] = ""

    def arguments(self) -> list[str]:
        """Name for the engine what it reads, and the namespace that counts by default.

        Errors: raises InputError for a kubeconfig that does not exist.
        """
        file = find_kubeconfig(self.kubeconfig)
        inside = namespace_of(file, self.kube_context)
        return ["--kubeconfig", str(file or ""), "--context", self.kube_context, "--namespace", inside]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SnapshotOptions(ClusterOptions):
    """Which cluster a command reads, or which file that holds one, and the namespace of what it is
    about.
    """

    snapshot: Annotated[
        Path | None,
        Parameter(name="--snapshot", help="A file that `topobus snapshot` wrote, instead of a cluster."),
    ] = None
    namespace: Annotated[
        str, Parameter(name=("--namespace", "-n"), help="Default: that of the kubeconfig's context.")
    ] = ""

    def arguments(self) -> list[str]:
        """Name for the engine what it reads, and the namespace.

        Errors: raises InputError for a file that does not exist, UsageError for a file and a cluster.
        """
        if self.snapshot is None:
            source = super().arguments()
        elif self.kubeconfig is not None or self.kube_context:
            raise UsageError(
                "got --snapshot and a kubeconfig or context, wanted one of them",
                next_step="--snapshot reads a file, the others a cluster",
            )
        elif not self.snapshot.is_file():
            raise InputError(f"there is no file {self.snapshot}", next_step="topobus snapshot FILE writes one")
        else:
            source = ["--snapshot", str(self.snapshot)]
        # The last one counts.
        return [*source, *(["--namespace", self.namespace] if self.namespace else [])]


CLUSTER_DEFAULTS = ClusterOptions()
SNAPSHOT_DEFAULTS = SnapshotOptions()


def why(
    subject: Annotated[str, Parameter(name="OBJECT", help="`pod/NAME`, or NAME for a pod, or `claim/NAME`.")],
    /,
    *,
    watch: Annotated[bool, Parameter(negative="", help="Ask again every five seconds until it fits.")] = False,
    svg: Annotated[Path | None, Parameter(help="Also save the answer as a picture.")] = None,
    output: Annotated[Literal["text", "json"], Parameter(name=("--output", "-o"), help="How to print.")] = "text",
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
            if out.is_json and watch:
                out.line(verdict)
            elif out.is_json:
                out.document(verdict)
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
    options: ClusterOptions = CLUSTER_DEFAULTS,
) -> int:
    """Save what `topobus why` reads of a cluster to a file: nodes, pods, claims, classes, slices.

    Images, commands, environment and mounts of containers are left out.
    """
    out = Output()
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", next_step="name a file in a folder that exists")
    saved = ask(["save", *options.arguments(), "--file", str(file)], out)
    for unseen in saved["unseen"]:
        out.note(f"left out: {unseen['kind']} objects ({unseen['why']})")
    out.note(f"{file}: {saved['objects']} objects; `topobus why pod/NAME --snapshot {file}` reads it")
    return ExitCode.OK


def _subject(text: str) -> tuple[str, str]:
    word, _, name = text.rpartition("/")
    kind = _KINDS.get(word.lower() or "pod")
    if kind is None or not name:
        raise UsageError(f"got {text!r}, wanted pod/NAME or claim/NAME", next_step="topobus why pod/NAME -n NAMESPACE")
    return kind, name


def read_one(verb: str, file: Path, note: Note) -> list[ApiObject]:
    """Read the manifest of one pod, claim or template, with what it needs.

    Errors: as `read_wanted`.
    """
    objects = read_wanted(verb, (file,), note, kinds=("Pod", "ResourceClaim", "ResourceClaimTemplate"))
    pods = [each for each in objects if each.kind == "Pod"]
    if len(pods) > 1:
        note(f"the manifest has {len(pods)} pods: the answer is about the first, {name_of(pods[0])}")
    return objects


def ask(arguments: list[str], out: Output, given: object = None) -> dict[str, Any]:
    """Run the engine, and show meanwhile what it reads.

    Errors: as `ask_snapshot`.
    """
    is_off = out.is_json or not out.errors.is_terminal
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=out.errors, transient=True, disable=is_off
    ) as bar:
        task = bar.add_task("reading the cluster")

        def show(plural: str, count: int) -> None:
            bar.update(task, description=f"reading {plural}: {count}")

        return asyncio.run(ask_snapshot(arguments, show, given))
