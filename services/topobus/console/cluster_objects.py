"""Follows the claims, and the pods that no node has yet, at a cluster's API server: the console's
part where the controller's home is a cluster.

It uses the controller's informers. It lists and watches, and writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import structs

from topobus.console.config import ClusterSettings
from topobus.formats.messages.messages import ApiObject
from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.answers import Plain
from topobus.kubernetes.api_reader import ApiReader
from topobus.kubernetes.client import KubernetesClient
from topobus.kubernetes.informers import Informer, Key
from topobus.kubernetes.reading import CLAIMS, PODS
from topobus.process.clock import Clock

__all__ = ["ClusterObjects", "open_reader"]

# Most pods of a cluster run and wait for nothing. They are not requested from the server.
_KINDS = (CLAIMS, structs.replace(PODS, fields="spec.nodeName="))

Take = Callable[[str, str, str, ApiObject | None], None]
"""Called with an object's kind, namespace and name. None: it is gone, or no longer waits."""


def open_reader(settings: ClusterSettings) -> ApiReader:
    """Read the configuration. No request is sent yet.

    Errors: raises ConfigError when the settings name a configuration that does not exist or cannot
    be used.
    """
    access = AccessSettings(
        kubeconfig=settings.kubeconfig,
        context=settings.context,
        call_s=settings.call_s,
        setting=f"console: cluster.mode is {settings.mode}",
        next_step="set TOPOBUS_CONSOLE__CLUSTER__MODE to in-cluster in a pod, or to kubeconfig with "
        "TOPOBUS_CONSOLE__CLUSTER__KUBECONFIG",
    )
    return ApiReader(KubernetesClient.open(access), settings.page, "deploy/kubernetes-console/console.yaml")


class ClusterObjects:
    """The sink of the informers."""

    def __init__(
        self, reader: ApiReader, settings: ClusterSettings, clock: Clock, take: Take, changed: Callable[[], None]
    ) -> None:
        self._take = take
        self._informers = [
            Informer(
                reader,
                kind,
                self,
                clock=clock,
                resync_s=settings.resync_s,
                retry_s=settings.retry_s,
                changed=changed,
                refused=lambda err: None,
            )
            for kind in _KINDS
        ]

    @property
    def trouble(self) -> str:
        """What is wrong with the connection. Empty while nothing is."""
        return next((informer.trouble for informer in self._informers if informer.trouble), "")

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())

    def put(self, kind: str, version: str, plain: Plain) -> None:
        """Store an object. Invalid parts of it count as absent."""
        metadata, spec, status = (
            part if isinstance(part := plain.get(name), dict) else {} for name in ("metadata", "spec", "status")
        )
        api_object = ApiObject(api_version=version, kind=kind, metadata=metadata, spec=spec, status=status)
        self._take(kind, str(metadata.get("namespace") or ""), str(metadata.get("name") or ""), api_object)

    def drop(self, kind: str, key: Key) -> None:
        """Remove an object."""
        self._take(kind, *key, None)
