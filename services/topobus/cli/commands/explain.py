"""`topobus explain`: one decision in detail, and recomputed from its recorded inputs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode, NotFoundError, UsageError
from topobus.cli.objects.input_files import DOCUMENT_BYTES, read_bytes
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus
from topobus.cli.render.answers import answer_view, hint_table
from topobus.cli.render.grids import facts_grid
from topobus.cli.render.output import Output
from topobus.engine.alignment.planning.backtracking import GaveUp
from topobus.engine.alignment.planning.placement import place, plan
from topobus.engine.alignment.planning.refusal_reasons import Conflict
from topobus.formats.kubernetes.objects import metadata_of
from topobus.formats.messages.catalogue import DECISION, OBJECT
from topobus.formats.messages.codec import decode
from topobus.formats.messages.messages import ApiObject, DecisionEvent
from topobus.values.node_text import counted
from topobus.values.outcome import HintList, Placement, Refusal, summary
from topobus.values.request import PodRequest
from topobus.values.view import NodeView, PlanMode

__all__ = ["conflict_of", "explain", "explanation", "replay"]

# As many as the stream keeps of one node.
_SEARCHED = 4096


async def explain(
    decision: Annotated[
        str | None,
        Parameter(name="DECISION", help="The decision's id, as `topobus place` and `topobus decisions` print it."),
    ] = None,
    /,
    *,
    file: Annotated[Path | None, Parameter(help="A decision event as JSON, instead of asking the bus.")] = None,
    output: Annotated[
        Literal["table", "wide", "json"],
        Parameter(name=("--output", "-o"), help="How to print; wide adds the facts behind each reason."),
    ] = "table",
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show a decision in parts: inputs, hints, merge, picks and reasons. It is also made again
    offline, and the answers are compared.
    """
    if (decision is None) == (file is None):
        raise UsageError(
            "wanted a decision: either its id or --file FILE", next_step="`topobus decisions` lists the ids"
        )
    event = _read(file) if file is not None else await _fetch(str(decision), options)
    out = Output(is_json=options.json or output == "json")
    again = replay(event)
    is_same = again is None or again == event.outcome
    out.document(
        {"decision": event, "replay": {"is_replayable": again is not None, "is_same": is_same, "outcome": again}}
    )
    for part in explanation(event, again, has_facts=output == "wide"):
        out.show(part)
    return ExitCode.OK if is_same else ExitCode.NO


def replay(event: DecisionEvent) -> Placement | Refusal | None:
    """Decide again from the event's own inputs. None for a decision that chose nothing."""
    return place(event.view, event.request) if event.view is not None and event.request is not None else None


def explanation(
    event: DecisionEvent, again: Placement | Refusal | None, *, has_facts: bool = False
) -> list[RenderableType]:
    """Render a decision for people. With `has_facts` each reason has its facts."""
    parts: list[RenderableType] = [_facts(event)]
    if event.request is not None and event.view is not None:
        parts += [
            Rule("asked", align="left", style="faint"),
            _request_table(event.request),
            Rule("inputs", align="left", style="faint"),
            _view_table(event.view),
        ]
    if isinstance(event.outcome, Placement):
        for container in event.outcome.containers:
            if container.has_alignment:
                parts += _hints(container.name, container.hints, f"merged to {container.alignment.text}")
    elif isinstance(event.outcome, Refusal) and (conflict := conflict_of(event)) is not None:
        lists = [resource_hints.record() for resource_hints in conflict.lists]
        parts += _hints(conflict.demand.name, lists, _merge_text(conflict))
    if event.outcome is not None:
        parts.append(
            Panel(
                answer_view(event.outcome, has_facts=has_facts, could_be_freed=event.request is not None),
                title=Text(summary(event.outcome)),
                title_align="left",
                border_style="ok" if isinstance(event.outcome, Placement) else "fail",
            )
        )
    if again is None:
        parts.append(Text(f"a {event.verb} chooses no devices: there is nothing to compute again", "faint"))
    elif again == event.outcome:
        parts.append(Text("replayed offline from the event's inputs: the same answer", "ok"))
    else:
        parts.append(Text(f"replayed offline from the event's inputs: another answer: {summary(again)}", "fail"))
        why = "this program and the service that decided are of different versions, or one of them has a defect"
        parts.append(Text(why, "faint"))
    return parts


def _hints(container: str, lists: Iterable[HintList], merged: str) -> list[RenderableType]:
    name = f"container {container}" if container else "claim"
    parts: list[RenderableType] = [Rule(f"hints of {name}", align="left", style="faint"), hint_table(lists)]
    return [*parts, Text(f"  {merged}")] if merged else parts


def _merge_text(conflict: Conflict) -> str:
    """Say what the hints merge to that the policy does not admit. Empty: they were not merged."""
    if conflict.merged is None:
        return ""
    hint, policy = conflict.merged.hint, conflict.policy
    if hint.nodes is None:
        return f"no merge of these is one that policy {policy} admits"
    return f"merged to {hint.text}, which policy {policy} does not admit"


