"""Promises of `place` on a node that aligns memory: memory comes with the devices, and groups of
nodes stay apart.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, owner, pod
from topobus.engine.alignment.planning.placement import place
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import MemoryBlock, Refusal
from topobus.values.request import ContainerKind, ContainerRequest, PodRequest, Policy
from topobus.values.view import AlignmentOptions, NodeView, NumaMemory, PlanMode
from unit.alignment.outcomes import codes, placed

GIB = 1 << 30


def with_memory(*, mode: PlanMode = PlanMode.COMPATIBLE, policy: Policy = Policy.RESTRICTED) -> NodeView:
    """The demo machine with 64 GiB and 8 GiB of huge pages a node, memory aligned."""
    return structs.replace(
        dgx(),
        options=AlignmentOptions(policy=policy, aligns_memory=True, mode=mode),
        memory=tuple(
            NumaMemory(id=node, allocatable={"memory": 64 * GIB, "hugepages-2Mi": 8 * GIB}) for node in (0, 1)
        ),
    )


def with_block(view: NodeView, name: str, nodes: str, **shares: int) -> NodeView:
    """The same node with memory held by the pod of that name; shares are `n0=…` in GiB."""
    block = MemoryBlock(
        kind="memory",
        nodes=NodeSet.parse(nodes),
        shares=tuple((int(node[1:]), size * GIB) for node, size in sorted(shares.items())),
    )
    return structs.replace(view, held_memory={owner(name).key: (block,)})


def hungry(name: str, gib: int, *, gpus: int = 2, hugepages: int = 0) -> PodRequest:
    """A pod of one container with memory."""
    wanted = structs.replace(
        container(gpu=gpus), memory_bytes=gib * GIB, hugepages={"hugepages-2Mi": hugepages * GIB} if hugepages else {}
    )
    return pod(name, wanted)


def test_place_takes_memory_with_the_devices_when_memory_is_aligned() -> None:
    """Memory and huge pages come from the node of the GPUs, and the placement says how much of
    which.
    """
    (container_placement,) = placed(place(with_block(with_memory(), "busy", "0", n0=40), hungry("p", 32, hugepages=2)))

    assert container_placement.alignment == Hint(NodeSet(1), preferred=True)
    assert container_placement.numa_nodes == NodeSet(1)
    assert {block.kind: block.by_node for block in container_placement.memory} == {
        "memory": {1: 32 * GIB},
        "hugepages-2Mi": {1: 2 * GIB},
    }


def test_place_keeps_groups_and_single_nodes_apart_when_memory_spans_nodes() -> None:
    """A node that serves a group takes no single-node block; the refusal names who holds it."""
    view = with_block(with_memory(), "wide", "0-1", n0=10, n1=10)

    outcome = place(view, hungry("p", 20))

    assert isinstance(outcome, Refusal)
    assert [reason.facts["owner"] for reason in outcome.to_free] == [owner("wide").key]


@pytest.mark.parametrize(
    ("mode", "code"), [(PlanMode.COMPATIBLE, "not-enough-memory"), (PlanMode.CORRECTED, "no-numa-node")]
)
def test_place_refuses_memory_that_is_not_there(mode: PlanMode, code: str) -> None:
    """Kubelet has no opinion and fails afterwards (k/k 128708).

    Corrected says beforehand that no node set has it.
    """
    assert code in codes(place(with_memory(mode=mode), hungry("p", 200)))


def test_place_lets_later_containers_reuse_the_init_containers_memory() -> None:
    """What an init container took on the same nodes is not taken again."""
    init = ContainerRequest(name="init", kind=ContainerKind.INIT, memory_bytes=48 * GIB)
    main = ContainerRequest(name="main", memory_bytes=56 * GIB)

    first, second = placed(place(with_memory(), PodRequest(owner=owner("p"), containers=(init, main))))

    assert [block.by_node for block in (*first.memory, *second.memory)] == [{0: 48 * GIB}, {0: 8 * GIB}]


def test_place_never_aligns_memory_that_may_be_exceeded() -> None:
    """Burstable memory is no matter of NUMA nodes, as in kubelet."""
    request = pod("p", structs.replace(container(gpu=1), memory_bytes=500 * GIB, is_memory_fixed=False))

    assert placed(place(with_memory(), request))[0].memory == ()


def test_place_ignores_memory_when_the_node_does_not_align_it() -> None:
    """Without the policy memory is only recorded, as with kubelet's policy None."""
    (container_placement,) = placed(place(dgx(), hungry("p", 10_000)))

    assert container_placement.memory == ()
