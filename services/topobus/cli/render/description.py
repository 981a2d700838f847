"""Describes one object of the stand-alone API with related data: its devices, their holders, its
decisions.

A Description is plain data for JSON, and is rendered for people. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from topobus.cli.render.answers import reason_lines
from topobus.cli.render.grids import facts_grid
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.cli.render.styles import HEALTH_STYLES
from topobus.cli.render.tables import claim_names, node_of, results_of, state_of, ways_of
from topobus.engine.drawing.leaves import short_address
from topobus.engine.shapes.shapes import is_shape, shapes_of
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.messages.messages import ApiObject, DecisionEvent, entries_of
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.device import Inventory
from topobus.values.dra_names import class_of_device
from topobus.values.ledger import Ledger
from topobus.values.outcome import Reason, Refusal, summary
from topobus.values.own_shapes import OwnShape
from topobus.values.timestamps import short_time

__all__ = ["Description", "Granted", "describe", "view"]

# The newest decisions explain the present state. `topobus decisions` has the others.
_SHOWN_DECISIONS = 8
# A waiting claim has what would fit as a condition, and among the reasons of its event.
_ADVICE = "Advice"
_NEAREST = "nearest-miss"
# A condition's message is cut at some thousand characters. So many distinguish one from another.
_COMPARED = 1000


class Granted(Struct, frozen=True, kw_only=True):
    """A device of a claim with its node's facts about it."""

    request: str
    driver: str
    pool: str
    node: str
    device: str
    shape: str
    """The shape that the claim has and that this device is a part of. Empty: the claim has the device
    itself."""
    numa_nodes: str
    """NUMA nodes that it is local to. `?` when they are unknown."""
    below: str
    """The PCIe switch or root above it. Empty when it is unknown."""
    health: str
    reason: str
    """The worst condition. Empty when it is healthy."""


class Held(Struct, frozen=True, kw_only=True):
    """What one node's ledger holds for the object."""

    node: str
    devices: dict[str, tuple[str, ...]]
    cpus: str
    is_prepared: bool


class Description(Struct, frozen=True, kw_only=True):
    """All about one object."""

    object: dict[str, Any]
    devices: tuple[Granted, ...] = ()
    held: tuple[Held, ...] = ()
    reasons: tuple[Reason, ...] = ()
    """Why it waits, with codes and facts. Empty when it does not."""
    decisions: tuple[DecisionEvent, ...] = ()


def describe(
    api_object: ApiObject,
    plain: dict[str, Any],
    inventories: Iterable[Inventory],
    ledgers: Iterable[Ledger],
    events: Iterable[DecisionEvent],
    claims: Mapping[str, ApiObject] | None = None,
    own_shapes: Mapping[str, Sequence[OwnShape]] | None = None,
) -> Description:
    """Collect what is known of an object.

    Shapes: claims — those of a pod, by the names that it has for them; plain — the object as
    Kubernetes writes it; events — in the order in which they were made; own_shapes — those that
    operators add, by node.
    """
    uid = metadata_of(api_object).uid
    decision_events = [event for event in events if event.owner.uid == uid and not event.is_dry_run]
    of_fleet = tuple(inventories)
    return Description(
        object=plain,
        devices=(
            *_all_granted(api_object, of_fleet, own_shapes or {}),
            *(
                structs.replace(granted, request=f"{name}/{granted.request}")
                for name, claim in (claims or {}).items()
                for granted in _all_granted(claim, of_fleet, own_shapes or {})
            ),
        ),
        held=tuple(
            Held(
                node=ledger.node,
                devices=allocation.devices,
                cpus=str(allocation.cpus),
                is_prepared=allocation.is_prepared,
            )
            for ledger in sorted(ledgers, key=lambda ledger: ledger.node)
            for allocation in ledger.allocations.values()
            if allocation.owner.uid == uid
        ),
        reasons=_reasons(api_object, decision_events),
        decisions=tuple(decision_events[-_SHOWN_DECISIONS:]),
    )


