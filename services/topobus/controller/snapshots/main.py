"""`topobus why`, `free`, `defrag`, `what-if` and `snapshot` as a process: reads a cluster, or a file
that holds one, and writes the answer to standard output.

It is the controller's program, since only the controller has the search and the CEL evaluator; the
command line loads neither. In a cluster it writes nothing but the evictions that are asked for. What
it is reading goes to standard error, one JSON object a line, and so does an error. The exit codes are
those of sysexits.h.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from topobus.controller.snapshots.rules.cluster_view import ClusterView, Place, Plain
from topobus.controller.snapshots.rules.defrag import plan_moves
from topobus.controller.snapshots.rules.explain import explain_claim, explain_pod
from topobus.controller.snapshots.rules.free import GROUPINGS, add_pod, count_fits, device_states, free_rows
from topobus.controller.snapshots.rules.replaced_names import replace_names
from topobus.controller.snapshots.rules.shapes import without_nulls, wrong_types
from topobus.controller.snapshots.rules.snapshot import Snapshot
from topobus.controller.snapshots.rules.what_if import edits_of, what_if
from topobus.engine.cel.selector import CelCompiler
from topobus.values.cluster_answers import FreeAnswer, MovePlan
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable, TopobusError

__all__ = ["main", "read_snapshot"]

_EXITS: tuple[tuple[type[TopobusError], int], ...] = ((ConfigError, 78), (ContractError, 65), (PeerUnavailable, 69))
_UNREACHED = "see whether `kubectl version` reaches it with the same kubeconfig and context, and log in again"
_GZIP = b"\x1f\x8b"
# Fields of a wrong type that are named. A file may have one in each object.
_SHOWN_PROBLEMS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question, or write a snapshot, and return the exit code."""
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument("--snapshot", default="", help="a file that `topobus snapshot` wrote, instead of a cluster")
    source.add_argument("--kubeconfig", default="", help="kubeconfig file; empty: the pod's own account")
    source.add_argument("--context", default="", help="context of that file")
    source.add_argument("--namespace", default="default")
    parser = argparse.ArgumentParser(prog="topobus-controller snapshots", description=__doc__)
    questions = parser.add_subparsers(dest="question", required=True)
    explain = questions.add_parser("explain", parents=[source], help="why a pod or a claim has no node")
    explain.add_argument("--kind", choices=["Pod", "ResourceClaim"], default="Pod")
    explain.add_argument("--name", required=True)
    save = questions.add_parser("save", parents=[source], help="write the snapshot to a file")
    save.add_argument("--file", type=Path, required=True)
    save.add_argument("--replace-names", action="store_true", help="and write what each stands for to FILE.names")
    defrag = questions.add_parser(
        "defrag", parents=[source], help="what would have to move for the pod on standard input"
    )
    defrag.add_argument("--evict", action="store_true", help="evict these pods one by one")
    changed = questions.add_parser("what-if", parents=[source], help="what would change with the objects given")
    changed.add_argument("--without", action="append", default=[], help="KIND/NAME or KIND/NAMESPACE/NAME")
    free = questions.add_parser("free", parents=[source], help="what is free")
    free.add_argument("--by", choices=GROUPINGS, action="append", default=[])
    free.add_argument("--for", dest="wanted", action="store_true", help="how many of the pod on standard input fit")
    asked = parser.parse_args(arguments)
    try:
        is_given = asked.question in ("defrag", "what-if") or getattr(asked, "wanted", False)
        wanted: list[Plain] = msgspec.json.decode(sys.stdin.buffer.read()) if is_given else []
        _refuse_wrong_types("the manifest", wanted)
        if asked.question == "defrag" and asked.evict:
            sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_evict(asked, wanted))))
            return 0
        snapshot = read_snapshot(Path(asked.snapshot)) if asked.snapshot else _read_cluster(asked)
        match asked.question:
            case "explain":
                explained = explain_pod if asked.kind == "Pod" else explain_claim
                answer: object = explained(ClusterView(snapshot), (asked.namespace, asked.name), CelCompiler())
            case "save":
                _save(snapshot, asked.file, with_names=not asked.replace_names)
                answer = {"objects": len(snapshot.items), "unseen": snapshot.unseen}
            case "what-if":
                view = ClusterView(snapshot)
                without = [_place_of(each) for each in asked.without]
                edits = edits_of(view, wanted, without, namespace=asked.namespace)
                answer = {"pods": what_if(view, edits, CelCompiler())}
            case "defrag":
                answer = _plan(snapshot, wanted, asked.namespace)
            case _:
                answer = _free(ClusterView(snapshot), asked.by, wanted, asked.namespace)
        sys.stdout.buffer.write(msgspec.json.encode(answer))
    except TopobusError as err:
        next_step = err.next_step or (_UNREACHED if isinstance(err, PeerUnavailable) else "")
        sys.stderr.buffer.write(msgspec.json.encode({"error": err.message, "next_step": next_step}) + b"\n")
        return next((code for kind, code in _EXITS if isinstance(err, kind)), 70)
    return 0


