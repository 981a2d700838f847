"""Two recorded nodes on a bus with the controller, and a user who writes pods and claims.

The fixtures that start them are in `integration/scheduling/conftest.py`.
"""

from __future__ import annotations

from typing import Any

from support.controllers import ApiUser
from support.reading import Reader
from support.real_topology import WatchedTopology
from topobus.bus.bus import Bus, Change
from topobus.formats.messages.messages import ApiObject


class Place(ApiUser):
    """Recorded nodes on a bus, and a user of the API."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]], nodes: dict[str, WatchedTopology]) -> None:
        super().__init__(bus, objects)
        self.nodes = nodes

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
