"""Resolves paths to objects, and answers discovery.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from topobus.testing.apiserver.values import RESOURCES, NotServed, Object, Resource, bad_request

__all__ = ["Target", "as_list", "discovery", "of_kind", "place_of", "target_of", "version_of"]


class Target(Struct, frozen=True, kw_only=True):
    """The meaning of a path: a kind, perhaps within a namespace, perhaps one object of it, perhaps
    a part of that.
    """

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def target_of(path: str) -> Target | None:
    """Read a path. None when it is no resource's.

    >>> target_of("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/c/status").subresource
    'status'
    """
    head, *parts = path.strip("/").split("/")
    if head == "api" and len(parts) >= 2:
        group, version, rest = "", parts[0], parts[1:]
    elif head == "apis" and len(parts) >= 3:
        group, version, rest = parts[0], parts[1], parts[2:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) >= 3:
        namespace, rest = rest[1], rest[2:]
    resource = next(
        (
            each_resource
            for each_resource in RESOURCES
            if (each_resource.group, each_resource.version, each_resource.plural) == (group, version, rest[0])
        ),
        None,
    )
    name, subresource = (*rest[1:], "", "")[:2]
    if (
        resource is None
        or (namespace and not resource.is_namespaced)
        or (resource.is_namespaced and name and not namespace)
        or len(rest) > 3
    ):
        return None
    if (
        subresource
        and not (subresource == "status" and resource.has_status)
        and (resource.kind, subresource) not in (("Pod", "binding"), ("Pod", "eviction"))
    ):
        return None
    return Target(resource=resource, namespace=namespace, name=name, subresource=subresource)


def discovery(path: str) -> Object:
    """Return the discovery document of a path.

    Errors: raises NotServed for a path without one.
    """
    groups = sorted({resource.group for resource in RESOURCES if resource.group})
    match path.strip("/").split("/"):
        case ["healthz" | "readyz" | "livez"]:
            return {"status": "ok"}
        case ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0-simulator", "platform": "linux/amd64"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(api_group) for api_group in groups]}
        case ["apis", group] if group in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(group)}
        case ["openapi", "v3"]:
            return {
                "paths": {
                    group_root: {"serverRelativeURL": f"/openapi/v3/{group_root}"}
                    for group_root in sorted({_root(resource) for resource in RESOURCES})
                }
            }
        case ["openapi", "v3", *root] if "/".join(root) in {_root(resource) for resource in RESOURCES}:
            return _openapi("/".join(root))
        case ["api", version]:
            return _resources("", version)
        case ["apis", group, version]:
            return _resources(group, version)
    raise NotServed


def of_kind(kind: str) -> Resource:
    """Find the resource of a kind.

    Errors: raises KeyError when none has it.
    """
    resource = next((each_resource for each_resource in RESOURCES if each_resource.kind == kind), None)
    if resource is None:
        raise KeyError(
            f"the API server simulator has no kind {kind!r}: it has "
            f"{sorted({each_resource.kind for each_resource in RESOURCES})}"
        )
    return resource


def as_list(resource: Resource, items: Iterable[Object], version: int) -> Object:
    """Wrap objects as a list. As in a real server, the items do not repeat kind and version."""
    shown = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in items]
    return {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.api_version,
        "metadata": {"resourceVersion": str(version)},
        "items": shown,
    }


def version_of(query: Mapping[str, str]) -> int | None:
    """Read the version after which to continue. None begins with whatever there is.

    Errors: raises ApiError 400 for a text that is no version.
    """
    text = query.get("resourceVersion", "")
    if text in ("", "0"):
        return None
    if not text.isdecimal():
        raise bad_request(f"Invalid value: {text!r}: strconv.ParseUint: parsing {text!r}: invalid syntax")
    return int(text)


def place_of(api_object: Object) -> str:
    """Order objects as a list does."""
    return f"{api_object['metadata'].get('namespace', '')}/{api_object['metadata']['name']}"


def _root(resource: Resource) -> str:
    return f"apis/{resource.api_version}" if resource.group else f"api/{resource.api_version}"


def _openapi(root: str) -> Object:
    """Return only what kubectl needs before it applies: that a server checks the fields itself
    (`fieldValidation`), and dry runs.
    """
    paths: Object = {}
    for resource in RESOURCES:
        if _root(resource) == root:
            middle = "/namespaces/{namespace}" if resource.is_namespaced else ""
            parameters = [
                {"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")
            ]
            kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
            paths[f"/{root}{middle}/{resource.plural}/{{name}}"] = {
                "patch": {
                    "parameters": parameters,
                    "x-kubernetes-action": "patch",
                    "x-kubernetes-group-version-kind": kind,
                }
            }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.36.0-simulator"}, "paths": paths}


def _group(group: str) -> Object:
    versions = [
        {"groupVersion": f"{group}/{version}", "version": version}
        for version in dict.fromkeys(it.version for it in RESOURCES if it.group == group)
    ]
    return {"name": group, "versions": versions, "preferredVersion": versions[0]}


def _resources(group: str, version: str) -> Object:
    served = [resource for resource in RESOURCES if (resource.group, resource.version) == (group, version)]
    if not served:
        raise NotServed
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    entries: list[Object] = []
    for resource in served:
        entry: Object = {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "namespaced": resource.is_namespaced,
            "kind": resource.kind,
        }
        entries.append({**entry, "verbs": verbs, "shortNames": list(resource.short_names)})
        if resource.has_status:
            entries.append(
                {**entry, "name": f"{resource.plural}/status", "singularName": "", "verbs": ["get", "patch", "update"]}
            )
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": served[0].api_version, "resources": entries}
