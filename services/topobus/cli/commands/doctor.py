"""`topobus doctor`: checks a deployment from the outside, changes nothing, and gives a next step
for each finding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from topobus.bus.bus import Bus, Entry, NobodyThere
from topobus.bus.login.certificate_facts import day
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.listing.fleet_inventories import list_inventories
from topobus.cli.listing.responding_services import side_by_side, sign_of_life, silence_text
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, NodeFilter, one_of, open_bus, system_text
from topobus.cli.rules.checkup import (
    MISSING,
    Finding,
    Level,
    check_access,
    check_certificate,
    check_clock,
    check_clock_here,
    check_holders,
    check_hub,
    check_node,
    check_plugin_failures,
    check_registrations,
    check_rejected,
    check_releases,
    check_rivals,
    check_runtime,
    check_server,
    check_slice_fields,
    check_stored_clock,
    check_streams,
    check_template,
    check_unread,
    check_unserved_drivers,
    grouped,
)
from topobus.cli.rules.slice_templates import devices_of_type, template_differences
from topobus.cli.simulation.cpus_offered import CpusOffered, read_cpus
from topobus.cli.simulation.node import open_machine
from topobus.cli.targets import is_local
from topobus.devicekit.registry import unserved_drivers
from topobus.engine.health.silence import Answered, Silent
from topobus.formats.messages.catalogue import (
    ALIGNMENT,
    HINT,
    INVENTORY,
    LEDGER,
    MACHINE,
    MAINTENANCE,
    OBJECT,
    PLAN,
    PODS,
    PREFER,
    RELAY,
)
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.formats.messages.messages import ApiObject, PodsRequest
from topobus.formats.messages.nouns import CLUSTER, State
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.formats.messages.relay_messages import NodeRelay
from topobus.values.device import Inventory
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.request import Owner, OwnerKind, PodRequest

__all__ = ["doctor"]

T = TypeVar("T")
_Template = Mapping[str, Mapping[str, Any]]

_STYLES = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "fail"}
# How long a requester waits for a sign of life. The services' own budgets are far below.
_ALIVE_S = 2.0
# The shipped manifests keep CPUs for kubelet's own manager (gateway.exposure), so CPUs alone
# promise no socket.
_SELDOM_OFFERED = frozenset({"cpu"})


async def doctor(
    *,
    node: NodeFilter = None,
    machine: Annotated[
        str | None,
        Parameter(
            name=("--machine", "--root"),
            help="A recorded machine: names how the nodes differ from what `topobus slices --machine` foretold of it.",
        ),
    ] = None,
    cpus: CpusOffered = "",
    problems: Annotated[bool, Parameter(help="Only what warns or fails.")] = False,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Check a deployment: NATS, streams, services, generations, what kubelet knows.

    Exits with 1 when a check fails.
    """
    output = options.output()
    nodes: list[str] = []
    foretold: _Template | None = None
    if cpus and machine is None:
        raise UsageError("--cpus is given without --machine", next_step="give --machine as well")
    if machine is not None:
        with open_machine(machine, read_cpus(cpus)) as opened:
            foretold = devices_of_type(opened.snapshot.inventories)
    findings = await _check_bus(node, options, nodes, foretold)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    if problems:
        findings = [finding for finding in findings if finding.level is not Level.OK]
    output.document({"findings": findings})
    table = Table.grid(padding=(0, 2))
    table.add_column(width=4)
    table.add_column(style="name")
    table.add_column(overflow="fold")
    for finding in grouped(findings, nodes):
        text = Text(finding.found)
        if finding.next_step:
            text.append(f"\nnext: {finding.next_step}", "faint")
        table.add_row(Text(finding.level, _STYLES[finding.level]), finding.what, text)
    output.show(table, Text(f"{counts[Level.OK]} ok, {counts[Level.WARN]} warn, {counts[Level.FAIL]} fail", "title"))
    return ExitCode.NO if counts[Level.FAIL] else ExitCode.OK


async def _check_bus(
    node: str | None, options: BusOptions, checked: list[str], foretold: _Template | None
) -> list[Finding]:
    """Check the server, its streams and the services. `checked` gets the names of the nodes."""
    try:
        async with open_bus(options, NamesSystem.NEVER) as bus:
            nats = options.settings().nats
            access = check_access(
                user=nats.user,
                wants_login=bus.wants_login,
                is_encrypted=bus.is_encrypted,
                is_local=is_local(nats.url),
            )
            findings = [
                Finding.ok("system", system_text(options)),
                check_server(bus.server_version),
                access,
            ]
            if (shown := bus.certificate) is not None:
                days = (shown.not_after - datetime.now(UTC)).days
                findings.append(check_certificate(issuer=shown.issuer, until=day(shown.not_after), days=days))
            try:
                differences = await bus.inspect()
                findings += check_streams(differences)
                if MISSING in differences.values():
                    return findings
                return findings + await _check_services(bus, node, checked, foretold)
            except PeerUnavailable as err:
                return [
                    *findings,
                    Finding.fail(
                        "jetstream",
                        err.message,
                        err.next_step or "see the NATS server's log, and whether its disk or its store is full",
                    ),
                ]
    except PeerUnavailable as err:
        return [Finding.fail("nats", err.message, err.next_step)]


