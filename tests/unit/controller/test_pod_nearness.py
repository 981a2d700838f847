"""Pods that wish for their alignment: the devices of all their claims, their CPUs and their memory
are judged as one.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.alignment.planning.placement import place
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, NoFit, Outcome
from topobus.engine.claims.lifecycle import owner_of, read_claim
from topobus.engine.claims.objects import Claim, Pod
from topobus.engine.scheduling.aligned_allocation import AlignedClaims, allocate_near, read_alignment_request
from topobus.engine.scheduling.pod_alignment import aligned_pod_request, claim_uses, groups_of
from topobus.formats.kubernetes import admit
from topobus.formats.messages.messages import ApiObject
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.outcome import Placement
from topobus.values.request import ClaimUse, Owner, OwnerKind, PodRequest, Policy, Scope
from topobus.values.view import AlignmentOptions, NodeAlignment
from unit.controller.nearness import COMPILER, NODE, claim, entry, names, state


def pod(
    annotations: dict[str, str], *containers: dict[str, Any], claims: tuple[str, ...] = ("gpus", "nics")
) -> ApiObject:
    """Make a pod; its one container uses all claims unless said otherwise."""
    used = {"claims": [{"name": each_claim} for each_claim in claims], "limits": {"cpu": "4", "memory": "4Gi"}}
    spec = {
        "containers": list(containers) or [{"name": "main", "resources": used}],
        "resourceClaims": [{"name": each_claim, "resourceClaimName": each_claim} for each_claim in claims],
    }
    return admit(
        ApiObject(api_version="v1", kind="Pod", metadata={"name": "trainer", "annotations": annotations}, spec=spec),
        uid="uid-trainer",
        now="2026-01-01T00:00:00Z",
    )


def solve(there: StandaloneState, api_object: ApiObject, *wanted: ApiObject) -> Outcome:
    """Allocate a pod's claims together, named in its spec as they are themselves."""
    specs = [(Claim(claim_), read_claim(claim_)) for claim_ in wanted]
    wished = [AlignedClaims(asked, read_alignment_request(spec, "claim")) for asked, spec in specs]
    request = aligned_pod_request(Pod(api_object), {claim_.metadata["name"]: owner_of(claim_).key for claim_ in wanted})
    return allocate_near(there.input_for(NODE, specs), wished, there.view_of(NODE), COMPILER, pod=request)


GPUS, NICS = claim({"gpu": 1}, name="gpus"), claim({"nic": 1}, name="nics")


@pytest.mark.parametrize(
    ("wishes", "held", "expected"),
    [
        pytest.param(
            {"topobus.dev/locality": "hard:switch"},
            {"gpu": ("gpu-0", "gpu-1")},
            [["gpu-2"], ["nic-2"]],
            id="hard-switch",
        ),
        pytest.param(
            {"topobus.dev/locality": "soft:switch"},
            {"gpu": ("gpu-0", "gpu-1")},
            [["gpu-2"], ["nic-2"]],
            id="soft-switch",
        ),
        pytest.param(
            {"topobus.dev/policy": "single-numa-node"},
            {"gpu": ("gpu-0", "gpu-1", "gpu-2", "gpu-3")},
            [["gpu-4"], ["nic-4"]],
            id="single-numa-node",
        ),
        pytest.param(
            {"topobus.dev/locality": "soft:switch"},
            {"gpu": ("gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5", "gpu-6"), "nic": ("nic-6", "nic-7")},
            [["gpu-7"], ["nic-0"]],
            id="soft-given-up",
        ),
    ],
)
def test_claims_of_a_pod_lie_together_when_the_pod_wishes_it(
    wishes: dict[str, str], held: dict[str, tuple[str, ...]], expected: list[list[str]]
) -> None:
    """Two claims of two drivers that say nothing themselves: the pod's wish holds over both."""
    assert names(solve(state(**held), pod(wishes), GPUS, NICS)) == expected


def test_claims_of_a_pod_are_served_as_ever_when_it_wishes_nothing() -> None:
    """Without annotations the result is the very one of the ordinary
    search, whatever lies where.
    """
    there = state(gpu=("gpu-0", "gpu-1"))
    specs = [(Claim(api_object), read_claim(api_object)) for api_object in (GPUS, NICS)]

    assert aligned_pod_request(Pod(pod({})), {"gpus": owner_of(GPUS).key}) is None
    assert solve(there, pod({}), GPUS, NICS) == allocate(there.input_for(NODE, specs), COMPILER)
    assert names(solve(there, pod({}), GPUS, NICS)) == [["gpu-2"], ["nic-0"]]


