"""Promises of CPU assignment: kubelet's static policy, its options, and
what `corrected` changes.
"""

from __future__ import annotations

import pytest

from topobus.engine.alignment.cpus.cpu_assignment import assign_cpus, contradiction, take_cpus
from topobus.engine.alignment.cpus.cpu_hints import cpu_hints
from topobus.engine.alignment.cpus.cpu_topology import CpuPlace, CpuTopology
from topobus.engine.alignment.cpus.exclusive_choice import choose_exclusive_cpus
from topobus.engine.alignment.cpus.numa_distribution import find_spread
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Refusal
from topobus.values.view import CpuOptions


def machine(nodes: int, cores_a_node: int, threads: int = 2, *, offline: tuple[int, ...] = ()) -> CpuTopology:
    """One socket a node; siblings are numbered after all first threads; one L3 a node."""
    cores = nodes * cores_a_node
    places = (
        CpuPlace(
            cpu=core + thread * cores,
            core=core,
            socket=core // cores_a_node,
            numa_node=core // cores_a_node,
            l3=core // cores_a_node,
        )
        for thread in range(threads)
        for core in range(cores)
    )
    return CpuTopology(place for place in places if place.cpu not in offline)


def test_take_cpus_takes_whole_cores_first_when_some_are_broken() -> None:
    """Whole free cores go first, single threads last."""
    topology = machine(1, 4)

    assert take_cpus(topology, CpuSet.parse("0-3,5-7"), 3) == CpuSet(0, 1, 5)


def test_assign_cpus_stays_inside_the_alignment_when_it_can() -> None:
    """CPUs outside the mask are used only for what does not fit inside."""
    topology = machine(2, 4)

    assert assign_cpus(topology, CpuSet.parse("0-15"), 4, NodeSet(1)) == CpuSet(4, 5, 12, 13)
    assert assign_cpus(topology, CpuSet.parse("0-15"), 10, NodeSet(1)) == CpuSet.parse("0,4-8,12-15")


def test_assign_cpus_is_none_when_there_are_too_few() -> None:
    """Too few free CPUs give no partial answer."""
    assert assign_cpus(machine(1, 2), CpuSet(0), 2, None) is None


def test_take_cpus_spreads_evenly_when_told_to_distribute() -> None:
    """distribute-cpus-across-numa takes equal shares where more than one node is needed."""
    taken = take_cpus(machine(2, 4), CpuSet.parse("0-15"), 10, CpuOptions(distribute_cpus_across_numa=True))

    assert taken is not None
    assert len(taken & CpuSet.parse("0-3,8-11")) == 5


@pytest.mark.parametrize(
    ("is_corrected", "nodes"), [(False, {0, 1, 2, 7}), (True, {0, 1, 2, 3})], ids=["compatible", "corrected"]
)
def test_take_cpus_lands_where_kubelets_defect_leads_when_compatible(is_corrected: bool, nodes: set[int]) -> None:
    """k/k 141237: with 8 free nodes of 8 CPUs, 32 CPUs land on nodes 0, 1, 2 and 7.

    Corrected uses the nodes that were scored.
    """
    topology = machine(8, 8, threads=1)

    taken = take_cpus(
        topology, CpuSet.parse("0-63"), 32, CpuOptions(distribute_cpus_across_numa=True, is_corrected=is_corrected)
    )

    assert taken is not None
    assert set(topology.nodes_of(taken)) == nodes


@pytest.mark.parametrize(("is_corrected", "nodes"), [(False, "0"), (True, "0-1")], ids=["compatible", "corrected"])
def test_assign_cpus_uses_every_node_of_the_affinity_when_corrected(is_corrected: bool, nodes: str) -> None:
    """k/k 139456: with distribute-cpus-across-numa the affinity's width is a floor for the nodes
    used, since 1.37.
    """
    topology = machine(2, 4)

    taken = assign_cpus(
        topology,
        CpuSet.parse("0-15"),
        4,
        NodeSet(0, 1),
        CpuOptions(distribute_cpus_across_numa=True, is_corrected=is_corrected),
    )

    assert taken is not None
    assert str(topology.nodes_of(taken)) == nodes


@pytest.mark.parametrize(("is_corrected", "wanted"), [(False, "1-2"), (True, "2,6")], ids=["compatible", "corrected"])
def test_take_cpus_finds_whole_cores_when_a_sibling_is_offline(is_corrected: bool, wanted: str) -> None:
    """k/k 124066: one offline sibling makes kubelet's average one thread a core, so no pair counts
    as whole and single threads are taken.

    kubelet itself would take CPU 5 with CPU 1 here, though it is busy;
    nobody is ever given a busy CPU.
    """
    topology = machine(1, 4, offline=(4,))

    taken = take_cpus(topology, CpuSet.parse("1,2,3,6,7"), 2, CpuOptions(is_corrected=is_corrected))

    assert taken == CpuSet.parse(wanted)


