"""Pods of several kinds that come and go in a cluster, each with what it was promised in its
variables (see `container_looks`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError
from lightkube.resources.core_v1 import Pod
from lightkube.resources.resource_v1 import ResourceClaim

__all__ = ["PodKind", "PodLoad"]

_LIMIT_S = 300.0
_ENDED = ("Succeeded", "Failed")
_FIELDS = {"STRESS_NODE": "spec.nodeName", "STRESS_POD": "metadata.uid"}


@dataclass(frozen=True, kw_only=True)
class PodKind:
    """A kind of pod.

    Shapes: workers — how many may be at a time; seconds — how long one may sleep; resources — so
    many of a resource; requests, constraints, config — of its claim; wants — so many devices
    of a class that its container has to see, or `+` for some; nodes — where it may be, empty: anywhere.
    """

    workers: int
    seconds: tuple[int, ...]
    resources: Mapping[str, int] = field(default_factory=dict)
    requests: tuple[dict[str, Any], ...] = ()
    constraints: tuple[dict[str, Any], ...] = ()
    config: tuple[dict[str, Any], ...] = ()
    wants: Mapping[str, int | str] = field(default_factory=dict)
    # A network interface that its container has to have.
    interface: str = ""
    gate: str = ""
    nodes: tuple[str, ...] = ()


class PodLoad:
    """Keeps one pod of each kind running and ending for each of its workers."""

    def __init__(
        self, client: AsyncClient, run: str, image: str, kinds: Mapping[str, PodKind], chance: random.Random
    ) -> None:
        self._client = client
        self._run = run
        self._image = image
        self._kinds = kinds
        self._chance = chance
        self.done: Counter[str] = Counter()
        # How long each pod took from its making until it was gone.
        self.took_s: dict[str, list[float]] = {kind: [] for kind in kinds}
        self.failed: list[str] = []
        self.turned_away: list[str] = []
        self._phases: dict[str, str] = {}

    async def come_and_go(self, goes_on: Callable[[], bool]) -> None:
        """Make pods as long as `goes_on` returns True, and wait for those that exist."""
        following = asyncio.create_task(self._follow())
        try:
            async with asyncio.TaskGroup() as group:
                for name, kind in self._kinds.items():
                    for worker in range(kind.workers):
                        group.create_task(self._work(name, worker, goes_on))
        finally:
            following.cancel()
            await self._clean()

    async def _clean(self) -> None:
        """Remove what a run that failed has left, and wait until its pods are gone: their drivers
        end with the run.
        """
        labels = {"stress": self._run}
        with suppress(TimeoutError):
            async with asyncio.timeout(_LIMIT_S):
                while pods := [
                    pod.metadata.name async for pod in self._client.list(Pod, namespace="default", labels=labels)
                ]:
                    for name in pods:
                        await self._remove(Pod, name)
                    await asyncio.sleep(1.0)
        for claim in [
            claim.metadata.name async for claim in self._client.list(ResourceClaim, namespace="default", labels=labels)
        ]:
            await self._remove(ResourceClaim, claim)

    async def _follow(self) -> None:
        while True:
            # A restarted API server is asked again.
            with suppress(ApiError, httpx2.HTTPError):
                pods = [
                    pod.to_dict()
                    async for pod in self._client.list(Pod, namespace="default", labels={"stress": self._run})
                ]
                self._phases = {pod["metadata"]["name"]: pod.get("status", {}).get("phase", "") for pod in pods}
            await asyncio.sleep(0.2)

    async def _work(self, kind: str, worker: int, goes_on: Callable[[], bool]) -> None:
        number = 0
        while goes_on():
            number += 1
            name = f"{self._run}-{kind}{worker}-{number}"
            begun_s = time.monotonic()
            await self._make(name, kind)
            try:
                async with asyncio.timeout(_LIMIT_S):
                    while self._phases.get(name) not in _ENDED:  # noqa: ASYNC110 - a list shows it, no event
                        await asyncio.sleep(0.1)
            except TimeoutError:
                pass
            if self._phases.get(name) == "Succeeded":
                self.done[kind] += 1
            else:
                await self._note(name, kind)
            await self._remove(Pod, name)
            await self._remove(ResourceClaim, name)
            self.took_s[kind].append(time.monotonic() - begun_s)

    async def _note(self, name: str, kind: str) -> None:
        try:
            status = (await self._client.get(Pod, name, namespace="default")).to_dict().get("status", {})
        except ApiError as err:
            self.failed.append(f"{name} cannot be read: {err.status.message}")
            return
        # kubelet gives up a pod whose device plugin cannot allocate now:
        # topology was away for too long.
        is_turned_away = status.get("reason") == "UnexpectedAdmissionError" and bool(self._kinds[kind].resources)
        text = (
            f"{name} is {status.get('phase')}: {status.get('reason')} {status.get('message')} "
            f"{status.get('conditions')}"
        )
        (self.turned_away if is_turned_away else self.failed).append(text)

    async def _make(self, name: str, kind_name: str) -> None:
        kind = self._kinds[kind_name]
        metadata = {"name": name, "namespace": "default", "labels": {"stress": self._run}}
        wants = ",".join(f"{device_class}={count}" for device_class, count in sorted(kind.wants.items()))
        container: dict[str, Any] = {
            "name": "main",
            "image": self._image,
            "imagePullPolicy": "Never",
            "command": ["sleep", str(self._chance.choice(kind.seconds))],
            "env": [
                {"name": "STRESS_KIND", "value": kind_name},
                {"name": "STRESS_WANTS", "value": wants},
                {"name": "STRESS_INTERFACE", "value": kind.interface},
                *(
                    {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                    for variable, path in _FIELDS.items()
                ),
            ],
        }
        spec: dict[str, Any] = {
            "containers": [container],
            # A container that is held back while the gateway is away fails at
            # its start, and is tried again.
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
        }
        if kind.requests:
            devices = {
                "requests": list(kind.requests),
                "constraints": list(kind.constraints),
                "config": list(kind.config),
            }
            await self._create(ResourceClaim, {"metadata": metadata, "spec": {"devices": devices}})
            spec["resourceClaims"] = [{"name": "devices", "resourceClaimName": name}]
            container["resources"] = {"claims": [{"name": "devices"}]}
        if kind.resources:
            container["resources"] = {"limits": {resource: str(count) for resource, count in kind.resources.items()}}
        if kind.gate:
            spec["schedulingGates"] = [{"name": kind.gate}]
        if kind.nodes:
            # Of this field Kubernetes takes one value a term.
            terms = [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]} for node in kind.nodes
            ]
            spec["affinity"] = {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            }
        await self._create(Pod, {"metadata": metadata, "spec": spec})

    async def _create(self, kind: Any, value: dict[str, Any]) -> None:
        await self._client.create(kind.from_dict(value))

    async def _remove(self, kind: Any, name: str) -> None:
        try:
            await self._client.delete(kind, name, namespace="default")
        except ApiError as err:
            if err.status.code != 404:
                raise
