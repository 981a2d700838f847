"""Devices that are no single node's: pools for all nodes, for nodes with a label, and devices that
choose for themselves.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.values import Allocated, Outcome
from topobus.engine.claims.lifecycle import placement_request, read_claim
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes import parse_manifest
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.device import Device, Inventory
from unit.controller.allocation import solve

CLAIM = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c, namespace: default, uid: uid-c}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: fabric}}]}}
"""
CLASS = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: fabric}
spec: {selectors: [{cel: {expression: 'device.driver == "fabric.example.com"'}}]}
"""
SLICE = """
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {{name: fabric}}
spec:
  driver: fabric.example.com
  pool: {{name: fabric, resourceSliceCount: 1}}
  {place}
  devices: [{{name: card{device}}}]
"""
RACK = "{nodeSelectorTerms: [{matchExpressions: [{key: example.com/rack, operator: In, values: [a]}]}]}"


def put(state: StandaloneState, text: str) -> ApiObject:
    """Store the object of a manifest."""
    (api_object,) = parse_manifest(text, where="test.yaml")
    namespace = api_object.metadata.get("namespace", CLUSTER)
    state.put_object(ObjectKey(api_object.kind.lower(), namespace, api_object.metadata["name"]), Stored(1, api_object))
    return api_object


def state(place: str, device: str = "") -> StandaloneState:
    """Make a world of two nodes, of which n1 stands in rack a, and a fabric."""
    made = StandaloneState()
    for node in ("n1", "n2"):
        made.put_inventory(
            Inventory(node=node, device_class="gpu", generation=1, devices=(Device(name="gpu-0", device_class="gpu"),))
        )
    put(made, "{apiVersion: v1, kind: Node, metadata: {name: n1, labels: {example.com/rack: a}}}")
    put(made, CLASS)
    put(made, SLICE.format(place=place, device=device))
    return made


def outcome(made: StandaloneState, node: str) -> Outcome:
    """Allocate a card for a node."""
    api_object = put(made, CLAIM)
    return solve(made.input_for(node, [(Claim(api_object), read_claim(api_object))]))


@pytest.mark.parametrize(
    ("place", "device", "nodes"),
    [
        pytest.param("allNodes: true", "", {"n1", "n2"}, id="all-nodes"),
        pytest.param(f"nodeSelector: {RACK}", "", {"n1"}, id="nodes-with-a-label"),
        pytest.param("nodeName: n2", "", {"n2"}, id="one-node"),
        pytest.param("perDeviceNodeSelection: true", ", allNodes: true", {"n1", "n2"}, id="a-device-for-all"),
        pytest.param("perDeviceNodeSelection: true", f", nodeSelector: {RACK}", {"n1"}, id="a-device-for-a-label"),
        pytest.param("perDeviceNodeSelection: true", ", nodeName: n2", {"n2"}, id="a-device-for-a-node"),
    ],
)
def test_devices_serve_the_nodes_that_they_name(place: str, device: str, nodes: set[str]) -> None:
    """A slice that somebody applied serves all nodes, those with its labels, or those of each
    device.
    """
    assert {node for node in ("n1", "n2") if isinstance(outcome(state(place, device), node), Allocated)} == nodes


@pytest.mark.parametrize(
    ("place", "device", "wanted"),
    [
        pytest.param("allNodes: true", "", None, id="all-nodes"),
        pytest.param(
            f"nodeSelector: {RACK}",
            "",
            {"matchExpressions": [{"key": "example.com/rack", "operator": "In", "values": ["a"]}]},
            id="label",
        ),
        pytest.param(
            "allNodes: true",
            ", bindsToNode: true, bindingConditions: [x], bindingFailureConditions: [y]",
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
            id="binds-to-the-node",
        ),
    ],
)
def test_allocation_says_where_its_devices_can_be_used(place: str, device: str, wanted: Any) -> None:
    """The node selector is that of the slice, none for all nodes, and the node itself for a device
    that binds.

    No ledger holds such a device.
    """
    made = state(place, device)
    allocated = outcome(made, "n1")
    assert isinstance(allocated, Allocated)
    (result,) = allocated.results

    terms = result.node_selector.node_selector_terms if result.node_selector is not None else ()
    shown = [
        {
            **(
                {"matchExpressions": [_plain(item) for item in term.match_expressions]}
                if term.match_expressions
                else {}
            ),
            **({"matchFields": [_plain(item) for item in term.match_fields]} if term.match_fields else {}),
        }
        for term in terms
    ]
    assert shown == ([wanted] if wanted is not None else [])
    assert placement_request(put(made, CLAIM), result, "n1") is None


def test_node_is_looked_at_anew_when_its_labels_change() -> None:
    """A label that goes takes the devices away; one that comes lets what waits be tried again."""
    made = state(f"nodeSelector: {RACK}")
    assert isinstance(outcome(made, "n1"), Allocated)
    before = made.supply

    put(made, "{apiVersion: v1, kind: Node, metadata: {name: n2, labels: {example.com/rack: a}}}")
    made.drop_object(ObjectKey("node", CLUSTER, "n1"))

    assert made.supply > before
    assert isinstance(outcome(made, "n2"), Allocated)
    assert not isinstance(outcome(made, "n1"), Allocated)


def _plain(requirement: Any) -> dict[str, Any]:
    return {"key": requirement.key, "operator": requirement.operator, "values": list(requirement.values)}
