"""Topobus on a cluster of its operator's: real kubelet, API server, scheduler and container
runtime.

Its authors had none; they ran it on two simulators. The tests stand in the order of a life, and the
last one takes Topobus off the node. conftest.py lists what the environment says.
"""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from support.cluster import Cluster, attribute_names, listed_by_kubelet, until
from support.installation import Installation, cdi_dir, command
from topobus.values.dra_names import DRIVER, class_of_device, pool_of_class

CLASS = os.environ.get("TOPOBUS_CLUSTER_CLASS", "gpu")
SECOND_CLASS = os.environ.get("TOPOBUS_CLUSTER_SECOND_CLASS", "nic")
RESOURCE = f"topobus.dev/{CLASS}"
# How many pods come by each door, over all bursts.
_PODS_A_DOOR = 20
_OCCUPIED = "topobus.dev/occupied"
_SPARE = "topobus.dev/spare"
_HEALTH = "topobus.dev/health"
# From the fault to the new container.
_REPLACED_S = 15.0
_AGAIN = "topobus.dev/prepare-again"
KUBELET = Path(os.environ.get("TOPOBUS_KUBELET_DIR", "/var/lib/kubelet"))


def our_sockets() -> list[str]:
    """Sockets of ours in kubelet's folders."""
    paths = [*(KUBELET / "device-plugins").glob("topobus*"), *(KUBELET / "plugins_registry").rglob(f"*{DRIVER}*")]
    paths += (KUBELET / "plugins").glob(f"{DRIVER}/*")
    return sorted(str(path.relative_to(KUBELET)) for path in paths if stat.S_ISSOCK(path.lstat().st_mode))


def our_cdi_files() -> list[str]:
    """CDI files of claims."""
    return sorted(path.name for path in cdi_dir().glob("topobus.dev-*")) if cdi_dir().is_dir() else []


def plugin_sockets() -> set[tuple[str, int, int]]:
    """Our device plugins' sockets, each with what tells it from a later one of the same name."""
    sockets = set()
    for path in (KUBELET / "device-plugins").glob("topobus*"):
        # One that kubelet or we take away meanwhile is none.
        with suppress(FileNotFoundError):
            status = path.lstat()
            sockets.add((path.name, status.st_ino, status.st_ctime_ns))
    return sockets


async def is_up(cluster: Cluster, *, in_claims: int = 0) -> int:
    """Wait until both doors are open.

    How many devices the resource offers: all but those that claims have.
    """
    devices = await until(f"slices of {CLASS} on {cluster.node}", lambda: cluster.devices(CLASS), bool)
    wanted = len(devices) - in_claims
    return await until(
        f"{wanted} allocatable {RESOURCE} on {cluster.node}",
        lambda: cluster.allocatable(RESOURCE),
        lambda count: count == wanted,
    )


def _is_true(condition: dict[str, Any]) -> bool:
    return condition.get("status") == "True"


async def test_scheduler_sees_devices_with_standard_attributes_when_the_node_is_up(cluster: Cluster) -> None:
    """Slices of our node are there, and each device says its PCI address, root and NUMA node, by
    which a scheduler aligns.
    """
    devices = await until("slices", lambda: cluster.devices(CLASS), bool)

    lacking = {name: {"pciBusID", "pcieRoot", "numaNode"} - attribute_names(device) for name, device in devices.items()}
    assert {name: names for name, names in lacking.items() if names} == {}


async def test_kubelet_has_the_driver_when_the_node_is_up(cluster: Cluster) -> None:
    """Our registration socket stands in kubelet's folder on this machine, and the node has the
    resource: both doors are open.
    """
    offered = await is_up(cluster)

    assert offered == len(await cluster.devices(CLASS))
    assert [
        our_socket
        for our_socket in our_sockets()
        if our_socket.startswith("plugins_registry/") and DRIVER in our_socket
    ]


