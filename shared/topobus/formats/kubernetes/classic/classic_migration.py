"""Classic objects turned into structured ones, with a note for each thing that has no counterpart.

The resource.k8s.io/v1 objects come in the order of their originals. A class with its parameters
becomes a DeviceClass, a claim with its parameters one request, and pods' claims get their newer
form. The meaning of a class or claim is never widened silently: a condition that structured
parameters cannot express is noted as lost, or the object is not written at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.classic import classic_parameters as parameters
from topobus.formats.kubernetes.classic.classic_cel import selector_expression
from topobus.formats.kubernetes.classic.classic_dialects import Dialect, dialect_of
from topobus.formats.kubernetes.classic.classic_handles import REQUEST
from topobus.formats.kubernetes.limits import MAX_EXPRESSION_BYTES
from topobus.formats.kubernetes.objects import API_VERSIONS, metadata_of, name_of
from topobus.formats.kubernetes.resource import Wire
from topobus.formats.kubernetes.shape import check_names, read_as
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import class_of_group
from topobus.values.errors import ContractError

__all__ = ["CLASSIC_VERSION_TEXTS", "Migration", "Note", "Severity", "migrate"]

CLASSIC_VERSION_TEXTS = ("resource.k8s.io/v1alpha1", classic.API_VERSION)
"""Versions of the API group in which classic objects were written; the specs of classes, claims and
templates are the same in both."""
ALLOCATION_MODE = "topobus.dev/allocation-mode"
"""Of Topobus' stand-alone home: when a claim is allocated. Kubernetes ignores it."""

# Fields that an API server writes into metadata, and that only a stored object has.
_SERVER_FIELDS = frozenset(
    [
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
        "selfLink",
        "finalizers",
    ]
)
_OURS = (classic.CLASSIC_ATTEMPT_ANNOTATION, "kubectl.kubernetes.io/last-applied-configuration")

P = TypeVar("P", bound=Wire)


class Severity(StrEnum):
    """What a note means for the person who applies the result."""

    INFO = "info"
    """Nothing is lost."""
    LOST = "lost"
    """The object is written without this: look whether that matters."""
    OMITTED = "omitted"
    """The object is not written."""


@dataclass(frozen=True)
class Note:
    """One part that was not translated, or not as one may expect."""

    object: str
    path: str
    severity: Severity
    message: str

    def __str__(self) -> str:
        return f"{self.object}: {f'{self.path}: ' if self.path else ''}{self.message}"


