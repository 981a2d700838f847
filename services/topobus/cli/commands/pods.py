"""`topobus pods`: the devices of each container as the node's kubelet lists them, and where the ledger differs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from cyclopts import Parameter
from rich import box
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of, open_bus
from topobus.cli.render.leaves import HEALTH_STYLES
from topobus.contracts.catalogue import MACHINE, PODS
from topobus.contracts.messages import HeldDevice, PodsReply, PodsRequest
from topobus.domain.errors import PeerUnavailable
from topobus.domain.health import HealthState
from topobus.domain.idset import CpuSet, NodeSet
from topobus.runtime.bus import Bus

__all__ = ["pods", "pods_table"]

_CPU_CLASS = "cpu"


def pods(
    *,
    node: Annotated[str | None, Parameter(help="Only this node.")] = None,
    namespace: Annotated[str, Parameter(help="Only pods of this namespace.")] = "",
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List pods with their devices. Exit code 1 when kubelet and the ledger disagree about a device."""
    return asyncio.run(_pods(node, namespace, options))


async def _pods(node: str | None, namespace: str, options: BusOptions) -> int:
    output = options.output()
    async with open_bus(options) as bus:
        nodes = sorted(entry.parts["node"] for entry in await bus.list(MACHINE))
        if not nodes:
            raise PeerUnavailable("no node has published its machine", next_step="`topobus doctor` tells what is missing")
        chosen = [one_of("node", node, nodes)] if node is not None else nodes
        replies = dict(zip(chosen, await asyncio.gather(*(_ask(bus, pod, namespace) for pod in chosen)), strict=True))
    if node is not None and replies[node].why:
        # One node was meant, and nothing is known of it.
        raise PeerUnavailable(f"{node}: {replies[node].why}", next_step="`topobus doctor` tells what is missing")
    if output.is_json:
        output.document({"nodes": replies})
    else:
        output.show(*(pods_table(name, reply) for name, reply in replies.items() if not reply.why))
    for name, reply in replies.items():
        if reply.why:
            output.show(Text(f"{name}: {reply.why}", "warn"))
        for disagreement in reply.disagreements:
            output.show(
                Text(f"{name}: {disagreement.device}: kubelet says {disagreement.kubelet}; the ledger says {disagreement.ledger}", "fail")
            )
    return ExitCode.NO if any(reply.disagreements for reply in replies.values()) else ExitCode.OK


async def _ask(bus: Bus, node: str, namespace: str) -> PodsReply:
    try:
        return await bus.ask(PODS, PodsRequest(namespace=namespace), node=node)
    except PeerUnavailable as err:
        return PodsReply(why=str(err))


def pods_table(node: str, reply: PodsReply) -> Table:
    """List one row a device."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title", title=node, title_justify="left", pad_edge=False, collapse_padding=True)
    for title in ("pod", "container", "resource", "device", "NUMA", "health"):
        # Where a device sits and how it is must not be pushed out by long names.
        table.add_column(title, overflow="fold", no_wrap=title == "device")
    for container in reply.containers:
        origin = f"claim {container.claim}" if container.claim else container.resource
        where = Text(f"{container.namespace}/{container.pod}", "name")
        if container.device_class == _CPU_CLASS and container.resource == _CPU_CLASS:
            # What kubelet's CPU and memory managers gave: a line for all CPUs, one for each kind of memory.
            if container.devices:
                table.add_row(where, container.container or "(all)", origin, *_cpus(container.devices))
            for block in container.memory:
                table.add_row(where, container.container or "(all)", block.kind, _size(block.size_bytes), str(block.nodes), "")
            continue
        for device in container.devices:
            health = device.health.value + (f": {device.reason}" if device.reason else "")
            table.add_row(
                where,
                container.container,
                origin,
                device.name,
                str(device.numa_nodes) if device.numa_nodes is not None else "?",
                Text(health, HEALTH_STYLES[device.health] or "ok"),
            )
    return table


def _cpus(devices: tuple[HeldDevice, ...]) -> tuple[str, str, Text]:
    """Give a container's exclusive CPUs as one line: the list, the NUMA nodes, and how the worst of them is."""
    cpus = CpuSet.of(int(device.name.removeprefix("cpu-")) for device in devices)
    nodes = NodeSet.of(node for device in devices for node in device.numa_nodes or ())
    sick = [device for device in devices if device.health is not HealthState.HEALTHY]
    shown = sick[0] if sick else devices[0]
    text = shown.health.value + (f": {shown.name} {shown.reason}" if sick and shown.reason else "")
    return f"cpus {cpus}", str(nodes) if nodes else "?", Text(text, HEALTH_STYLES[shown.health] or "ok")


def _size(size_bytes: int) -> str:
    """Write a size as people do.

    >>> _size(3 * 1024**3)
    '3 GiB'
    """
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"
