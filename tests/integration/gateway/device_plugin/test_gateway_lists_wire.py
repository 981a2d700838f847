"""The device plugin's list on the wire: kubelet's largest message, several streams, one of them
slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from support.looks import next_turn
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.device_plugins.allocation_record import AllocationRecord
from topobus.gateway.device_plugins.device_plugin import LIST_LIMIT_BYTES, DevicePlugin, ResourceTraits
from topobus.gateway.device_plugins.pod_resources import PodResourcesReader
from topobus.gateway.device_plugins.sockets import serving
from topobus.gateway.metrics import CallMetrics
from topobus.gateway.node_state import NodeState, Offer
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.process.broadcast import Broadcast
from topobus.values.device import Device, Inventory
from topobus.values.idset import NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

GPU = "topobus.dev/gpu"
OTHERS: Any = None
"""What ListAndWatch never asks: the bus, the node plane."""
# Tag and length (2), id tag and length (2) + 63, health (2 + 7), topology (2) with one node 0 (2).
ENTRY_BYTES = 80
MOST = LIST_LIMIT_BYTES // ENTRY_BYTES


def named(number: int, length: int = 63) -> Device:
    """A device whose name is as long as one may be."""
    return Device(name=f"gpu-{number:0{length - 4}d}", device_class="gpu", numa_nodes=NodeSet(0))


class Served:
    """One device plugin on a socket, fed by hand."""

    def __init__(self, folder: Path) -> None:
        self.state = NodeState(OTHERS, "demo-node", lambda device_class: f"topobus.dev/{device_class}")
        self.registry = CollectorRegistry()
        self.plugin = DevicePlugin(
            Offer(resource=GPU, device_class="gpu"),
            state=self.state,
            asks=OTHERS,
            record=AllocationRecord(folder / "given.json", lambda _: True, boot_id="b"),
            pods=PodResourcesReader(folder / "pods.sock", "demo-node", {GPU: "gpu"}),
            metrics=CallMetrics(self.registry),
            deadlines=DeadlineSettings(),
            traits=ResourceTraits(),
            streams_changed=Broadcast(),
        )
        self.socket = folder / "p.sock"

    def show(self, *devices: Device) -> None:
        """Publish an inventory."""
        self.state.take_inventory("gpu", Inventory(node="demo-node", device_class="gpu", generation=1, devices=devices))

    def left_out(self) -> float | None:
        """The metric."""
        return self.registry.get_sample_value("topobus_gateway_devices_left_out", {"resource": GPU})

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[pb.ListAndWatchResponse]]:
        """Open ListAndWatch with gRPC's default limits, as kubelet does, on a connection of its
        own.
        """
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"unix:{self.socket}", options=options) as channel, asyncio.timeout(30):
            call = rpc.DevicePluginStub(channel).ListAndWatch(pb.Empty())
            try:
                yield aiter(call)
            finally:
                call.cancel()


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    """Serve."""
    made = Served(folder)
    async with serving(made.socket, lambda server: rpc.add_DevicePluginServicer_to_server(made.plugin, server)):
        yield made


async def test_list_is_sent_whole_when_it_is_just_as_large_as_kubelet_takes(tmp_path: Path) -> None:
    """Up to the last byte: a message of 4 MiB arrives at a client with gRPC's default limit."""
    # All but one are as long as can be; the last one fills what is left.
    rest = LIST_LIMIT_BYTES - MOST * ENTRY_BYTES
    devices = [*(named(index) for index in range(MOST - 1)), named(MOST - 1, 63)]
    while rest < ENTRY_BYTES - 63 + 8 and rest:
        devices.pop()
        rest += ENTRY_BYTES
    if rest:
        devices.append(named(MOST, rest - (ENTRY_BYTES - 63)))
    async with served(tmp_path) as plugin:
        plugin.show(*devices)
        async with plugin.stream() as stream:
            message = await anext(stream)

    assert message.ByteSize() == LIST_LIMIT_BYTES
    assert (len(message.devices), plugin.left_out()) == (len(devices), 0)


async def test_list_is_cut_when_it_is_larger_than_kubelet_takes(tmp_path: Path) -> None:
    """A longer message would end the stream and take all devices away.

    So the last free ones by name are left out, and never a held one.
    """
    many = MOST + 100
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=GPU, uid="u")
    held = named(many - 1).name
    ledger = Ledger(
        node="demo-node",
        allocations={owner.key: Allocation(owner=owner, holdings=(Holding(devices={"gpu": (held,)}),))},
    )
    async with served(tmp_path) as plugin:
        plugin.state.take_ledger(ledger)
        plugin.show(*(named(index) for index in range(many)))
        async with plugin.stream() as stream:
            cut = await anext(stream)
            plugin.show(*(named(index) for index in range(10)), named(many - 1))
            whole = await anext(stream)

    assert cut.ByteSize() <= LIST_LIMIT_BYTES < cut.ByteSize() + ENTRY_BYTES
    assert [device.ID for device in cut.devices][-1] == held
    assert [device.ID for device in cut.devices][:-1] == [named(index).name for index in range(MOST - 1)]
    assert (len(whole.devices), plugin.left_out()) == (11, 0)


async def test_a_stream_whose_reader_is_slow_holds_up_no_other_and_gets_the_newest_list(tmp_path: Path) -> None:
    """While one reader takes nothing at all, the others get each change.

    Then it gets the newest list soon, not all of those in between.
    """
    rounds = 40
    block = [named(index) for index in range(10_000)]
    async with served(tmp_path) as plugin:
        plugin.show(*block)
        async with plugin.stream() as slow, plugin.stream() as first, plugin.stream() as second:
            for stream in (first, second):
                await anext(stream)
            for turn in range(rounds):
                plugin.show(*block[: 10_000 - turn - 1])
                lengths = [len((await anext(stream)).devices) for stream in (first, second)]
                assert lengths == [10_000 - turn - 1] * 2
            seen = 0
            while len((await anext(slow)).devices) != 10_000 - rounds:
                seen += 1

    # What gRPC and the socket's buffer hold when the reader takes nothing: at most gRPC's largest
    # window, 8 MB, which is a dozen lists of 0.8 MB; not forty.
    assert seen < rounds // 2


async def test_streams_get_one_list_when_many_changes_come_at_once(tmp_path: Path) -> None:
    """A driver that finds its cards one after the other is one message
    more, not one for each card.
    """
    async with served(tmp_path) as plugin:
        plugin.show(named(0))
        async with plugin.stream() as stream:
            await anext(stream)
            for count in range(2, 101):
                plugin.show(*(named(index) for index in range(count)))
            got = [len((await anext(stream)).devices)]
            while got[-1] != 100:
                got.append(len((await anext(stream)).devices))

    assert len(got) <= 2


async def test_streams_get_nothing_when_nothing_that_kubelet_is_told_has_changed(tmp_path: Path) -> None:
    """Kubelet's own allocation changes who holds a device, and nothing in the list.

    The next message is the next change.
    """
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=GPU, uid="u")
    async with served(tmp_path) as plugin:
        plugin.show(named(0), named(1))
        async with plugin.stream() as stream:
            await anext(stream)
            plugin.state.hand_out("gpu", [named(0).name], owner, 7)
            await next_turn()
            plugin.show(named(0))
            changed = await anext(stream)

    assert [device.ID for device in changed.devices] == [named(0).name]
