"""Renders objects of the stand-alone API as listings, with the most useful columns of each kind.

Pure except for the age, which needs the present time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from topobus.cli.objects.applying import WRONG, condition_of, is_allocated
from topobus.cli.render.listing import Cell, Column, Fit, Listing, Row
from topobus.formats.kubernetes.built_in_classes import BUILT_IN
from topobus.formats.kubernetes.classic.classic_handles import shown
from topobus.formats.kubernetes.objects import is_of_cluster, metadata_of
from topobus.formats.messages.messages import ApiObject, entries_of
from topobus.values.dra_names import DRIVER, node_of_pool

__all__ = ["age", "claim_names", "node_of", "object_listing", "results_of", "state_of", "ways_of"]

Cells = Callable[[ApiObject], tuple[Cell, ...]]


def object_listing(
    kind: str, objects: Sequence[ApiObject], *, now: datetime, has_namespace: bool = False, title: str = ""
) -> Listing:
    """List objects of one kind."""
    columns, row = _KINDS.get(kind, ((), _plain))
    has_namespace = has_namespace and not is_of_cluster(kind)
    return Listing(
        title=title,
        columns=(
            *([Column(title="namespace", fit=Fit.NAME)] if has_namespace else []),
            Column(title="name", fit=Fit.NAME),
            Column(title="state"),
            *columns,
            Column(title="age", fit=Fit.NAME),
            Column(title="why", is_wide=True),
            Column(title="labels", is_wide=True),
            Column(title="generation", fit=Fit.NUMBER, is_wide=True),
        ),
        rows=tuple(
            _object_row(api_object, row(api_object), now, has_namespace=has_namespace) for api_object in objects
        ),
    )


def _object_row(api_object: ApiObject, cells: tuple[Cell, ...], now: datetime, *, has_namespace: bool) -> Row:
    metadata = metadata_of(api_object)
    condition = condition_of(api_object) or {}
    labels = {str(key): str(value) for key, value in (metadata.labels or {}).items()}
    return Row(
        name=f"{api_object.kind.lower()}/{metadata.name}",
        cells=(
            *([metadata.namespace or "default"] if has_namespace else []),
            Text(metadata.name, "name"),
            state_of(api_object),
            *cells,
            age(metadata.creation_timestamp, now),
            str(condition.get("message") or "-"),
            ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-",
            str(metadata.generation or "-"),
        ),
        document=api_object,
        labels=labels,
        sort_keys={"age": metadata.creation_timestamp},
    )


def state_of(api_object: ApiObject) -> Text:
    """Describe an object's state in a few words."""
    if metadata_of(api_object).deletion_timestamp:
        return Text("going", "warn")
    condition = condition_of(api_object)
    reason = str(condition.get("reason") or "") if condition is not None else ""
    if reason in WRONG:
        return Text(reason, "fail")
    if api_object.kind == "ResourceClaim":
        if is_allocated(api_object):
            return Text("allocated,reserved" if api_object.status.get("reservedFor") else "allocated", "ok")
        return Text(f"pending{f' ({reason})' if reason else ''}", "warn")
    if api_object.kind == "Pod":
        if condition is not None and condition.get("status") == "True":
            return Text("scheduled", "ok")
        return Text(f"pending{f' ({reason})' if reason else ''}", "warn")
    if reason == BUILT_IN:
        return Text("built-in", "faint")
    return Text(reason.lower() if reason else "stored", "ok" if reason else "")


def age(created: str, now: datetime) -> str:
    """Write how old something is, as kubectl does.

    >>> age("2026-01-01T00:00:00Z", datetime(2026, 1, 1, 2, 5, tzinfo=UTC)), age("", datetime(2026, 1, 1, tzinfo=UTC))
    ('2h5m', '-')
    """
    try:
        seconds = max(int((now - datetime.fromisoformat(created).astimezone(UTC)).total_seconds()), 0)
    except ValueError:
        return "-"
    if seconds < 120:
        return f"{seconds}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86_400
    if minutes < 180:
        return f"{minutes // 60}h{minutes % 60}m" if minutes >= 120 else f"{minutes}m"
    return f"{hours}h" if hours < 48 else f"{days}d"


def _claim(api_object: ApiObject) -> tuple[Cell, ...]:
    results = results_of(api_object)
    users = [str(user.get("name")) for user in entries_of(api_object.status.get("reservedFor"))]
    nodes = _nodes_of(results)
    devices = "\n".join(f"{result.get('request')}: {result.get('device')}" for result in results)
    return ", ".join(nodes) or "-", devices or "-", "\n".join(users) or "-"


