"""Claims for CPUs get what kubelet's static policy would take: through the stand-alone home, the
cluster's home and classic DRA.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.cpu_parity import MACHINES, NODE, compare, grouped_inventory_of, inventory_of, machine_named
from support.laws import examples
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.alignment.cpus.cpu_assignment import take_cpus
from topobus.engine.alignment.cpus.cpu_topology import CpuTopology
from topobus.engine.alignment.planning.node_view import cores_of
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, NoFit, Outcome
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.objects import Claim
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.kubernetes.slices import slice_order
from topobus.formats.messages.messages import ApiObject
from topobus.values.idset import CpuSet
from topobus.values.view import AlignmentOptions, CpuOptions, NodeAlignment


@pytest.mark.law
# Half a minute of work: the limit for a hang alone is too near on a machine with other work.
@pytest.mark.timeout(900)
async def test_picks_are_the_static_policys_on_random_sequences() -> None:
    """Whatever was allocated and released before, each claim gets the policy's CPUs, or is refused
    where the policy refuses; with all sets of options.
    """
    sequences = examples(75)

    compared = await compare(sequences)

    assert compared.picks > 6 * sequences
    assert compared.refusals > sequences // 8
    assert set(compared.by_machine) == set(MACHINES)
    assert len(compared.by_door) == 3


@pytest.mark.parametrize("name", MACHINES)
def test_slices_begin_with_the_policys_cpus_when_nothing_is_held(name: str) -> None:
    """A scheduler that takes the first devices that fit takes the policy's on an idle node, however
    many it is asked for.
    """
    topology = CpuTopology.of_cores(cores_of(machine_named(name)))
    order = [device.cpu for device in slice_order(inventory_of(name).devices) if device.cpu is not None]
    everything = CpuSet.of(order)

    for count in range(1, len(order) + 1):
        assert CpuSet.of(order[:count]) == take_cpus(topology, everything, count), count


def _state(**options: Any) -> StandaloneState:
    state = StandaloneState()
    state.put_machine(machine_named("dgx"))
    state.put_inventory(inventory_of("dgx"))
    alignment = AlignmentOptions(cpu=CpuOptions(**options.pop("cpu", {})))
    state.put_alignment(NODE, NodeAlignment(node=NODE, options=alignment, **options))
    return state


def _ask(state: StandaloneState, *requests: dict[str, Any], constraints: tuple[dict[str, Any], ...] = ()) -> Outcome:
    spec = {
        "devices": {
            "requests": [
                {"name": f"r{number}", "exactly": {"deviceClassName": "cpu.topobus.dev", **request}}
                for number, request in enumerate(requests)
            ],
            "constraints": list(constraints),
        }
    }
    claim = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": "u"},
        spec=spec,
    )
    given = state.input_for(NODE, [(Claim(claim), read_as(spec, ClaimSpec, where="claim"))])
    return allocate(given, CelCompiler())


def _cpus(outcome: Outcome) -> dict[str, CpuSet]:
    assert isinstance(outcome, Allocated), outcome
    by_request: dict[str, list[int]] = {}
    for granted in outcome.results[0].devices.results:
        by_request.setdefault(granted.request, []).append(int(granted.device.removeprefix("cpu-")))
    return {request: CpuSet.of(cpus) for request, cpus in by_request.items()}


def _selector(expression: str) -> dict[str, Any]:
    return {"selectors": [{"cel": {"expression": expression}}]}


def test_requests_keep_their_selectors_when_cpus_are_exchanged() -> None:
    """A request for the second socket gets whole cores of it.

    Another of the same claim gets none of these.
    """
    outcome = _ask(_state(), {"count": 3}, {"count": 4, **_selector("device.attributes['topobus.dev'].socket == 1")})

    assert _cpus(outcome) == {"r0": CpuSet(0, 1, 112), "r1": CpuSet(56, 57, 168, 169)}


def test_earlier_request_leaves_a_later_one_what_only_that_can_use() -> None:
    """The policy's first CPUs are the only ones that the later request may have: the earlier one
    takes others.
    """
    outcome = _ask(_state(), {"count": 2}, {"count": 2, **_selector("device.attributes['topobus.dev'].core == 0")})

    assert _cpus(outcome) == {"r0": CpuSet(1, 113), "r1": CpuSet(0, 112)}


def test_constraint_holds_when_cpus_are_exchanged() -> None:
    """All CPUs of a claim that wants one NUMA node are of one, and distinct cores stay distinct."""
    together = _cpus(_ask(_state(), {"count": 5}, constraints=({"matchAttribute": "topobus.dev/numaNode"},)))["r0"]
    apart = _cpus(_ask(_state(), {"count": 2}, constraints=({"distinctAttribute": "topobus.dev/core"},)))["r0"]

    assert together == CpuSet(0, 1, 2, 112, 113)
    assert apart == CpuSet(0, 1)


def test_reserved_cpus_are_given_to_nobody() -> None:
    """What the node reserves for the system is passed by, and asked for by number it is refused
    with the reason.
    """
    state = _state(reserved_cpus=CpuSet(0, 112))

    taken = _cpus(_ask(state, {"count": 2}))["r0"]
    refused = _ask(state, {"count": 1, **_selector("device.attributes['topobus.dev'].cpu == 0")})

    assert taken == CpuSet(1, 113)
    assert isinstance(refused, NoFit)
    assert "reserved for the system" in str(refused.reasons)


def test_half_cores_are_refused_when_only_whole_ones_are_given() -> None:
    """With full-pcpus-only an odd number is refused, as kubelet does."""
    outcome = _ask(_state(cpu={"full_pcpus_only": True}), {"count": 3})

    assert isinstance(outcome, NoFit)
    assert outcome.reasons[0].code == "smt-alignment"


def test_groups_are_shared_by_the_number_of_cpus() -> None:
    """Claims take a group's capacity, one CPU where they name no number, until none is left; which
    CPUs these are is the node's to say.
    """
    state = StandaloneState()
    state.put_machine(machine_named("dgx"))
    state.put_inventory(grouped_inventory_of("dgx", "numa"))
    match = {"matchAttribute": "resource.kubernetes.io/numaNode"}

    both = _ask(state, {"capacity": {"requests": {"cpus": "100"}}}, {}, constraints=(match,))
    apart = _ask(state, {"capacity": {"requests": {"cpus": "100"}}}, {"capacity": {"requests": {"cpus": "100"}}})
    too_many = _ask(state, {"capacity": {"requests": {"cpus": "113"}}})

    assert isinstance(both, Allocated)
    assert [(granted.device, granted.consumed_capacity) for granted in both.results[0].devices.results] == [
        ("cpu-numa-0", {"cpus": "100"}),
        ("cpu-numa-0", {"cpus": "1"}),
    ]
    assert isinstance(apart, Allocated)
    assert [granted.device for granted in apart.results[0].devices.results] == ["cpu-numa-0", "cpu-numa-1"]
    assert isinstance(too_many, NoFit)
