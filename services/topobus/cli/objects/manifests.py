"""Reads manifest files from disk or standard input, and converts them to requests to a node.

The parser, strict and with line numbers, is in `topobus.formats.kubernetes`. This module handles
the file, its errors and a pod's identity. Users pass whole charts: objects without a use here, such
as a Service, are left out with one note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from topobus.cli.exits import InputError, UsageError
from topobus.cli.objects.input_files import MANIFEST_BYTES, read_text, shown_name
from topobus.formats.kubernetes.manifest import MixedManifest, parse_manifest, parse_mixed
from topobus.formats.kubernetes.objects import metadata_of, name_of, placed_uid
from topobus.formats.kubernetes.pod import pod_request
from topobus.formats.kubernetes.workloads import WORKLOAD_KINDS
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.node_text import first_of
from topobus.values.request import PodRequest

__all__ = [
    "NamespacedName",
    "Note",
    "counted_kinds",
    "manifest_files",
    "only_ours",
    "parse_namespaced",
    "read_mixed",
    "read_objects",
    "read_pod",
    "read_wanted",
    "request_of",
]

NamespacedName = tuple[str, str]
Note = Callable[[str], None]
"""Prints a note to the user beside a command's answer."""

_MANIFESTS = (".json", ".yaml", ".yml")
# Fields that group pods for kube-scheduler (gangs, alpha).
_GROUPED = frozenset({"schedulingGroup", "workloadRef"})
# Kinds, or workloads, that one note names. A manifest may have hundreds.
_NAMED = 7
_EXAMPLES = "examples/pods and examples/claims have manifests to start from"


def read_objects(path: Path) -> tuple[ApiObject, ...]:
    """Read a manifest that has only our objects. `-` is standard input.

    Errors: raises InputError for a file that cannot be read, ContractError for one that is no
    manifest.
    """
    text = read_text(path, limit_bytes=MANIFEST_BYTES, next_step=_EXAMPLES)
    return parse_manifest(text, where=shown_name(path))


def read_mixed(files: Iterable[Path], note: Note, *, has_nodes: bool = False) -> list[ApiObject]:
    """Read our objects of manifests, and print one note on the others.

    Shapes: has_nodes — take Nodes too.
    Errors: as `read_objects`; InputError when nothing in them is of use.
    """
    files = list(files)
    return only_ours(_parsed(files, has_nodes=has_nodes, has_workloads=False), files, note)


def _parsed(files: Sequence[Path], *, has_nodes: bool = False, has_workloads: bool) -> list[MixedManifest]:
    """Read all files before any of them is parsed."""
    texts = [(file, read_text(file, limit_bytes=MANIFEST_BYTES, next_step="")) for file in files]
    return [
        parse_mixed(text, where=shown_name(file), has_nodes=has_nodes, has_workloads=has_workloads)
        for file, text in texts
    ]


def only_ours(parts: Sequence[MixedManifest], named: Sequence[Path], note: Note) -> list[ApiObject]:
    """Return our objects, and print one note on the others.

    Errors: raises InputError when all of it is left out.
    """
    workloads = [text for part in parts for text in part.workloads]
    if workloads:
        more = f"; and {len(workloads) - _NAMED} more" if len(workloads) > _NAMED else ""
        note(f"planned as pods, as many as run at once: {'; '.join(workloads[:_NAMED])}{more}")
    kinds = Counter(kind for part in parts for kind in part.left_out)
    text = counted_kinds(kinds)
    objects = [api_object for part in parts for api_object in part.objects]
    is_workload = not WORKLOAD_KINDS.isdisjoint(kinds)
    if text and not objects and not workloads:
        next_step = (
            "`topobus simulate` and `topobus allocate` plan the pods of workloads; a cluster runs them"
            if is_workload
            else _EXAMPLES
        )
        raise InputError(
            f"{', '.join(map(shown_name, named))}: nothing in it is of use here: it has {text}", next_step=next_step
        )
    grouped = [
        name_of(api_object) for api_object in objects if api_object.kind == "Pod" and _GROUPED & api_object.spec.keys()
    ]
    if grouped:
        note(
            f"{first_of(grouped, 1)}: the group in its spec ({', '.join(sorted(_GROUPED))}) is not "
            "considered: pods are placed one by one, not all or none"
        )
    if text:
        note(f"left out, because Topobus does not use it: {text}")
    return objects


def counted_kinds(kinds: Counter[str]) -> str:
    """Count objects by kind, the frequent ones first.

    Of many kinds the first are named, and the others counted.

    >>> counted_kinds(Counter({"Service": 1, "ConfigMap": 3}))
    '3 ConfigMap, 1 Service'
    >>> counted_kinds(Counter({f"Kind{number}": 1 for number in range(50)}))
    '1 Kind0, 1 Kind1, 1 Kind10, 1 Kind11, 1 Kind12, 1 Kind13, and 44 objects of 44 other kinds'
    """
    ordered = sorted(kinds.items(), key=lambda entry: (-entry[1], entry[0]))
    named, others = (ordered, []) if len(ordered) <= _NAMED else (ordered[: _NAMED - 1], ordered[_NAMED - 1 :])
    text = ", ".join(f"{count} {kind}" for kind, count in named)
    return text + (f", and {sum(count for _, count in others)} objects of {len(others)} other kinds" if others else "")


