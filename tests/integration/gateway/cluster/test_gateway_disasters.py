"""What is taken away from under a running gateway never ends it: it serves the node as soon as that
is there again.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable

import pytest

from support.cluster_slices import shown
from support.gateway_rig import Rig
from support.node_plane import NODE, device
from topobus.bus.server_config.streams import stream_names
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration]


async def delete_buckets(rig: Rig, _: ApiServerSimulator) -> None:
    """All that is stored is gone: inventories, ledger, events."""
    for stream in stream_names():
        await rig.bus._jetstream.call(f"STREAM.DELETE.{stream}")


async def remove_node(_: Rig, server: ApiServerSimulator) -> None:
    """The Node is deleted, with its slices, and made again."""
    server.remove("Node", NODE)
    server.wipe_slices(NODE)
    server.close_watches()
    server.put({"kind": "Node", "metadata": {"name": NODE}})


async def replace_kubelet(rig: Rig, _: ApiServerSimulator) -> None:
    """An installation of kubelet goes with its folders, and another one comes."""
    await rig.kubelet.stop()
    for folder in (rig.kubelet.device_plugin_dir, rig.kubelet.plugins_registry_dir, rig.kubelet.plugins_dir):
        shutil.rmtree(folder)
        folder.mkdir()
    await rig.kubelet.start()


@pytest.mark.parametrize("disaster", [delete_buckets, remove_node, replace_kubelet])
async def test_gateway_lives_through_it(
    disaster: Callable[[Rig, ApiServerSimulator], Awaitable[None]], rig: Rig, server: ApiServerSimulator
) -> None:
    """A device that comes afterwards is offered in both ways."""
    async with rig.kubelet, rig.gateway() as gateway:
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=2)
        await disaster(rig, server)
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1), device("gpu-2", 1))
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=3)
        await rig.kubelet.wait_for_driver(DRIVER)
        await server.until(
            lambda: "gpu-2" in [shown_device["name"] for shown_device in shown(server)["gpu"]],
            what="the new device in a slice",
        )
        assert not gateway.done()