def _read_cluster(asked: argparse.Namespace) -> Snapshot:
    # Imported here, as a snapshot needs no Kubernetes client.
    from topobus.controller.snapshots.listing import open_client, take_snapshot

    is_of_pod = asked.question == "explain" and asked.kind == "Pod"
    pod = (asked.namespace, asked.name) if is_of_pod else None

    async def read() -> Snapshot:
        client = open_client(asked.kubeconfig, asked.context)
        try:
            return await take_snapshot(client, _report, pod=pod)
        finally:
            await client.close()

    return asyncio.run(read())


async def _evict(asked: argparse.Namespace, wanted: Sequence[Plain]) -> object:
    from topobus.controller.snapshots.evicting import evict_moves
    from topobus.controller.snapshots.listing import open_client

    client = open_client(asked.kubeconfig, asked.context)
    try:
        return await evict_moves(client, lambda snapshot: _plan(snapshot, wanted, asked.namespace), _report)
    finally:
        await client.close()


def _plan(snapshot: Snapshot, wanted: Sequence[Plain], namespace: str) -> MovePlan:
    view = ClusterView(snapshot)
    return plan_moves(view, add_pod(view, wanted, namespace), CelCompiler())


def _free(view: ClusterView, by: Sequence[str], wanted: Sequence[Plain], namespace: str) -> FreeAnswer:
    compiler = CelCompiler()
    rows = free_rows(list(device_states(view, compiler)), by)
    if not wanted:
        return FreeAnswer(rows=rows)
    key = add_pod(view, wanted, namespace)
    fits = count_fits(view, key, compiler)
    is_none = not any(fit.count for fit in fits)
    return FreeAnswer(rows=rows, fits=fits, verdict=explain_pod(view, key, compiler) if is_none else None)


def _save(snapshot: Snapshot, file: Path, *, with_names: bool) -> None:
    if not with_names:
        snapshot, names = replace_names(snapshot)
        file.with_name(f"{file.name}.names").write_bytes(msgspec.json.format(msgspec.json.encode(names)))
    content = msgspec.json.encode(snapshot)
    file.write_bytes(gzip.compress(content, mtime=0) if file.suffix == ".gz" else content)


def read_snapshot(path: Path) -> Snapshot:
    """Read a file that `topobus snapshot` wrote.

    Errors: raises ContractError for a file that holds no snapshot, or only a part of one, and for
    objects with fields of a wrong type.
    """
    next_step = "topobus snapshot FILE writes one"
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content.startswith(_GZIP) else content
        snapshot = msgspec.json.decode(content, type=Snapshot)
        if b"null" in content:
            snapshot = msgspec.structs.replace(snapshot, items=tuple(map(without_nulls, snapshot.items)))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as err:
        raise ContractError(f"{path}: no snapshot of a cluster: {err}", next_step=next_step) from err
    _refuse_wrong_types(str(path), snapshot.items)
    return snapshot


def _refuse_wrong_types(where: str, items: Sequence[Plain]) -> None:
    problems = wrong_types(items)
    more = [f"and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
    if problems:
        raise ContractError("\n".join(f"{where}: {line}" for line in (*problems[:_SHOWN_PROBLEMS], *more)))


def _place_of(text: str) -> Place:
    kind, *namespace, name = text.split("/")
    return kind, (namespace[0] if namespace else "", name)


def _report(plural: str, count: int) -> None:
    sys.stderr.buffer.write(msgspec.json.encode({"reading": plural, "count": count}) + b"\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
