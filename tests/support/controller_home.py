"""One recorded node on a bus with the controller, and a user of the API.

The fixtures that start it are in `integration/controller/conftest.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.controllers import NOW, ApiUser
from support.reading import Reader
from support.real_topology import WatchedTopology
from topobus.bus.bus import Bus, Change
from topobus.formats.kubernetes import admit, object_parts
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Inventory

NODE = "demo-node"


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
    return admit(api_object, uid=f"uid-{name}", now=NOW)


class Home(ApiUser):
    """One recorded node on a bus, and a user of the API."""

    def __init__(
        self, bus: Bus, objects: Reader[Change[ApiObject]], topology: WatchedTopology, inventories: list[Inventory]
    ) -> None:
        super().__init__(bus, objects)
        self.topology = topology
        self.inventories = inventories

    async def put(self, api_object: ApiObject) -> None:
        """Store an object, whatever was there."""
        await self.bus.put(catalogue.OBJECT, api_object, **object_parts(api_object))

    async def until_claim(self, name: str, is_enough: Callable[[ApiObject | None], bool]) -> ApiObject | None:
        """Wait until the newest version of a claim satisfies the test."""
        return await self.until("resourceclaim", name, is_enough)

    async def results(self, name: str) -> list[dict[str, Any]]:
        """Wait until a claim is allocated; gives its results."""
        allocated = await self.allocated(name)
        results: list[dict[str, Any]] = allocated.status["allocation"]["devices"]["results"]
        return results

    async def until_settled(self) -> None:
        """Wait until every claim is allocated or has a reason why not, and none is being deleted or
        attempted.
        """
        probe = claim("probe-settled", count=9)
        await self.put(probe)
        await self.until_reason("probe-settled", "DoesNotFit")
        await self.objects.until(is_settled)


def condition(api_object: ApiObject | None) -> dict[str, Any]:
    """Give the first condition of a claim; empty when there is none."""
    conditions = (api_object.status.get("conditions") if api_object is not None else None) or [{}]
    first: dict[str, Any] = conditions[0]
    return first


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
        now=NOW,
    )


def conditions(api_object: ApiObject | None, kind: str) -> dict[str, Any]:
    """Find a condition."""
    found_conditions = (api_object.status.get("conditions") if api_object is not None else None) or []
    return next((dict(item) for item in found_conditions if item.get("type") == kind), {})
