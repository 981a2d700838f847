"""Counts the requests that the API server simulator was sent, by user, verb and resource: in
Python, and as the metric of a real API server.

Pure.
Source: k8s.io/apiserver pkg/endpoints/metrics (apiserver_request_total). The label `user` is ours,
for tests that count one user's requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from topobus.testing.apiserver.access import verb_of
from topobus.testing.apiserver.routes import target_of
from topobus.testing.apiserver.values import ApiRequest

__all__ = ["METRICS_PATH", "RequestKind", "count_requests", "exposition"]

METRICS_PATH = "/metrics"
_METRIC = "apiserver_request_total"


class RequestKind(Struct, frozen=True, kw_only=True, order=True):
    """The verb, resource, user and result of a request."""

    user: str
    verb: str
    """As RBAC names it: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`."""
    resource: str
    """With its part: `resourceclaims/status`."""
    code: int
    """Of the answer; 0 for a watch that is open."""


def count_requests(requests: Iterable[ApiRequest]) -> dict[RequestKind, int]:
    """Count the requests for resources.

    Pages of one list count one by one, and discovery not at all.

    >>> from topobus.testing.apiserver.values import ApiRequest
    >>> request = ApiRequest(method="PATCH", path="/api/v1/namespaces/a/pods/p/status", query={}, body={}, user="u", code=200)
    >>> [(kind.verb, kind.resource, count) for kind, count in count_requests([request, request]).items()]
    [('patch', 'pods/status', 2)]
    """  # noqa: E501
    counts: Counter[RequestKind] = Counter()
    for request in requests:
        target = target_of(request.path)
        if target is None:
            continue
        is_watch = request.query.get("watch") in ("true", "1")
        part = f"/{target.subresource}" if target.subresource else ""
        verb = verb_of(request.method, target.name, is_watch=is_watch)
        counts[
            RequestKind(user=request.user, verb=verb, resource=target.resource.plural + part, code=request.code)
        ] += 1
    return dict(sorted(counts.items()))


def exposition(requests: Iterable[ApiRequest]) -> str:
    """Show the counts as a page of metrics."""
    lines = [f"# HELP {_METRIC} Requests for resources, by who asked for what.", f"# TYPE {_METRIC} counter"]
    for kind, count in count_requests(requests).items():
        resource, _, part = kind.resource.partition("/")
        labels = {
            "user": kind.user,
            "verb": kind.verb.upper(),
            "resource": resource,
            "subresource": part,
            "code": str(kind.code),
        }
        lines.append(f"{_METRIC}{{{','.join(f'{name}={_quoted(value)}' for name, value in labels.items())}}} {count}")
    return "\n".join((*lines, ""))


def _quoted(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'
