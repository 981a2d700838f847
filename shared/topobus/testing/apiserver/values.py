"""The resources that the API server simulator serves, and its errors with Kubernetes' Status
bodies.

Wording and reasons follow k8s.io/apimachinery/pkg/api/errors, 1.36.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

__all__ = [
    "RESOURCES",
    "ApiError",
    "ApiRequest",
    "NotServed",
    "Object",
    "Resource",
    "already_exists",
    "bad_request",
    "conflict",
    "expired",
    "forbidden",
    "invalid",
    "not_found",
]

Object = dict[str, Any]
"""An object in Kubernetes' wire shape."""


class Resource(Struct, frozen=True, kw_only=True):
    """One served resource in one version.

    Versions of the same group and plural show the same objects.
    """

    group: str = ""
    version: str
    plural: str
    kind: str
    is_namespaced: bool = False
    has_status: bool = False
    fields: tuple[str, ...] = ()
    """Paths that a field selector may name, besides metadata.name and metadata.namespace."""
    short_names: tuple[str, ...] = ()
    immutable: tuple[str, ...] = ()
    """Paths that an update must not change."""

    @property
    def api_version(self) -> str:
        """As in an object: `resource.k8s.io/v1`, `v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As in error texts: `resourceslices.resource.k8s.io`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _dra(plural: str, kind: str, version: str = "v1", **more: Any) -> Resource:
    return Resource(group="resource.k8s.io", version=version, plural=plural, kind=kind, **more)


def _core(plural: str, kind: str, **more: Any) -> Resource:
    return Resource(version="v1", plural=plural, kind=kind, **more)


def _of(group: str, plural: str, kind: str, **more: Any) -> Resource:
    return Resource(group=group, version="v1", plural=plural, kind=kind, **more)


_RBAC = "rbac.authorization.k8s.io"
_ADMISSION = "admissionregistration.k8s.io"

# The first ones have rules of their own here. The rest is kept as written, for deployments and for
# clients that read it.
RESOURCES: tuple[Resource, ...] = (
    _dra(
        "resourceslices",
        "ResourceSlice",
        fields=("spec.nodeName", "spec.driver", "spec.pool.name"),
        immutable=("spec.nodeName", "spec.driver", "spec.pool.name"),
    ),
    _dra("resourceclaims", "ResourceClaim", is_namespaced=True, has_status=True, immutable=("spec",)),
    _dra("resourceclaimtemplates", "ResourceClaimTemplate", is_namespaced=True, immutable=("spec",)),
    _dra("deviceclasses", "DeviceClass"),
    *(
        _dra("devicetaintrules", "DeviceTaintRule", version, has_status=True)
        for version in ("v1", "v1beta2", "v1alpha3")
    ),
    Resource(
        version="v1",
        plural="pods",
        kind="Pod",
        short_names=("po",),
        is_namespaced=True,
        has_status=True,
        fields=("spec.nodeName", "spec.schedulerName", "spec.restartPolicy", "status.phase"),
        immutable=("spec.nodeName",),
    ),
    _core("nodes", "Node", short_names=("no",), has_status=True, fields=("spec.unschedulable",)),
    _core("namespaces", "Namespace", short_names=("ns",), has_status=True, fields=("status.phase",)),
    _core(
        "events",
        "Event",
        short_names=("ev",),
        is_namespaced=True,
        fields=("involvedObject.kind", "involvedObject.name", "involvedObject.uid", "reason", "type"),
    ),
    _core("serviceaccounts", "ServiceAccount", short_names=("sa",), is_namespaced=True),
    _core("configmaps", "ConfigMap", short_names=("cm",), is_namespaced=True),
    _core("secrets", "Secret", is_namespaced=True, fields=("type",)),
    _core(
        "services",
        "Service",
        short_names=("svc",),
        is_namespaced=True,
        has_status=True,
        fields=("spec.clusterIP", "spec.type"),
    ),
    _core("persistentvolumeclaims", "PersistentVolumeClaim", short_names=("pvc",), is_namespaced=True, has_status=True),
    _core("persistentvolumes", "PersistentVolume", short_names=("pv",), has_status=True),
    _of("storage.k8s.io", "storageclasses", "StorageClass", short_names=("sc",)),
    _of("storage.k8s.io", "csinodes", "CSINode"),
    _of("apps", "deployments", "Deployment", short_names=("deploy",), is_namespaced=True, has_status=True),
    _of("apps", "daemonsets", "DaemonSet", short_names=("ds",), is_namespaced=True, has_status=True),
    _of("apps", "statefulsets", "StatefulSet", short_names=("sts",), is_namespaced=True, has_status=True),
    _of("batch", "jobs", "Job", is_namespaced=True, has_status=True),
    _of("batch", "cronjobs", "CronJob", short_names=("cj",), is_namespaced=True, has_status=True),
    _of("coordination.k8s.io", "leases", "Lease", is_namespaced=True),
    _of("networking.k8s.io", "networkpolicies", "NetworkPolicy", short_names=("netpol",), is_namespaced=True),
    _of(
        "policy",
        "poddisruptionbudgets",
        "PodDisruptionBudget",
        short_names=("pdb",),
        is_namespaced=True,
        has_status=True,
    ),
    _of("scheduling.k8s.io", "priorityclasses", "PriorityClass", short_names=("pc",)),
    _of(_RBAC, "clusterroles", "ClusterRole"),
    _of(_RBAC, "clusterrolebindings", "ClusterRoleBinding"),
    _of(_RBAC, "roles", "Role", is_namespaced=True),
    _of(_RBAC, "rolebindings", "RoleBinding", is_namespaced=True),
    _of(_ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy", has_status=True),
    _of(_ADMISSION, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding"),
)


class ApiRequest(Struct, frozen=True, kw_only=True):
    """One request that the simulator answered, for a test to look at."""

    method: str
    path: str
    query: dict[str, str] = {}
    body: Any = None
    user: str = ""
    """The user of the request; empty where no users were made."""
    code: int = 0
    """The HTTP status of the answer; 0 while it is being answered."""

    @property
    def is_write(self) -> bool:
        """Return whether it requests a change."""
        return self.method not in ("GET", "HEAD")


class ApiError(Exception):
    """An answer that is an error. `status` is its body."""

    def __init__(
        self, code: int, reason: str, message: str, *, details: Object | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self._details = details

    @property
    def status(self) -> Object:
        """The Status object."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }
        details = dict(self._details or {})
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        if details:
            body["details"] = details
        return body