def _with_cpus_held(there: StandaloneState, cpus: CpuSet) -> StandaloneState:
    taker = Owner(kind=OwnerKind.POD, name="taker", uid="t")
    allocation = Allocation(owner=taker, holdings=(Holding(container="main", cpus=cpus),))
    there.put_ledger(Ledger(node=NODE, sequence=1, allocations={taker.key: allocation}))
    return there


def test_devices_come_from_where_the_pod_has_cpus_left() -> None:
    """All CPUs of NUMA node 0 are taken: the pod's own four must come from node 1, so its claims'
    devices do, too.
    """
    there = state()
    view = there.view_of(NODE)
    assert view is not None
    of_node_0 = CpuSet.of(cpu for core in view.cores if core.numa_node == 0 for cpu in core.cpus)

    devices = names(
        solve(_with_cpus_held(there, of_node_0), pod({"topobus.dev/policy": "single-numa-node"}), GPUS, NICS)
    )

    assert devices == [["gpu-4"], ["nic-4"]]


def test_pod_is_refused_with_the_engines_reason_when_no_place_has_devices_and_cpus() -> None:
    """CPUs are left on node 0 alone and GPUs on node 1 alone: the claim could be served, the pod
    could not.
    """
    there = state()
    view = there.view_of(NODE)
    assert view is not None
    taker = Owner(kind=OwnerKind.POD, name="taker", uid="t")
    of_node_1 = CpuSet.of(cpu for core in view.cores if core.numa_node == 1 for cpu in core.cpus)
    held = Holding(container="main", cpus=of_node_1, devices={"gpu": ("gpu-0", "gpu-1", "gpu-2", "gpu-3")})
    there.put_ledger(Ledger(node=NODE, sequence=1, allocations={taker.key: Allocation(owner=taker, holdings=(held,))}))

    outcome = solve(there, pod({"topobus.dev/policy": "single-numa-node"}), GPUS, NICS)

    assert isinstance(outcome, NoFit)
    assert outcome.reasons[0].code == "locality-not-met"
    assert "policy single-numa-node" in outcome.reasons[0].message


def test_controller_judges_with_the_nodes_own_options() -> None:
    """The node reserves all CPUs of NUMA node 0: the controller knows,
    and looks at node 1 at once.
    """
    there = state()
    view = there.view_of(NODE)
    assert view is not None
    reserved = CpuSet.of(cpu for core in view.cores if core.numa_node == 0 for cpu in core.cpus)
    wish = pod({"topobus.dev/policy": "single-numa-node"})
    assert names(solve(there, wish, GPUS, NICS)) == [["gpu-0"], ["nic-0"]]

    there.put_alignment(
        NODE, NodeAlignment(node=NODE, options=AlignmentOptions(policy=Policy.RESTRICTED), reserved_cpus=reserved)
    )

    assert names(solve(there, wish, GPUS, NICS)) == [["gpu-4"], ["nic-4"]]


def test_node_places_the_pod_where_the_controller_chose_its_devices() -> None:
    """The node is asked the same question by the same engine: CPUs come from the NUMA node of the
    claims' devices.
    """
    there = state(gpu=("gpu-0", "gpu-1", "gpu-2", "gpu-3"))
    api_object = pod({"topobus.dev/policy": "single-numa-node"})
    outcome = solve(there, api_object, GPUS, NICS)
    assert isinstance(outcome, Allocated)
    taken = {
        owner_of(claim_).key: Allocation(
            owner=owner_of(claim_), holdings=(Holding(container="", devices={kind: tuple(found_names)}),)
        )
        for claim_, kind, found_names in zip((GPUS, NICS), ("gpu", "nic"), names(outcome), strict=True)
    }
    there.put_ledger(Ledger(node=NODE, sequence=1, allocations=taken))
    request = aligned_pod_request(Pod(api_object), {"gpus": owner_of(GPUS).key, "nics": owner_of(NICS).key})
    view = there.view_of(NODE)
    assert request is not None
    assert view is not None

    placed = place(view, request)

    assert isinstance(placed, Placement)
    assert placed.containers[0].numa_nodes == NodeSet(1)
    assert len(placed.containers[0].cpus) == 4


