"""Which pod uses what a device plugin's allocation holds, as kubelet lists it."""

from __future__ import annotations

import pytest
from msgspec import structs

from topobus.gateway.reconcile.rules.pods import PodUse
from topobus.gateway.reconcile.rules.users import ClaimUsers, nameless, unnamed_users, users_of_claims
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.request import Owner, OwnerKind

PLUGIN = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="hash")
CLAIM = Owner(kind=OwnerKind.CLAIM, name="training", uid="u")
A, B = (Owner(kind=OwnerKind.POD, name=name, uid="") for name in "ab")
HELD = Allocation(owner=PLUGIN, holdings=(Holding(devices={"gpu": ("gpu-0", "gpu-1")}),), decision_id="d")


def _ledger(*allocations: Allocation) -> Holders:
    return Holders(node="n", allocations={allocation.owner.key: allocation for allocation in allocations})


def _use(pod: str, *devices: str, resource: str = "topobus.dev/gpu") -> PodUse:
    return PodUse(
        namespace="default", pod=pod, container="main", resource=resource, device_class="gpu", devices=devices
    )


@pytest.mark.parametrize(
    ("user", "uses", "users"),
    [
        (None, (_use("a", "gpu-0", "gpu-1"),), [A]),
        (A, (_use("a", "gpu-0", "gpu-1"),), []),
        (A, (_use("b", "gpu-1"),), [B]),
        (None, (_use("a", "gpu-0"), _use("b", "gpu-1")), []),
        (None, (_use("a", "gpu-0", resource="topobus.dev/gpu-h100"),), []),
        (None, (_use("a", "gpu-7"),), []),
        (None, (), []),
    ],
    ids=["new", "known", "another", "two-pods", "another-resource", "another-device", "not-listed"],
)
def test_unnamed_users_tells_the_pod_when_kubelet_lists_one(
    user: Owner | None, uses: tuple[PodUse, ...], users: list[Owner]
) -> None:
    """One pod with a device of the allocation, through its resource, is its user.

    Anything less certain says nothing.
    """
    held = structs.replace(HELD, pods=(user,) if user is not None else (), container="main" if user is not None else "")

    assert [user for _, user, _ in unnamed_users(_ledger(held), uses)] == users


@pytest.mark.parametrize(
    ("known_as", "containers", "wanted"),
    [("", ("main",), ["main"]), ("main", ("main",), []), ("", ("main", "side"), []), ("main", ("main", "side"), [""])],
    ids=["new", "known", "several", "several by now"],
)
def test_unnamed_users_tells_the_container_when_kubelet_lists_one(
    known_as: str, containers: tuple[str, ...], wanted: list[str]
) -> None:
    """Of several containers none is named: the pod has the device."""
    held = structs.replace(HELD, pods=(A,), container=known_as)
    uses = [structs.replace(_use("a", "gpu-0"), container=container) for container in containers]

    assert [container for _, _, container in unnamed_users(_ledger(held), uses)] == wanted


def test_nameless_lists_allocations_of_kubelets_alone_when_claims_hold_devices_too() -> None:
    """A claim is named already, and a pod that is known is not asked for again."""
    claim = Allocation(owner=CLAIM, holdings=(Holding(devices={"gpu": ("gpu-2",)}),))

    assert nameless(_ledger(HELD, claim)) == (HELD,)
    assert nameless(_ledger(structs.replace(HELD, pods=(A,)), claim)) == nameless(None) == ()


RESERVED = Owner(kind=OwnerKind.POD, name="a", uid="u-a")


def _claims(pod: str, container: str = "main") -> PodUse:
    return PodUse(
        namespace="default",
        pod=pod,
        container=container,
        claim_namespace="default",
        claim="training",
        device_class="gpu",
        devices=("gpu-2",),
    )


@pytest.mark.parametrize(
    ("pods", "uses", "listed_before", "wanted"),
    [
        ((), (_claims("a"),), (), (A,)),
        ((RESERVED,), (_claims("a"),), (), (RESERVED,)),
        ((RESERVED,), (), (), (RESERVED,)),
        ((RESERVED,), (_claims("b"),), (), (RESERVED, B)),
        ((RESERVED,), (_claims("b"),), (A,), (B,)),
        ((RESERVED,), (), (A,), ()),
    ],
    ids=["new", "known with its uid", "not listed yet", "a second pod", "the first has ended", "all have ended"],
)
def test_users_of_claims_follows_what_kubelet_lists(
    pods: tuple[Owner, ...], uses: tuple[PodUse, ...], listed_before: tuple[Owner, ...], wanted: tuple[Owner, ...]
) -> None:
    """A pod counts from its reservation on, until kubelet has listed it once and lists it no more.

    Kubelet's allocations are none of this.
    """
    claim = Allocation(owner=CLAIM, holdings=(Holding(devices={"gpu": ("gpu-2",)}),), pods=pods)

    named = users_of_claims(_ledger(HELD, claim), uses, {CLAIM.key: frozenset(listed_before)})

    assert {key: users.pods for key, users in named.items()} == {CLAIM.key: wanted}


@pytest.mark.parametrize(
    ("pods", "uses", "wanted"),
    [
        ((RESERVED,), (_claims("a"),), ClaimUsers(pods=(RESERVED,), container="main", is_listed=True)),
        ((), (_claims("a"),), ClaimUsers(pods=(A,), container="main", is_listed=True)),
        ((RESERVED,), (_claims("a"), _claims("a", "side")), ClaimUsers(pods=(RESERVED,), is_listed=True)),
        ((RESERVED, B), (_claims("a"), _claims("b")), ClaimUsers(pods=(RESERVED, B), container="main", is_listed=True)),
        ((RESERVED,), (_claims("b", "side"),), ClaimUsers(pods=(RESERVED, B))),
        ((RESERVED,), (), ClaimUsers(pods=(RESERVED,), container="before")),
        ((), (), ClaimUsers(container="before")),
    ],
    ids=["one", "not reserved", "two of a pod", "one name in two pods", "one pod not listed", "none listed", "no pod"],
)
def test_users_of_claims_names_the_container_when_kubelet_lists_all_pods(
    pods: tuple[Owner, ...], uses: tuple[PodUse, ...], wanted: ClaimUsers
) -> None:
    """Of several containers none is named. As long as kubelet lists no pod, what was recorded
    stays.
    """
    claim = Allocation(owner=CLAIM, holdings=(), pods=pods, container="before")

    assert users_of_claims(_ledger(claim), uses, {}) == {CLAIM.key: wanted}
