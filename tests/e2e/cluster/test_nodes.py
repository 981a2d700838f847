"""Pods of all kinds on real nodes through kills, restarts, reboots and cut-offs.

A checker compares, many times a second, what each container has with what was promised and with all
others'. Topobus runs on them as processes of this suite, as root
(TOPOBUS_CLUSTER_INSTALLATION=nodes). Its kernel is asked for every container, so the nodes share
this machine: one node of it, or several in namespaces or containers of their own.

| variable | what | default |
|---|---|---|
| TOPOBUS_CLUSTER_NODES | `NAME=MACHINE,…`: `this` (its own CPUs and interfaces made for the purpose; one node at most, for CPUs are the machine's) or a recorded machine (`dgx`, …) | needed |
| TOPOBUS_CLUSTER_MANIFESTS | a kustomization: Topobus runs as its pods, and stays when the test ends | processes of this suite |
| TOPOBUS_CLUSTER_ON | words that run a command on `{node}` by becoming it, as `nsenter` does | on this machine |
| TOPOBUS_CLUSTER_NRI | the runtime's NRI socket of `{node}` | needed with `this`; none |
| TOPOBUS_CLUSTER_NATS_PORT | where the nodes reach this machine's loopback address | any |
| TOPOBUS_CLUSTER_RESTART_KUBELET, _RESTART_RUNTIME, _REBOOT, _CUT_OFF and _JOIN | shell commands for $NODE | does not happen |
| TOPOBUS_CLUSTER_STRESS_PODS, _STRESS_FAULTS | how many pods at least come and go, how many things at least befall them | 200, each once |
| TOPOBUS_CLUSTER_STRESS_ONLY | the only things that befall them: `node rebooted,kubelet restarted` | all |
| TOPOBUS_CLUSTER_STRESS_SEED | what else, and when | by chance |
"""  # noqa: E501

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lightkube.resources.core_v1 import Node

from e2e.cluster.hands import IMAGE
from support.cluster import Cluster, until
from support.container_looks import ContainerLooks, Overlap
from support.installation import setting
from support.machine_places import MachinePlaces
from support.node_fleet import INTERFACES, NodeFleet
from support.pod_fleet import PodFleet
from support.pod_load import PodKind, PodLoad
from topobus.formats.kubernetes.built_in_classes import class_selector, shape_selector
from topobus.values.dra_names import DRIVER

# The gateway looks each three seconds and believes a difference after half a second; a
# start of the gateway looks at once.
_OUTSIDE_LOOK_S = 5.0
_PAUSE_S = (4.0, 12.0)
_SECONDS = (1, 2, 4, 8)
_GATE = "topobus.dev/allocation"
# The machine's own cards are offered, too.
_IS_OURS = 'device.attributes["topobus.dev"].?kind.orValue("") == "veth"'
_ROOT = "resource.kubernetes.io/pcieRoot"

pytestmark = pytest.mark.skipif(
    setting("INSTALLATION") != "nodes",
    reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `nodes`",
)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """The cluster, seen from the first of its nodes."""
    if not setting("NODES"):
        pytest.fail("TOPOBUS_CLUSTER_NODES is not set: name the nodes, `node-1=this,node-2=dgx`", pytrace=False)
    async with Cluster.open(Path(os.environ["KUBECONFIG"]), next(iter(_machines()))) as opened:
        yield opened


@pytest_asyncio.fixture
async def fleet(cluster: Cluster) -> AsyncIterator[NodeFleet]:
    """Topobus on each node."""
    if setting("MANIFESTS"):
        pods = PodFleet(_machines())
        await pods.install()
        yield pods
        return
    addresses = {}
    for node in _machines():
        status = (await cluster.client.get(Node, node)).to_dict()["status"]
        addresses[node] = next(each["address"] for each in status["addresses"] if each["type"] == "InternalIP")
    made = NodeFleet(_machines(), addresses, Path(os.environ["TOPOBUS_KUBELET_DIR"]), Path(os.environ["KUBECONFIG"]))
    try:
        await made.install()
        yield made
    finally:
        made.close()


def _machines() -> dict[str, str]:
    return dict(word.split("=", 1) for word in setting("NODES").split(","))