def read_wanted(
    verb: str, files: Sequence[Path], note: Note, *, kinds: Sequence[str] = ("Pod", "ResourceClaim")
) -> list[ApiObject]:
    """Read the objects of files and folders that a command is to answer: pods (including those of
    workloads), claims, and what they need.

    Shapes: kinds — at least one object must be of these; a workload without any pod is enough, and
    gives no answer.
    Errors: as `read_mixed`; InputError where there is none, with a next step.
    """
    manifests = manifest_files(files)
    parts = _parsed(manifests, has_workloads=True)
    objects = only_ours(parts, manifests, note)
    for api_object in objects:
        if (
            api_object.kind == "ResourceClaim"
            and api_object.status.get("allocation")
            and not _is_used(api_object, objects)
        ):
            note(f"{name_of(api_object)} is allocated already according to its status; it is planned as if it were not")
    if any(api_object.kind in kinds for api_object in objects) or any(part.workloads for part in parts):
        return objects
    named = ", ".join(map(shown_name, files))
    counts = Counter(api_object.kind for api_object in objects)
    text = counted_kinds(counts)
    if "ResourceClaim" in counts:
        raise InputError(
            f"{named}: there is nothing to {verb}: wanted a Pod or a workload, got {text}",
            next_step="`topobus apply -f` allocates claims",
        )
    if "ResourceClaimTemplate" in counts:
        names = ", ".join(
            metadata_of(api_object).name for api_object in objects if api_object.kind == "ResourceClaimTemplate"
        )
        raise InputError(
            f"{named}: there is nothing to {verb}: it has {text}, and claims are made of a template when a "
            "pod names it",
            next_step="add a pod, or a Deployment or Job, with spec.resourceClaims: [{name: …, "
            f"resourceClaimTemplateName: {names.partition(', ')[0]}}}]; "
            "or write `kind: ResourceClaim` with the template's spec.spec as its spec",
        )
    raise InputError(
        f"{named}: there is nothing to {verb}: wanted a Pod, a workload or a ResourceClaim, got {text}",
        next_step=_EXAMPLES,
    )


def _is_used(claim: ApiObject, objects: Sequence[ApiObject]) -> bool:
    """Say whether a pod names a claim, which then keeps what it has."""
    place = (metadata_of(claim).namespace or "default", metadata_of(claim).name)
    return any(
        (metadata_of(pod).namespace or "default", entry.get("resourceClaimName")) == place
        for pod in objects
        if pod.kind == "Pod"
        for entry in pod.spec.get("resourceClaims") or ()
    )


def read_pod(path: Path) -> PodRequest:
    """Read the request of the one pod of a manifest.

    Errors: raises ContractError when the file holds no pod or several.
    """
    pods = [api_object for api_object in read_objects(path) if api_object.kind == "Pod"]
    if len(pods) != 1:
        raise ContractError(f"{path}: wanted one Pod, got {len(pods)}", next_step="give a file with one pod")
    return request_of(pods[0])


def manifest_files(paths: Iterable[Path], *, is_recursive: bool = False) -> list[Path]:
    """List the manifest files: those named, and of a folder every manifest in it, by name.

    Those of its subfolders only with `is_recursive`.

    Errors: raises InputError for a folder without a manifest.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = _manifests_in(path, is_recursive=is_recursive)
        if not inside:
            deeper = _manifests_in(path, is_recursive=True)
            next_step = "add -R for the folders within it" if deeper else _EXAMPLES
            raise InputError(f"{path} holds no manifest ({', '.join(_MANIFESTS)})", next_step=next_step)
        files += inside
    return files


def _manifests_in(folder: Path, *, is_recursive: bool) -> list[Path]:
    return sorted(
        path
        for path in (folder.rglob("*") if is_recursive else folder.iterdir())
        if path.suffix in _MANIFESTS and path.is_file()
    )


def request_of(pod: ApiObject) -> PodRequest:
    """Read a pod's request. A pod without a uid gets the same one each time."""
    metadata = metadata_of(pod)
    return pod_request(pod, uid=metadata.uid or placed_uid(metadata.namespace or "default", metadata.name))


def parse_namespaced(text: str) -> NamespacedName:
    """Read `NAMESPACE/NAME`, or `NAME` in namespace default.

    Errors: raises UsageError for any other text.

    >>> parse_namespaced("default/trainer"), parse_namespaced("trainer")
    (('default', 'trainer'), ('default', 'trainer'))
    """
    parts = text.split("/")
    if len(parts) > 2 or not all(parts):
        raise UsageError(f"cannot read {text!r} as a name", next_step="write NAMESPACE/NAME, such as default/trainer")
    return (parts[0], parts[1]) if len(parts) == 2 else ("default", parts[0])
