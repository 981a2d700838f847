"""What kubelet's managers decide is what `topobus simulate` predicts: the same functions on the
guest's own machine, for pods drawn by a seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import Struct

from topobus.cli.objects.manifests import request_of
from topobus.cli.simulation.node import Simulation, open_machine
from topobus.engine.ledger import transitions
from topobus.formats.messages.messages import ApiObject
from topobus.values.idset import CpuSet
from topobus.values.outcome import Placement
from topobus.values.request import Owner, Policy
from topobus.values.view import AlignmentOptions
from vm.kubelet import PODS, STATE, Kubelet, guaranteed, pod, until
from vm.node import NAME, Node

pytestmark = pytest.mark.timeout(1800)
_RESERVED = "0"
_PODS = 6


class _Run(Struct):
    """What became of the pods of one configuration."""

    live: dict[str, Owner] = {}
    simulated: dict[str, CpuSet] = {}
    """By `POD/CONTAINER`, of pods that are live."""
    differences: list[Any] = []
    refusals: list[tuple[str, str]] = []
    """By kubelet, and by the simulation."""


@pytest.fixture(scope="module")
def machine() -> Iterator[Any]:
    """Read the guest's machine as `topobus simulate --machine /` does, once."""
    with open_machine("/") as read:
        yield read


@pytest_asyncio.fixture(scope="module")
async def alone(node: Node, kubelet: Kubelet) -> AsyncIterator[Kubelet]:
    """Leave all CPUs to kubelet."""
    node.kill("gateway")
    yield kubelet


@pytest.mark.parametrize("policy", [*Policy])
async def test_kubelet_decides_as_simulated_when_guaranteed_pods_come_and_go(
    alone: Kubelet, machine: Any, policy: Policy
) -> None:
    """Pods of one or two containers with 1 to 4 CPUs, some of which end: the same are refused, and
    the others have the same CPUs, by kubelet's state and by the kernel.
    """
    await alone.start(is_new=True, topologyManagerPolicy=policy, reservedSystemCPUs=_RESERVED)
    await alone.ready()
    simulation = Simulation(machine, AlignmentOptions(policy=policy), CpuSet.parse(_RESERVED))
    # Each has its own draw, the same in each run.
    run = await _come_and_go(alone, simulation, random.Random(f"{policy} "))
    print(f"vm: {policy}: {_PODS} pods, {len(run.live)} run at the end, refused: {run.refusals}")

    assert run.differences == []
    kernel = await alone.become("all run", lambda seen: set(seen) == set(run.simulated))
    assert {name: cpus.are for name, cpus in kernel.items()} == run.simulated


async def _come_and_go(kubelet: Kubelet, simulation: Simulation, draw: random.Random) -> _Run:
    run = _Run()
    for number in range(_PODS):
        if run.live and draw.random() < 0.4:
            ended = draw.choice(sorted(run.live))
            await kubelet.delete(ended)
            owner = run.live.pop(ended)
            run.simulated = {name: cpus for name, cpus in run.simulated.items() if name.split("/")[0] != ended}
            step = transitions.release(
                simulation.ledger, op_id=f"end-{owner.uid}", owner=owner, decision_id=f"end-{owner.uid}"
            )
            simulation.undo(step.ledger)
        containers = {f"c{each}": guaranteed(draw.choice((1, 1, 2, 2, 3, 4))) for each in range(draw.choice((1, 1, 2)))}
        made = await kubelet.make(PODS, pod(f"pod-{number}", node=NAME, **containers))
        asked = request_of(ApiObject(api_version="v1", kind="Pod", metadata=made["metadata"], spec=made["spec"]))
        outcome = simulation.place(asked)
        wanted = {each.name: each.cpus for each in outcome.containers} if isinstance(outcome, Placement) else {}
        decided = await _decided(kubelet, made)
        refused_by = outcome.reasons[0].code if not isinstance(outcome, Placement) else ""
        if isinstance(decided, str):
            run.refusals.append((decided, refused_by))
            await kubelet.delete(f"pod-{number}")
        else:
            run.live[f"pod-{number}"] = asked.owner
            run.simulated |= {f"pod-{number}/{name}": cpus for name, cpus in wanted.items()}
        if ({} if isinstance(decided, str) else decided) != wanted:
            run.differences.append((containers, decided, wanted or outcome))
            # What comes after it would differ as well.
            break
    return run


def _written(uid: str) -> dict[str, CpuSet]:
    """Tell what kubelet's CPU manager has written down for a pod, by container."""
    return {
        name: CpuSet.parse(cpus) for name, cpus in json.loads(STATE.read_text()).get("entries", {}).get(uid, {}).items()
    }


async def _decided(kubelet: Kubelet, made: Any) -> dict[str, CpuSet] | str:
    """Wait for kubelet's decision on a pod: CPUs by container, or the reason of a refusal."""
    name, uid, count = made["metadata"]["name"], made["metadata"]["uid"], len(made["spec"]["containers"])
    refused: list[str] = []

    async def is_decided() -> bool:
        status = (await kubelet.pod(name))["status"]
        if status["phase"] == "Failed":
            refused.append(status["reason"])
        return bool(refused) or len(_written(uid)) == count

    await until(f"kubelet's word on {name}", is_decided)
    return refused[0] if refused else _written(uid)