async def test_pod_runs_when_it_asks_for_a_resource(cluster: Cluster) -> None:
    """The device plugin's door: scheduled, admitted, started."""
    await is_up(cluster)
    pod = await cluster.make_pod(resource=RESOURCE)

    assert (await cluster.until_running(pod))["spec"]["nodeName"] == cluster.node


async def test_pod_runs_with_its_claim_when_it_asks_by_dra(cluster: Cluster) -> None:
    """The DRA door: the scheduler allocates a device of our slices, kubelet prepares it, the
    container starts.

    Its CDI file goes with the pod.
    """
    devices = await until("slices", lambda: cluster.devices(CLASS), bool)
    claim = await cluster.make_claim(CLASS)
    pod = await cluster.make_pod(claim=claim)
    await cluster.until_running(pod)
    found_claim = await cluster.claim(claim)
    written = our_cdi_files()
    await cluster.remove(pod)

    async def left() -> list[str]:
        return our_cdi_files()

    (result,) = found_claim["status"]["allocation"]["devices"]["results"]
    assert (result["driver"], result["pool"]) == (DRIVER, pool_of_class(cluster.node, CLASS))
    assert result["device"] in devices
    assert [file for file in written if found_claim["metadata"]["uid"] in file]
    await until(
        "the claim's CDI file is gone",
        left,
        lambda names: not [name for name in names if found_claim["metadata"]["uid"] in name],
    )


async def test_scheduler_aligns_two_classes_when_a_claim_asks_for_one_pcie_root(cluster: Cluster) -> None:
    """Kubernetes' own scheduler, by the attribute alone: a device of each class below the same PCIe
    root.
    """
    classes = (CLASS, SECOND_CLASS)
    roots: dict[str, dict[str, str]] = {}
    for device_class in classes:
        devices = await until(f"slices of {device_class}", partial(cluster.devices, device_class), bool)
        roots[device_class] = {name: _root(device) for name, device in devices.items()}
    if not set(roots[CLASS].values()) & set(roots[SECOND_CLASS].values()):
        pytest.skip(f"NOT CHECKED ON A CLUSTER: no {CLASS} and {SECOND_CLASS} of this node share a PCIe root")
    claim = await cluster.make_claim(*classes, match="resource.kubernetes.io/pcieRoot")
    await cluster.until_running(await cluster.make_pod(claim=claim))
    results = (await cluster.claim(claim))["status"]["allocation"]["devices"]["results"]

    granted = {str(class_of_device(result["driver"], result["device"])): result["device"] for result in results}
    assert len(results) == len(classes)
    assert granted.keys() == set(classes)
    assert len({roots[device_class][device] for device_class, device in granted.items()}) == 1


def _root(device: dict[str, Any]) -> str:
    return str(device["attributes"]["resource.kubernetes.io/pcieRoot"]["string"])


async def test_resources_and_pods_survive_when_kubelet_restarts(cluster: Cluster) -> None:
    """After TOPOBUS_CLUSTER_RESTART_KUBELET the resource is back and slices are published again.

    Pods of both doors still run, and new ones start.
    """
    await is_up(cluster)
    by_claim = await cluster.make_pod(claim=await cluster.make_claim(CLASS))
    # kubelet gives a pod by resource the device that kube-scheduler has just given to a claim which
    # is not prepared yet: the two doors know nothing of each other.
    await cluster.until_running(by_claim)
    by_resource = await cluster.make_pod(resource=RESOURCE)
    await cluster.until_running(by_resource)
    offered = await is_up(cluster, in_claims=1)
    before = plugin_sockets()
    await command("RESTART_KUBELET")

    async def look() -> tuple[bool, int]:
        now = plugin_sockets()
        return bool(now) and not now & before, await listed_by_kubelet(KUBELET, RESOURCE)

    # kubelet deletes sockets as it starts; the node object still says what was before.
    await until(f"new sockets, and {offered} {RESOURCE} at kubelet itself", look, lambda seen: seen == (True, offered))
    await is_up(cluster, in_claims=1)
    assert [(await cluster.pod(name))["status"]["phase"] for name in (by_claim, by_resource)] == ["Running", "Running"]
    await cluster.until_running(await cluster.make_pod(resource=RESOURCE))
    await cluster.until_running(await cluster.make_pod(claim=await cluster.make_claim(CLASS)))


