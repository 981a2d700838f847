"""Two recorded nodes on a bus with the controller, and a user who writes pods and claims.

The fixtures that start them are in `integration/scheduling/conftest.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from support.mortal_bus import mortal_bus
from support.real_topology import WatchedTopology
from topobus.bus.bus import Bus, Change, Conflict
from topobus.controller.config import ControllerSettings
from topobus.controller.standalone.service import serve
from topobus.formats.kubernetes import admit, ask_deletion, object_parts, parse_manifest
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.testing.fates import FatedBus, Fates
from topobus.testing.reading import Reader

SETTINGS = ControllerSettings(ask_timeout_s=30.0, retry_s=0.2)

NOW = "2026-01-01T00:00:00Z"


class Place:
    """Recorded nodes on a bus, and a user of the API."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]], nodes: dict[str, WatchedTopology]) -> None:
        self.bus = bus
        self.objects = objects
        self.nodes = nodes
        self._made = 0

    async def apply(self, manifest: str) -> None:
        """Store the objects of a manifest as the CLI does."""
        for api_object in parse_manifest(manifest, where="test.yaml"):
            self._made += 1
            stored = admit(api_object, uid=f"uid-{api_object.metadata['name']}-{self._made}", now=NOW)
            await self.bus.compare_and_set(catalogue.OBJECT, stored, 0, **object_parts(api_object))

    async def until(
        self, kind: str, name: str, is_enough: Callable[[ApiObject | None], bool], timeout_s: float = 60
    ) -> ApiObject | None:
        """Wait until the newest version of an object satisfies the test.

        A deletion is None.
        """

        def newest(items: list[Change[ApiObject]]) -> tuple[bool, ApiObject | None]:
            changes = [
                change for change in items if (change.parts.get("kind"), change.parts.get("name")) == (kind, name)
            ]
            return bool(changes), changes[-1].value if changes else None

        await self.objects.until(lambda items: newest(items)[0] and is_enough(newest(items)[1]), timeout_s=timeout_s)
        return newest(self.objects.items)[1]

    async def scheduled(self, name: str) -> str:
        """Wait until a pod has its node."""
        api_object = await self.until(
            "pod", name, lambda value: value is not None and condition(value).get("status") == "True"
        )
        assert api_object is not None
        return str(api_object.spec["nodeName"])

    async def until_reason(self, kind: str, name: str, reason: str) -> str:
        """Wait until an object has a condition with this reason; gives the message."""
        api_object = await self.until(
            kind, name, lambda value: value is not None and condition(value).get("reason") == reason
        )
        assert api_object is not None
        return str(condition(api_object)["message"])

    async def claim(self, name: str) -> ApiObject:
        """Read a claim as it is now."""
        entry = await self.bus.get(catalogue.OBJECT, kind="resourceclaim", namespace="default", name=name)
        assert entry is not None
        return entry.value

    async def delete(self, kind: str, name: str) -> None:
        """Delete an object as the CLI does: mark it, or remove it when nothing holds it."""
        parts = {"kind": kind, "namespace": "default", "name": name}
        while (entry := await self.bus.get(catalogue.OBJECT, **parts)) is not None:
            marked = ask_deletion(entry.value, now=NOW)
            if marked is None:
                if isinstance(await self.bus.compare_and_delete(catalogue.OBJECT, entry.revision, **parts), Conflict):
                    continue
            elif isinstance(
                await self.bus.compare_and_set(catalogue.OBJECT, marked, entry.revision, **parts), Conflict
            ):
                continue
            return

    def held(self, node: str) -> dict[str, list[str]]:
        """List what a node's ledger holds: owner to GPUs."""
        allocations = self.nodes[node].ledger.allocations
        return {
            key.rpartition("/")[0]: sorted(
                name for holding in allocation.holdings for name in holding.devices.get("gpu", ())
            )
            for key, allocation in sorted(allocations.items())
        }


def condition(api_object: ApiObject) -> dict[str, Any]:
    """Give the first condition of an object."""
    condition: dict[str, Any] = (api_object.status.get("conditions") or [{}])[0]
    return condition


def claim(name: str, count: int, **annotations: str) -> str:
    """Write a claim for some GPUs."""
    notes = ", ".join(f'"topobus.dev/{key.replace("_", "-")}": {value}' for key, value in annotations.items())
    return f"""
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}, annotations: {{{notes}}}}}
spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: gpu.topobus.dev, count: {count}}}}}]}}}}
"""


def pod(name: str, *claims: str, gpus: int = 0, template: str = "", extra: str = "") -> str:
    """Write a pod with claims by name, one by template, and GPUs of its own."""
    entries = [f"{{name: c{index}, resourceClaimName: {each_claim}}}" for index, each_claim in enumerate(claims)]
    entries += [f"{{name: made, resourceClaimTemplateName: {template}}}"] if template else []
    limits = f"{{topobus.dev/gpu: {gpus}}}" if gpus else "{}"
    return f"""
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  containers: [{{name: main, resources: {{limits: {limits}}}}}]
  resourceClaims: [{", ".join(entries)}]
{extra}
"""


TEMPLATE = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: two-gpus}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev, count: 2}}]}}}
"""


@asynccontextmanager
async def controller(url: str, settings: ControllerSettings = SETTINGS, *, step: int = 0) -> AsyncIterator[Fates]:
    """Run one replica. With a step it dies before its write or ask of that number, and its fates
    record that.
    """
    async with Bus.session(NatsSettings(url=url), name="controller") as real:
        bus = mortal_bus(real, step, is_done=False) if step else real
        runtime = Runtime(
            name="controller",
            node="central",
            bus=bus,
            clock=SystemClock(),
            readiness=Readiness(),
            registry=CollectorRegistry(),
        )
        task = asyncio.create_task(serve(settings, runtime))
        try:
            yield bus.fates if isinstance(bus, FatedBus) else Fates()
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]  # checked just before
