"""Reads and writes the Secrets and ConfigMaps of one namespace, one by one, so that rights can be
bound to their names.

A lost race is a value. A missing right is an error.
"""

from __future__ import annotations

from topobus.kubernetes.answers import CONFLICT, NOT_FOUND, Plain, Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.values.errors import ConfigError

__all__ = ["NamespaceObjects"]

_PLURALS = {"Secret": "secrets", "ConfigMap": "configmaps"}


class NamespaceObjects:
    """The objects of one namespace.

    `written` names those that this process made or changed, in order.
    """

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self.written: list[str] = []

    async def read(self, kind: str, name: str) -> Plain | None:
        """Read an object. None: it does not exist.

        Errors: raises ConfigError for a missing right, PeerUnavailable when the API server does not
        answer.
        """
        answer = await self._client.ask("GET", object_path("v1", _PLURALS[kind], namespace=self.namespace, name=name))
        if isinstance(answer, Rejected):
            if answer.code == NOT_FOUND:
                return None
            raise self._refused("get", kind, name, answer)
        return answer

    async def made(self, wanted: Plain) -> Plain:
        """Read the object with the name of `wanted`, and create it as `wanted` when it is missing.

        Errors: as `read`.
        """
        while True:
            present = await self.read(wanted["kind"], wanted["metadata"]["name"])
            if present is not None:
                return present
            created = await self._write(wanted, "POST")
            if created is not None:
                return created

    async def replace(self, present: Plain | None, wanted: Plain) -> bool:
        """Write an object in place of the one that was read. False when it has changed meanwhile.

        Errors: as `read`.
        """
        if present is None:
            return await self._write(wanted, "POST") is not None
        version = {"metadata": {**wanted["metadata"], "resourceVersion": present["metadata"]["resourceVersion"]}}
        return await self._write(wanted | version, "PATCH") is not None

    async def _write(self, wanted: Plain, method: str) -> Plain | None:
        """Create or patch an object. None when another writer was first."""
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        path = object_path("v1", _PLURALS[kind], namespace=self.namespace, name="" if method == "POST" else name)
        answer = await self._client.ask(method, path, body=wanted)
        if isinstance(answer, Rejected):
            # A missing namespace answers a POST with 404, which is not a lost race.
            if answer.code == CONFLICT or (answer.code == NOT_FOUND and method == "PATCH"):
                return None
            raise self._refused("create" if method == "POST" else "patch", kind, name, answer)
        self.written.append(name)
        return answer

    def _refused(self, verb: str, kind: str, name: str, answer: Rejected) -> ConfigError:
        return ConfigError(
            f"API server {self._client.server}: cannot {verb} {kind} {self.namespace}/{name}: "
            f"{answer.message or answer.code}",
            next_step="in a cluster the rights are in deploy/kubernetes/keys.yaml; by hand use a kubeconfig that may "
            "write Secrets there",
        )
