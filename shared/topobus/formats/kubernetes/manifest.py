"""Manifests: the YAML or JSON that a user wrote, read strictly.

Every known field of an ApiObject that is returned has a legal name and type, and its values keep
Kubernetes' limits. All errors of a file are reported at once. Each names the file, the line, the
path, what was found and what was wanted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import yaml

from topobus.formats.first_read import ready
from topobus.formats.kubernetes import limits, pod, resource
from topobus.formats.kubernetes.classic import classic, classic_parameters
from topobus.formats.kubernetes.fields import TOP_FIELDS, UNUSED_FIELDS
from topobus.formats.kubernetes.objects import (
    API_VERSIONS,
    CLAIM_PARAMETERS,
    CLASS_PARAMETERS,
    CLASSIC_VERSIONS,
    KINDS,
    OLDER_VERSIONS,
    Metadata,
    name_of,
)
from topobus.formats.kubernetes.older_versions import CONVERTED_VERSIONS, as_v1
from topobus.formats.kubernetes.pod_claims import check_pod_claims
from topobus.formats.kubernetes.shape import Problem, check_names, did_you_mean, problem_of, read_as
from topobus.formats.kubernetes.workloads import is_of_others, workload_of
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError, TopobusError

__all__ = ["MixedManifest", "parse_manifest", "parse_mixed", "parse_some"]

# An API server takes 3 MiB at most; a manifest beyond 1 MiB would not fit a KV value either.
_MAX_BYTES = 1 << 20
# Anchors can make a small file enormous; this many values are far beyond any real manifest.
_MAX_VALUES = 100_000
_MAX_DEPTH = 64
_MAX_PROBLEMS = 10

_SPECS: dict[str, Any] = {
    "Pod": pod.PodSpec,
    "DeviceClass": resource.DeviceClassSpec,
    "ResourceClaim": resource.ClaimSpec,
    "ResourceClaimTemplate": resource.ClaimTemplateSpec,
    "ResourceSlice": resource.SliceSpec,
    "DeviceTaintRule": resource.TaintRuleSpec,
    "Namespace": dict[str, Any],  # only its labels matter
    "Node": dict[str, Any],  # who reads one checks what it uses
}
_CLASSIC_SPECS: dict[str, type] = {
    "ResourceClass": classic.ResourceClassSpec,
    "ResourceClaim": classic.ClaimSpec,
    "ResourceClaimTemplate": classic.ClaimTemplateSpec,
    "PodSchedulingContext": classic.PodSchedulingSpec,
}
_PARAMETER_SPECS: dict[str, type] = {
    CLASS_PARAMETERS: classic_parameters.DeviceClassParameters,
    CLAIM_PARAMETERS: classic_parameters.ClaimParameters,
}
_PARTS = ("metadata", "spec", "status")
_PARAMETERS_VERSION = "v1alpha1"
# Parameters of another vendor's classic driver: only that driver can check them. A group of
# Kubernetes' or of ours is none of these.
_FOREIGN = re.compile(r"(?!(?:.*\.)?(?:k8s\.io|topobus\.dev)/)[a-z0-9-]+(?:\.[a-z0-9-]+)+/v[0-9a-z]+")
_ANNOTATIONS = "metadata.annotations"


class MixedManifest(NamedTuple):
    """The objects of a manifest that are ours, and the kinds of the others."""

    objects: tuple[ApiObject, ...]
    """In the order of the file. The pods of a workload are in its place."""
    workloads: tuple[str, ...] = ()
    """Workloads whose pods are among them: `Deployment web: 3 pods`."""
    left_out: tuple[str, ...] = ()
    """The kind of each object that is left out."""


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it: a time is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_manifest(text: str, *, where: str) -> tuple[ApiObject, ...]:
    """Read all objects of a manifest: YAML with any number of documents, JSON, or a `List` of
    objects.

    Shapes: where — the file's name, for messages. Order: as written.
    Errors: raises ContractError that lists what is wrong, each with document, line and path. Also
            when there is no object at all.

    >>> [api_object.kind for api_object in parse_manifest("{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [{name: c}]}}", where="pod.yaml")]
    ['Pod']
    """  # noqa: E501
    documents = parse_some(text, where=where, choose=lambda value: value)
    return tuple(document for document in documents if isinstance(document, ApiObject))


def parse_some(
    text: str, *, where: str, choose: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> tuple[ApiObject | dict[str, Any], ...]:
    """Read the wanted objects of a manifest strictly, and return the others as they are: Topobus
    cannot check every kind of Kubernetes.

    Shapes: choose — maps an object as written to the part to be read, or to None for one to be left
            alone. Order: as written.
    Errors: as `parse_manifest`: ContractError with every problem found, each with its document and
            line.
    """
    documents: list[ApiObject | dict[str, Any]] = []
    problems: list[str] = []
    for document, path, value in _written(text, where):
        chosen = choose(value) if isinstance(value, dict) else value
        api_object = document.read(path, chosen, problems) if chosen is not None else value
        if api_object is not None:
            documents.append(api_object)
    _refuse(problems, where)
    if not documents:
        raise ContractError(f"{where}: there is no object in it: wanted a {' or '.join(sorted(KINDS))}")
    return tuple(documents)


def parse_mixed(text: str, *, where: str, has_nodes: bool = False, has_workloads: bool = False) -> MixedManifest:
    """Read our objects of a manifest strictly, and name the kinds of the others.

    A misspelt kind of ours is still an error.

    Shapes: has_nodes — take v1 Nodes, of which only the types of the parts are checked;
            has_workloads — take the pods of Deployments and the like, as many as run at once,
            instead of leaving those out.
    Errors: as `parse_manifest`, but a manifest with objects of others alone gives no objects.
    """
    objects: list[ApiObject] = []
    workloads: list[str] = []
    left_out: list[str] = []
    problems: list[str] = []
    for document, path, value in _written(text, where):
        workload = workload_of(value) if has_workloads and isinstance(value, dict) else None
        if workload is not None:
            if workload.problems:
                document.tell(path, workload.problems, workload.place, problems)
                continue
            pod = document.read(f"{path}{workload.prefix}", workload.pod, problems, name=workload.place)
            if pod is not None:
                objects.extend(
                    msgspec.structs.replace(pod, metadata={**pod.metadata, "name": f"{workload.name}-{number}"})
                    for number in range(workload.pods)
                )
                workloads.append(
                    f"{workload.kind} {workload.name}: {workload.pods} pod{'s' if workload.pods != 1 else ''}"
                )
        elif has_nodes and isinstance(value, dict) and (value.get("apiVersion"), value.get("kind")) == ("v1", "Node"):
            wrong = _wrong_parts(value)
            document.tell(path, wrong, "", problems)
            objects += [] if wrong else [_node(value)]
        elif isinstance(value, dict) and _is_left_out(value):
            left_out.append(value["kind"])
        else:
            api_object = document.read(path, value, problems)
            objects += [api_object] if api_object is not None else []
    _refuse(problems, where)
    if not objects and not workloads and not left_out:
        raise ContractError(f"{where}: there is no object in it: wanted a {' or '.join(sorted(KINDS))}")
    return MixedManifest(tuple(objects), tuple(workloads), tuple(left_out))


def _is_left_out(value: Mapping[str, Any]) -> bool:
    """Say whether an object is not ours. A kind of ours in a group like `apps` is a mistake and not
    left out, and parameters of any class are read.
    """
    is_like_ours = value.get("kind") in KINDS and "." not in str(value.get("apiVersion")).partition("/")[0]
    return not is_like_ours and not str(value.get("kind")).endswith("Parameters") and is_of_others(value)


def _written(text: str, where: str) -> Iterator[tuple[_Document, str, Any]]:
    """List the objects of a manifest: the document, the path in it, and the value.

    Errors: raises ContractError for text that is no manifest.
    """
    if len(text.encode("utf-8", "replace")) > _MAX_BYTES:
        raise ContractError(f"{where}: the manifest is larger than {_MAX_BYTES} bytes")
    for number, node in enumerate(_compose(text, where), start=1):
        document = _Document(node, f"{where}: document {number}")
        for path, value in document.objects():
            yield document, path, value


def _refuse(problems: list[str], where: str) -> None:
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        shown = [*problems[:_MAX_PROBLEMS], *([f"{where}: and {more} more"] if more > 0 else [])]
        raise ContractError("\n".join(shown), problems=len(problems))


def _compose(text: str, where: str) -> list[yaml.Node]:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as err:
        # The whole text is looked through at once, before anything is read.
        number = text.count("\n", 0, err.position) + 1
        sign = f"U+{ord(err.character) if isinstance(err.character, str) else err.character:04X}"
        raise ContractError(f"{where}, line {number}: the character {sign} is not allowed in YAML or JSON") from err
    try:
        nodes: list[yaml.Node] = []
        while loader.check_node():
            node = loader.get_node()
            if node is not None and not (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
                nodes.append(node)
    except yaml.MarkedYAMLError as err:
        line = f", line {err.problem_mark.line + 1}" if err.problem_mark else ""
        raise ContractError(f"{where}{line}: this is neither YAML nor JSON: {err.problem or err.context}") from err
    except (yaml.YAMLError, RecursionError) as err:
        raise ContractError(f"{where}: this is neither YAML nor JSON: {str(err).splitlines()[0]}") from err
    else:
        return nodes
    finally:
        loader.dispose()


class _Document:
    """One document: its values, and the line of each."""

    def __init__(self, node: yaml.Node, where: str) -> None:
        self.where = where
        self.lines: dict[str, int] = {}
        self._loader = _Loader("")
        self.value = self._plain(node, "", 0)

    def objects(self) -> list[tuple[str, Any]]:
        """List the objects in the document with their paths: one, or the items of a List."""
        if isinstance(self.value, dict) and self.value.get("kind") in (
            "List",
            "PodList",
            "ResourceClaimList",
            "DeviceClassList",
            "ResourceSliceList",
        ):
            return [(f"items[{index}].", item) for index, item in enumerate(self.value.get("items") or [])]
        return [("", self.value)]

    def read(self, prefix: str, value: Any, problems: list[str], *, name: str = "") -> ApiObject | None:
        """Read one object, and append what is wrong to `problems`.

        Shapes: name — the name that people know it by, with paths relative to it; empty: its own
                name.
        """
        issues: list[Problem] = []
        api_object = _read(value, issues)
        if name:
            issues = [Problem(prefix + issue.path, issue.message) for issue in issues]
            self.tell("", issues, name, problems)
        else:
            self.tell(prefix, issues, name_of(api_object) if api_object is not None else "", problems)
        return api_object if not issues else None

    def tell(self, prefix: str, issues: Iterable[Problem], name: str, problems: list[str]) -> None:
        """Add what is wrong in one object, and at which line, to `problems`."""
        what = f"{self.where}{f' ({name})' if name else ''}"
        problems += [f"{what}, line {self._line(prefix + issue.path)}: {issue}" for issue in issues]

    def _line(self, path: str) -> int:
        """Find the line of the nearest enclosing value that the text contains."""
        while path and path not in self.lines:
            # Shorter at each turn whatever it contains: keys may hold dots, and msgspec writes
            # `[...]` for "some key of this mapping".
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.lines.get(path, 1)

    def _plain(self, node: yaml.Node, path: str, depth: int) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if depth > _MAX_DEPTH or len(self.lines) > _MAX_VALUES:
            raise ContractError(f"{self.where}, line {line}: the values nest too deep or are too many (anchors?)")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as err:
            raise ContractError(f"{self.where}, line {line}: {path}: cannot read {node.value!r}: {err}") from err
        if isinstance(value, float) and not math.isfinite(value):
            raise ContractError(f"{self.where}, line {line}: {path}: {node.value} is no number")
        if value is not None and not isinstance(value, str | int | float | bool):
            raise ContractError(
                f"{self.where}, line {line}: {path}: a {type(value).__name__} is not allowed in a manifest"
            )
        return value

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key_node, inner in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise ContractError(
                    f"{self.where}, line {line}: {path}: the key {key!r} is not text: write it in quotes"
                )
            if key in fields:
                raise ContractError(f"{self.where}, line {line}: {path}: {key} is here twice")
            place = f"{path}.{key}" if path else key
            self.lines[place] = line
            fields[key] = self._plain(inner, place, depth + 1)
        return fields


def _read(value: Any, problems: list[Problem]) -> ApiObject | None:
    if not isinstance(value, Mapping):
        problems.append(
            Problem("", f"wanted an object with apiVersion, kind, metadata and spec, got {type(value).__name__}")
        )
        return None
    value = as_v1(value)
    kind, version = value.get("kind"), value.get("apiVersion")
    wanted = _spec_of(kind, version, problems)
    if wanted is None:
        return None
    is_class = wanted is classic.ResourceClassSpec
    if is_class:
        problems.extend(
            Problem(key, "unknown field" + did_you_mean(key, classic.CLASS_FIELDS))
            for key in value
            if key not in (*classic.CLASS_FIELDS, "apiVersion", "kind", "metadata")
        )
        value = classic.fold_class({key: value[key] for key in ("metadata", *classic.CLASS_FIELDS) if key in value})
    problems.extend(
        Problem(key, f"unknown field{did_you_mean(key, sorted(TOP_FIELDS))}") for key in value if key not in TOP_FIELDS
    )
    metadata = _convert(value.get("metadata") or {}, Metadata, "metadata", problems)
    _convert(value.get("spec") or {}, wanted, "" if is_class else "spec", problems)
    cleaned = {
        key: check_names(value.get(key) or {}, shape, key, UNUSED_FIELDS, [])
        for key, shape in (("metadata", Metadata), ("spec", wanted))
    }
    status = value.get("status") or {}
    if not all(isinstance(part, dict) for part in (*cleaned.values(), status)):
        return None
    api_object = ApiObject(api_version=version, kind=kind, **cleaned, status=status)  # type: ignore[arg-type]  # checked to be dicts just above
    if metadata is not None and not problems:
        problems.extend(limits.check_object(api_object))
    if kind == "Pod" and not problems:
        is_grouped = any("podGroupResourceClaim" in entry for entry in api_object.spec.get("resourceClaims") or ())
        problems.extend(check_pod_claims(read_as(api_object.spec, pod.PodSpec, where="spec"), is_grouped=is_grouped))
    if kind == "Pod" and not problems:
        try:
            pod.pod_request(api_object, uid="")
        except TopobusError as err:
            text = str(err).removeprefix(f"{name_of(api_object)}: ")
            path = _ANNOTATIONS if text.startswith(f"{_ANNOTATIONS}: ") else "spec"
            problems.append(Problem(path, text.removeprefix(f"{_ANNOTATIONS}: ")))
    return api_object


def _spec_of(kind: Any, version: Any, problems: list[Problem]) -> Any:
    """Find the shape of a kind's spec.

    None, with a Problem, when we do not read that kind in that version.
    """
    if isinstance(kind, str) and isinstance(version, str):
        if version == API_VERSIONS.get(kind) or version in OLDER_VERSIONS.get(kind, ()):
            return _SPECS[kind]
        if version == CLASSIC_VERSIONS.get(kind):
            return _CLASSIC_SPECS[kind]
        group, _, number = version.partition("/")
        if (
            kind in _PARAMETER_SPECS
            and classic_parameters.device_class_of_group(group)
            and number == _PARAMETERS_VERSION
        ):
            return _PARAMETER_SPECS[kind]
        if kind.endswith("Parameters") and _FOREIGN.fullmatch(version):
            return dict[str, Any]
    legal = [
        api_version
        for api_version in (API_VERSIONS.get(str(kind)), CLASSIC_VERSIONS.get(str(kind)))
        if api_version is not None
    ]
    if legal and legal[0] == "resource.k8s.io/v1":
        legal[1:1] = CONVERTED_VERSIONS
    if kind in _PARAMETER_SPECS:
        legal.append(f"<class>.{classic_parameters.PARAMETERS_GROUP}/{_PARAMETERS_VERSION}")
    if legal:
        problems.append(Problem("apiVersion", f"got {version!r}, wanted {' or '.join(legal)} for a {kind}"))
    else:
        problems.append(
            Problem("kind", f"got {kind!r}, wanted one of {', '.join(KINDS)}{did_you_mean(str(kind), KINDS)}")
        )
    return None


def _node(value: Mapping[str, Any]) -> ApiObject:
    parts = {part: dict(value.get(part) or {}) for part in _PARTS}
    return ApiObject(api_version="v1", kind="Node", **parts)


def _wrong_parts(value: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem(part, f"wanted object, got {type(value[part]).__name__}")
        for part in _PARTS
        if not isinstance(value.get(part) or {}, Mapping)
    ]


def _convert(value: Any, wanted: Any, path: str, problems: list[Problem]) -> object | None:
    """Check names and types. Each problem gets its path."""
    cleaned = check_names(value, wanted, path, UNUSED_FIELDS, problems)
    try:
        converted: object = msgspec.convert(cleaned, type=ready(wanted))
    except msgspec.ValidationError as err:
        problems.append(problem_of(err, path))
        return None
    else:
        return converted
