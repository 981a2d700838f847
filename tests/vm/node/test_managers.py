"""What kubelet's managers decide is what `topobus simulate` says beforehand: the same functions on
the guest's own machine, for pods drawn by a seed.

Beside them runs a pod by claim, whose CPUs and memory node stay its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import Struct

from topobus.cli.objects.manifests import request_of
from topobus.cli.simulation.node import Simulation, open_machine
from topobus.engine.ledger import transitions
from topobus.formats.messages.messages import ApiObject
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Placement
from topobus.values.request import Owner, Policy
from topobus.values.view import AlignmentOptions, CpuOptions
from vm.kubelet import CLAIM, EVICTION_MIB, GATEWAY, MEMORY_STATE, PODS, STATE, Kubelet, guaranteed, pod, until
from vm.node import NAME, Node

pytestmark = pytest.mark.timeout(3600)
_ALL, _OWNED = CpuSet.parse("0-7"), CpuSet.parse("6-7")
# One CPU of the system's and those of Topobus: pods get 1 to 5, of three NUMA nodes.
_RESERVED = CpuSet(0) | _OWNED
# What the system has of node 0.
_SYSTEM_MIB = 250
# Pods of a configuration that differs by one option, and of one that aligns memory, at most.
_FEW, _SOME = 8, 25
# So many pods at the end of a comparison start, and the kernel is asked what they have; those
# before wait for a volume, because an emulated container takes half a minute to come and go.
_STARTED = 3


class _Given(Struct, frozen=True):
    """What one container has: CPUs, and memory nodes where kubelet aligns memory."""

    cpus: CpuSet
    memory: NodeSet = NodeSet()


class _Comparison:
    """Kubelet with some configuration and a simulation of it, which are given the same pods."""

    def __init__(self, kubelet: Kubelet, simulation: Simulation, draw: random.Random, memory: tuple[str, ...]) -> None:
        self.differences: list[Any] = []
        self.refusals: list[tuple[str, str]] = []
        """Each by kubelet, and by the simulation."""
        self.started: dict[str, _Given] = {}
        """By `POD/CONTAINER`, of pods that are live."""
        self.live: dict[str, Owner] = {}
        self.ended = 0
        self._kubelet = kubelet
        self._simulation = simulation
        self._draw = draw
        self._memory = memory

    async def come_and_go(self, count: int) -> None:
        """Make pods one after the other, and end some; no further than the first difference, for
        what comes after it would differ, too.
        """
        for number in range(count):
            while self.live and self._draw.random() < 0.5:
                await self._end(self._draw.choice(sorted(self.live)))
            await self._make(f"pod-{number}", starts=number >= count - _STARTED)
            if self.differences:
                break

    async def _end(self, name: str) -> None:
        await self._kubelet.delete(name)
        owner = self.live.pop(name)
        self.ended += 1
        self.started = {key: given for key, given in self.started.items() if key.split("/")[0] != name}
        operation = f"end-{owner.uid}"
        step = transitions.release(self._simulation.ledger, op_id=operation, owner=owner, decision_id=operation)
        self._simulation.undo(step.ledger)

    async def _make(self, name: str, *, starts: bool) -> None:
        containers = {
            f"c{each}": guaranteed(self._draw.choice((1, 1, 1, 2, 2, 3)), self._draw.choice(self._memory))
            for each in range(self._draw.choice((1, 1, 2)))
        }
        made = await self._kubelet.make(PODS, pod(name, node=NAME, starts=starts, **containers))
        asked = request_of(ApiObject(api_version="v1", kind="Pod", metadata=made["metadata"], spec=made["spec"]))
        outcome = self._simulation.place(asked)
        decided = await self._decided(made)
        if isinstance(outcome, Placement):
            wanted: Any = {
                each.name: _Given(each.cpus, NodeSet.of(node for block in each.memory for node in block.nodes))
                for each in outcome.containers
            }
        else:
            wanted = outcome.reasons[0].code
        if isinstance(decided, str):
            await self._kubelet.delete(name)
        if isinstance(decided, str) and isinstance(wanted, str):
            self.refusals.append((decided, wanted))
        elif decided != wanted:
            self.differences.append((name, containers, decided, wanted))
        else:
            self.live[name] = asked.owner
            self.started |= {f"{name}/{key}": given for key, given in wanted.items()} if starts else {}

    async def _decided(self, made: Any) -> dict[str, _Given] | str:
        """Wait for kubelet's word on a pod: what its containers have, or the reason of a refusal."""
        name, uid, count = made["metadata"]["name"], made["metadata"]["uid"], len(made["spec"]["containers"])
        aligns_memory = "memoryManagerPolicy" in self._kubelet.settings
        decided: Any = None

        async def is_decided() -> bool:
            nonlocal decided
            cpus, memory = _written(STATE, uid), _written(MEMORY_STATE, uid) if aligns_memory else {}
            if len(cpus) == count and (len(memory) == count or not aligns_memory):
                decided = {
                    container: _Given(
                        CpuSet.parse(cpus[container]),
                        NodeSet.of(node for block in memory.get(container, ()) for node in block["numaAffinity"]),
                    )
                    for container in cpus
                }
                return True
            status = (await self._kubelet.pod(name))["status"]
            decided = status.get("reason", "")
            return bool(status["phase"] == "Failed")

        await until(f"kubelet's word on {name}", is_decided)
        return decided  # type: ignore[no-any-return]