async def _kinds(cluster: Cluster, fleet: NodeFleet) -> dict[str, PodKind]:
    classes = {name: await cluster.make_class(name) for name in ("gpu", "nic", "cpu")}

    def request(name: str, count: int, selector: str = "") -> dict[str, Any]:
        selectors = [{"cel": {"expression": selector}}] if selector else []
        exactly = {
            "deviceClassName": classes[name],
            "allocationMode": "ExactCount",
            "count": count,
            "selectors": selectors,
        }
        return {"name": name, "exactly": exactly}

    this = tuple(node for node, machine in fleet.machines.items() if machine == "this")
    cards = tuple(fleet.machines.keys() - this)
    kinds: dict[str, PodKind] = {}
    if cards:
        made = partial(PodKind, seconds=_SECONDS, nodes=cards, workers=len(cards))
        kinds |= {
            "gpu": made(resources={"topobus.dev/gpu": 3}, wants={"gpu": 3}),
            "nic": made(resources={"topobus.dev/nic": 2}, wants={"nic": 2}),
            # Pods by resource, which kubelet serves at once, leave room for one of these at a time on `dgx`, `gb200`
            # and `epyc-8numa`. Of three that wait for it kube-scheduler never took the oldest, whose back-off is
            # longest, within the 300 s that a pod may take.
            "gpuclaim": made(workers=min(2, len(cards)), requests=(request("gpu", 3),), wants={"gpu": 3}),
            "pair": made(
                requests=(request("gpu", 1), request("nic", 1)),
                constraints=({"requests": ["gpu", "nic"], "matchAttribute": _ROOT},),
                wants={"gpu": 1, "nic": 1},
            ),
            "gated": made(requests=(request("nic", 2),), gate=_GATE, wants={"nic": 2}),
        }
    if this:
        made = partial(PodKind, seconds=_SECONDS, nodes=this)
        parameters = {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", "interface": {"name": "net1"}}
        config = {"requests": ["nic"], "opaque": {"driver": DRIVER, "parameters": parameters}}
        kinds |= {
            # One may be at a time, for a node of two CPUs has one to give and one for all others.
            "cpu": made(workers=1, requests=(request("cpu", 1),)),
            # Pods by claim take each interface as it comes free: were there as many as interfaces, kubelet would
            # never see one for a pod by resource.
            "interface": made(
                workers=INTERFACES - 1,
                requests=(request("nic", 1, _IS_OURS),),
                config=(config,),
                wants={"nic": 1},
                interface="net1",
            ),
            "resource": made(workers=2, resources={"topobus.dev/nic": 1}, wants={"nic": 1}),
            "plain": made(workers=3),
        }
    return kinds


@pytest.mark.timeout(8 * 3600)
async def test_every_pod_has_what_it_was_promised_alone_whatever_befalls_its_node(
    cluster: Cluster, fleet: NodeFleet
) -> None:
    """No device is in two containers at a moment, none has less than promised or other devices when
    it starts anew, no exclusive CPU is shared while a gateway is there, and nothing is left.
    """
    await _stress(cluster, fleet, await _kinds(cluster, fleet))


@pytest.mark.timeout(8 * 3600)
async def test_every_pod_has_an_aligned_part_of_its_machine_whatever_befalls_its_node(
    cluster: Cluster, fleet: NodeFleet
) -> None:
    """Pairs, quarters and halves beside single devices, by claim and by resource, without a gate: each is
    where the machine's own files say that it should be, and no part is in two containers.
    """
    kinds = await _shape_kinds(cluster, fleet)
    if not kinds:
        pytest.skip("NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_NODES has no recorded machine")
    places = {node: MachinePlaces(fleet.nodes[node].folder / "machine") for node in fleet.machines}

    def why_not_aligned(node: str, kind: str, devices: list[str]) -> str:
        if kind in ("pairs", "pairclaim"):
            return places[node].why_no_pairs(devices, is_by_node=fleet.machines[node] == "gb200")
        if kind in ("quarter", "half"):
            return places[node].why_no_region(devices, is_of_switch=kind == "quarter")
        return ""

    await _stress(cluster, fleet, kinds, why_not_aligned)


async def _shape_kinds(cluster: Cluster, fleet: NodeFleet) -> dict[str, PodKind]:
    cards = tuple(node for node, machine in fleet.machines.items() if machine != "this")
    # A machine without PCIe switches has no quarters, one with cards here and there no halves.
    switched = tuple(node for node in cards if fleet.machines[node] == "dgx")
    halved = tuple(node for node in cards if fleet.machines[node] in ("dgx", "gb200"))
    resources = {level: await cluster.offer(level, shape_selector(level)) for level in ("gpu-nic", "quarter", "half")}
    single = await cluster.offer("gpu", class_selector("gpu"))

    def claim(level: str, count: int = 1) -> tuple[dict[str, Any], ...]:
        device_class = f"{cluster.run}-{level}"
        exactly = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count}
        return ({"name": "devices", "exactly": exactly},)

    made = partial(PodKind, seconds=_SECONDS)
    some = {"gpu": "+", "nic": "+"}
    kinds = {
        "single": made(workers=2, nodes=cards, resources={single: 1}, wants={"gpu": 1}),
        "twoclaim": made(workers=1, nodes=cards, requests=claim("gpu", 2), wants={"gpu": 2}),
        "pairs": made(workers=2, nodes=cards, resources={resources["gpu-nic"]: 2}, wants={"gpu": 2, "nic": 2}),
        "pairclaim": made(workers=2, nodes=cards, requests=claim("gpu-nic"), wants={"gpu": 1, "nic": 1}),
        "quarter": made(workers=2, nodes=switched, resources={resources["quarter"]: 1}, wants={"gpu": 2, "nic": 2}),
        "half": made(workers=2, nodes=halved, requests=claim("half"), wants=some),
    }
    return {name: kind for name, kind in kinds.items() if kind.nodes}