async def test_claims_are_prepared_again_when_the_gateway_is_killed(
    cluster: Cluster, installation: Installation
) -> None:
    """After a kill -9 the old pod still runs, a new one gets another device, and the old one's
    claim is undone in the end.
    """
    await is_up(cluster)
    claim = await cluster.make_claim(CLASS)
    old = await cluster.make_pod(claim=claim)
    await cluster.until_running(old)
    await installation.kill_gateway()
    other = await cluster.make_claim(CLASS)
    await cluster.until_running(await cluster.make_pod(claim=other))

    assert (await cluster.pod(old))["status"]["phase"] == "Running"
    devices = [
        (await cluster.claim(name))["status"]["allocation"]["devices"]["results"][0]["device"]
        for name in (claim, other)
    ]
    assert len(set(devices)) == 2
    await cluster.remove(old)


class Watch:
    """What a cluster sees of the node while something is done to it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_over = asyncio.Event()
        self.offered: set[int] = set()
        self.devices: set[int] = set()
        self.listed: set[int] = set()
        """What kubelet itself had, which the node object tells every 10 s only."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over.set()
        await self._task

    async def _look(self) -> None:
        while not self._is_over.is_set():
            listed = await listed_by_kubelet(KUBELET, RESOURCE)
            if listed >= 0:
                self.listed.add(listed)
            self.offered.add(await self._cluster.allocatable(RESOURCE))
            self.devices.add(len(await self._cluster.devices(CLASS)))
            await asyncio.sleep(0.1)


async def test_node_stays_ready_for_devices_when_the_gateway_is_killed(
    cluster: Cluster, installation: Installation
) -> None:
    """The condition of the class is True since the same moment, whoever writes it."""
    kind = f"topobus.dev/{CLASS}-ready"
    ready = await until(f"{kind} of {cluster.node}", lambda: cluster.node_condition(kind), _is_true)
    await installation.kill_gateway()
    await is_up(cluster)

    assert await cluster.node_condition(kind) == ready
    assert f"{len(await cluster.devices(CLASS))} device" in ready["message"]


async def test_no_device_vanishes_when_the_gateway_is_updated_with_surge(
    cluster: Cluster, installation: Installation
) -> None:
    """The new one first: allocatable and slices never change, running pods go on, and a pod that
    comes meanwhile starts.
    """
    await is_up(cluster)
    running = await cluster.make_pod(claim=await cluster.make_claim(CLASS))
    await cluster.until_running(running)
    offered = await is_up(cluster, in_claims=1)
    async with Watch(cluster) as seen:
        update = asyncio.create_task(installation.update(surge=True))
        meanwhile = await cluster.make_pod(resource=RESOURCE)
        await update
        await cluster.until_running(meanwhile)
    await cluster.until_running(await cluster.make_pod(claim=await cluster.make_claim(CLASS)))

    assert (seen.listed, seen.offered, len(seen.devices)) == ({offered}, {offered}, 1)
    assert (await cluster.pod(running))["status"]["phase"] == "Running"


