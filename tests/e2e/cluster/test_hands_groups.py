"""Claims for a number of a group's CPUs on a real node: kube-scheduler counts the group's capacity,
and which CPUs is decided when the claim is prepared.

As `test_hands`: TOPOBUS_CLUSTER_INSTALLATION=hands, TOPOBUS_CLUSTER_NRI. The cluster needs
DRAConsumableCapacity (on by default in Kubernetes 1.36).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from e2e.cluster.hands import Hands, container_pid, cpus_of_pid, refusals_of
from support.cluster import until
from support.installation import setting
from support.real_hands import HandsInstallation, installed_hands
from topobus.values.idset import CpuSet

_LIMIT_S = 150.0

pytestmark = pytest.mark.skipif(
    setting("INSTALLATION") != "hands", reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `hands`"
)


@pytest.fixture(scope="module")
def topobus() -> Iterator[HandsInstallation]:
    """Topobus on this node, which shows the machine as one group of CPUs."""
    with installed_hands({"TOPOBUS_CPU__CPUS__GROUPS": "machine"}) as installation:
        yield installation


async def _cpus_of(pid: int) -> str:
    return cpus_of_pid(pid)


async def test_cpus_of_a_group_are_alone_when_a_claim_asks_for_a_number(
    topobus: HandsInstallation, hands: Hands
) -> None:
    """One of the machine's CPUs by number: the pod has it alone, all others the rest.

    All of them are refused, and in the end everybody has all again.
    """
    neighbour = await hands.make()
    await hands.started(neighbour, _LIMIT_S)
    neighbour_pid = await container_pid(neighbour.uid)
    online = cpus_of_pid(neighbour_pid)
    pod = await hands.make(has_cpu=True, cpu_count=1, is_cpu_group=True)
    seen = await hands.started(pod, _LIMIT_S)
    others = cpus_of_pid(neighbour_pid)
    (result,) = (await hands.claim(pod))["status"]["allocation"]["devices"]["results"]
    await hands.remove(pod, _LIMIT_S)
    await until("everybody has all CPUs again", partial(_cpus_of, neighbour_pid), lambda cpus: cpus == online)
    greedy = await hands.make(has_cpu=True, cpu_count=len(CpuSet.parse(online)), is_cpu_group=True)
    (line,) = await until("a refusal", partial(refusals_of, hands, greedy, ("last of the shared pool",)), bool)
    await hands.remove(greedy, _LIMIT_S)
    topobus.check()

    print(f"hands: {line}; before: {result['device']} gave {seen.cpus}")  # noqa: T201 - for people
    assert result["consumedCapacity"] == {"cpus": "1"}
    assert len(CpuSet.parse(seen.cpus)) == 1
    assert CpuSet.parse(seen.cpus).isdisjoint(CpuSet.parse(others))
    assert CpuSet.parse(seen.cpus) | CpuSet.parse(others) == CpuSet.parse(online)
    assert cpus_of_pid(neighbour_pid) == online