def l3_machine() -> CpuTopology:
    """One NUMA node, two L3 groups of four cores with two threads."""
    return CpuTopology(CpuPlace(core + 8 * thread, core, 0, 0, core // 4) for thread in range(2) for core in range(8))


@pytest.mark.parametrize(("is_corrected", "groups"), [(False, 2), (True, 1)], ids=["compatible", "corrected"])
def test_take_cpus_stays_under_one_l3_when_cores_are_broken(is_corrected: bool, groups: int) -> None:
    """k/k 137315: kubelet misses an L3 group that has enough CPUs, when some of its cores are only
    half free.
    """
    topology = l3_machine()
    free = CpuSet.parse("0,1,2,10,4,12,5")

    taken = take_cpus(topology, free, 4, CpuOptions(prefer_align_cpus_by_uncorecache=True, is_corrected=is_corrected))

    assert taken is not None
    assert sum(1 for cpus in topology.by_l3.values() if cpus & taken.bits) == groups


def test_contradiction_names_the_pair_when_options_exclude_each_other() -> None:
    """Options that kubelet refuses together are named."""
    assert contradiction(CpuOptions(full_pcpus_only=True, distribute_cpus_across_numa=True)) == ""
    assert (
        contradiction(CpuOptions(prefer_align_cpus_by_uncorecache=True, distribute_cpus_across_numa=True))
        == "prefer-align-cpus-by-uncorecache and distribute-cpus-across-numa"
    )


def test_take_cpus_never_loops_when_leftovers_are_smaller_than_a_core() -> None:
    """k/k 140730: full-pcpus-only and distribute-cpus-across-numa with odd leftovers ends with an
    answer.
    """
    options = CpuOptions(distribute_cpus_across_numa=True, full_pcpus_only=True)

    taken = take_cpus(machine(2, 4), CpuSet.parse("0-2,8-9,4-6,12-13"), 10, options)

    assert taken is None or len(taken) == 10


@pytest.mark.parametrize(
    "options", [CpuOptions(distribute_cpus_across_numa=True), CpuOptions()], ids=["distribute", "plain"]
)
def test_take_cpus_packs_when_no_cpu_tells_its_node(options: CpuOptions) -> None:
    """A machine without NUMA has nothing to distribute over: whole cores are taken as without the
    option.
    """
    topology = CpuTopology(CpuPlace(cpu, cpu % 4, 0, None, 0) for cpu in range(8))

    assert take_cpus(topology, CpuSet.parse("0-2,5-7"), 3, options) == CpuSet(0, 1, 5)


def test_spread_takes_the_first_combination_that_leaves_all_nodes_alike() -> None:
    """Nothing is better than a balance of 0, so that the combinations
    behind it are not looked at.
    """
    assert find_spread({0: 6, 1: 2, 2: 6}, 8, 1, total_nodes=3, total_cpus=18) == [(0, 4), (2, 4)]


def test_spread_gives_the_remainder_in_turn_when_shares_are_not_equal() -> None:
    """Whole groups of what is left over go to the nodes that keep the machine most even."""
    spread = find_spread({0: 8, 1: 6}, 10, 2, total_nodes=2, total_cpus=16)

    assert spread == [(0, 4), (1, 4), (0, 2)]


def test_hints_are_none_when_a_cpu_to_be_reused_is_on_no_node() -> None:
    """A reusable CPU that went offline is in no set of nodes, and kubelet lists only sets that have
    all of them.
    """
    by_node = {0: CpuSet(0, 1), 1: CpuSet(2, 3)}

    assert cpu_hints(by_node, CpuSet(0, 1, 2, 3), 1, reusable=CpuSet(9)) == ()
    assert cpu_hints(by_node, CpuSet(0, 1, 2, 3), 1, reusable=CpuSet(3)) == (
        Hint(NodeSet(1), preferred=True),
        Hint(NodeSet(0, 1), preferred=False),
    )


@pytest.mark.parametrize(
    ("count", "code", "facts"),
    [
        pytest.param(3, "smt-alignment", {"resource": "cpu", "wanted": 3, "threads": 2}, id="half a core"),
        pytest.param(
            8, "smt-alignment", {"resource": "cpu", "wanted": 8, "free": 6}, id="more than lie outside reserved cores"
        ),
    ],
)
def test_exclusive_cpus_are_refused_as_kubelet_refuses_them_when_whole_cores_are_wanted(
    count: int, code: str, facts: dict[str, object]
) -> None:
    """full-pcpus-only gives whole cores, and none that has a CPU of the system."""
    machine = CpuTopology([CpuPlace(cpu, cpu % 4, 0, 0, 0) for cpu in range(8)])

    refusal = choose_exclusive_cpus(
        machine, CpuSet.parse("0-7"), count, CpuOptions(full_pcpus_only=True), reserved=CpuSet(0)
    )

    assert isinstance(refusal, Refusal)
    assert [(reason.code, reason.facts) for reason in refusal.reasons] == [(code, facts)]


def test_exclusive_cpus_are_chosen_without_reserved_ones_when_none_are_named() -> None:
    """No reservation is an ordinary one; too few CPUs are a refusal with the numbers."""
    machine = CpuTopology([CpuPlace(cpu, cpu % 4, 0, 0, 0) for cpu in range(8)])

    assert choose_exclusive_cpus(machine, CpuSet.parse("0-7"), 8, CpuOptions()) == CpuSet.parse("0-7")
    refusal = choose_exclusive_cpus(machine, CpuSet.parse("0-3"), 5, CpuOptions())
    assert isinstance(refusal, Refusal)
    assert [(reason.code, reason.facts["free"]) for reason in refusal.reasons] == [("not-enough-cpus", 4)]
