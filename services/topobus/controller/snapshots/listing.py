"""Reads a snapshot from an API server, page by page, with the rights that the user has.

A kind that the user may not list is noted in the snapshot, and the answer says what follows from
that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import msgspec

from topobus.controller.snapshots.rules.cluster_view import Key
from topobus.controller.snapshots.rules.snapshot import (
    Server,
    Snapshot,
    Unseen,
    gates_of_release,
    is_waiting,
    names_volumes,
    reduced,
)
from topobus.controller.snapshots.rules.volume_index import VOLUME_KINDS
from topobus.controller.store.api import CLASSES, NAMESPACES, NODES, SLICES, TAINT_RULES, TEMPLATES
from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.answers import HistoryLost, Rejected
from topobus.kubernetes.api_reader import ApiReader
from topobus.kubernetes.client import KubernetesClient
from topobus.kubernetes.reading import CLAIMS, PODS, Kind
from topobus.values.errors import PeerUnavailable
from topobus.values.timestamps import rfc3339

__all__ = ["KINDS", "RIGHTS", "list_objects", "open_client", "take_snapshot"]

KINDS: tuple[Kind, ...] = (
    NODES,
    CLASSES,
    SLICES,
    CLAIMS,
    TEMPLATES,
    TAINT_RULES,
    PODS,
    NAMESPACES,
    Kind(name="ResourceQuota", plural="resourcequotas", is_namespaced=True),
    Kind(name="PodDisruptionBudget", plural="poddisruptionbudgets", group="policy", is_namespaced=True),
    Kind(name="PersistentVolumeClaim", plural="persistentvolumeclaims", is_namespaced=True),
    Kind(name="PersistentVolume", plural="persistentvolumes"),
    Kind(name="StorageClass", plural="storageclasses", group="storage.k8s.io"),
    Kind(name="CSINode", plural="csinodes", group="storage.k8s.io"),
)
"""What decides where a pod with devices goes."""
RIGHTS = "examples/why/rights.yaml"
"""A ClusterRole with the rights to read all of it."""
# Objects in one page of a list, as kubectl reads them.
_PAGE = 500
_CALL_S = 30.0
_FORBIDDEN = 403
_GATE = re.compile(rb'^kubernetes_feature_enabled\{name="([^"]+)",[^}]*\} ([01])', re.MULTILINE)

Progress = Callable[[str, int], None]
"""Called with the plural of a kind and how many of its objects were read."""


def open_client(kubeconfig: str, context: str) -> KubernetesClient:
    """Read the user's configuration. No request is sent yet.

    Errors: raises ConfigError when there is none that can be used.
    """
    return KubernetesClient.open(
        AccessSettings(
            kubeconfig=kubeconfig,
            context=context,
            call_s=_CALL_S,
            setting="--kubeconfig",
            next_step="name a kubeconfig with --kubeconfig FILE or KUBECONFIG, and its context with --kube-context",
            # A person's kubeconfig names a credential program on most clouds.
            runs_programs=True,
        )
    )


async def take_snapshot(client: KubernetesClient, progress: Progress, *, pod: Key | None = None) -> Snapshot:
    """Read the objects of a cluster, its release and its feature gates.

    Shapes: pod — only what decides about this pod is read, and nothing else of one that has a node.
    Errors: raises PeerUnavailable for a server that does not answer or serves no DRA.
    """
    kinds = KINDS
    if pod is not None:
        reader = ApiReader(client, _PAGE, RIGHTS)
        only = msgspec.structs.replace(PODS, fields=f"metadata.namespace={pod[0]},metadata.name={pod[1]}")
        listed = await _list(reader, only, "v1", progress)
        if listed and not is_waiting(listed[0]):
            return Snapshot(items=tuple(listed))
        if listed and not names_volumes(listed[0]):
            kinds = tuple(kind for kind in KINDS if kind.name not in VOLUME_KINDS)
    server = await _server(client)
    items, unseen = await list_objects(client, kinds, progress)
    return Snapshot(taken_at=rfc3339(datetime.now(UTC)), server=server, items=items, unseen=unseen)


async def list_objects(
    client: KubernetesClient, kinds: Sequence[Kind], progress: Progress
) -> tuple[tuple[dict[str, Any], ...], tuple[Unseen, ...]]:
    """List the objects of some kinds. Returns them, and the kinds that the user may not list.

    Errors: raises PeerUnavailable for a server that does not answer or serves no DRA.
    """
    reader = ApiReader(client, _PAGE, RIGHTS)
    items: list[dict[str, Any]] = []
    unseen: list[Unseen] = []
    for kind in kinds:
        version = await reader.version_of(kind)
        if not version and kind in (SLICES, CLAIMS):
            raise PeerUnavailable(
                f"API server {client.server} ({await _release(client)}): it serves no {kind.plural} that we can read",
                next_step="Dynamic Resource Allocation must be enabled there (Kubernetes 1.32 or newer)",
            )
        if version:
            try:
                items += await _list(reader, kind, version, progress)
            except PeerUnavailable as err:
                if err.facts.get("code") != _FORBIDDEN:
                    raise
                unseen.append(Unseen(kind=kind.name, why="no right to list them"))
    return tuple(items), tuple(unseen)


async def _list(reader: ApiReader, kind: Kind, version: str, progress: Progress) -> list[dict[str, Any]]:
    """List the objects of a kind, once more from the start when the list became too old."""
    api_version = f"{kind.group}/{version}" if kind.group else version
    for _ in range(2):
        items: list[dict[str, Any]] = []
        try:
            async with aclosing(reader.pages(kind)) as pages:
                async for page in pages:
                    # A list's items do not say what they are.
                    items += (reduced({**plain, "apiVersion": api_version, "kind": kind.name}) for plain in page.items)
                    progress(kind.plural, len(items))
        except HistoryLost:
            continue
        return items
    raise PeerUnavailable(f"the list of {kind.plural} became too old twice while it was read", next_step="try again")


async def _server(client: KubernetesClient) -> Server:
    """Read the server's release, and its feature gates where the user may read its metrics."""
    version = await _release(client)
    defaults = gates_of_release(version)
    metrics = await client.fetch_bytes("/metrics", "text/plain")
    exported = (
        {}
        if isinstance(metrics, Rejected)
        else {name.decode(): value == b"1" for name, value in _GATE.findall(metrics)}
    )
    gates = {gate: exported.get(gate, is_on) for gate, is_on in defaults.items()}
    return Server(
        address=client.server,
        version=version,
        gates=gates,
        gates_from="the metrics of the API server" if exported else f"the defaults of {version or 'its release'}",
    )


async def _release(client: KubernetesClient) -> str:
    answer = await client.ask("GET", "/version")
    return str(answer.get("gitVersion") or "") if isinstance(answer, Mapping) else ""
