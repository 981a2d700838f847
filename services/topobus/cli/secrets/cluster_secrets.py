"""Makes and changes the Secrets of NATS' users in one namespace of a cluster.

Flows in: what the API server has. Flows out: the Secrets that are missing, and the server's, derived from all others. A Secret of a principal is only ever created, unless
somebody asks for a new password; so a run that is killed anywhere leaves what the next one completes, and two that run at once take what the first one made. The server's is
written by compare-and-set on its version, which is read before the passwords: who changed a password writes the server's afterwards, and nobody writes an older state over it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from topobus.cli.secrets.secret_objects import (
    SERVER_SECRET,
    is_ours,
    password_of,
    password_secret,
    server_secret,
    user_secret,
)
from topobus.contracts.nats_permissions import PRINCIPALS
from topobus.domain.errors import ConfigError
from topobus.kubernetes.answers import CONFLICT, NOT_FOUND, Plain, Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.runtime.user_keys import new_password

__all__ = ["ClusterSecrets"]

_PLURALS = {"Secret": "secrets", "ConfigMap": "configmaps"}


class ClusterSecrets:
    """The Secrets of one namespace; `written` names those that this process made or changed, in order."""

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self.written: list[str] = []

    async def make(self) -> None:
        """Make what is missing, and the server's as the others are now.

        Errors: raises ConfigError for a Secret that cannot be used and for a right that is missing, PeerUnavailable when the API server does not answer.
        """
        await self._passwords()
        await self._settle_server()

    async def rotate(self, principals: Iterable[str], *, server_after_s: float) -> None:
        """Make passwords anew, and after a while the server's file.

        Units: server_after_s — by then the nodes have brought the new passwords to the pods. The server ends the connections of these users when it reads its file; a pod
               that had the old password then would be refused until it has the new one.
        Errors: as `make`, and ConfigError before anything is changed for a Secret that somebody else made. Interrupted in between, `make` writes the server's file.
        """
        wanted = tuple(principals)
        await self._passwords()
        for principal in wanted:
            present = await self._read("Secret", user_secret(principal))
            if present is not None and not is_ours(present):
                name = present["metadata"]["name"]
                raise ConfigError(
                    f"Secret {self._namespace}/{name} was not made here",
                    next_step=f"change it where it is made; then topobus keys secrets make {self._namespace}",
                )
        for principal in wanted:
            await self._write(password_secret(principal, new_password()), "PATCH")
        await asyncio.sleep(server_after_s)
        await self._settle_server()

    async def password(self, principal: str) -> str:
        """Read the password of a principal.

        Errors: as `make`, and ConfigError when it has none.
        """
        secret = await self._read("Secret", user_secret(principal))
        if secret is None:
            raise ConfigError(
                f"namespace {self._namespace} has no Secret {user_secret(principal)}",
                next_step=f"topobus keys secrets make {self._namespace}",
            )
        return password_of(secret)

    async def _passwords(self) -> dict[str, str]:
        """Give the password of each principal; a missing one is made."""
        passwords = {}
        for principal in PRINCIPALS:
            passwords[principal] = password_of(await self._made(password_secret(principal, new_password())))
        return passwords

    async def _made(self, wanted: Plain) -> Plain:
        """Give the object of this name as it is; made as `wanted` when it is missing."""
        while True:
            present = await self._read(wanted["kind"], wanted["metadata"]["name"])
            if present is not None:
                return present
            made = await self._write(wanted, "POST")
            if made is not None:
                return made

    async def _settle_server(self) -> None:
        """Bring the server's users in line with the passwords."""
        while True:
            present = await self._read("Secret", SERVER_SECRET)
            wanted = server_secret(await self._passwords())
            if present is not None and (not is_ours(present) or present.get("data") == wanted["data"]):
                # Somebody else's is theirs to keep right.
                return
            if await self._replaced(present, wanted):
                return

    async def _replaced(self, present: Plain | None, wanted: Plain) -> bool:
        """Write an object in place of what was read; False when it is another one by now."""
        if present is None:
            return await self._write(wanted, "POST") is not None
        version = {"metadata": {**wanted["metadata"], "resourceVersion": present["metadata"]["resourceVersion"]}}
        return await self._write(wanted | version, "PATCH") is not None

    async def _read(self, kind: str, name: str) -> Plain | None:
        answer = await self._client.ask("GET", object_path("v1", _PLURALS[kind], namespace=self._namespace, name=name))
        if isinstance(answer, Rejected):
            if answer.code == NOT_FOUND:
                return None
            raise self._refused("get", kind, name, answer)
        return answer

    async def _write(self, wanted: Plain, method: str) -> Plain | None:
        """Create or patch; None when somebody else was faster."""
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        path = object_path("v1", _PLURALS[kind], namespace=self._namespace, name="" if method == "POST" else name)
        answer = await self._client.ask(method, path, body=wanted)
        if isinstance(answer, Rejected):
            # A namespace that is not there says 404 to a POST: that is no race.
            if answer.code == CONFLICT or (answer.code == NOT_FOUND and method == "PATCH"):
                return None
            raise self._refused("create" if method == "POST" else "patch", kind, name, answer)
        self.written.append(name)
        return answer

    def _refused(self, verb: str, kind: str, name: str, answer: Rejected) -> ConfigError:
        return ConfigError(
            f"API server {self._client.server}: cannot {verb} {kind} {self._namespace}/{name}: {answer.message or answer.code}",
            next_step="in a cluster the rights are in deploy/kubernetes/keys.yaml; by hand use a kubeconfig that may write Secrets there",
        )
