"""`topobus pods`: the devices of each container as the node's kubelet lists them, and where the
ledger differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.exits import ExitCode
from topobus.cli.listing.list_options import LIST_DEFAULTS, AllNamespaces, ListOptions, NamespaceFilter
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NodeFilter, one_of, open_bus
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.cli.render.styles import health_text
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MACHINE, PODS
from topobus.formats.messages.messages import ContainerDevices, HeldDevice, PodsReply, PodsRequest
from topobus.values.dra_names import CPU_CLASS
from topobus.values.errors import PeerUnavailable
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet, NodeSet

__all__ = ["pods", "pods_listing"]


async def pods(
    *,
    node: NodeFilter = None,
    namespace: NamespaceFilter = "",
    all_namespaces: AllNamespaces = False,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List pods with their devices.

    Exit code 1 when kubelet and the ledger disagree about a device.
    """
    namespace = "" if all_namespaces else namespace
    lister = listing.lister(is_json=options.json)
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            return [
                pods_listing(name, reply)
                for name, reply in (await _replies(bus, node, namespace)).items()
                if not reply.why
            ]

        if lister.options.watch:
            # kubelet sends no notice of changes: it is asked again whenever a ledger or an
            # inventory changed.
            return await lister.follow(bus, [(LEDGER, {}), (INVENTORY, {})], collect)
        replies = await _replies(bus, node, namespace)

    def document(rows: Sequence[Row]) -> Any:
        if lister.form == "json" and not lister.selector.requirements and not lister.options.sort_by:
            return {"nodes": replies}
        return {"nodes": _regrouped(replies, rows)}

    lister.show([pods_listing(name, reply) for name, reply in replies.items() if not reply.why], document, thing="pod")
    output = lister.output()
    for name, reply in replies.items():
        if reply.why:
            output.show(Text(f"{name}: {reply.why}", "warn"))
        for disagreement in reply.disagreements:
            output.show(
                Text(
                    f"{name}: {disagreement.device}: kubelet has {disagreement.kubelet}, the ledger has "
                    f"{disagreement.ledger}",
                    "fail",
                )
            )
    return ExitCode.NO if any(reply.disagreements for reply in replies.values()) else ExitCode.OK


async def _replies(bus: Bus, node: str | None, namespace: str) -> dict[str, PodsReply]:
    nodes = sorted(entry.parts["node"] for entry in await bus.list(MACHINE))
    if not nodes:
        raise PeerUnavailable("no node has published its machine", next_step="`topobus doctor` reports what is missing")
    chosen = [one_of("node", node, nodes)] if node is not None else nodes
    replies = dict(zip(chosen, await asyncio.gather(*(_ask(bus, pod, namespace) for pod in chosen)), strict=True))
    if node is not None and replies[node].why:
        # A single node was named, and nothing is known of it.
        raise PeerUnavailable(f"{node}: {replies[node].why}", next_step="`topobus doctor` reports what is missing")
    return replies


def _regrouped(replies: Mapping[str, PodsReply], rows: Sequence[Row]) -> dict[str, PodsReply]:
    """Keep of each node's answer the containers that still have a row, in the order of the rows."""
    containers: dict[str, dict[int, ContainerDevices]] = {}
    for row in rows:
        held = row.document
        containers.setdefault(held["node"], {})[held["place"]] = held["container"]
    return {
        node: structs.replace(reply, containers=tuple(containers.get(node, {}).values()))
        for node, reply in replies.items()
    }


async def _ask(bus: Bus, node: str, namespace: str) -> PodsReply:
    try:
        return await bus.ask(PODS, PodsRequest(namespace=namespace), node=node)
    except PeerUnavailable as err:
        return PodsReply(why=str(err))


def pods_listing(node: str, reply: PodsReply) -> Listing:
    """List one row per device."""
    rows = [row for place, container in enumerate(reply.containers) for row in _rows(node, place, container)]
    return Listing(
        title=node,
        columns=(
            Column(title="pod", fit=Fit.NAME),
            Column(title="container", fit=Fit.NAME),
            Column(title="resource", fit=Fit.NAME, gives_way=True),
            Column(title="device", fit=Fit.NAME),
            Column(title="NUMA", fit=Fit.NAME),
            Column(title="health"),
            Column(title="class", fit=Fit.NAME, is_wide=True),
            Column(title="node", fit=Fit.NAME, is_wide=True),
        ),
        rows=tuple(rows),
    )


def _rows(node: str, place: int, container: ContainerDevices) -> Iterable[Row]:
    origin = f"claim {container.claim}" if container.claim else container.resource
    where = Text(f"{container.namespace}/{container.pod}", "name")

    def row(name: str, kind: str, device: str, numa: str, health: Text | str) -> Row:
        return Row(
            name=f"pod/{container.pod}",
            cells=(where, name, kind, device, numa, health, container.device_class or "-", node),
            document={"node": node, "place": place, "container": container},
            labels={
                "node": node,
                "namespace": container.namespace,
                "pod": container.pod,
                "container": container.container,
                "class": container.device_class,
                "device": device,
                "numa": numa,
                "health": str(health).partition(":")[0],
            },
        )

    if container.device_class == CPU_CLASS and container.resource == CPU_CLASS:
        # Allocations of kubelet's CPU and memory managers: a line for all CPUs, one for each kind
        # of memory.
        if container.devices:
            yield row(container.container or "(all)", origin, *_cpus(container.devices))
        for block in container.memory:
            yield row(container.container or "(all)", block.kind, _size(block.size_bytes), str(block.nodes), "")
        return
    for device in container.devices:
        numa = str(device.numa_nodes) if device.numa_nodes is not None else "?"
        yield row(container.container, origin, device.name, numa, health_text(device.health, device.reason))


def _cpus(devices: tuple[HeldDevice, ...]) -> tuple[str, str, Text]:
    """Return a container's exclusive CPUs as one line: the list, the NUMA nodes, and the worst
    health of them.
    """
    cpus = CpuSet.of(int(device.name.removeprefix("cpu-")) for device in devices)
    nodes = NodeSet.of(node for device in devices for node in device.numa_nodes or ())
    sick = [device for device in devices if device.health is not HealthState.HEALTHY]
    shown = sick[0] if sick else devices[0]
    detail = f"{shown.name} {shown.reason}" if sick and shown.reason else ""
    return f"cpus {cpus}", str(nodes) if nodes else "?", health_text(shown.health, detail)


def _size(size_bytes: int) -> str:
    """Write a size as people do.

    >>> _size(3 * 1024**3)
    '3 GiB'
    """
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"
