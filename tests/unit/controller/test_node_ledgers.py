"""A node that fails concerns its own devices: both homes ask it by one `NodeLedgers`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from topobus.bus.streams.state import Entry
from topobus.controller.commit.node_ledgers import NODE_FAILED, Held, NodeLedgers
from topobus.controller.state.cluster_state import ClusterState
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.objects import Claim
from topobus.formats.kubernetes.resource import AllocationResult, DevicesAllocated, GrantedDevice
from topobus.formats.messages.messages import ApiObject, PlaceReply
from topobus.values.errors import ConfigError, ContractError, HardwareError, PeerUnavailable
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.outcome import Reason, Refusal

CLAIM = Claim(
    ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "one", "namespace": "default", "uid": "u"},
    )
)


def attempt(device: str) -> Attempt:
    """Attempt to get one GPU of n1."""
    result = GrantedDevice(request="r", driver="topobus.dev", pool="n1", device=device)
    return Attempt(number=1, node="n1", allocation=AllocationResult(devices=DevicesAllocated(results=(result,))))


async def newest() -> bool:
    """Say that the attempt is the claim's newest."""
    return True


async def unreadable() -> bool:
    """Find a claim that nobody can read any more."""
    raise ContractError("ResourceClaim default/one: status: malformed")


class _Node:
    """A bus behind which one node answers: with an outcome, or with an error.

    Its ledger shows the claim with one GPU.
    """

    def __init__(self, outcome: Refusal | Exception, device: str) -> None:
        self._outcome = outcome
        holding = Holding(container="", devices={"gpu": (device,)})
        allocation = Allocation(owner=CLAIM.owner, holdings=(holding,), decision_id="d")
        self._ledger = Ledger(node="n1", epoch="e", sequence=4, allocations={CLAIM.owner.key: allocation})

    async def ask(self, *_: Any, **__: Any) -> PlaceReply:
        """Answer."""
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return PlaceReply(decision_id="d2", node="n1", result=self._outcome, ledger_sequence=4)

    async def get(self, *_: Any, **__: Any) -> Entry[Ledger]:
        """Show the ledger."""
        return Entry(parts={"node": "n1"}, revision=1, value=self._ledger)


REFUSAL = Refusal(reasons=(Reason(code="already-placed", message="it is held"),))


@pytest.mark.parametrize(
    "error",
    [ContractError("no answer"), HardwareError("a card"), ConfigError("a key")],
    ids=["malformed-answer", "hardware", "configuration"],
)
async def test_node_is_unavailable_when_it_answers_with_an_error(error: Exception) -> None:
    """Whatever a node's topology fails by is no fault of the claim: the node is as unavailable as a
    silent one, and named.
    """
    bus: Any = _Node(error, "gpu0")

    with pytest.raises(PeerUnavailable, match="node n1: its topology service failed") as failed:
        await NodeLedgers(bus, ClusterState(), 1.0).hold(CLAIM, attempt("gpu0"), newest)

    assert failed.value.facts["code"] == NODE_FAILED


async def test_attempt_is_held_when_the_ledger_shows_it_as_done() -> None:
    """A refusal of what the ledger shows as done is none: the node has forgotten the operation, and
    no placement of now is told.
    """
    bus: Any = _Node(REFUSAL, "gpu0")

    assert await NodeLedgers(bus, ClusterState(), 1.0).hold(CLAIM, attempt("gpu0"), newest) == Held()


async def test_claims_own_fault_is_not_the_nodes_when_it_cannot_be_read_anew() -> None:
    """A claim that nobody can read any more is told so itself; its node has not failed."""
    bus: Any = _Node(REFUSAL, "gpu1")

    with pytest.raises(ContractError, match="default/one"):
        await NodeLedgers(bus, ClusterState(), 1.0).hold(CLAIM, attempt("gpu0"), unreadable)


async def test_ledger_is_told_as_unreadable_when_nobody_can_read_it() -> None:
    """A stored value that is malformed is no silent node: whoever asked sets its object aside and
    does not ask for it again and again.
    """
    bus: Any = SimpleNamespace(get=unreadable_ledger)

    with pytest.raises(ContractError, match="ledger of n1"):
        await NodeLedgers(bus, ClusterState(), 1.0).read("n1")


async def unreadable_ledger(*_: Any, **__: Any) -> Any:
    """Find a ledger that nobody can read."""
    raise ContractError("ledger of n1: malformed")