def test_matched_values_stand_in_the_allocation_for_prepare() -> None:
    """Each claim of the pod is told where the devices of both lie.

    The configuration is for our driver, and not there without a wish.
    """
    wished = solve(state(gpu=("gpu-0", "gpu-1")), pod({"topobus.dev/locality": "hard:switch"}), GPUS, NICS)
    plain = solve(state(gpu=("gpu-0", "gpu-1")), pod({}), GPUS, NICS)
    assert isinstance(wished, Allocated)
    assert isinstance(plain, Allocated)

    opaques = [allocation_result.devices.config[-1].opaque for allocation_result in wished.results]

    assert [opaque_configuration.driver for opaque_configuration in opaques if opaque_configuration is not None] == [
        "topobus.dev",
        "topobus.dev",
    ]
    assert all(
        opaque_configuration is not None
        and opaque_configuration.parameters["kind"] == "AlignmentResult"
        and opaque_configuration.parameters["numaNodes"] == "0"
        for opaque_configuration in opaques
    )
    assert (
        len(
            {
                tuple(opaque_configuration.parameters["pcieSwitches"])
                for opaque_configuration in opaques
                if opaque_configuration is not None
            }
        )
        == 1
    )
    assert [allocation_result.devices.config for allocation_result in plain.results] == [(), ()]


def test_matched_values_stand_in_the_allocation_of_a_claim_with_a_wish_of_its_own() -> None:
    """A claim that wishes for itself is told, too; another of the same pod is not."""
    near = claim({"gpu": 1, "nic": 1}, entry(locality="hard:numa"), name="gpus")

    outcome = solve(state(), pod({}), near, NICS)

    assert isinstance(outcome, Allocated)
    kinds = [
        [
            granted_configuration.opaque.parameters["kind"]
            for granted_configuration in result.devices.config
            if granted_configuration.opaque is not None
        ]
        for result in outcome.results
    ]
    assert kinds == [["AlignmentParameters", "AlignmentResult"], []]


def _container(name: str, *uses: str) -> dict[str, Any]:
    return {"name": name, "resources": {"claims": [{"name": use} for use in uses]}}


def test_claims_of_two_containers_may_lie_apart_when_scope_is_container() -> None:
    """With scope container each container has a place of its own; with scope pod there is one for
    all.
    """
    containers = (_container("a", "gpus"), _container("b", "nics"))
    held = {"gpu": ("gpu-0", "gpu-1", "gpu-2", "gpu-3"), "nic": ("nic-4", "nic-5", "nic-6", "nic-7")}

    for scope, expected in (("container", [["gpu-4"], ["nic-0"]]), ("pod", None)):
        wishes = {"topobus.dev/policy": "single-numa-node", "topobus.dev/scope": scope}
        outcome = solve(state(**held), pod(wishes, *containers), GPUS, NICS)
        assert (names(outcome) if isinstance(outcome, Allocated) else None) == expected


def test_groups_join_claims_over_the_containers_that_use_them() -> None:
    """A claim that two containers use ties them.

    One that nobody uses is tied to nothing, but for scope pod.
    """
    owner = Owner(kind=OwnerKind.POD, name="p", uid="p")
    uses = [("k0", ("a",)), ("k1", ("b",)), ("k2", ("a", "b")), ("k3", ()), ("k4", ("c",))]
    request = PodRequest(
        owner=owner,
        containers=(),
        claims=tuple(ClaimUse(owner_key=key, containers=containers) for key, containers in uses),
    )
    keys = [key for key, _ in uses]

    assert groups_of(request, keys, Scope.CONTAINER) == (frozenset({0, 1, 2}), frozenset({4}))
    assert groups_of(request, keys, Scope.POD) == (frozenset(range(5)),)


def test_claim_uses_name_the_containers_in_the_pods_order() -> None:
    """Init containers come first; a claim that is used twice in one container counts once."""
    api_object = pod({}, _container("main", "gpus", "gpus", "nics"), _container("side", "nics"))

    assert claim_uses(Pod(api_object), {"gpus": "k0", "nics": "k1"}) == (
        ClaimUse(owner_key="k0", containers=("main",)),
        ClaimUse(owner_key="k1", containers=("main", "side")),
    )
