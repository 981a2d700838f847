"""Which of the claims that the controller says are written at a node's own server: nothing newer is undone, nothing prepared goes, nothing of another node comes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from topobus.contracts.messages import ApiObject
from topobus.contracts.node_claim_messages import ClaimDrop, ClaimPut, ClaimsRequest, NodeClaim
from topobus.domain.ledger import Allocation, Ledger
from topobus.domain.request import Owner, OwnerKind
from topobus.relay.core.node_claims import HeldClaim, objection_to, prepared_claims, steps_of

_HELD = {"default/a": HeldClaim(revision=3, uid="u-a", version="3-x")}
_OWNER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="a", uid="u-a")


def _claim(version: str = "4-y", name: str = "a") -> NodeClaim:
    metadata = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    claim = ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata)
    return NodeClaim(node="n1", namespace="default", name=name, uid=f"u-{name}", version=version, claim=claim)


@pytest.mark.parametrize(
    ("name", "version", "replaces", "is_written"),
    [
        ("b", "1-z", "", True),
        ("b", "1-z", "0-w", False),
        ("a", "4-y", "3-x", True),
        ("a", "4-y", "2-w", False),
        ("a", "4-y", "", False),
        ("a", "3-x", "3-x", False),
    ],
    ids=["new", "of-a-store-that-was-lost", "newer", "stuck-and-late", "behind", "said-again"],
)
def test_claim_is_written_when_the_node_has_what_it_replaces(name: str, version: str, replaces: str, is_written: bool) -> None:
    """A request that comes late, or of a controller that is behind, changes nothing."""
    claim = _claim(version, name)

    steps = steps_of(ClaimsRequest(puts=(ClaimPut(claim=claim, replaces=replaces),)), _HELD, ())

    assert steps.puts == ((claim,) if is_written else ())


@pytest.mark.parametrize(
    ("version", "prepared", "drops", "kept"),
    [
        ("3-x", (), (("default", "a"),), ()),
        ("2-w", (), (), ()),
        ("3-x", (_OWNER.key,), (), ("default/a",)),
        ("3-x", (replace(_OWNER, uid="other").key,), (("default", "a"),), ()),
    ],
    ids=["gone", "written-since", "prepared", "another-of-its-name-is-prepared"],
)
def test_claim_is_deleted_when_it_is_the_one_that_went_and_is_not_prepared(
    version: str, prepared: tuple[str, ...], drops: tuple[tuple[str, str], ...], kept: tuple[str, ...]
) -> None:
    """What is prepared stays until that is undone; a version that the controller does not know stays, too."""
    steps = steps_of(ClaimsRequest(drops=(ClaimDrop(namespace="default", name="a", version=version),)), _HELD, prepared)

    assert (steps.drops, steps.kept) == (drops, kept)


def test_drop_is_ignored_when_the_node_has_no_such_claim() -> None:
    """Said again, it changes nothing."""
    steps = steps_of(ClaimsRequest(drops=(ClaimDrop(namespace="default", name="b", version="3-x"),)), _HELD, ())

    assert (steps.puts, steps.drops, steps.kept) == ((), (), ())


@pytest.mark.parametrize(
    "claim",
    [
        replace(_claim(), node="n2"),
        replace(_claim(), name="b"),
        replace(_claim(), namespace="other"),
        replace(_claim(), uid="u-b"),
        replace(_claim(), version=""),
        replace(_claim(), claim=replace(_claim().claim, kind="Pod")),
    ],
    ids=["node", "name", "namespace", "uid", "version", "kind"],
)
def test_claim_is_refused_when_it_is_not_what_its_place_says(claim: NodeClaim) -> None:
    """The gateway acts for the uid that it finds at a place."""
    assert objection_to(claim, "n1")
    assert objection_to(_claim(), "n1") == ""


def test_prepared_claims_are_those_of_the_ledger_that_are_prepared() -> None:
    """What is only allocated may go."""
    other = replace(_OWNER, name="b")
    ledger = Ledger(
        node="n1",
        allocations={
            _OWNER.key: Allocation(owner=_OWNER, decision_id="d", is_prepared=True),
            other.key: Allocation(owner=other, decision_id="d"),
        },
    )

    assert prepared_claims(ledger) == {_OWNER.key}