def conflict_of(event: DecisionEvent) -> Conflict | None:
    """Find the container whose hints could not be merged, by planning again.

    None for a refusal that has another cause, such as too few devices.
    """
    if event.view is None or event.request is None:
        return None
    tried = plan(event.view, event.request)
    conflict = tried.conflict if isinstance(tried, GaveUp) else tried
    return conflict if isinstance(conflict, Conflict) and conflict.lists else None


def _read(file: Path) -> DecisionEvent:
    next_step = "`topobus explain ID --json` prints a decision that can be kept in a file"
    return decode(read_bytes(file, limit_bytes=DOCUMENT_BYTES, next_step=next_step), DecisionEvent, where=str(file))


async def _fetch(wanted: str, options: BusOptions) -> DecisionEvent:
    async with open_bus(options) as bus:
        for received_event in reversed(await bus.last(DECISION, limit=_SEARCHED)):
            if received_event.value.id == wanted:
                return received_event.value
        # A user who names a claim or a pod wants to know why it waits.
        stored = [entry.value for entry in await bus.list(OBJECT) if _is_named(entry.value, wanted)]
        if stored:
            metadata, kind = metadata_of(stored[0]), {"ResourceClaim": "claim", "Pod": "pod"}[stored[0].kind]
            raise NotFoundError(
                f"{wanted} is no decision's id but the name of a stored {kind}",
                next_step=f"`topobus describe {kind} {metadata.name} -n {metadata.namespace or 'default'}` shows its "
                "state, and why it waits",
            )
        raise NotFoundError(
            f"there is no decision {wanted} among the newest {_SEARCHED}", next_step="`topobus decisions` lists the ids"
        )


def _is_named(api_object: ApiObject, wanted: str) -> bool:
    metadata = metadata_of(api_object)
    return api_object.kind in ("ResourceClaim", "Pod") and wanted in (
        metadata.name,
        f"{metadata.namespace or 'default'}/{metadata.name}",
    )


def _facts(event: DecisionEvent) -> Table:
    grid = facts_grid()
    grid.add_row("decision", Text(event.id, "name"))
    grid.add_row(
        "what",
        f"{event.operation.text if event.operation is not None else f'{event.verb} for {event.owner}'} at "
        f"{event.node}{' (dry run)' if event.is_dry_run else ''}",
    )
    grid.add_row("when", event.time)
    grid.add_row("operation", event.op_id)
    return grid


def _request_table(request: PodRequest) -> Table:
    grid = facts_grid()
    for container in request.containers:
        wants = [
            f"{device.count} {device.device_class}" + (f" ({', '.join(device.names)})" if device.names else "")
            for device in container.devices
        ]
        if container.cpus:
            wants.append(f"{container.cpus} exclusive cpus")
        grid.add_row(f"{container.kind} {container.name}" if container.name else "claim", ", ".join(wants) or "nothing")
    # A claim's devices were chosen before the node was asked to hold them, so no policy affected
    # the choice.
    wishes = (
        (("policy", request.policy), ("scope", request.scope))
        if any(container.name for container in request.containers)
        else ()
    )
    own = [f"{what} {wish}" for what, wish in wishes if wish is not None]
    own += [f"locality {locality}" for locality in request.locality]
    if own:
        grid.add_row("of its own", ", ".join(own))
    return grid


def _view_table(view: NodeView) -> Table:
    grid = facts_grid()
    options = view.options
    grid.add_row(
        "policy",
        f"{options.policy}, scope {options.scope}"
        + (", prefer-closest-numa-nodes" if options.prefer_closest_numa_nodes else ""),
    )
    grid.add_row(
        "mode", options.mode.value + (f", {options.search_steps} steps" if options.mode is PlanMode.CORRECTED else "")
    )
    grid.add_row(
        "generations",
        ", ".join(
            [
                f"machine {view.machine_generation}",
                *(f"{key} {value}" for key, value in sorted(view.inventory_generations.items())),
            ]
        ),
    )
    grid.add_row("NUMA nodes", str(view.numa_nodes))
    for device_class, devices in sorted(view.devices.items()):
        held = view.held_devices.get(device_class, {})
        sick = sum(not device.is_fit for device in devices)
        spares = sum(device.is_spare for device in devices)
        kept = f", {counted(spares, 'spare')}" if spares else ""
        grid.add_row(device_class, f"{counted(len(devices), 'device')}, {len(held)} held, {sick} not well{kept}")
    held_cpus = sum(len(cpus) for cpus in view.held_cpus.values())
    grid.add_row(
        "cpus",
        f"{sum(len(core.cpus) for core in view.cores)} in {len(view.cores)} cores, {held_cpus} held, reserved "
        f"{view.reserved_cpus or 'none'}",
    )
    if view.silent_classes:
        grid.add_row("silent", Text(f"{', '.join(view.silent_classes)} gave no opinion in time", "warn"))
    return grid