async def test_pods_go_on_when_the_gateway_is_updated_without_surge(
    cluster: Cluster, installation: Installation
) -> None:
    """The old one ends first: slices stay, running pods go on, everything is offered again and new
    pods are admitted at both doors.
    """
    await is_up(cluster)
    by_claim = await cluster.make_pod(claim=await cluster.make_claim(CLASS))
    by_resource = await cluster.make_pod(resource=RESOURCE)
    for name in (by_claim, by_resource):
        await cluster.until_running(name)
    await is_up(cluster, in_claims=1)
    async with Watch(cluster) as seen:
        await installation.update(surge=False)
    await is_up(cluster, in_claims=1)

    assert len(seen.devices) == 1
    assert [(await cluster.pod(name))["status"]["phase"] for name in (by_claim, by_resource)] == ["Running", "Running"]
    await cluster.until_running(await cluster.make_pod(resource=RESOURCE))
    await cluster.until_running(await cluster.make_pod(claim=await cluster.make_claim(CLASS)))


async def test_pods_of_both_doors_run_and_end_when_they_come_in_bursts(cluster: Cluster) -> None:
    """40 pods, half by each door, as many at once as the node has devices: none is turned away,
    none waits for the other door, all end.
    """
    offered = await is_up(cluster)
    half = offered // 2
    assert half, f"the node has {offered} {RESOURCE}, wanted two or more"
    given: list[set[str]] = []
    for burst in range(0, _PODS_A_DOOR, half):
        count = min(half, _PODS_A_DOOR - burst)
        claims = [await cluster.make_claim(CLASS) for _ in range(count)]
        made = [cluster.make_pod(claim=claim) for claim in claims] + [
            cluster.make_pod(resource=RESOURCE) for _ in range(count)
        ]
        pods = await asyncio.gather(*made)
        await asyncio.gather(*(cluster.until_running(pod) for pod in pods))
        allocated = [
            (await cluster.claim(claim))["status"]["allocation"]["devices"]["results"][0]["device"] for claim in claims
        ]
        given.append(set(allocated))
        await asyncio.gather(*(cluster.remove(pod) for pod in pods))

    # Each claim a device of its own, in each burst.
    assert sum(map(len, given)) == _PODS_A_DOOR
    assert await is_up(cluster) == offered


async def test_pod_by_claim_starts_at_once_when_the_pod_that_had_its_device_is_gone(cluster: Cluster) -> None:
    """The loser waits and is told who has its device, on the pod and on the claim.

    Kubelet looks again as soon as the device is free.
    """
    offered = await is_up(cluster)
    winner = await cluster.make_pod(resource=RESOURCE, count=offered)
    await cluster.until_running(winner)
    await until(
        "slices say that a pod has the devices",
        lambda: cluster.devices(CLASS),
        lambda devices: all(map(_is_occupied, devices.values())),
    )
    # Whoever tolerates that a pod has the device is given it.
    claim = await cluster.make_claim(CLASS, tolerates=_OCCUPIED)
    loser = await cluster.make_pod(claim=claim)
    for name in (loser, claim):
        # Who has it is known when kubelet lists that pod, a moment after it has begun.
        await until(
            f"an event on {name} that names {winner}",
            partial(cluster.events, name, "DevicesNotPrepared"),
            lambda messages: any(winner in message for message in messages),
        )
    # An API server that is simulated says nothing of a pod that has not begun.
    assert (await cluster.pod(loser)).get("status", {}).get("phase", "Pending") == "Pending"
    await cluster.remove(winner)
    running = await cluster.until_running(loser)

    assert running["metadata"]["annotations"][_AGAIN]


def _is_occupied(device: dict[str, Any]) -> bool:
    return any(taint["key"] == _OCCUPIED for taint in device.get("taints") or ())


