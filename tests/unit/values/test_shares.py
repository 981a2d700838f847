"""Shares of devices: what is left, what clashes, and what an older allocation loses."""

from __future__ import annotations

import pytest
from msgspec import structs

from topobus.engine.ledger import transitions
from topobus.engine.ledger.holdings import without
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.engine.ledger.transitions import Step
from topobus.values.counters import CapacityPolicy
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing, HeldShare
from topobus.values.errors import InvariantError
from topobus.values.idset import CpuSet
from topobus.values.ledger import Adoption, Allocation, Holding, Ledger
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.shares import (
    device_of_replica,
    free_replicas,
    number_of_replica,
    replica_id,
    replica_share,
    shortage_of,
)

GPU = Device(
    name="gpu-0",
    device_class="gpu",
    allows_multiple=True,
    capacity={"memory": 80, "shares": 4},
    capacity_policies={"memory": CapacityPolicy(default=20), "shares": CapacityPolicy(default=1)},
    sharing=DeviceSharing(replicas=4),
)


def plugin(uid: str) -> Owner:
    """An owner behind kubelet's device plugin."""
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu-shared", uid=uid)


def take(ledger: Ledger, owner: Owner, share: HeldShare | None) -> Step | Refusal:
    """Adopt the GPU, by share or whole."""
    return transitions.adopt(
        ledger,
        Adoption(
            owner=owner,
            devices={"gpu": ("gpu-0",)},
            shared={"gpu": ("gpu-0",)} if share is not None else {},
            shares={"gpu": {"gpu-0": share}} if share is not None else {},
        ),
        op_id=f"op-{ledger.sequence}",
        decision_id=f"d-{ledger.sequence}",
    )


@pytest.mark.parametrize(
    ("held", "free"),
    [
        ({}, 4),
        ({"p": HeldShare(amounts={"memory": 20, "shares": 1}, replicas=(3,))}, 3),
        ({"c": HeldShare(amounts={"memory": 50, "shares": 1})}, 1),
        ({"c": HeldShare(amounts={"memory": 10, "shares": 4})}, 0),
        ({"c": HeldShare(amounts={"memory": 100})}, 0),
    ],
)
def test_free_replicas_counts_what_fits_beside_the_others(held: dict[str, HeldShare], free: int) -> None:
    """A replica is free while each of its amounts is left.

    A device that became smaller has none.
    """
    assert free_replicas(GPU, held) == free


def test_shortage_of_names_the_first_capacity_that_is_short() -> None:
    """The numbers are those that a person needs: what is wanted, what is left, who has the rest."""
    held = {"claim/a": HeldShare(amounts={"memory": 61, "shares": 3})}

    short = shortage_of(GPU, {"memory": 20, "shares": 1}, held)

    assert short is not None
    assert (short.capacity, short.wanted, short.left, short.total, short.owners) == ("memory", 20, 19, 80, ("claim/a",))


def test_adopt_refuses_the_whole_of_a_shared_device_and_a_share_of_a_whole_one() -> None:
    """No device is whole and shared at once, whoever comes first."""
    claim = Owner(kind=OwnerKind.CLAIM, name="c", uid="c")
    by_share = take(Ledger(node="n"), plugin("0"), replica_share(GPU, [0]))
    whole = take(Ledger(node="n"), claim, None)
    assert isinstance(by_share, Step)
    assert isinstance(whole, Step)

    assert isinstance(take(by_share.ledger, claim, None), Refusal)
    assert isinstance(take(whole.ledger, plugin("0"), replica_share(GPU, [0])), Refusal)