def view(api_object: ApiObject, description: Description) -> RenderableType:
    """Render a description for people."""
    parts: list[RenderableType] = [Text(name_of(api_object), "title"), _facts(api_object)]
    asks = _asks(api_object)
    if asks:
        parts += [Text("asks for", "title"), *map(_indented, asks)]
    if description.devices:
        parts += [Text("devices", "title"), _device_listing(description.devices)]
    for held in description.held:
        names = ", ".join(
            f"{len(devices)} {device_class}" for device_class, devices in sorted(held.devices.items()) if devices
        )
        cpus = f"CPUs {held.cpus}" if held.cpus else ""
        what = ", ".join(part for part in (names, cpus) if part) or "nothing"
        parts.append(Text(f"held on {held.node}: {what}{'; prepared for a container' if held.is_prepared else ''}"))
    users = [str(user.get("name")) for user in entries_of(api_object.status.get("reservedFor"))]
    if api_object.kind == "ResourceClaim":
        parts.append(Text(f"reserved for: {', '.join(users) or 'no pod'}"))
    conditions = entries_of(api_object.status.get("conditions"))
    has_advice = any(reason.code == _NEAREST for reason in description.reasons)
    for condition in conditions:
        if has_advice and condition.get("type") == _ADVICE:
            continue  # the reasons below have the same content with their codes
        is_true = condition.get("status") == "True"
        head = Text.assemble(
            (f"{condition.get('type')}: ", "title"), (_reason_of(condition), "ok" if is_true else "warn")
        )
        head.append(f"  since {short_time(str(condition.get('lastTransitionTime') or '')) or '?'}", "faint")
        parts.append(head)
        if not description.reasons or is_true:
            parts.append(_indented(str(condition.get("message", ""))))
    if description.reasons:
        parts += [Text("why not", "title"), *reason_lines(description.reasons)]
    if description.decisions:
        parts += [Text("decisions", "title"), _decision_listing(description.decisions)]
    return Group(*parts)


def _indented(line: str) -> Padding:
    """Indent a line, and the parts of it that a narrow terminal folds, by two columns more than it
    is already.
    """
    text = line.lstrip()
    return Padding(Text(text), (0, 0, 0, 2 + len(line) - len(text)))


def _facts(api_object: ApiObject) -> Table:
    metadata = metadata_of(api_object)
    owners = [f"{owner.get('kind')} {owner.get('name')}" for owner in metadata.owner_references]
    facts: dict[str, str | Text] = {
        "state": state_of(api_object),
        "uid": metadata.uid,
        "created": short_time(metadata.creation_timestamp),
        "made for": ", ".join(owners),
        "node": str(api_object.spec.get("nodeName") or "") if api_object.kind == "Pod" else "",
        "allocated": metadata.annotations.get("topobus.dev/allocation-mode", "")
        if api_object.kind == "ResourceClaim"
        else "",
        "deleted": short_time(metadata.deletion_timestamp),
        "finalizers": ", ".join(metadata.finalizers),
    }
    grid = facts_grid()
    for name, fact in facts.items():
        if fact:
            grid.add_row(f"  {name}", fact)
    return grid


def _asks(api_object: ApiObject) -> list[str]:
    if api_object.kind == "Pod":
        lines = [f"claim {name}: {claim or 'not made yet'}" for name, claim in claim_names(api_object).items()]
        for container in entries_of(api_object.spec.get("containers")):
            limits = (container.get("resources") or {}).get("limits") or {}
            asked = ", ".join(f"{name}: {amount}" for name, amount in sorted(limits.items()))
            lines += [f"container {container.get('name')}: {asked}"] if asked else []
        return lines
    spec = api_object.spec.get("spec") or {} if api_object.kind == "ResourceClaimTemplate" else api_object.spec
    devices = spec.get("devices") if isinstance(spec, dict) else None
    return _device_asks(devices) if isinstance(devices, dict) else []


