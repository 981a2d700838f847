"""`topobus holders`: who holds which devices and CPUs, over all nodes, whatever way they were given out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from topobus.cli.commands.inventory import read_ledgers
from topobus.cli.exits import ExitCode
from topobus.cli.listing.list_options import LIST_DEFAULTS, AllNamespaces, Lister, ListOptions
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of, open_bus
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.contracts.catalogue import LEDGER
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Allocation, AllocationPhase, Ledger
from topobus.domain.request import OwnerKind

__all__ = ["allocations_of_pod", "holder_listing", "holders"]


def holders(
    *,
    node: Annotated[str | None, Parameter(help="Only this node.")] = None,
    namespace: Annotated[str, Parameter(name=("--namespace", "-n"), help="Only holders of this namespace. Default: all.")] = "",
    all_namespaces: AllNamespaces = False,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List who holds what: pods, claims, and what kubelet gave out, stored or not."""
    return asyncio.run(_holders(node, "" if all_namespaces else namespace, listing.lister(is_json=options.json), options))


async def _holders(node: str | None, namespace: str, lister: Lister, options: BusOptions) -> int:
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            ledgers = await read_ledgers(bus)
            if node is not None:
                one_of("node", node, ledgers)
            shown = [ledgers[name] for name in sorted(ledgers) if node in (None, name)]
            return [holder_listing(pair for ledger in shown for pair in _allocations(ledger) if namespace in ("", pair[1].shown.namespace))]

        if lister.options.watch:
            await lister.follow(bus, [(LEDGER, {"node": node} if node is not None else {})], collect)
            return ExitCode.OK
        listings = await collect()
    lister.show(listings, lambda rows: {"holders": [row.document for row in rows]}, empty="nobody holds anything", thing="holder")
    return ExitCode.OK


def allocations_of_pod(ledgers: Iterable[Ledger], namespace: str, name: str) -> list[tuple[str, Allocation]]:
    """Find what a pod holds or uses, by node: placed by `topobus place`, given by kubelet, or by its claims."""
    return [
        (node, allocation)
        for ledger in ledgers
        for node, allocation in _allocations(ledger)
        if any(
            (owner.kind, owner.namespace, owner.name) == (OwnerKind.POD, namespace, name)
            for owner in (allocation.owner, allocation.user, *allocation.pods)
            if owner is not None
        )
    ]


def holder_listing(held: Iterable[tuple[str, Allocation]]) -> Listing:
    """List allocations with their nodes."""
    return Listing(
        columns=(
            Column(title="holder", fit=Fit.NAME),
            Column(title="node", fit=Fit.NAME),
            Column(title="what"),
            Column(title="used by", gives_way=True),
            Column(title="way", is_wide=True),
            Column(title="decision", fit=Fit.ID, is_wide=True),
        ),
        rows=tuple(_row(node, allocation) for node, allocation in held),
    )


def _allocations(ledger: Ledger) -> list[tuple[str, Allocation]]:
    return sorted(((ledger.node, allocation) for allocation in ledger.allocations.values()), key=lambda pair: str(pair[1].shown))


def _row(node: str, allocation: Allocation) -> Row:
    owner = allocation.shown
    devices: dict[str, list[str]] = {}
    for holding in allocation.holdings:
        for device_class, names in holding.devices.items():
            devices.setdefault(device_class, []).extend(names)
    cpus = CpuSet.of(cpu for holding in allocation.holdings for cpu in holding.cpus)
    memory_bytes = sum(holding.memory_bytes for holding in allocation.holdings)
    parts = [f"{len(names)} {device_class}: {' '.join(sorted(names))}" for device_class, names in sorted(devices.items())]
    parts += [f"{len(cpus)} cpu: {cpus}"] if cpus else []
    parts += [f"{memory_bytes / 1024**3:.3g} GiB of memory"] if memory_bytes else []
    phase = " (reserved)" if allocation.phase is AllocationPhase.RESERVED else ""
    way = {OwnerKind.POD: "place", OwnerKind.CLAIM: "claim", OwnerKind.DEVICE_PLUGIN: "device plugin"}.get(allocation.owner.kind, "kubelet")
    return Row(
        name=str(owner),
        cells=(
            Text(str(owner) + phase, "name"),
            node,
            "; ".join(parts) or "nothing",
            ", ".join(f"{pod.namespace}/{pod.name}" for pod in allocation.pods) or "-",
            way,
            allocation.decision_id or "-",
        ),
        document={"node": node, "allocation": allocation},
        labels={"node": node, "kind": owner.kind.value, "namespace": owner.namespace, "name": owner.name, "way": way},
    )
