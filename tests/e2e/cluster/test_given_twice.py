"""Devices that kubelet gives to a second pod while the first one runs with them
(UpdateAllocatedDevices, pkg/kubelet/cm/devicemanager/manager.go of 1.36.2), made on purpose.

A pod is being killed when the first one is admitted, topology is stopped so that its Allocate
takes until the other has ended, and pods are listed meanwhile: kubelet frees what the ended one
had, and forgets what it is allocating. Seen on one real node (1.36.2, containerd 2.4,
2026-11-29): with `_refuse_given_twice` of the gateway's device plugin made empty, first and
second ran with one GPU in common.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lightkube.resources.core_v1 import Pod

from support.cluster import Cluster, devices_by_pod, listed_by_kubelet, until
from support.installation import Installation, Processes

CLASS = os.environ.get("TOPOBUS_CLUSTER_CLASS", "gpu")
RESOURCE = f"topobus.dev/{CLASS}"
KUBELET = Path(os.environ.get("TOPOBUS_KUBELET_DIR", "/var/lib/kubelet"))
# As long does the killed pod take to end: longer than the next one
# needs to be scheduled and admitted.
_ENDING_S = 4
# Without the runtime's word, by which the gateway knows who runs with a device; and an Allocate
# that waits for a topology that is stopped until the killed pod has ended.
_SETTINGS = {"TOPOBUS_GATEWAY__RUNTIME__SOCKET": "", "TOPOBUS_GATEWAY__DEADLINES__ADOPT_S": "10"}


@pytest_asyncio.fixture
async def processes(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Processes]:
    """Topobus with a gateway of these settings, and afterwards with the one of before."""
    if not isinstance(installation, Processes):
        pytest.skip("NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `processes`")
    present = os.environ.get("TOPOBUS_CLUSTER_SETTINGS") or "{}"
    with monkeypatch.context() as patch:
        patch.setenv("TOPOBUS_CLUSTER_SETTINGS", json.dumps(json.loads(present) | _SETTINGS))
        await installation.kill_gateway()
        yield installation
    await installation.kill_gateway()


async def test_second_pod_is_refused_when_kubelet_gives_it_a_device_of_the_first(
    cluster: Cluster, processes: Processes
) -> None:
    """It is turned away by the first one's name, nobody runs with a device of another, and the next
    pod gets all that the first one left.
    """
    offered = len(await until("slices", lambda: cluster.devices(CLASS), bool))
    await until(
        f"{offered} devices at kubelet", partial(listed_by_kubelet, KUBELET, RESOURCE), lambda count: count == offered
    )
    await until(f"allocatable {RESOURCE}", lambda: cluster.allocatable(RESOURCE), lambda count: count == offered)
    over = await cluster.make_pod(resource=RESOURCE, ending_s=_ENDING_S)
    await cluster.until_running(over)
    with processes.frozen("topology"):
        await cluster.client.delete(Pod, over, namespace="default")
        await until(f"{over} is being killed", partial(cluster.events, over, "Killing"), bool)
        first = await _allocating(cluster, processes, 1)
        assert over in await devices_by_pod(KUBELET, RESOURCE), "it had ended before: kubelet forgets nothing then"
        await until(
            f"kubelet's list is without {over}",
            partial(devices_by_pod, KUBELET, RESOURCE),
            lambda devices: over not in devices,
        )
    await cluster.until_running(first)
    await cluster.remove(over)
    # Topology would choose none that the first one has.
    with processes.frozen("topology"):
        second = await _allocating(cluster, processes, offered - 1)
    decided = await until(
        f"kubelet decides on {second}",
        partial(_status, cluster, second),
        lambda status: status.get("phase") != "Pending",
    )
    after_it = await devices_by_pod(KUBELET, RESOURCE)
    assert set(after_it) == {first}, f"{second} runs, too, and they have {after_it}"
    third = await cluster.make_pod(resource=RESOURCE, count=offered - 1)
    await cluster.until_running(third)
    at_the_end = await devices_by_pod(KUBELET, RESOURCE)

    (of_first,) = after_it[first]
    assert decided["reason"] == "UnexpectedAdmissionError"
    assert f"pod default/{first} has {of_first}" in decided["message"]
    assert set(at_the_end) == {first, third}
    assert at_the_end[first] == {of_first}
    assert len(at_the_end[third] - at_the_end[first]) == offered - 1


async def _allocating(cluster: Cluster, processes: Processes, count: int) -> str:
    """Make a pod for so many devices, and wait until kubelet allocates them: right before that the
    gateway is asked for a choice, and topology is not there to make it.
    """

    async def choices() -> int:
        return (processes.folder / "gateway.log").read_text().count('"preference.fell-back"')

    before = await choices()
    pod = await cluster.make_pod(resource=RESOURCE, count=count)
    await until(f"kubelet allocates for {pod}", choices, lambda now: now > before)
    return pod


async def _status(cluster: Cluster, pod: str) -> dict[str, Any]:
    status: dict[str, Any] = (await cluster.pod(pod)).get("status", {})
    return status