async def test_fault_is_in_the_pods_status_when_its_device_fails(cluster: Cluster, installation: Installation) -> None:
    """The container's status shows the device as Unhealthy (kubelet's ResourceHealthStatus), and
    its slice has a taint.
    """
    await is_up(cluster)
    claim = await cluster.make_claim(CLASS)
    pod = await cluster.make_pod(claim=claim)
    await cluster.until_running(pod)
    (result,) = (await cluster.claim(claim))["status"]["allocation"]["devices"]["results"]
    device = (await cluster.devices(CLASS))[result["device"]]
    await installation.break_device(result["device"], device["attributes"]["resource.kubernetes.io/pciBusID"]["string"])

    await until(
        "a taint on its device",
        lambda: cluster.devices(CLASS),
        lambda devices: devices[result["device"]].get("taints"),
    )
    await until(
        "taints on the shapes that it is a part of",
        lambda: cluster.devices("shape"),
        lambda shapes: all(
            shape.get("taints") for shape in shapes.values() if result["device"] in str(shape["consumesCounters"])
        ),
    )
    await until(
        "health in the pod's status",
        lambda: cluster.pod(pod),
        lambda shown: "Unhealthy" in str(shown["status"].get("containerStatuses")),
    )


async def test_spare_replaces_a_device_that_fails_while_all_others_are_held(
    cluster: Cluster, installation: Installation
) -> None:
    """The pod's owner makes another pod when its device is tainted, as a Deployment does when the
    device taint eviction has deleted one; that has the spare, and runs within 15 s of the fault.
    """

    def spares(devices: dict[str, Any]) -> list[str]:
        return [name for name, device in devices.items() if _taint_keys(device) == {_SPARE}]

    sick = [device for device in (await cluster.devices(CLASS)).values() if _HEALTH in _taint_keys(device)]
    await installation.set_spares(CLASS, len(sick) + 1)
    devices = await until("one spare", lambda: cluster.devices(CLASS), lambda devices: len(spares(devices)) == 1)
    offered = [name for name, device in devices.items() if not device.get("taints")]
    claims = [await cluster.make_claim(CLASS) for _ in offered]
    pods = [await cluster.make_pod(claim=claim) for claim in claims]
    for pod in pods:
        await cluster.until_running(pod)
    victim = await _device_of(cluster, claims[0])
    pci = devices[victim]["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
    await installation.break_device(victim, pci)

    loop = asyncio.get_running_loop()
    fault_s = loop.time()
    async with asyncio.timeout(_REPLACED_S):
        await until(
            "a taint on its device",
            lambda: cluster.devices(CLASS),
            lambda devices: _HEALTH in _taint_keys(devices[victim]),
        )
        claim = await cluster.make_claim(CLASS)
        replacement = await cluster.make_pod(claim=claim)
        _, running = await asyncio.gather(cluster.remove(pods[0]), cluster.until_running(replacement))

    print(f"spare: {loop.time() - fault_s:.1f} s from the fault to the new container")  # noqa: T201 - measured here alone
    assert running["spec"]["nodeName"] == cluster.node
    assert [await _device_of(cluster, claim)] == spares(devices)


async def _device_of(cluster: Cluster, claim: str) -> str:
    (result,) = (await cluster.claim(claim))["status"]["allocation"]["devices"]["results"]
    return str(result["device"])


def _taint_keys(device: dict[str, Any]) -> set[str]:
    return {taint["key"] for taint in device.get("taints") or ()}


async def test_nothing_is_left_when_it_is_uninstalled(cluster: Cluster, installation: Installation) -> None:
    """Pods first, then Topobus: no socket, no CDI file, no slice stays, and the node offers nothing
    of ours any more. The Node's conditions stay until they are taken off by hand
    (docs/how-to/turn-it-off.md), since without a gateway nothing else may write them.
    """

    async def sockets() -> list[str]:
        return our_sockets()

    async def files() -> list[str]:
        return our_cdi_files()

    await until("CDI files of the pods before are gone", files, lambda files_left: not files_left)
    await installation.uninstall()

    await until("sockets are gone", sockets, lambda sockets_left: not sockets_left)
    await until("slices are gone", lambda: cluster.slices(), lambda slices_left: not slices_left)
    await until("nothing is offered", lambda: cluster.allocatable(RESOURCE), lambda count: count == 0)
    assert our_cdi_files() == []
    assert await cluster.our_conditions() != []
    await cluster.take_off_conditions()
    assert await cluster.our_conditions() == []
