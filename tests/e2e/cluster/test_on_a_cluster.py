"""Topobus on a cluster of its operator's: real kubelet, API server, scheduler and container runtime. Has not been run on one by its authors yet.

What must be done to the node from outside (restart kubelet, kill the gateway) is a shell command that the environment names, for every
installation does it another way; without it that test is skipped and says so.
"""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from support.cluster import Cluster, attribute_names, until

CLASS = os.environ.get("TOPOBUS_CLUSTER_CLASS", "gpu")
DRIVER = f"{CLASS}.topobus.dev"
RESOURCE = f"topobus.dev/{CLASS}"


async def shell(variable: str) -> None:
    """Run the command that a variable holds."""
    command = os.environ.get(variable)
    if not command:
        pytest.skip(f"NOT CHECKED ON A CLUSTER: {variable} not set (a shell command)")
    process = await asyncio.create_subprocess_shell(command)
    assert await asyncio.wait_for(process.wait(), 60) == 0, f"{variable}: {command} failed"


async def test_scheduler_sees_devices_with_standard_attributes_when_the_node_is_up(cluster: Cluster) -> None:
    """Slices of our node are there, and each device says its PCI address, root and NUMA node."""
    devices = await until("slices", lambda: cluster.devices(DRIVER), bool)

    lacking = {name: {"pciBusID", "pcieRoot"} - attribute_names(one) for name, one in devices.items()}
    assert {name: one for name, one in lacking.items() if one} == {}


async def test_kubelet_has_the_driver_when_the_node_is_up(cluster: Cluster) -> None:
    """Our registration socket stands in kubelet's folder on this machine, and the node has the resource: both doors are open."""
    sockets = list((Path(os.environ["TOPOBUS_KUBELET_DIR"]) / "plugins_registry").glob(f"{DRIVER}*-reg.sock"))

    assert await until(f"allocatable {RESOURCE}", lambda: cluster.allocatable(RESOURCE), bool) > 0
    assert [one for one in sockets if stat.S_ISSOCK(one.lstat().st_mode)]


async def test_pod_runs_when_it_asks_for_a_resource(cluster: Cluster) -> None:
    """The device plugin's door: scheduled, admitted, started."""
    await until(f"allocatable {RESOURCE}", lambda: cluster.allocatable(RESOURCE), bool)
    pod = await cluster.make_pod(resource=RESOURCE)

    assert (await cluster.until_running(pod))["spec"]["nodeName"] == cluster.node


async def test_pod_runs_with_its_claim_when_it_asks_by_dra(cluster: Cluster) -> None:
    """The DRA door: the scheduler allocates a device of our slices, kubelet prepares it, the container starts."""
    known = await until("slices", lambda: cluster.devices(DRIVER), bool)
    claim = await cluster.make_claim(DRIVER)
    pod = await cluster.make_pod(claim=claim)
    await cluster.until_running(pod)

    (result,) = (await cluster.claim(claim))["status"]["allocation"]["devices"]["results"]
    assert (result["driver"], result["pool"]) == (DRIVER, cluster.node)
    assert result["device"] in known


async def test_resources_and_pods_survive_when_kubelet_restarts(cluster: Cluster) -> None:
    """After TOPOBUS_CLUSTER_RESTART_KUBELET the resource is back and slices are published again; a pod with a claim still runs."""
    pod = await cluster.make_pod(claim=await cluster.make_claim(DRIVER))
    await cluster.until_running(pod)
    before = await cluster.allocatable(RESOURCE)
    await shell("TOPOBUS_CLUSTER_RESTART_KUBELET")

    await until("resource is back", lambda: cluster.allocatable(RESOURCE), lambda count: count == before)
    await until("slices are back", lambda: cluster.devices(DRIVER), bool)
    assert (await cluster.pod(pod))["status"]["phase"] == "Running"


async def test_claims_are_prepared_again_when_the_gateway_is_killed(cluster: Cluster) -> None:
    """After TOPOBUS_CLUSTER_KILL_GATEWAY (kill -9) the old pod still runs and a new one gets its device."""
    await shell("TOPOBUS_CLUSTER_KILL_GATEWAY")
    pod = await cluster.make_pod(claim=await cluster.make_claim(DRIVER))

    await cluster.until_running(pod)


async def test_fault_is_in_the_pods_status_when_its_device_fails(cluster: Cluster) -> None:
    """After TOPOBUS_CLUSTER_BREAK_DEVICE the container's status shows the device as Unhealthy (kubelet's ResourceHealthStatus)."""
    pod = await cluster.make_pod(claim=await cluster.make_claim(DRIVER))
    await cluster.until_running(pod)
    await shell("TOPOBUS_CLUSTER_BREAK_DEVICE")

    await until(
        "health in the pod's status", lambda: cluster.pod(pod), lambda one: "Unhealthy" in str(one["status"].get("containerStatuses"))
    )