def test_adopt_of_a_replica_takes_it_from_the_older_allocation_alone() -> None:
    """Kubelet gives a replica anew: the owner of before keeps its others, worth as much less, and
    nobody else loses anything.
    """
    first = take(Ledger(node="n"), plugin("0-1"), replica_share(GPU, [0, 1]))
    assert isinstance(first, Step)
    second = take(first.ledger, plugin("2"), replica_share(GPU, [2]))
    assert isinstance(second, Step)

    third = take(second.ledger, plugin("1"), replica_share(GPU, [1]))

    assert isinstance(third, Step)
    shares = {
        key: holding.shares["gpu"]["gpu-0"]
        for key, held in third.ledger.allocations.items()
        for holding in held.holdings
    }
    assert shares == {
        plugin("0-1").key: replica_share(GPU, [0]),
        plugin("1").key: replica_share(GPU, [1]),
        plugin("2").key: replica_share(GPU, [2]),
    }


def test_groups_lose_the_cpus_that_another_takes() -> None:
    """What is left of a holding names no CPU of a group that it has no more, and no group of which
    nothing is left.
    """
    held = Holding(cpus=CpuSet(0, 1, 4), groups={"cpu-numa-0": CpuSet(0, 1), "cpu-numa-1": CpuSet(4)})

    left = without(held, Holding(cpus=CpuSet(1, 4)))

    assert left == Holding(cpus=CpuSet(0), groups={"cpu-numa-0": CpuSet(0)})


def test_replica_is_named_by_its_device_and_number() -> None:
    """What is written otherwise is a device's own name, or no replica of ours."""
    assert replica_id("gpu-0", 3) == "gpu-0::3"
    assert [device_of_replica(name) for name in ("gpu-0::3", "gpu-0")] == ["gpu-0", "gpu-0"]
    assert [number_of_replica(name) for name in ("gpu-0::3", "gpu-0", "gpu-0::03", "gpu-0::-1", "gpu-0::99999")] == [
        3,
        None,
        None,
        None,
        None,
    ]


def test_device_that_is_not_shared_has_no_replicas() -> None:
    """Its operator took the sharing back."""
    assert free_replicas(structs.replace(GPU, sharing=None), {}) == 0


def test_capacity_that_the_device_does_not_tell_limits_no_replica() -> None:
    """A policy may name a capacity that a driver has not reported (yet).

    Shares are counted all the same.
    """
    assert free_replicas(structs.replace(GPU, capacity={"shares": 4}), {}) == 4


def test_ledger_with_one_replica_given_twice_breaks_the_invariant() -> None:
    """Each replica has one owner."""
    allocations = {
        owner.key: Allocation(
            owner=owner,
            holdings=(
                Holding(
                    devices={"gpu": ("gpu-0",)},
                    shared={"gpu": ("gpu-0",)},
                    shares={"gpu": {"gpu-0": HeldShare(replicas=(1,))}},
                ),
            ),
        )
        for owner in (plugin("a"), plugin("b"))
    }

    with pytest.raises(InvariantError, match="replica 1 of gpu gpu-0 is held by"):
        check_holders(Ledger(node="n", sequence=1, allocations=allocations))


def test_ledger_with_one_cpu_given_twice_breaks_the_invariant() -> None:
    """CPUs have one owner, and the error names those that have two."""
    allocations = {
        owner.key: Allocation(owner=owner, holdings=(Holding(cpus=CpuSet(*cpus)), Holding(cpus=CpuSet(7 + cpus[0]))))
        for owner, cpus in ((plugin("a"), (0, 1)), (plugin("b"), (1, 2)))
    }

    with pytest.raises(InvariantError, match=r"CPUs 1 are held by .* and by another owner"):
        check_holders(Ledger(node="n", sequence=1, allocations=allocations))


def test_replica_of_one_owner_meets_no_claim_by_share() -> None:
    """Only the same replica is a clash: a claim's share has none."""
    claim = Owner(kind=OwnerKind.CLAIM, name="c", uid="c")
    replica = take(Ledger(node="n"), plugin("0"), replica_share(GPU, [0]))
    assert isinstance(replica, Step)

    both = take(replica.ledger, claim, HeldShare(amounts={"memory": 20, "shares": 1}))

    assert isinstance(both, Step), both
    assert both.ledger.allocations.keys() == {plugin("0").key, claim.key}