async def _stress(
    cluster: Cluster,
    fleet: NodeFleet,
    kinds: dict[str, PodKind],
    is_wrong: Callable[[str, str, list[str]], str] | None = None,
) -> None:
    pods, count = int(setting("STRESS_PODS", "200")), int(setting("STRESS_FAULTS", "0"))
    seed = int(setting("STRESS_SEED", "0")) or secrets.randbelow(2**31)
    chance = random.Random(seed)
    faults = fleet.faults(chance)
    if only := setting("STRESS_ONLY"):
        faults = {name: faults[name] for name in only.split(",")}
    print(f"nodes: {pods} pods, TOPOBUS_CLUSTER_STRESS_SEED={seed}, what befalls: {', '.join(faults)}")  # noqa: T201 - to repeat it
    load = PodLoad(cluster.client, cluster.run, IMAGE, kinds, chance)
    befell: Counter[str] = Counter()
    coming = chance.sample(sorted(faults), len(faults))

    def goes_on() -> bool:
        return load.done.total() < pods or load.done.keys() < kinds.keys() or bool(coming) or befell.total() < count

    async def break_things() -> None:
        while goes_on():
            await asyncio.sleep(chance.uniform(*_PAUSE_S))
            name = coming.pop() if coming else chance.choice(sorted(faults))
            await faults[name]()
            befell[name] += 1
            print(f"nodes: {name}; {load.done.total()} pods, mistakes: {looks.mistakes}", flush=True)  # noqa: T201 - it takes long

    looks = ContainerLooks("cpu", is_wrong)
    looks.start()
    begun_s = time.time()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(break_things())
            group.create_task(load.come_and_go(goes_on))
    finally:
        await asyncio.to_thread(looks.finish)
    away = {node: fleet.away(node) for node in fleet.machines}
    said = [f"at {each.since_s - begun_s:.1f} s for {each.lasted_s:.2f} s: {each.text}" for each in looks.overlaps]
    slowest = {kind: f"{max(took_s):.0f}" for kind, took_s in load.took_s.items() if took_s}
    print(  # noqa: T201 - the figures
        f"nodes: {load.done.total()} pods in {time.time() - begun_s:.0f} s, {dict(load.done)}; "
        f"{befell.total()} faults, {dict(befell)}; {looks.looks} looks at "
        f"{ {kind: len(pods_of_kind) for kind, pods_of_kind in looks.seen.items()} } pods; slowest of each "
        f"kind {slowest} s; turned away by kubelet: {load.turned_away}; "
        f"CPUs shared: {said}"
    )

    assert looks.mistakes == []
    assert load.failed == []
    assert looks.seen.keys() == kinds.keys()
    assert [each.text for each in looks.overlaps if each.looks > 1 and not _is_within(each, away[each.node])] == []
    assert [
        each.text for each in looks.overlaps if each.until_s > _back_s(each, away[each.node]) + _OUTSIDE_LOOK_S
    ] == []
    await until("nothing is left on any node", partial(asyncio.to_thread, fleet.left), lambda remains: not remains)


def _back_s(overlap: Overlap, away: list[tuple[float, float]]) -> float:
    """When a gateway was there that could put it right."""
    return max((until_s for since_s, until_s in away if since_s <= overlap.since_s <= until_s), default=overlap.since_s)


def _is_within(overlap: Overlap, away: list[tuple[float, float]]) -> bool:
    return any(since_s <= overlap.since_s <= until_s for since_s, until_s in away)