@dataclass(frozen=True)
class _Fleet:
    """What is stored of all nodes, by node."""

    machines: Mapping[str, Entry[Machine]]
    inventories: Mapping[str, Sequence[Entry[Inventory]]]
    ledgers: Mapping[str, Entry[Ledger]]
    relays: Mapping[str, Entry[NodeRelay]]
    objects: Sequence[Entry[ApiObject]]
    rejected: Sequence[tuple[State[Any], str, str]]
    """Entries that cannot be read: the state, the key, and why."""
    unread: Sequence[str]
    """Nodes that have inventories and are none."""


async def _read_fleet(bus: Bus) -> _Fleet:
    rejected: list[tuple[State[Any], str, str]] = []

    def note(state: State[Any]) -> Callable[[str, str], None]:
        return lambda key, why: rejected.append((state, key, why))

    async def by_node(state: State[T]) -> dict[str, Entry[T]]:
        return {entry.parts["node"]: entry for entry in await bus.list(state, on_rejected=note(state))}

    machines = await by_node(MACHINE)
    inventories, unread = await list_inventories(bus, on_rejected=note(INVENTORY))
    ledgers, relays = await by_node(LEDGER), await by_node(RELAY)
    objects = await bus.list(OBJECT, on_rejected=note(OBJECT))
    others: list[State[Any]] = [ALIGNMENT, MAINTENANCE]
    for state in others:
        await bus.list(state, on_rejected=note(state))
    entries_of: dict[str, list[Entry[Inventory]]] = {}
    for entry in inventories:
        entries_of.setdefault(entry.parts["node"], []).append(entry)
    return _Fleet(machines, entries_of, ledgers, relays, objects, rejected, unread)


async def _check_services(bus: Bus, node: str | None, checked: list[str], foretold: _Template | None) -> list[Finding]:
    fleet = await _read_fleet(bus)
    inventories = [entry.value for entries in fleet.inventories.values() for entry in entries]
    nodes = sorted({*fleet.machines, *fleet.ledgers, *(inventory.node for inventory in inventories)})
    if node is not None:
        nodes = [one_of("node", node, nodes)]
    checked += nodes
    hub = check_hub(sorted(fleet.relays), wants_login=bus.wants_login, version=bus.server_version)
    findings = [
        *([hub] if hub is not None else []),
        *check_clock_here(bus.clock_ahead_s),
        *check_rejected(fleet.rejected),
        *check_unread(fleet.unread),
    ]
    findings += check_holders(
        [entry.value for entry in fleet.ledgers.values()],
        [entry.value for entry in fleet.objects],
        {key for state, key, _ in fleet.rejected if state is OBJECT},
    )
    # For all nodes, not only the checked ones: a class that another node serves is served.
    unserved = unserved_drivers(inventory.device_class for inventory in inventories)
    findings += check_unserved_drivers((driver.name, driver.device_class, driver.next_step) for driver in unserved)
    if not nodes:
        findings.append(
            Finding.fail(
                "nodes",
                "no node reports anything",
                "start the node's services: `topobus up`, or `kubectl apply -k deploy/kubernetes`",
            )
        )
    of_each = await side_by_side(nodes, partial(_check_stored_node, bus, fleet))
    findings += [finding for of_node in of_each for finding in of_node]
    if foretold is not None:
        of_nodes = {name: [entry.value for entry in fleet.inventories.get(name, ())] for name in nodes}
        findings += [
            check_template(name, template_differences(foretold, devices_of_type(of_nodes[name]))) for name in nodes
        ]
    return [
        *findings,
        *await _check_controller(bus, is_missed=any(entry.value.kind != "DeviceClass" for entry in fleet.objects)),
    ]