def _device_asks(devices: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for request in entries_of(devices.get("requests")):
        for way in ways_of(request):
            name = f"{request.get('name')}/{way['name']}" if way.get("name") else str(request.get("name"))
            count = "all" if way.get("allocationMode") == "All" else str(way.get("count", 1))
            lines.append(f"request {name}: {count} of class {way.get('deviceClassName')}")
            expressions = [
                str((selector.get("cel") or {}).get("expression", "?")) for selector in entries_of(way.get("selectors"))
            ]
            lines.extend(f"  where {' '.join(text.split())}" for text in expressions)
    for constraint in entries_of(devices.get("constraints")):
        of = ", ".join(map(str, constraint.get("requests") or ())) or "all requests"
        kind = "equal" if constraint.get("matchAttribute") else "different"
        lines.append(f"{kind} {constraint.get('matchAttribute') or constraint.get('distinctAttribute')} among {of}")
    return lines


def _device_listing(devices: Sequence[Granted]) -> Listing:
    return Listing(
        columns=(
            Column(title="request", fit=Fit.NAME),
            Column(title="device", fit=Fit.NAME),
            Column(title="driver", fit=Fit.NAME, gives_way=True),
            Column(title="node", fit=Fit.NAME, gives_way=True),
            Column(title="NUMA", fit=Fit.NAME),
            Column(title="below", fit=Fit.NAME),
            Column(title="health"),
        ),
        rows=tuple(map(_granted_row, devices)),
        all_of_it="-o json has all",
    )


def _granted_row(device: Granted) -> Row:
    style = next((style for state, style in HEALTH_STYLES.items() if state.value == device.health), "") or "ok"
    health = Text(f"{device.health}{f': {device.reason}' if device.reason else ''}", style)
    return Row(
        cells=(
            device.request,
            Text(f"{device.shape}: {device.device}" if device.shape else device.device, "name"),
            device.driver,
            device.node,
            device.numa_nodes,
            device.below or "-",
            health,
        )
    )


def _decision_listing(decisions: Sequence[DecisionEvent]) -> Listing:
    return Listing(
        columns=(
            Column(title="time", fit=Fit.NAME),
            Column(title="decision", fit=Fit.ID),
            Column(title="what"),
            Column(title="answer"),
        ),
        rows=tuple(map(_decision_row, decisions)),
    )


def _decision_row(event: DecisionEvent) -> Row:
    answer = Text(summary(event.outcome), "fail" if isinstance(event.outcome, Refusal) else "ok")
    return Row(cells=(short_time(event.time), Text(event.id, "name"), _what(event), answer))


def _what(event: DecisionEvent) -> str:
    """Return what was decided: on one node, or among all."""
    return event.verb if event.node == CLUSTER else f"{event.verb} on {event.node}"


def _reason_of(condition: dict[str, Any]) -> str:
    """Return a condition's reason. A reason that repeats the type becomes yes or no."""
    reason = str(condition.get("reason"))
    if reason != condition.get("type"):
        return reason
    return "yes" if condition.get("status") == "True" else "no"


def _reasons(card: ApiObject, events: Sequence[DecisionEvent]) -> tuple[Reason, ...]:
    """Find the reasons behind the present condition: those of the event with the same text, else
    the condition's own text.
    """
    waits = [condition for condition in entries_of(card.status.get("conditions")) if condition.get("status") == "False"]
    if not waits:
        return ()
    message = str(waits[0].get("message") or "")
    for event in reversed(events):
        # The event has the advice as well, and a long message of a condition is cut.
        if isinstance(event.outcome, Refusal) and event.outcome.why.startswith(message[:_COMPARED]):
            return *event.outcome.reasons, *event.outcome.to_free
    facts: dict[str, str | int | float | bool | tuple[str, ...]] = {"reason": str(waits[0].get("reason") or "")}
    return (Reason(code="condition", message=message, facts=facts),) if message else ()


def _all_granted(
    api_object: ApiObject, inventories: Sequence[Inventory], own_shapes: Mapping[str, Sequence[OwnShape]]
) -> Iterator[Granted]:
    """List what a claim has: of a shape the parts, as its node has them now."""
    for result in results_of(api_object):
        driver, pool, name = (str(result.get(key) or "") for key in ("driver", "pool", "device"))
        node = node_of(driver, pool)
        of_node = [inventory for inventory in inventories if inventory.node == node]
        parts = shapes_of(of_node, own_shapes.get(node, ())).parts.get(name, ()) if is_shape(driver, name) else ()
        for part in parts:
            yield _granted({**result, "device": part}, of_node, shape=name)
        if not parts:
            yield _granted(result, of_node)


def _granted(result: dict[str, Any], inventories: Iterable[Inventory], *, shape: str = "") -> Granted:
    driver, pool, name = (str(result.get(key) or "") for key in ("driver", "pool", "device"))
    device_class = class_of_device(driver, name)
    of_class = (inventory for inventory in inventories if inventory.device_class == device_class)
    device = next((device for inventory in of_class for device in inventory.devices if device.name == name), None)
    worst = device.health.worst if device is not None else None
    above = (str(device.pcie_switch) if device.pcie_switch else device.pcie_root) if device is not None else ""
    return Granted(
        request=str(result.get("request") or ""),
        driver=driver,
        pool=pool,
        node=node_of(driver, pool),
        device=name,
        shape=shape,
        numa_nodes=str(device.numa_nodes) if device is not None and device.numa_nodes is not None else "?",
        below=short_address(above) if above and not above.startswith("pci") else above,
        health=device.health.state.value if device is not None else "not in the inventory",
        reason=worst.reason if worst is not None else "",
    )