@dataclass(frozen=True)
class Migration:
    """The translated objects and the notes."""

    objects: tuple[dict[str, Any], ...]
    notes: tuple[Note, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Say whether nothing was lost and nothing left out."""
        return all(note.severity is Severity.INFO for note in self.notes)


def migrate(objects: Sequence[ApiObject | Mapping[str, Any]]) -> Migration:
    """Translate classic objects, and the claims of pods and of workloads' pod templates.

    Everything else stays as it is.

    Shapes: objects — classic ones read strictly, others as written. Order: as given.
    Errors: none raised. Whatever cannot be read or expressed becomes a note.
    """
    return _Migrator([api_object for api_object in objects if isinstance(api_object, ApiObject)]).migrate(objects)


class _Stop(Exception):
    """Raised inside this module when an object must not be written."""


@dataclass
class _Migrator:
    """One migration. It finds the objects to which classes and claims refer."""

    api_objects: list[ApiObject]
    notes: list[Note] = field(default_factory=list)
    used: set[tuple[str, str, str]] = field(default_factory=set)

    def migrate(self, objects: Sequence[ApiObject | Mapping[str, Any]]) -> Migration:
        made: list[dict[str, Any]] = []
        for api_object in objects:
            if not isinstance(api_object, ApiObject):
                made.append(_with_pod_claims(api_object))
                continue
            try:
                translated = self._translate(api_object)
            except _Stop as stop:
                self._note(api_object, str(stop.args[0]), Severity.OMITTED, str(stop.args[1]))
                continue
            if translated is not None:
                made.append(translated)
        for parameters_object in self.api_objects:
            if parameters_object.kind.endswith("Parameters") and _key(parameters_object) not in self.used:
                self._note(
                    parameters_object,
                    "",
                    Severity.INFO,
                    "no class or claim among these files refers to it: it is left out",
                )
        return Migration(tuple(made), tuple(self.notes))

    def _translate(self, api_object: ApiObject) -> dict[str, Any] | None:
        if api_object.kind == "ResourceClass":
            return self._class(api_object)
        if api_object.kind == "ResourceClaim":
            return self._claim(api_object)
        if api_object.kind == "ResourceClaimTemplate":
            return self._template(api_object)
        if api_object.kind == "PodSchedulingContext":
            self._note(api_object, "", Severity.INFO, "left out: structured claims are scheduled without one")
        return None  # parameters go into the classes and claims that refer to them

    def _class(self, api_object: ApiObject) -> dict[str, Any]:
        spec = read_as(api_object.spec, classic.ResourceClassSpec, where=name_of(api_object))
        dialect = dialect_of(spec.driver_name)
        if spec.structured_parameters:
            self._note(
                api_object,
                "structuredParameters",
                Severity.LOST,
                "true: parameters for the scheduler of 1.30 are another language",
            )
        if spec.suitable_nodes is not None:
            message = (
                "has no counterpart in a DeviceClass: put it into the pods' node affinity, or publish such "
                "devices on these nodes only"
            )
            self._note(api_object, "suitableNodes", Severity.LOST, message)
        expressions = [dialect.device_selector]
        made: dict[str, Any] = {}
        class_parameters = self._class_parameters(api_object, spec, dialect)
        if class_parameters is not None:
            self._selector(api_object, "parametersRef", class_parameters.selector, dialect, expressions)
            self._config(class_parameters.sharing, dialect, made)
            if not class_parameters.shareable:
                message = (
                    "false: nothing keeps a second pod from using a claim by name; use templates, which make a "
                    "claim for each pod"
                )
                self._note(api_object, "parametersRef.shareable", Severity.LOST, message)
            else:
                self._note(api_object, "parametersRef.shareable", Severity.INFO, "true: so is every structured claim")
        made = {"selectors": [{"cel": {"expression": text}} for text in expressions], **made}
        if dialect.driver != spec.driver_name and class_of_group(spec.driver_name) is None:
            self._note(
                api_object,
                "driverName",
                Severity.INFO,
                f"{spec.driver_name} publishes its devices as {dialect.driver} now",
            )
        return _object("DeviceClass", self._metadata(api_object), made)

    def _class_parameters(
        self, api_object: ApiObject, spec: classic.ResourceClassSpec, dialect: Dialect
    ) -> parameters.DeviceClassParameters | None:
        if spec.parameters_ref is None:
            return None
        found_api_object = self._find(spec.parameters_ref, spec.parameters_ref.namespace)
        if not dialect.reads_class(spec.parameters_ref):
            self._note(
                api_object,
                "parametersRef",
                Severity.LOST,
                f"{_shown(spec.parameters_ref)} is understood by driver {spec.driver_name} alone",
            )
            return None
        if found_api_object is None:
            raise _Stop(
                "parametersRef",
                f"{_shown(spec.parameters_ref)} is not among these files: which devices the class has is not known",
            )
        return self._read(found_api_object, parameters.DeviceClassParameters, "parametersRef")

    def _claim(self, api_object: ApiObject) -> dict[str, Any]:
        spec = read_as(api_object.spec, classic.ClaimSpec, where=f"{name_of(api_object)}: spec")
        if api_object.status.get("allocation"):
            self._note(
                api_object,
                "status.allocation",
                Severity.LOST,
                "the new claim is not allocated: delete the old one, whose devices it may get",
            )
        metadata = self._metadata(api_object)
        metadata["annotations"] = metadata.get("annotations", {}) | {ALLOCATION_MODE: classic.mode_of(spec)}
        return _object(
            "ResourceClaim",
            metadata,
            self._claim_spec(api_object, spec, metadata_of(api_object).namespace or "default", "spec"),
        )

    def _template(self, api_object: ApiObject) -> dict[str, Any]:
        spec = read_as(api_object.spec, classic.ClaimTemplateSpec, where=f"{name_of(api_object)}: spec")
        inner: dict[str, Any] = {
            "spec": self._claim_spec(api_object, spec.spec, metadata_of(api_object).namespace or "default", "spec.spec")
        }
        if spec.metadata:
            inner = {"metadata": spec.metadata, **inner}
        return _object("ResourceClaimTemplate", self._metadata(api_object), inner)

    def _claim_spec(self, api_object: ApiObject, spec: classic.ClaimSpec, namespace: str, path: str) -> dict[str, Any]:
        """Write what a claim asks for as one request."""
        dialect = self._dialect(api_object, spec, path)
        if classic.mode_of(spec) == classic.IMMEDIATE:
            message = (
                "Immediate: structured claims are allocated for the first pod that uses them (Topobus' "
                "stand-alone home keeps the mode, by an annotation)"
            )
            self._note(api_object, f"{path}.allocationMode", Severity.LOST, message)
        exactly: dict[str, Any] = {
            "deviceClassName": spec.resource_class_name,
            "allocationMode": "ExactCount",
            "count": 1,
        }
        devices: dict[str, Any] = {"requests": [{"name": REQUEST, "exactly": exactly}]}
        reference = spec.parameters_ref
        if reference is None:
            return {"devices": devices}
        found_api_object = self._find(reference, namespace)
        if dialect is None or not dialect.reads_claim(reference):
            self._foreign(api_object, found_api_object, reference, dialect, devices, f"{path}.parametersRef")
            return {"devices": devices}
        if found_api_object is None:
            raise _Stop(
                f"{path}.parametersRef",
                f"{_shown(reference)} is not among these files: what the claim asks for is not known",
            )
        expressions: list[str] = []
        wanted = self._read(
            dialect.as_claim_parameters(found_api_object),
            parameters.ClaimParameters,
            f"{path}.parametersRef",
            name_of(found_api_object),
        )
        for field_name, message in dialect.losses(found_api_object):
            self._note(api_object, f"{path}.parametersRef.{field_name}", Severity.LOST, message)
        exactly["count"] = wanted.count
        self._selector(api_object, f"{path}.parametersRef", wanted.selector, dialect, expressions)
        expressions.extend(dialect.claim_expressions(found_api_object))
        if expressions:
            exactly["selectors"] = [{"cel": {"expression": text}} for text in expressions]
        self._config(wanted.sharing, dialect, devices)
        return {"devices": devices}

    def _dialect(self, api_object: ApiObject, spec: classic.ClaimSpec, path: str) -> Dialect | None:
        """Find the dialect of a claim's class, or else that of its parameters."""
        for other in self.api_objects:
            if other.kind == "ResourceClass" and metadata_of(other).name == spec.resource_class_name:
                return dialect_of(str(other.spec.get("driverName")))
        message = (
            f"ResourceClass {spec.resource_class_name} is not among these files: a DeviceClass of that name is "
            "taken for granted"
        )
        self._note(api_object, f"{path}.resourceClassName", Severity.INFO, message)
        return Dialect.of_group(spec.parameters_ref.api_group) if spec.parameters_ref is not None else None

    def _foreign(
        self,
        api_object: ApiObject,
        found_api_object: ApiObject | None,
        reference: classic.ParametersReference,
        dialect: Dialect | None,
        devices: dict[str, Any],
        path: str,
    ) -> None:
        """Pass another driver's parameters on as opaque configuration, where such drivers now
        expect them.
        """
        if found_api_object is None or dialect is None:
            raise _Stop(path, f"{_shown(reference)} is understood only by its driver, and it is not among these files")
        parameter = {
            "apiVersion": found_api_object.api_version,
            "kind": found_api_object.kind,
            **({"spec": found_api_object.spec} if found_api_object.spec else {}),
        }
        devices["config"] = [{"requests": [REQUEST], "opaque": {"driver": dialect.driver, "parameters": parameter}}]
        message = (
            "is understood only by its driver: it is passed on as opaque configuration; its count and selection "
            "are not translated"
        )
        self._note(api_object, path, Severity.LOST, f"{_shown(reference)} {message}")

    def _selector(
        self,
        api_object: ApiObject,
        path: str,
        selector: parameters.DeviceSelector,
        dialect: Dialect,
        expressions: list[str],
    ) -> None:
        text = selector_expression(selector, dialect.driver, dialect.names)
        if len(text.encode()) > MAX_EXPRESSION_BYTES:
            raise _Stop(
                f"{path}.selector", f"as CEL it has {len(text.encode())} bytes, and {MAX_EXPRESSION_BYTES} are the most"
            )
        if text:
            expressions.append(text)

    def _config(self, sharing: parameters.Sharing | None, dialect: Dialect, into: dict[str, Any]) -> None:
        if sharing is not None and sharing.strategy != parameters.EXCLUSIVE:
            into["config"] = [
                {
                    "opaque": {
                        "driver": dialect.driver,
                        "parameters": dialect.sharing_config(_plain(sharing), sharing.strategy),
                    }
                }
            ]

    def _read(self, api_object: ApiObject, kind: type[P], path: str, name: str = "") -> P:
        """Read parameters strictly, so that no part that is not understood is lost unnoticed."""
        problems: list[Any] = []
        check_names(api_object.spec, kind, "spec", {}, problems)
        name = name or name_of(api_object)
        if problems:
            raise _Stop(path, f"{name}: " + "; ".join(str(problem) for problem in problems))
        try:
            read = read_as(api_object.spec, kind, where=f"{name}: spec")
        except ContractError as err:
            raise _Stop(path, err.message) from err
        if isinstance(read, parameters.ClaimParameters):
            problems.extend(parameters.check_claim_parameters(read))
        elif isinstance(read, parameters.DeviceClassParameters):
            problems.extend(parameters.check_class_parameters(read))
        if problems:
            raise _Stop(path, f"{name}: " + "; ".join(str(problem) for problem in problems))
        return read

    def _find(
        self, reference: classic.ParametersReference | classic.ClassParametersReference, namespace: str
    ) -> ApiObject | None:
        for api_object in self.api_objects:
            group = api_object.api_version.partition("/")[0]
            is_there = metadata_of(api_object).namespace in ("", namespace) or (
                namespace == "default" and not metadata_of(api_object).namespace
            )
            if (group, api_object.kind, metadata_of(api_object).name) == (
                reference.api_group,
                reference.kind,
                reference.name,
            ) and is_there:
                self.used.add(_key(api_object))
                return api_object
        return None

    def _metadata(self, api_object: ApiObject) -> dict[str, Any]:
        kept = {key: value for key, value in api_object.metadata.items() if key not in _SERVER_FIELDS}
        notes = {key: value for key, value in (kept.pop("annotations", None) or {}).items() if key not in _OURS}
        return kept | ({"annotations": notes} if notes else {})

    def _note(self, api_object: ApiObject, path: str, severity: Severity, message: str) -> None:
        self.notes.append(Note(name_of(api_object), path, severity, message))


def _with_pod_claims(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Write the claims of a pod, and of the pod templates of workloads, in the form of Kubernetes
    1.31 and later.
    """
    made: dict[str, Any] = {}
    for key, value in manifest.items():
        if key == "resourceClaims" and isinstance(value, list):
            made[key] = [_flat(entry) for entry in value]
        elif key in ("spec", "template", "jobTemplate") and isinstance(value, Mapping):
            made[key] = _with_pod_claims(value)
        else:
            made[key] = value
    return made


def _flat(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("source"), Mapping):
        return entry
    return {**{key: value for key, value in entry.items() if key != "source"}, **entry["source"]}


def _object(kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec}


def _plain(value: Wire) -> dict[str, Any]:
    return decode(encode(value), dict[str, Any], where="parameters")


def _key(api_object: ApiObject) -> tuple[str, str, str]:
    return api_object.api_version, api_object.kind, name_of(api_object)


def _shown(reference: classic.ParametersReference | classic.ClassParametersReference) -> str:
    return f"{reference.kind} {reference.name} of group {reference.api_group or 'core'!r}"
