"""Replicas of the stand-alone controller in the test's own process, and a user of the API that they
serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from support.reading import Reader
from support.runtimes import runtime_of
from topobus.bus.bus import Bus, Change, Conflict
from topobus.controller.config import ControllerSettings
from topobus.controller.standalone.service import serve
from topobus.formats.kubernetes import admit, ask_deletion, object_parts, parse_manifest
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.process.clock import Clock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime

__all__ = ["NOW", "SETTINGS", "ApiUser", "beside", "controller", "reasons", "runtime_on"]

SETTINGS = ControllerSettings(ask_timeout_s=30.0, retry_s=0.2)
NOW = "2026-01-01T00:00:00Z"


def runtime_on(bus: Bus, *, clock: Clock | None = None, readiness: Readiness | None = None) -> Runtime:
    """Give a replica's runtime on a bus."""
    return runtime_of("controller", "central", bus, clock=clock, readiness=readiness)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Do something for the length of a block.

    Errors: raises what it ended with, if it had before.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def controller(
    url: str,
    settings: ControllerSettings = SETTINGS,
    *,
    through: Callable[[Bus], Bus] = lambda bus: bus,
    clock: Clock | None = None,
    readiness: Readiness | None = None,
) -> AsyncIterator[Runtime]:
    """Run one replica; `through` puts something between it and the bus."""
    async with Bus.session(NatsSettings(url=url), name="controller") as bus:
        runtime = runtime_on(through(bus), clock=clock, readiness=readiness)
        async with beside(serve(settings, runtime)):
            yield runtime


class ApiUser:
    """Writes objects as the CLI does, and follows what becomes of them."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]]) -> None:
        self.bus = bus
        self.objects = objects
        self._made = 0

    async def apply(self, manifest: str) -> None:
        """Create the objects of a manifest; each has a uid of its own."""
        for api_object in parse_manifest(manifest, where="test.yaml"):
            self._made += 1
            stored = admit(api_object, uid=f"uid-{api_object.metadata['name']}-{self._made}", now=NOW)
            await self.bus.compare_and_set(catalogue.OBJECT, stored, 0, **object_parts(api_object))

    def versions(self, kind: str, name: str) -> list[ApiObject | None]:
        """List all versions of an object that the watch brought. A deletion is None."""
        return [
            change.value
            for change in self.objects.items
            if (change.parts.get("kind"), change.parts.get("name")) == (kind, name)
        ]

    async def until(
        self, kind: str, name: str, is_enough: Callable[[ApiObject | None], bool], timeout_s: float = 60
    ) -> ApiObject | None:
        """Wait until the newest version of an object satisfies the test.

        A deletion is None.
        """

        def is_there(_: object) -> bool:
            versions = self.versions(kind, name)
            return bool(versions) and is_enough(versions[-1])

        await self.objects.until(is_there, timeout_s=timeout_s)
        return self.versions(kind, name)[-1]

    async def allocated(self, name: str) -> ApiObject:
        """Wait until a claim is allocated."""
        claim = await self.until(
            "resourceclaim", name, lambda value: value is not None and bool(value.status.get("allocation"))
        )
        assert claim is not None
        return claim

    async def scheduled(self, name: str) -> str:
        """Wait until a pod has its node and is told so."""
        pod = await self.until("pod", name, lambda value: value is not None and _is_scheduled(value))
        assert pod is not None
        return str(pod.spec["nodeName"])

    async def until_reason(self, name: str, reason: str, kind: str = "resourceclaim") -> str:
        """Wait until an object has a condition with this reason; gives the message."""
        api_object = await self.until(kind, name, lambda value: reason in reasons(value))
        return reasons(api_object)[reason]

    async def gone(self, kind: str, name: str) -> None:
        """Wait until an object is deleted."""
        await self.until(kind, name, lambda value: value is None)

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
            written = (
                await self.bus.compare_and_delete(catalogue.OBJECT, entry.revision, **parts)
                if marked is None
                else await self.bus.compare_and_set(catalogue.OBJECT, marked, entry.revision, **parts)
            )
            if not isinstance(written, Conflict):
                return


def reasons(api_object: ApiObject | None) -> dict[str, str]:
    """Give the reasons of an object's conditions with their messages, of one reason the first."""
    return {
        str(condition.get("reason")): str(condition.get("message")) for condition in reversed(_conditions(api_object))
    }


def _is_scheduled(pod: ApiObject) -> bool:
    return any(
        condition.get("type") == "PodScheduled" and condition.get("status") == "True" for condition in _conditions(pod)
    )


def _conditions(api_object: ApiObject | None) -> list[dict[str, Any]]:
    return (api_object.status.get("conditions") if api_object is not None else None) or []
