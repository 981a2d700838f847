"""Who has which CPUs: no CPU in two exclusive sets, none of them in the pool, and a refusal before
anybody's set would be empty.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topobus.gateway.containers.rules.cpusets import ContainerCpuset, CpuOwnership, cpuset_of, refuse_demand
from topobus.values.edits import Cpuset
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Refusal

CPUS = st.frozensets(st.integers(min_value=0, max_value=9)).map(CpuSet.of)


@given(CPUS, CPUS, st.lists(CPUS, max_size=4), st.one_of(st.none(), CPUS))
def test_cpusets_are_disjoint_when_every_claim_was_admitted(
    online: CpuSet, kubelet: CpuSet, demands: list[CpuSet], given_cpus: CpuSet | None
) -> None:
    """Claims that were admitted one after the other have what they asked for.

    All others have a part of the rest, and never nothing.
    """
    claims: dict[str, Cpuset] = {}
    for number, cpus in enumerate(demands):
        taken = CpuOwnership(online=online, claims=claims, kubelet=kubelet)
        # The ledger keeps two claims from one CPU.
        wanted = cpus - taken.exclusive
        if wanted and refuse_demand([Cpuset(cpus=wanted)], taken) is None:
            claims[f"claim-{number}"] = Cpuset(cpus=wanted)
    ownership = CpuOwnership(online=online, claims=claims, kubelet=kubelet)
    shared = cpuset_of([], given_cpus, ownership)
    own = [cpuset_of([name], None, ownership) for name in claims]

    assert [cpuset.cpus for cpuset in own if cpuset is not None] == [cpuset.cpus for cpuset in claims.values()]
    assert shared is None or (shared.cpus and not shared.cpus & ownership.exclusive)
    assert not claims or ownership.shared
    assert not ownership.exclusive & kubelet
    if given_cpus is not None:
        assert shared is None or shared.cpus <= given_cpus


def test_cpuset_joins_what_several_devices_bring() -> None:
    """A container that names two CPUs has both, and the memory of both nodes."""
    claims = {"a": Cpuset(cpus=CpuSet(1), mems=NodeSet(0)), "b": Cpuset(cpus=CpuSet(4), mems=NodeSet(1))}

    joined = cpuset_of(["b", "gpu-0", "a"], None, CpuOwnership(online=CpuSet(0, 1, 4), claims=claims))

    assert joined == ContainerCpuset(cpus=CpuSet(1, 4), mems=NodeSet(0, 1), is_exclusive=True)


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        pytest.param(CpuSet(7), "cpu-offline", id="offline"),
        pytest.param(CpuSet(0), "cpu-not-ours", id="not owned"),
        pytest.param(CpuSet(2), "cpu-of-claim", id="another claim's"),
        pytest.param(CpuSet(3), "cpu-of-kubelet", id="kubelet's"),
        pytest.param(CpuSet(1), "shared-pool-empty", id="the last"),
    ],
)
def test_demand_is_refused_with_its_reason_when_it_cannot_be_met(wanted: CpuSet, code: str) -> None:
    """Nothing is taken from anybody then."""
    ownership = CpuOwnership(
        online=CpuSet(0, 1, 2, 3),
        owned=CpuSet(1, 2, 3, 7),
        claims={"other": Cpuset(cpus=CpuSet(0, 2))},
        running=CpuSet(0, 2),
        kubelet=CpuSet(3),
    )

    refusal = refuse_demand([Cpuset(cpus=wanted)], ownership)

    assert isinstance(refusal, Refusal)
    assert [reason.code for reason in refusal.reasons] == [code]
