"""Memory goes through the ledger: what a placement takes is held until its owner lets go, over
storing and loading.
"""

from __future__ import annotations

from msgspec import structs

from support.alignment_nodes import container, dgx_facts, owner, pod
from topobus.engine.alignment.planning.node_view import node_view, with_ledger
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger import transitions
from topobus.formats.messages.codec import decode, encode
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.machine import HugepagePool
from topobus.values.outcome import Placement
from topobus.values.view import AlignmentOptions

GIB = 1 << 30


def test_ledger_holds_memory_until_the_owner_is_released() -> None:
    """Placed, stored, loaded, released: free memory follows, to the byte."""
    machine, inventories = dgx_facts()
    view = node_view(
        machine, inventories, None, AlignmentOptions(aligns_memory=True), CpuSet(), reserved_memory={0: 24 * GIB}
    )
    request = pod("p", structs.replace(container(gpu=1), memory_bytes=900 * GIB))
    outcome = place(view, request)
    assert isinstance(outcome, Placement)

    step = transitions.reserve(
        Ledger(node="demo-node"), op_id="op-1", request=request, placement=outcome, decision_id="d-1"
    )
    stored = decode(encode(step.ledger), Ledger)
    held = with_ledger(view, stored)
    freed = with_ledger(view, transitions.release(stored, op_id="op-2", owner=owner("p"), decision_id="d-2").ledger)

    assert [block.by_node for block in held.held_memory[owner("p").key]] == [{0: 900 * GIB}]
    assert freed.held_memory == {}
    again = place(held, structs.replace(request, owner=owner("q")))
    assert isinstance(again, Placement)
    assert again.containers[0].memory[0].by_node == {1: 900 * GIB}


def test_node_view_counts_memory_as_kubelet_does() -> None:
    """Ordinary memory is the node's without its huge pages and what is reserved.

    Pools are named as Kubernetes names them.
    """
    machine, inventories = dgx_facts()
    pools = (HugepagePool(page_bytes=2 << 20, total=1024, free=0), HugepagePool(page_bytes=GIB, total=3, free=3))
    machine = structs.replace(
        machine, numa_nodes=tuple(structs.replace(numa_node, hugepages=pools) for numa_node in machine.numa_nodes)
    )

    view = node_view(machine, inventories, None, AlignmentOptions(), CpuSet(), reserved_memory={1: GIB})

    assert [numa_memory.allocatable for numa_memory in view.memory] == [
        {"memory": (1024 - 5) * GIB, "hugepages-2Mi": 2 * GIB, "hugepages-1Gi": 3 * GIB},
        {"memory": (1024 - 6) * GIB, "hugepages-2Mi": 2 * GIB, "hugepages-1Gi": 3 * GIB},
    ]
