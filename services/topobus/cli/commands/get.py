"""`topobus get`: objects of the stand-alone API, listed or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from cyclopts import Parameter

from topobus.bus.bus import Bus
from topobus.cli.exits import ExitCode
from topobus.cli.listing.list_options import LIST_DEFAULTS, AllNamespaces, Lister, ListOptions, Namespace
from topobus.cli.objects.applying import built_in_classes, find_object, parts_of, plain_object
from topobus.cli.objects.kinds import is_node_allocation_state, plural_of, read_target
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus
from topobus.cli.render.listing import Listing, Row
from topobus.cli.render.tables import object_listing
from topobus.formats.kubernetes.objects import is_of_cluster, metadata_of
from topobus.formats.messages.catalogue import LEDGER, OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.ledger import Allocation
from topobus.values.request import OwnerKind

__all__ = ["get"]


async def get(
    *target: Annotated[
        str,
        Parameter(
            name="KIND [NAME...]", help="Such as claims, pods, deviceclasses, claim/fast; several kinds with commas."
        ),
    ],
    namespace: Namespace = "default",
    all_namespaces: AllNamespaces = False,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List objects, or show those named."""
    lister = listing.lister(is_json=options.json)
    if target and is_node_allocation_state(target[0].partition("/")[0]):
        # Imported here, as it is rarely used: it loads devices, drawings and ledgers.
        from topobus.cli.commands.nodeallocationstates import show_states

        named = (target[0].partition("/")[2], *target[1:])
        return await show_states(tuple(argument for argument in named if argument), lister, options)
    kinds, names = read_target(target, verb="get")
    namespace = "" if all_namespaces else namespace
    unread: set[str] = set()
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            now = datetime.now(UTC)
            return [
                object_listing(
                    kind,
                    await _objects(bus, kind, names, namespace, unread),
                    now=now,
                    has_namespace=not namespace,
                    title=plural_of(kind) if len(kinds) > 1 else "",
                )
                for kind in kinds
            ]

        if lister.options.watch:
            return await lister.follow(bus, [(OBJECT, _parts(kind, namespace)) for kind in kinds], collect)
        listings = await collect()
        unstored = (
            await _count_unstored_pods(bus, listings[kinds.index("Pod")], namespace)
            if "Pod" in kinds and not names
            else 0
        )
    where = f" in namespace {namespace}" if namespace and not all(map(is_of_cluster, kinds)) else ""

    def document(rows: Sequence[Row]) -> Any:
        plain = [plain_object(row.document, is_brief=lister.form == "yaml") for row in rows]
        return plain[0] if len(names) == 1 and plain else {"apiVersion": "v1", "kind": "List", "items": plain}

    lister.show(
        listings, document, thing=f"{' or '.join(map(str.lower, kinds))}{where}", empty=_none_text(kinds, where)
    )
    _note_left_out(lister, len(unread), unstored)
    return ExitCode.OK


def _note_left_out(lister: Lister, unread: int, unstored: int) -> None:
    if unread:
        them = "1 object cannot be read: `topobus doctor` names it" if unread == 1 else ""
        lister.output().note(them or f"{unread} objects cannot be read: `topobus doctor` names them")
    if unstored and lister.is_text:
        pods = "1 pod holds devices and is" if unstored == 1 else f"{unstored} pods hold devices and are"
        lister.output().note(f"{pods} not stored: `topobus holders`")


def _none_text(kinds: Sequence[str], where: str) -> str:
    text = f"there are no {' and no '.join(map(plural_of, kinds))}{where}" + ("; -A looks into all" if where else "")
    if "Node" in kinds:
        text += "; none is stored: `topobus inventory` and `topobus machine` show those that run"
    return text


async def _count_unstored_pods(bus: Bus, stored: Listing, namespace: str) -> int:
    """Count the pods that `topobus place` placed and that have no stored object."""
    owners = {
        (allocation.owner.namespace, allocation.owner.name)
        for ledger in await bus.list(LEDGER)
        for allocation in ledger.value.allocations.values()
        if allocation.owner.kind is OwnerKind.POD
        and namespace in ("", allocation.owner.namespace)
        and _holds_something(allocation)
    }
    metadata = [metadata_of(row.document) for row in stored.rows]
    return len(owners - {(each.namespace or "default", each.name) for each in metadata})


def _holds_something(allocation: Allocation) -> bool:
    return any(holding.devices or holding.cpus or holding.memory_bytes for holding in allocation.holdings)


async def _objects(bus: Bus, kind: str, names: tuple[str, ...], namespace: str, unread: set[str]) -> list[ApiObject]:
    """Read objects. The keys of those that cannot be read are added to `unread`."""
    if names:
        return [await find_object(bus, parts_of(kind, namespace or "default", name)) for name in names]
    stored = [
        entry.value
        for entry in await bus.list(OBJECT, on_rejected=lambda key, _: unread.add(key), **_parts(kind, namespace))
    ]
    stored_names = {metadata_of(each).name for each in stored}
    built_in = [each for each in await built_in_classes(bus, kind) if metadata_of(each).name not in stored_names]
    return sorted([*stored, *built_in], key=lambda each: metadata_of(each).name) if built_in else stored


def _parts(kind: str, namespace: str) -> dict[str, str]:
    inside = CLUSTER if is_of_cluster(kind) else namespace
    return {"kind": kind.lower()} | ({"namespace": inside} if inside else {})
