"""`topobus holders`: the holders of devices and CPUs on all nodes, whatever way they were
allocated.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.commands.inventory import read_ledgers
from topobus.cli.exits import ExitCode
from topobus.cli.listing.list_options import LIST_DEFAULTS, AllNamespaces, ListOptions, NamespaceFilter
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NodeFilter, one_of, open_bus
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.formats.messages.catalogue import LEDGER, OBJECT
from topobus.formats.messages.messages import ApiObject, entries_of
from topobus.values.ledger import Allocation, AllocationPhase, Ledger
from topobus.values.request import Owner, OwnerKind

__all__ = ["allocations_of_pod", "holder_listing", "holders"]


async def holders(
    *,
    node: NodeFilter = None,
    namespace: NamespaceFilter = "",
    all_namespaces: AllNamespaces = False,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List who holds what: pods, claims, and what kubelet allocated, stored or not."""
    namespace = "" if all_namespaces else namespace
    lister = listing.lister(is_json=options.json)
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            ledgers = await _with_users(bus, await read_ledgers(bus))
            if node is not None:
                one_of("node", node, ledgers)
            shown = [ledgers[name] for name in sorted(ledgers) if node in (None, name)]
            return [
                holder_listing(
                    pair
                    for ledger in shown
                    for pair in _allocations(ledger)
                    if namespace in ("", pair[1].shown.namespace)
                )
            ]

        if lister.options.watch:
            return await lister.follow(
                bus,
                [(LEDGER, {"node": node} if node is not None else {}), (OBJECT, {"kind": "resourceclaim"})],
                collect,
            )
        listings = await collect()
    lister.show(
        listings,
        lambda rows: {"holders": [row.document for row in rows]},
        empty="no device is held",
        thing="holder",
    )
    return ExitCode.OK


async def _with_users(bus: Bus, ledgers: dict[str, Ledger]) -> dict[str, Ledger]:
    """Add the pods that stored claims are reserved for, where a node's ledger names none because it
    has no kubelet.
    """
    has_unknown = any(
        _is_without_pods(allocation) for ledger in ledgers.values() for allocation in ledger.allocations.values()
    )
    claims = [entry.value for entry in await bus.list(OBJECT, kind="resourceclaim")] if has_unknown else []
    users = {str(claim.metadata.get("uid")): _users_of(claim) for claim in claims}

    def with_users(allocation: Allocation) -> Allocation:
        pods = users.get(allocation.owner.uid, ()) if _is_without_pods(allocation) else ()
        return structs.replace(allocation, pods=pods) if pods else allocation

    return {
        name: structs.replace(ledger, allocations={key: with_users(each) for key, each in ledger.allocations.items()})
        for name, ledger in ledgers.items()
    }


def _is_without_pods(allocation: Allocation) -> bool:
    return allocation.owner.kind is OwnerKind.CLAIM and not allocation.pods


def _users_of(claim: ApiObject) -> tuple[Owner, ...]:
    """Return the pods that a claim is reserved for, sorted."""
    namespace = str(claim.metadata.get("namespace") or "default")
    pods = (
        Owner(kind=OwnerKind.POD, namespace=namespace, name=str(user.get("name")), uid=str(user.get("uid") or ""))
        for user in entries_of(claim.status.get("reservedFor"))
        if user.get("resource") == "pods"
    )
    return tuple(sorted(pods, key=str))


def allocations_of_pod(ledgers: Iterable[Ledger], namespace: str, name: str) -> list[tuple[str, Allocation]]:
    """Find what a pod holds or uses, by node: placed by `topobus place`, allocated by kubelet, or
    by its claims.
    """
    return [
        (node, allocation)
        for ledger in ledgers
        for node, allocation in _allocations(ledger)
        if any(
            (owner.kind, owner.namespace, owner.name) == (OwnerKind.POD, namespace, name)
            for owner in (allocation.owner, *allocation.pods)
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
    return sorted(
        ((ledger.node, allocation) for allocation in ledger.allocations.values()), key=lambda pair: str(pair[1].shown)
    )


def _row(node: str, allocation: Allocation) -> Row:
    owner, cpus = allocation.shown, allocation.cpus
    memory_bytes = sum(holding.memory_bytes for holding in allocation.holdings)
    parts = [f"{len(names)} {device_class}: {' '.join(names)}" for device_class, names in allocation.devices.items()]
    parts += [f"{len(cpus)} cpu: {cpus}"] if cpus else []
    parts += [f"{memory_bytes / 1024**3:.3g} GiB of memory"] if memory_bytes else []
    phase = " (reserved)" if allocation.phase is AllocationPhase.RESERVED else ""
    way = {OwnerKind.POD: "place", OwnerKind.CLAIM: "claim", OwnerKind.DEVICE_PLUGIN: "device plugin"}.get(
        allocation.owner.kind, "kubelet"
    )
    return Row(
        name=str(owner),
        cells=(
            Text(str(owner) + phase, "name"),
            node,
            "; ".join(parts) or "nothing",
            ", ".join(f"{pod.namespace}/{pod.name}" for pod in allocation.pods if pod != owner) or "-",
            way,
            allocation.decision_id or "-",
        ),
        document={"node": node, "allocation": allocation},
        labels={"node": node, "kind": owner.kind.value, "namespace": owner.namespace, "name": owner.name, "way": way},
    )
