"""Secrets of NATS' users on the API-server simulator, as the Job of deploy/kubernetes makes them,
and what a pod has of them.
"""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats

from support.kustomize import built, container_of, named, pod_of
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.keys.namespace_objects import NamespaceObjects
from topobus.keys.secret_objects import AUTHORITY_MAP, SERVER_SECRET, TLS_SECRET, user_secret
from topobus.kubernetes.access import Access, AccessSettings
from topobus.kubernetes.answers import Plain, Rejected
from topobus.kubernetes.client import KubernetesClient
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator

__all__ = [
    "NAMESPACE",
    "Killed",
    "MortalClient",
    "PodFiles",
    "mortal_client",
    "objects_of",
    "secret_data",
    "server_with_rights",
    "trusted_authorities",
]

NAMESPACE = "topobus"


@asynccontextmanager
async def server_with_rights() -> AsyncIterator[ApiServerSimulator]:
    """Run an API server that has the roles of deploy/kubernetes, and nothing else."""
    simulator = ApiServerSimulator(token="admin")
    for manifest in built("kubernetes"):
        if manifest["kind"] in ("Role", "RoleBinding"):
            simulator.put(manifest)
    async with simulator:
        yield simulator


class Killed(BaseException):
    """Replaces kill -9: no code of the Job handles it."""


class MortalClient(KubernetesClient):
    """A client whose process dies at a request: even steps before it is sent, odd ones after the
    server has done it and before the answer is read.
    """

    def __init__(self, settings: AccessSettings, access: Access) -> None:
        super().__init__(settings, access)
        self._steps_left = -1

    def die_in(self, steps: int) -> None:
        """Die after so many steps from now on; never when negative."""
        self._steps_left = steps

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        is_applied: bool = False,
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
async def objects_of(server: ApiServerSimulator, folder: Path, *, user: str = "") -> AsyncIterator[NamespaceObjects]:
    """Give the namespace's objects as one run of the Job has them."""
    async with mortal_client(server, folder, user=user) as client:
        yield NamespaceObjects(client, NAMESPACE)


def secret_data(server: ApiServerSimulator) -> dict[str, dict[str, str]]:
    """Read all Secrets of the namespace: their texts by name and key."""
    return {
        secret["metadata"]["name"]: {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}
        for secret in server.objects("Secret")
        if secret["metadata"]["namespace"] == NAMESPACE
    }


def mounted(data: Mapping[str, Any], folder: Path) -> Path:
    """Lay a Secret's texts into a folder as kubelet does: a link is turned, so that all change at
    once, and nothing is done when they are the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.is_file()} == dict(data):
        return folder
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


def trusted_authorities(server: ApiServerSimulator) -> str:
    """Read what clients trust."""
    trusted: str = named(server.objects("ConfigMap"), "ConfigMap", AUTHORITY_MAP)["data"]["ca.crt"]
    return trusted


class PodFiles:
    """Secrets and the ConfigMap as files of pods: each user's folder, the server's, and whom
    clients trust.
    """

    def __init__(self, server: ApiServerSimulator, folder: Path) -> None:
        self._server = server
        self._folder = folder

    def sync(self) -> None:
        """Do what kubelet does: lay all into the pods as it is now."""
        for name, data in secret_data(self._server).items():
            mounted(data, self._folder / name)
        mounted({"ca.crt": trusted_authorities(self._server)}, self._folder / AUTHORITY_MAP)

    @property
    def trusted(self) -> Path:
        """The authorities that clients trust."""
        return self._folder / AUTHORITY_MAP / "ca.crt"

    def server_of_this_machine(self, binary: Path) -> tuple[NatsServer, dict[str, str]]:
        """Give a server with the manifest's configuration, a port and a store of its own, and the
        environment of the container `reload` beside it.
        """
        nats_server = NatsServer(binary=binary, config="include nats/nats.conf")
        here = nats_server.folder
        (here / "nats-users").symlink_to(self._folder / SERVER_SECRET)
        (here / "nats-tls").symlink_to(self._folder / TLS_SECRET)
        (here / "nats").mkdir()
        manifests = built("kubernetes")
        text: str = named(manifests, "ConfigMap", "nats")["data"]["nats.conf"]
        text = text[: text.index("jetstream {")] + text[text.index("include ") :]
        lines = [line for line in text.splitlines() if not line.startswith(("listen:", "http:"))]
        # As start.sh configures the file where the server writes its PID.
        lines.append('pid_file: "/tmp/nats.pid"')
        (here / "nats" / "nats.conf").write_text(self._moved("\n".join(lines), here) + "\n", encoding="utf-8")
        reload = container_of(pod_of(manifests, "StatefulSet", "nats"), "reload")
        variables = {it["name"]: self._moved(it["value"], here) for it in reload["env"]}
        return nats_server, {**os.environ, **variables, "PERIOD_S": "0.1"}

    def folder_of(self, name: str) -> Path:
        """Name the folder of a Secret or the ConfigMap."""
        return self._folder / name

    @property
    def tls(self) -> Path:
        """A folder with what is mounted at /etc/nats-tls, by server or client."""
        return self._folder / TLS_SECRET

    def password(self, principal: str) -> str:
        """Read a user's password as its pod has it."""
        return (self._folder / user_secret(principal) / "password").read_text(encoding="utf-8").strip()

    def settings(self, url: str, principal: str, *, is_leaf: bool = False) -> NatsSettings:
        """Give the settings of a user's pod.

        On a node with a server of its own nothing is encrypted, and topology makes the streams.
        """
        file = self._folder / user_secret(principal) / "password"
        zone = "vendor" if principal in DEVICE_SERVICES or principal == "user" else "core"
        return NatsSettings(
            url=url,
            user=principal,
            password_file=str(file),
            zone=zone,
            tls_ca_file="" if is_leaf else str(self.trusted),
            provisioner="topology" if is_leaf else "controller",
            timeout_s=60.0,
        )

    async def connect(self, url: str, principal: str, *, password: str) -> None:
        """Connect with any password, and go.

        Errors: raises the client's own for a refusal.
        """
        context = ssl.create_default_context(cafile=str(self.trusted))
        client = await nats.connect(
            url, user=principal, password=password, tls=context, allow_reconnect=False, connect_timeout=60
        )
        await client.close()

    def _moved(self, text: str, folder: Path) -> str:
        """Give a text whose paths are those of a pod for a server in a folder."""
        for path in ("/etc/nats-users/", "/etc/nats-tls/", "/tmp/"):
            text = text.replace(path, f"{folder}/{path.removeprefix('/etc/').removeprefix('/tmp/')}")
        return text
