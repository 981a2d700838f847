"""What commands about any cluster share: which cluster or saved snapshot they read, the manifest that
they ask about, and the engine that answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.progress import Progress, SpinnerColumn, TextColumn

from topobus.cli.engine_process import ask_snapshot
from topobus.cli.exits import InputError, UsageError
from topobus.cli.kubeconfigs import find_kubeconfig, namespace_of
from topobus.cli.objects.manifests import Note, read_wanted
from topobus.cli.render.output import Output
from topobus.formats.kubernetes.objects import name_of
from topobus.formats.messages.messages import ApiObject

__all__ = ["CLUSTER_DEFAULTS", "SNAPSHOT_DEFAULTS", "ClusterOptions", "SnapshotOptions", "ask", "read_one"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which cluster a command reads."""

    kubeconfig: Annotated[
        Path | None, Parameter(help="Default: $KUBECONFIG, ~/.kube/config, else the pod's service account.")
    ] = None
    kube_context: Annotated[str, Parameter(help="Context of the kubeconfig. Default: its current one.")] = ""

    def server(self) -> list[str]:
        """Name the cluster for the engine.

        Errors: raises InputError for a kubeconfig that does not exist.
        """
        return ["--kubeconfig", str(find_kubeconfig(self.kubeconfig) or ""), "--context", self.kube_context]

    def arguments(self) -> list[str]:
        """Name the cluster for the engine, and the namespace that counts by default.

        Errors: as `server`.
        """
        inside = namespace_of(find_kubeconfig(self.kubeconfig), self.kube_context)
        return [*self.server(), "--namespace", inside]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SnapshotOptions(ClusterOptions):
    """Which cluster a command reads, or which file that holds one, and the namespace of what it is
    about.
    """

    snapshot: Annotated[Path | None, Parameter(help="A file that `topobus snapshot` wrote, instead of a cluster.")] = (
        None
    )
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