def _nodes_of(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the nodes of granted devices. Another driver's pool counts as a node.

    >>> _nodes_of([{"driver": "topobus.dev", "pool": pool} for pool in ("node-a", "node-a/cpu")])
    ['node-a']
    """
    return sorted({node_of(str(result.get("driver", "")), str(result.get("pool", ""))) for result in results})


def node_of(driver: str, pool: str) -> str:
    """Name the node of a pool, or another driver's pool."""
    return node_of_pool(pool) if driver == DRIVER else pool


def _pod(api_object: ApiObject) -> tuple[Cell, ...]:
    names = [claim or "-" for claim in claim_names(api_object).values()]
    return str(api_object.spec.get("nodeName") or "-"), "\n".join(names) or "-"


def claim_names(pod: ApiObject) -> dict[str, str]:
    """Map the names that a pod has for its claims to the claims. Empty for one that is not created
    yet.
    """
    made = {
        str(status.get("name")): str(status.get("resourceClaimName"))
        for status in entries_of(pod.status.get("resourceClaimStatuses"))
    }
    return {
        str(entry.get("name")): _named_claim(entry) or made.get(str(entry.get("name")), "")
        for entry in entries_of(pod.spec.get("resourceClaims"))
    }


def _named_claim(entry: dict[str, Any]) -> str:
    """Name the claim of a pod's entry, in either form in which it is written.

    Empty for a template's.
    """
    source = entry.get("source")
    return str(
        entry.get("resourceClaimName") or (source.get("resourceClaimName") if isinstance(source, dict) else "") or ""
    )


def _class(api_object: ApiObject) -> tuple[Cell, ...]:
    selectors = [
        str((entry.get("cel") or {}).get("expression", "")) for entry in entries_of(api_object.spec.get("selectors"))
    ]
    return (" && ".join(" ".join(text.split()) for text in selectors) or "every device",)


def _template(api_object: ApiObject) -> tuple[Cell, ...]:
    return (_requests(api_object.spec.get("spec") or {}),)


def _slice(api_object: ApiObject) -> tuple[Cell, ...]:
    pool = api_object.spec.get("pool") or {}
    where = api_object.spec.get("nodeName") or ("all nodes" if api_object.spec.get("allNodes") else "selected nodes")
    return (
        str(api_object.spec.get("driver", "-")),
        str(pool.get("name", "-")),
        str(where),
        str(len(entries_of(api_object.spec.get("devices")))),
    )


def _plain(_: ApiObject) -> tuple[Cell, ...]:
    return ()


def _requests(spec: dict[str, Any]) -> str:
    lines: list[str] = []
    for request in entries_of((spec.get("devices") or {}).get("requests")):
        texts = [
            f"{'all' if way.get('allocationMode') == 'All' else way.get('count', 1)} {way.get('deviceClassName')}"
            for way in ways_of(request)
        ]
        lines.append(f"{request.get('name')}: {' or '.join(texts)}")
    return "\n".join(lines) or "-"


def ways_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    """List the ways in which a request may be met, the first one that can be counts."""
    return (
        [request["exactly"]] if isinstance(request.get("exactly"), dict) else entries_of(request.get("firstAvailable"))
    )


def results_of(api_object: ApiObject) -> list[dict[str, Any]]:
    """List what a claim has, of classic claims as well."""
    allocation = shown(api_object).status.get("allocation")
    devices = allocation.get("devices") if isinstance(allocation, dict) else None
    return entries_of(devices.get("results")) if isinstance(devices, dict) else []


_NODE = Column(title="node", fit=Fit.NAME, gives_way=True)
_KINDS: dict[str, tuple[tuple[Column, ...], Cells]] = {
    "ResourceClaim": (
        (_NODE, Column(title="devices", fit=Fit.NAME), Column(title="used by", fit=Fit.NAME, gives_way=True)),
        _claim,
    ),
    "Pod": ((_NODE, Column(title="claims", fit=Fit.NAME)), _pod),
    "DeviceClass": ((Column(title="selects"),), _class),
    "ResourceClaimTemplate": ((Column(title="requests", fit=Fit.NAME),), _template),
    "ResourceSlice": (
        (
            Column(title="driver", fit=Fit.NAME),
            Column(title="pool", fit=Fit.NAME),
            Column(title="where", fit=Fit.NAME),
            Column(title="devices", fit=Fit.NUMBER),
        ),
        _slice,
    ),
}
