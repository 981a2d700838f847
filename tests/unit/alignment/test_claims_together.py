"""A pod and its claims as one: what claims hold already decides where the pod's own CPUs, memory
and devices come from.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from topobus.engine.alignment.planning.claim_alignment import with_claim_held
from topobus.engine.alignment.planning.placement import place, plan
from topobus.values.device import Device
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Placement, Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import (
    ClaimUse,
    ContainerRequest,
    DeviceRequest,
    Locality,
    LocalityLevel,
    Owner,
    OwnerKind,
    PodRequest,
    Policy,
    Scope,
)
from topobus.values.view import AlignmentOptions, CoreView, NodeView, NumaMemory

POD = Owner(kind=OwnerKind.POD, name="trainer", uid="p")
CLAIM, OTHER = (Owner(kind=OwnerKind.CLAIM, name=name, uid=name).key for name in ("gpus", "nics"))
GIB = 1 << 30


def _view(**held: tuple[str, ...]) -> NodeView:
    """Two NUMA nodes of eight CPUs, two GPUs and two NICs each, a switch for each pair; `held` is
    what the claim holds.
    """
    devices = {
        name: tuple(
            Device(
                name=f"{name}-{index}",
                device_class=name,
                numa_nodes=NodeSet(index // 2),
                pcie_switch=PciAddress(0, index + 1, 0, 0),
            )
            for index in range(4)
        )
        for name in ("gpu", "nic")
    }
    empty = NodeView(
        node="n",
        options=AlignmentOptions(aligns_memory=True),
        numa_nodes=NodeSet(0, 1),
        distances=((10, 21), (21, 10)),
        cores=tuple(
            CoreView(cpus=CpuSet(core), numa_node=core // 8, socket=core // 8, l3=core // 8 * 8) for core in range(16)
        ),
        devices=devices,
        memory=tuple(NumaMemory(id=node, allocatable={"memory": 16 * GIB}) for node in range(2)),
    )
    return with_claim_held(empty, CLAIM, dict(held), CpuSet()) if held else empty


def _pod(*containers: ContainerRequest, uses: tuple[str, ...] = ("main",), **wishes: object) -> PodRequest:
    made = containers or (ContainerRequest(name="main", cpus=4, memory_bytes=GIB),)
    return structs.replace(
        PodRequest(owner=POD, containers=made, claims=(ClaimUse(owner_key=CLAIM, containers=uses),)), **wishes
    )


def _placed(view: NodeView, request: PodRequest) -> Placement:
    outcome = place(view, request)
    assert isinstance(outcome, Placement), outcome
    return outcome


@pytest.mark.parametrize("policy", [Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
def test_place_takes_cpus_and_memory_where_the_claims_devices_are(policy: Policy) -> None:
    """The claim holds a GPU of NUMA node 1: CPUs and memory come from there, though node 0 would
    come first.

    Without the claim they come from node 0.
    """
    view = _view(gpu=("gpu-3",))

    [container_placement] = _placed(view, _pod(policy=policy)).containers
    [alone] = _placed(view, structs.replace(_pod(policy=policy), claims=())).containers

    assert (container_placement.cpus, container_placement.numa_nodes) == (CpuSet.of(range(8, 12)), NodeSet(1))
    assert {node for block in container_placement.memory for node in block.nodes} == {1}
    assert alone.cpus == CpuSet.of(range(4))


def test_place_gives_the_pod_nothing_of_what_its_claims_hold() -> None:
    """The claim's device is in no container of the placement: it stays the claim's."""
    [container_placement] = _placed(_view(gpu=("gpu-3",)), _pod(policy=Policy.RESTRICTED)).containers

    assert container_placement.devices == {}


def test_place_refuses_when_the_claims_devices_and_the_cpus_have_no_node_in_common() -> None:
    """Two GPUs of two NUMA nodes cannot be on one: single-numa-node
    says no, best-effort goes on.
    """
    view = _view(gpu=("gpu-0", "gpu-3"))

    assert isinstance(place(view, _pod(policy=Policy.SINGLE_NUMA_NODE)), Refusal)
    assert isinstance(place(view, _pod(policy=Policy.BEST_EFFORT)), Placement)


def test_place_keeps_a_hard_locality_over_claims_and_own_devices() -> None:
    """A NIC of the pod's own comes from the switch under which the claim's GPU is.

    When that NIC is gone the pod is refused.
    """
    near = (Locality(level=LocalityLevel.SWITCH),)
    wants = ContainerRequest(name="main", devices=(DeviceRequest(device_class="nic", count=1),))
    view = _view(gpu=("gpu-2",))

    [container_placement] = _placed(view, _pod(wants, locality=near)).containers
    taken = with_claim_held(view, OTHER, {"nic": ("nic-2",)}, CpuSet())

    assert container_placement.devices == {"nic": ("nic-2",)}
    assert isinstance(place(taken, _pod(wants, locality=near)), Refusal)


def test_place_aligns_only_the_container_that_uses_the_claim_when_scope_is_container() -> None:
    """The other container is free to go where there is room."""
    containers = tuple(ContainerRequest(name=name, cpus=4) for name in ("side", "main"))

    side, main = _placed(
        _view(gpu=("gpu-3",)), _pod(*containers, policy=Policy.RESTRICTED, scope=Scope.CONTAINER)
    ).containers

    assert (side.numa_nodes, main.numa_nodes) == (NodeSet(0), NodeSet(1))


def test_place_aligns_the_whole_pod_when_scope_is_pod() -> None:
    """With scope pod the claim binds all containers, and one that no container uses counts, too."""
    containers = tuple(ContainerRequest(name=name, cpus=4) for name in ("side", "main"))

    for uses in (("main",), ()):
        request = _pod(*containers, uses=uses, policy=Policy.SINGLE_NUMA_NODE, scope=Scope.POD)
        assert [container.numa_nodes for container in _placed(_view(gpu=("gpu-3",)), request).containers] == [
            NodeSet(1),
            NodeSet(1),
        ]


def test_place_counts_the_cpus_of_a_claim_as_the_containers_own() -> None:
    """CPUs that a claim holds on node 1 draw the pod's own to node 1, and are not given twice."""
    view = with_claim_held(_view(), CLAIM, {}, CpuSet(8, 9))

    [container_placement] = _placed(
        view, _pod(ContainerRequest(name="main", cpus=4), policy=Policy.SINGLE_NUMA_NODE)
    ).containers

    assert container_placement.cpus == CpuSet.of(range(10, 14))


def test_plan_and_place_say_the_same_when_claims_take_part() -> None:
    """The controller judges with `plan`, the node answers with `place`."""
    view, request = _view(gpu=("gpu-3",)), _pod(policy=Policy.RESTRICTED)

    assert plan(view, request) == place(view, request)
