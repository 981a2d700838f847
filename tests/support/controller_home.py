"""One recorded node on a bus with the controller, and a user of the API.

The fixtures that start it are in `integration/controller/conftest.py`. Tests that need another
controller start it by `controller`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from support.real_topology import WatchedTopology
from topobus.bus.bus import Bus, Change, Conflict
from topobus.controller.config import ControllerSettings
from topobus.controller.standalone.service import serve
from topobus.formats.kubernetes import admit, ask_deletion, object_parts
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.testing.reading import Reader
from topobus.values.device import Inventory

NODE = "demo-node"

SETTINGS = ControllerSettings(ask_timeout_s=30.0, retry_s=0.2)


def claim(
    name: str, *, device_class: str = "gpu.topobus.dev", count: int = 1, expression: str = "true", **metadata: Any
) -> ApiObject:
    """Make a claim for some devices of one class."""
    request = {"deviceClassName": device_class, "count": count, "selectors": [{"cel": {"expression": expression}}]}
    api_object = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, **metadata},
        spec={"devices": {"requests": [{"name": "r", "exactly": request}]}},
    )
    return admit(api_object, uid=f"uid-{name}", now="2026-01-01T00:00:00Z")


class Home:
    """One recorded node on a bus, and a user of the API."""

    def __init__(
        self, bus: Bus, objects: Reader[Change[ApiObject]], topology: WatchedTopology, inventories: list[Inventory]
    ) -> None:
        self.bus = bus
        self.objects = objects
        self.topology = topology
        self.inventories = inventories
        self._made = 0

    async def apply(self, api_object: ApiObject) -> None:
        """Store an object as the CLI does."""
        await self.bus.put(catalogue.OBJECT, api_object, **object_parts(api_object))

    async def until(self, name: str, is_enough: Callable[[ApiObject | None], bool]) -> ApiObject | None:
        """Wait until the newest version of a claim satisfies the test.

        A deletion is None.
        """

        def newest(items: list[Change[ApiObject]]) -> tuple[bool, ApiObject | None]:
            changes = [
                change
                for change in items
                if change.parts.get("name") == name and change.parts.get("kind") == "resourceclaim"
            ]
            return bool(changes), changes[-1].value if changes else None

        await self.objects.until(lambda items: newest(items)[0] and is_enough(newest(items)[1]))
        return newest(self.objects.items)[1]

    async def allocated(self, name: str) -> list[dict[str, Any]]:
        """Wait until a claim is allocated; gives its results."""
        api_object = await self.until(name, lambda value: value is not None and bool(value.status.get("allocation")))
        assert api_object is not None
        results: list[dict[str, Any]] = api_object.status["allocation"]["devices"]["results"]
        return results

    async def until_reason(self, name: str, reason: str) -> str:
        """Wait until a claim has a condition with this reason; gives the message."""
        api_object = await self.until(name, lambda value: condition(value).get("reason") == reason)
        return str(condition(api_object)["message"])

    async def apply_new(self, api_object: ApiObject) -> None:
        """Create an object unless there is one of its name; each has a uid of its own."""
        self._made += 1
        fresh = admit(api_object, uid=f"{api_object.metadata['uid']}-{self._made}", now="2026-01-01T00:00:00Z")
        await self.bus.compare_and_set(catalogue.OBJECT, fresh, 0, **object_parts(api_object))

    async def until_settled(self) -> None:
        """Wait until every claim is allocated or has a reason why not, and none is being deleted or
        attempted.
        """
        probe = claim("probe-settled", count=9)
        await self.apply(probe)
        await self.until_reason("probe-settled", "DoesNotFit")
        await self.objects.until(is_settled)

    async def delete(self, name: str) -> None:
        """Delete a claim as the CLI does: mark it, or remove it when nothing holds it."""
        parts = {"kind": "resourceclaim", "namespace": "default", "name": name}
        while True:
            entry = await self.bus.get(catalogue.OBJECT, **parts)
            if entry is None:
                return
            marked = ask_deletion(entry.value, now="2026-01-02T00:00:00Z")
            if marked is None:
                if isinstance(await self.bus.compare_and_delete(catalogue.OBJECT, entry.revision, **parts), Conflict):
                    continue
                return
            if not isinstance(
                await self.bus.compare_and_set(catalogue.OBJECT, marked, entry.revision, **parts), Conflict
            ):
                return


def condition(api_object: ApiObject | None) -> dict[str, Any]:
    """Give the first condition of a claim; empty when there is none."""
    conditions = (api_object.status.get("conditions") if api_object is not None else None) or [{}]
    first: dict[str, Any] = conditions[0]
    return first


@asynccontextmanager
async def controller(
    url: str, *, mortal: Callable[[Bus], Bus] = lambda bus: bus, readiness: Readiness | None = None
) -> AsyncIterator[Readiness]:
    """Run one replica; gives its readiness, or takes one.

    `mortal` puts something between it and the bus.
    """
    readiness = readiness or Readiness()
    async with Bus.session(NatsSettings(url=url), name="controller") as real:
        bus = mortal(real)
        runtime = Runtime(
            name="controller",
            node="central",
            bus=bus,
            clock=SystemClock(),
            readiness=readiness,
            registry=CollectorRegistry(),
        )
        task = asyncio.create_task(serve(SETTINGS, runtime))
        try:
            yield readiness
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]  # checked just before


def is_settled(items: list[Change[ApiObject]]) -> bool:
    """Return whether every claim is allocated or has a reason why not, and none is being deleted or
    attempted.
    """
    newest = {change.parts["name"]: change.value for change in items if change.parts.get("kind") == "resourceclaim"}
    return all(
        not stored.metadata.get("deletionTimestamp")
        and "topobus.dev/attempt" not in (stored.metadata.get("annotations") or {})
        and condition(stored)
        for stored in newest.values()
        if stored is not None
    )


def pod(name: str, claim_name: str) -> ApiObject:
    """Make a pod that uses a claim."""
    spec = {"containers": [{"name": "c"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": claim_name}]}
    return admit(
        ApiObject(api_version="v1", kind="Pod", metadata={"name": name}, spec=spec),
        uid=f"uid-{name}",
        now="2026-01-01T00:00:00Z",
    )


def conditions(api_object: ApiObject | None, kind: str) -> dict[str, Any]:
    """Find a condition."""
    found_conditions = (api_object.status.get("conditions") if api_object is not None else None) or []
    return next((dict(item) for item in found_conditions if item.get("type") == kind), {})


async def until(home: Home, kind: str, name: str, is_enough: Any) -> ApiObject | None:
    """Wait until the newest version of an object satisfies the test.

    A deletion is None.
    """

    def newest(items: Any) -> list[Any]:
        return [item for item in items if (item.parts.get("kind"), item.parts.get("name")) == (kind, name)][-1:]

    await home.objects.until(lambda items: any(is_enough(change.value) for change in newest(items)))
    api_object: ApiObject | None = newest(home.objects.items)[0].value
    return api_object
