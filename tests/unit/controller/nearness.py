"""Claims with wishes for their place, and the demo node as the controller sees it."""

from __future__ import annotations

from typing import Any

from support.alignment_nodes import dgx_facts
from support.shape_names import plain
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.values import (
    Allocated,
    Outcome,
)
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes import admit
from topobus.formats.messages.messages import ApiObject
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

COMPILER = CelCompiler()
NODE = "demo-node"


def entry(driver: str = "topobus.dev", **fields: Any) -> dict[str, Any]:
    """Write wishes as a claim's configuration."""
    return {
        "opaque": {
            "driver": driver,
            "parameters": {"apiVersion": "topobus.dev/v1", "kind": "AlignmentParameters", **fields},
        }
    }


def claim(wanted: dict[str, int], *config: dict[str, Any], name: str = "c") -> ApiObject:
    """Make a claim for so many devices a class."""
    requests = [
        {"name": key, "exactly": {"deviceClassName": f"{key}.topobus.dev", "count": count}}
        for key, count in wanted.items()
    ]
    api_object = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name},
        spec={"devices": {"requests": requests, "config": list(config)}},
    )
    return admit(api_object, uid=f"uid-{name}", now="2026-01-01T00:00:00Z")


def state(**held: tuple[str, ...]) -> StandaloneState:
    """The demo node, with these devices held by somebody else."""
    machine, inventories = dgx_facts()
    made = StandaloneState()
    made.put_machine(machine)
    for inventory in inventories.values():
        made.put_inventory(inventory)
    if held:
        taker = Owner(kind=OwnerKind.POD, name="taker", uid="t")
        allocation = Allocation(owner=taker, holdings=(Holding(container="main", devices=dict(held)),))
        made.put_ledger(Ledger(node=NODE, sequence=1, allocations={taker.key: allocation}))
    return made


def names(outcome: Outcome) -> list[list[str]]:
    """Name the devices of each claim, shapes without their digests."""
    assert isinstance(outcome, Allocated), outcome
    return [[plain(granted_device.device) for granted_device in result.devices.results] for result in outcome.results]