def _written(state: Path, uid: str) -> dict[str, Any]:
    """Tell what a manager of kubelet has written down for a pod, by container."""
    return json.loads(state.read_text()).get("entries", {}).get(uid, {})  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def machine() -> Iterator[Any]:
    """Read the guest's machine as `topobus simulate --machine /` does, once."""
    with open_machine("/") as read:
        yield read


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> int:
    """How many pods each configuration gets."""
    return request.config.getoption("--pods")  # type: ignore[no-any-return]


@pytest_asyncio.fixture(scope="module")
async def beside(node: Node, cluster: Kubelet) -> AsyncIterator[Kubelet]:
    """Let Topobus own 6 and 7, which a pod has by its claim, and run one that has the pool."""
    before = cluster.settings
    await node.start("gateway", **{**GATEWAY, "TOPOBUS_GATEWAY__CPUS__OWNED": str(_OWNED)})
    await cluster.start(is_new=True, **{**before, "reservedSystemCPUs": str(_RESERVED)})
    await cluster.ready()
    await cluster.run(pod("worker", template="pair", main=CLAIM), pod("other", main={}))
    yield cluster
    await cluster.delete("worker", "other")
    await node.start("gateway", **GATEWAY)
    await cluster.start(is_new=True, **before)
    await cluster.ready()


async def _compare(
    kubelet: Kubelet,
    simulation: Simulation,
    pods: int,
    *,
    seed: str,
    memory: tuple[str, ...] = ("20Mi",),
    pool: CpuSet = _ALL,
    **settings: Any,
) -> None:
    """Let pods come and go: kubelet and the simulation decide alike, the kernel says the same of
    those that have started, the pod by claim keeps what it has, and the other has the rest of
    `pool`.
    """
    async with kubelet.unchanged("worker/main"):
        await kubelet.start(is_new=True, reservedSystemCPUs=str(_RESERVED), **settings)
        await kubelet.ready()
        comparison = _Comparison(kubelet, simulation, random.Random(seed), memory)
        await comparison.come_and_go(pods)
        print(
            f"vm: {seed}: {pods} pods, {len(comparison.live)} at the end, {comparison.ended} ended, refused: "
            f"{comparison.refusals}"
        )
        assert comparison.differences == []

        held = {
            cpu for allocation in simulation.ledger.allocations.values() for h in allocation.holdings for cpu in h.cpus
        }
        rest = pool - _OWNED - CpuSet.of(held)
        kernel = await kubelet.become(
            "the rest for others, and all run",
            lambda seen: seen["other/main"].are == rest and comparison.started.keys() <= seen.keys(),
        )
        assert {
            name: _Given(kernel[name].are, NodeSet.parse(kernel[name].mems)) for name in comparison.started
        } == comparison.started
        await kubelet.delete(*comparison.live)


@pytest.mark.parametrize("policy", [*Policy])
async def test_kubelet_decides_as_simulated_when_guaranteed_pods_come_and_go(
    beside: Kubelet, machine: Any, pods: int, policy: Policy
) -> None:
    """Pods of one or two containers with 1 to 3 CPUs, by each policy of the Topology Manager."""
    simulation = Simulation(machine, AlignmentOptions(policy=policy), _RESERVED)
    await _compare(beside, simulation, pods, seed=policy, topologyManagerPolicy=policy)


@pytest.mark.parametrize("policy", [Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
async def test_kubelet_gives_memory_nodes_as_simulated_when_it_aligns_memory(
    beside: Kubelet, machine: Any, pods: int, policy: Policy
) -> None:
    """The memory manager's policy Static, with memory reserved on node 0; pods want up to about all
    that a node has.
    """
    reserved = _SYSTEM_MIB + EVICTION_MIB
    simulation = Simulation(
        machine,
        AlignmentOptions(policy=policy, aligns_memory=True),
        _RESERVED,
        reserved_memory={0: reserved << 20},
    )
    await _compare(
        beside,
        simulation,
        min(pods, _SOME),
        seed=f"memory, {policy}",
        memory=("20Mi", "200Mi", "400Mi", "700Mi"),
        topologyManagerPolicy=policy,
        memoryManagerPolicy="Static",
        systemReserved={"memory": f"{_SYSTEM_MIB}Mi"},
        reservedMemory=[{"numaNode": 0, "limits": {"memory": f"{reserved}Mi"}}],
    )


@pytest.mark.parametrize(
    ("option", "policy", "pool"),
    [
        ("full-pcpus-only", Policy.RESTRICTED, _ALL),
        ("distribute-cpus-across-numa", Policy.BEST_EFFORT, _ALL),
        ("distribute-cpus-across-cores", Policy.BEST_EFFORT, _ALL),
        ("align-by-socket", Policy.RESTRICTED, _ALL),
        ("prefer-align-cpus-by-uncorecache", Policy.BEST_EFFORT, _ALL),
        ("strict-cpu-reservation", Policy.RESTRICTED, _ALL - _RESERVED),
    ],
)
async def test_kubelet_decides_as_simulated_with_an_option_of_its_cpu_manager(
    beside: Kubelet, machine: Any, pods: int, option: str, policy: Policy, pool: CpuSet
) -> None:
    """Each by itself, for a few pods."""
    options = CpuOptions(**{option.replace("-", "_"): True})
    await _compare(
        beside,
        Simulation(machine, AlignmentOptions(policy=policy, cpu=options), _RESERVED),
        min(pods, _FEW),
        seed=option,
        pool=pool,
        topologyManagerPolicy=policy,
        cpuManagerPolicyOptions={option: "true"},
        featureGates={"CPUManagerPolicyAlphaOptions": True, "CPUManagerPolicyBetaOptions": True},
    )