class NotServed(ApiError):
    """A path that the server does not have.

    A real one answers it by Go's own handler, in plain text: a Status is for a missing object.
    """

    def __init__(self) -> None:
        super().__init__(404, "NotFound", "404 page not found")

    @property
    def status(self) -> Any:
        """The body, which is no object."""
        return f"{self}\n"


def not_found(resource: Resource, name: str) -> ApiError:
    """There is no such object."""
    return ApiError(404, "NotFound", f'{resource.qualified} "{name}" not found', details=_details(resource, name))


def already_exists(resource: Resource, name: str) -> ApiError:
    """The name is taken."""
    return ApiError(
        409, "AlreadyExists", f'{resource.qualified} "{name}" already exists', details=_details(resource, name)
    )


def conflict(resource: Resource, name: str, why: str) -> ApiError:
    """Another client was faster, or a precondition does not hold."""
    text = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", text, details=_details(resource, name))


def invalid(resource: Resource, name: str, problems: list[tuple[str, str]]) -> ApiError:
    """The object breaks a rule. `problems` are field and message."""
    causes = [{"reason": "FieldValueInvalid", "message": message, "field": field} for field, message in problems]
    shown = ", ".join(f"{field}: {message}" for field, message in problems)
    text = f'{resource.kind}.{resource.group} "{name}" is invalid: {shown}'
    return ApiError(422, "Invalid", text, details={**_details(resource, name), "causes": causes})


def expired(since: int, oldest: int) -> ApiError:
    """The requested history is gone: list again."""
    return ApiError(410, "Expired", f"too old resource version: {since} ({oldest})")


def forbidden(resource: Resource, name: str, why: str) -> ApiError:
    """The user has no right to this."""
    shown = f'{resource.qualified} "{name}"' if name else resource.qualified
    return ApiError(403, "Forbidden", f"{shown} is forbidden: {why}", details=_details(resource, name))


def bad_request(why: str) -> ApiError:
    """The request cannot be understood."""
    return ApiError(400, "BadRequest", why)


def _details(resource: Resource, name: str) -> Object:
    details: Object = {"name": name, "kind": resource.plural}
    return {**details, "group": resource.group} if resource.group else details
