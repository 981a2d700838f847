"""Follows the claims, and the pods that no node has yet, at a cluster's API server: the console's
part where the controller's home is a cluster.

Flows in: lists and watches, by the informers that the controller has. Flows out: one call for each
object. It lists and watches, and writes nothing.
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

# Pods that run are most of a cluster's and wait for nothing; they stay at the server.
_KINDS = (CLAIMS, structs.replace(PODS, fields="spec.nodeName="))

Take = Callable[[str, str, str, ApiObject | None], None]
"""Hears of an object by kind, namespace and name; None: it is gone, or waits no more."""


def open_reader(settings: ClusterSettings) -> ApiReader:
    """Read the configuration; no request is sent yet.

    Errors: raises ConfigError when there is none where the settings say, or it cannot be used.
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
        """What is wrong with the connection; empty while all is well."""
        return next((informer.trouble for informer in self._informers if informer.trouble), "")

    async def run(self) -> None:
        """Follow for ever."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())

    def put(self, kind: str, version: str, plain: Plain) -> None:
        """Take in an object; whatever in it is not as it should be counts as absent."""
        metadata, spec, status = (
            part if isinstance(part := plain.get(name), dict) else {} for name in ("metadata", "spec", "status")
        )
        api_object = ApiObject(api_version=version, kind=kind, metadata=metadata, spec=spec, status=status)
        self._take(kind, str(metadata.get("namespace") or ""), str(metadata.get("name") or ""), api_object)

    def drop(self, kind: str, key: Key) -> None:
        """Forget an object."""
        self._take(kind, *key, None)
