"""The API server client of the controller: kinds in the best version served, paged lists, watches
(`ApiReader`), merge patches.

Connections and requests are in `topobus.kubernetes`, which the gateway uses as well. Only the
cluster home imports this module. Objects have Kubernetes' wire shape, and the server's refusals are
values. A request without an answer raises PeerUnavailable, and a write without an answer may or may
not have taken effect.

Source: Kubernetes API concepts (resource versions, bookmarks, 410, preconditions of a patch).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.controller.config import ClusterSettings
from topobus.controller.store.api import FIELD_MANAGER
from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.answers import Plain, Rejected
from topobus.kubernetes.api_reader import ApiReader
from topobus.kubernetes.client import KubernetesClient
from topobus.kubernetes.reading import Kind

__all__ = ["KubernetesApi"]

_WRITER = {"fieldManager": FIELD_MANAGER}


class KubernetesApi(ApiReader):
    """One API server."""

    @classmethod
    def open(cls, settings: ClusterSettings) -> KubernetesApi:
        """Read the configuration. No request is sent yet.

        Errors: raises ConfigError when the settings name a configuration that does not exist or
        cannot be used.
        """
        access = AccessSettings(
            kubeconfig=settings.kubeconfig,
            context=settings.context,
            call_s=settings.call_s,
            setting="controller: cluster.kubeconfig",
            next_step="set TOPOBUS_CONTROLLER__CLUSTER__KUBECONFIG to a kubeconfig file, or run in a pod with a "
            "service account",
        )
        return cls(KubernetesClient.open(access), settings.page, "deploy/kubernetes/controller.yaml")

    async def create(self, kind: Kind, plain: Mapping[str, Any]) -> Plain | Rejected:
        """Create an object. Returns what the server stored."""
        path = await self.path_of(kind, str((plain.get("metadata") or {}).get("namespace", "")))
        return await self.ask("POST", path, params=_WRITER, body=plain)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, part: str = ""
    ) -> Plain | Rejected:
        """Change an object by a merge patch.

        A patch that carries metadata.resourceVersion is refused when the object has changed since.

        Shapes: part — `status` changes the status and nothing else.
        """
        return await self.ask("PATCH", await self.path_of(kind, namespace, name, part), params=_WRITER, body=patch)

    async def delete(self, kind: Kind, namespace: str, name: str, *, version: str) -> Rejected | None:
        """Delete an object that is still at this version.

        The server only marks an object that has finalizers.
        """
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"resourceVersion": version}}
        answer = await self.ask("DELETE", await self.path_of(kind, namespace, name), body=body)
        return answer if isinstance(answer, Rejected) else None
