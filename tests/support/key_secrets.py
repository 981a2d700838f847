"""Secrets of NATS' users on the API-server simulator, as the Job of deploy/kubernetes makes them, and what a pod has of them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from topobus.cli.secrets.cluster_secrets import ClusterSecrets
from topobus.kubernetes.access import Access, AccessSettings
from topobus.kubernetes.answers import Plain, Rejected
from topobus.kubernetes.client import KubernetesClient
from topobus.testing.apiserver import ApiServerSimulator

__all__ = ["NAMESPACE", "Killed", "MortalClient", "mortal_client", "mounted", "secret_data", "secrets_of"]

NAMESPACE = "topobus"


class Killed(BaseException):
    """What stands for kill -9: no code of the Job handles it."""


class MortalClient(KubernetesClient):
    """A client whose process dies at a request: even steps before it is sent, odd ones after the server has done it and before the answer is read."""

    def __init__(self, settings: AccessSettings, access: Access) -> None:
        super().__init__(settings, access)
        self._steps_left = -1

    def die_in(self, steps: int) -> None:
        """Die after so many steps from now on; never when negative."""
        self._steps_left = steps

    async def ask(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: object = None, is_applied: bool = False
    ) -> Plain | Rejected:
        """Make one request, or die."""
        self._live()
        answer = await super().ask(method, path, params=params, body=body, is_applied=is_applied)
        self._live()
        return answer

    def _live(self) -> None:
        if self._steps_left == 0:
            raise Killed
        self._steps_left -= 1


@asynccontextmanager
async def mortal_client(server: ApiServerSimulator, folder: Path, *, user: str = "") -> AsyncIterator[MortalClient]:
    """Give a client with the administrator's rights, or those of a user."""
    kubeconfig = server.write_kubeconfig(folder / "kubeconfig", **({"user": user} if user else {}))
    client = MortalClient.open(AccessSettings(kubeconfig=str(kubeconfig), setting="test", next_step="none"))
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def secrets_of(server: ApiServerSimulator, folder: Path, *, user: str = "") -> AsyncIterator[ClusterSecrets]:
    """Give the Secrets as one run of the Job has them."""
    async with mortal_client(server, folder, user=user) as client:
        yield ClusterSecrets(client, NAMESPACE)


def secret_data(server: ApiServerSimulator) -> dict[str, dict[str, str]]:
    """Read all Secrets of the namespace: their texts by name and key."""
    return {
        secret["metadata"]["name"]: {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}
        for secret in server.objects("Secret")
        if secret["metadata"]["namespace"] == NAMESPACE
    }


def mounted(data: Mapping[str, Any], folder: Path) -> Path:
    """Lay a Secret's texts into a folder as kubelet does: a link is turned, so that all change at once."""
    folder.mkdir(parents=True, exist_ok=True)
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    for key, text in data.items():
        (version / key).write_text(text, encoding="utf-8")
        (version / key).chmod(0o440)
    link = folder / "..unready"
    link.symlink_to(version.name)
    link.replace(folder / "..data")
    for key in data:
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(f"..data/{key}")
    return folder