async def _check_stored_node(bus: Bus, fleet: _Fleet, node: str) -> list[Finding]:
    entries = fleet.inventories.get(node, ())
    machine, ledger, relay = fleet.machines.get(node), fleet.ledgers.get(node), fleet.relays.get(node)
    own = [entry.value for entry in entries]
    signs = await _signs_of_life(bus, node, sorted({*DEVICE_SERVICES, *(inventory.device_class for inventory in own)}))
    silent = {service: text for service, sign in signs.items() if (text := silence_text(sign))}
    of_node = [
        *check_node(
            node,
            machine.value if machine is not None else None,
            own,
            ledger.value if ledger is not None else None,
            silent,
        )
    ]
    releases = {service: sign.release for service, sign in signs.items() if isinstance(sign, Answered)}
    # These services answer no requests. The entries that they wrote have their release, if it is
    # new enough to write it.
    written = {"discovery": machine, "relay": relay}
    releases |= {
        service: entry.origin.release
        for service, entry in written.items()
        if entry is not None and entry.origin.release
    }
    of_node += check_releases(node, releases, bus.release)
    topology = signs["topology"]
    if isinstance(topology, Answered):
        of_node += check_clock(node, topology.clock_ahead_s, bus.clock_ahead_s)
    else:
        stored = (machine, ledger, relay, *entries)
        of_node += check_stored_clock(node, [entry.origin for entry in stored if entry is not None])
    has_devices = any(inventory.devices for inventory in own if inventory.device_class not in _SELDOM_OFFERED)
    is_missed = ledger is not None and any(
        allocation.owner.kind in (OwnerKind.DEVICE_PLUGIN, OwnerKind.CLAIM)
        for allocation in ledger.value.allocations.values()
    )
    return of_node + await _check_gateway(bus, node, has_devices=has_devices, is_missed=is_missed)


async def _signs_of_life(bus: Bus, node: str, classes: list[str]) -> Mapping[str, Answered | Silent]:
    """Ask which services of a node run."""
    services = [*classes, "topology"]
    answers = await asyncio.gather(
        *(sign_of_life(bus, HINT, node=node, device_class=device_class) for device_class in classes),
        sign_of_life(bus, PREFER, node=node),
    )
    return dict(zip(services, answers, strict=True))


def _level(err: PeerUnavailable, *, is_missed: bool) -> Level:
    """Return how bad a silent service is: it may be absent on purpose, if it never ran and nothing
    waits for it.
    """
    return Level.WARN if isinstance(err, NobodyThere) and not is_missed else Level.FAIL


async def _check_controller(bus: Bus, *, is_missed: bool) -> list[Finding]:
    """Look for a controller.

    If none runs, that is a failure where objects wait for it (`is_missed`). Otherwise the finding
    names what one would be good for.
    """
    # A dry run on a node that cannot exist: no node is asked, and nothing is written.
    empty_pod = PodRequest(
        owner=Owner(kind=OwnerKind.POD, namespace="topobus", name="doctor", uid="doctor"), containers=()
    )
    try:
        await bus.ask(
            PLAN,
            PlanRequest(op_id="doctor", pod=empty_pod, node="doctor.invalid", is_dry_run=True),
            timeout_s=_ALIVE_S,
            node=CLUSTER,
        )
    except PeerUnavailable as err:
        step = (
            "start topobus-controller for claims and stored pods; without it `topobus place --node NODE` places a pod"
        )
        return [Finding(level=_level(err, is_missed=is_missed), what="controller", found=err.message, next_step=step)]
    except TopobusError:
        # An error is an answer as well.
        pass
    sign = await sign_of_life(bus, PLAN, node=CLUSTER)
    releases = check_releases("", {"controller": sign.release}, bus.release) if isinstance(sign, Answered) else []
    return [Finding.ok("controller", "answers"), *releases]


async def _check_gateway(bus: Bus, node: str, *, has_devices: bool, is_missed: bool) -> list[Finding]:
    """Ask a node's gateway about its registrations with kubelet: its sockets may be in a container
    or on another machine, and those here may belong to another program.
    """
    what = f"{node}: gateway"
    try:
        pods = await bus.ask(PODS, PodsRequest(), timeout_s=_ALIVE_S, node=node)
    except PeerUnavailable as err:
        step = "start topobus-gateway on this node: without it kubelet is offered no device"
        return [Finding(level=_level(err, is_missed=is_missed), what=what, found=err.message, next_step=step)]
    except TopobusError as err:
        return [Finding.warn(what, err.message, "see the log of topobus-gateway")]
    runtime = check_runtime(node, pods.runtime)
    slices = check_slice_fields(node, pods.dropped_slice_fields)
    return [
        *check_registrations(node, pods.registrations, pods.resource_rivals, has_devices=has_devices),
        *(finding for finding in (runtime, slices) if finding is not None),
        *check_rivals(node, pods.resource_rivals),
        *check_plugin_failures(node, pods.plugin_failures),
    ]
