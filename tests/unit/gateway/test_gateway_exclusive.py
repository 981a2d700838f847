"""What kubelet's own CPU and memory managers gave, against the ledger."""

from __future__ import annotations

import pytest

from topobus.gateway.containers.rules.exclusive import ExclusiveUse, compare_exclusive, idle_containers
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.outcome import MemoryBlock
from topobus.values.request import Owner, OwnerKind

MEMORY = (MemoryBlock(kind="memory", nodes=NodeSet(1), shares=((1, 1 << 30),)),)
USE = ExclusiveUse(namespace="default", pod="p", container="c", cpus=CpuSet(4, 5), memory=MEMORY)
OLD = Owner(kind=OwnerKind.CONTAINER, namespace="default", name="old", uid="c")
CLAIM = Owner(kind=OwnerKind.CLAIM, namespace="default", name="training", uid="u")
PLACED = Owner(kind=OwnerKind.POD, namespace="default", name="p", uid="u")


def ledger(owner: Owner | None = None, cpus: CpuSet = CpuSet(), memory: tuple[MemoryBlock, ...] = ()) -> Ledger:  # noqa: B008  (immutable)
    """A ledger with one holding, or none."""
    if owner is None:
        return Ledger(node="n")
    return Ledger(
        node="n",
        allocations={owner.key: Allocation(owner=owner, holdings=(Holding(container="c", cpus=cpus, memory=memory),))},
    )


@pytest.mark.parametrize(
    ("written", "lacking"),
    [
        pytest.param(None, True, id="no-ledger"),
        pytest.param(ledger(), True, id="nobody"),
        pytest.param(ledger(USE.owner, CpuSet(4, 5), MEMORY), False, id="written"),
        pytest.param(ledger(USE.owner, CpuSet(4, 5, 6), MEMORY), True, id="had-more-before"),
        pytest.param(ledger(USE.owner, CpuSet(4, 5)), True, id="memory-missing"),
        pytest.param(ledger(OLD, CpuSet(4)), True, id="kubelet-gave-it-on"),
    ],
)
def test_container_is_written_down_when_the_ledger_does_not_say_so(written: Ledger | None, *, lacking: bool) -> None:
    """The word of kubelet is taken whole, and a newer one replaces what it gave another container
    before.
    """
    exclusive_uses, disagreements = compare_exclusive([USE], written)

    assert exclusive_uses == ((USE,) if lacking else ())
    assert disagreements == ()


def test_both_sides_are_named_when_somebody_else_holds_a_cpu() -> None:
    """A claim's CPU is not taken from it; the rest of the container's is written down."""
    (exclusive_use,), (said,) = compare_exclusive([USE], ledger(CLAIM, CpuSet(4)))

    assert exclusive_use.cpus == CpuSet(5)
    assert (said.device_class, said.device) == ("cpu", "cpu-4")
    assert said.kubelet == "container c of pod default/p (kubelet's CPU manager)"
    assert said.ledger == "claim default/training holds it"


def test_placed_pod_is_in_order_when_kubelet_lists_its_cpus() -> None:
    """What the ledger holds for the pod itself needs no second entry."""
    assert compare_exclusive([USE], ledger(PLACED, CpuSet(4, 5), MEMORY)) == ((), ())


def test_container_is_let_go_when_kubelet_lists_it_no_more() -> None:
    """Only what was kubelet's own; claims and pods are none of this."""
    gone = ledger(OLD, CpuSet(4))

    assert [idle_container.owner for idle_container in idle_containers(gone, [USE])] == [OLD]
    assert idle_containers(ledger(USE.owner, CpuSet(4, 5)), [USE]) == ()
    assert idle_containers(ledger(CLAIM, CpuSet(4)), []) == ()


@pytest.mark.parametrize(
    ("written", "keeper"),
    [
        pytest.param(None, "ended", id="nobody-has-it"),
        pytest.param(ledger(USE.owner, CpuSet(4, 5), MEMORY), "p", id="the-newer-has-it"),
    ],
)
def test_ledger_comes_to_rest_when_kubelet_lists_a_cpu_twice(written: Ledger | None, keeper: str) -> None:
    """A pod that has ended is listed for a while beside the one that has its CPUs now: one of them
    keeps each CPU, look after look.
    """
    ended = ExclusiveUse(namespace="default", pod="ended", container="c", cpus=CpuSet(4))
    exclusive_uses, disagreements = compare_exclusive([USE, ended], written)
    holder = {cpu: exclusive_use.pod for exclusive_use in exclusive_uses for cpu in exclusive_use.cpus} or {4: "p"}

    assert disagreements == ()
    assert holder[4] == keeper
    assert len([exclusive_use for exclusive_use in exclusive_uses if 4 in exclusive_use.cpus]) <= 1
