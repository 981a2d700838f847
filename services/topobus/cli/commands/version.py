"""`topobus version`: of this program, of the NATS server, and of each running service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter
from msgspec import Struct
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.bus.connection.connection import OWN_RELEASE
from topobus.cli.exits import ExitCode
from topobus.cli.listing.fleet_inventories import list_inventories
from topobus.cli.listing.responding_services import side_by_side, silence_text
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, open_bus, system_text
from topobus.cli.render.output import Output, TextOrJson
from topobus.engine.health.silence import Answered, Silent
from topobus.formats.messages.catalogue import HINT, MACHINE, PLAN, PODS, PREFER, RELAY
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.node_text import first_of

__all__ = ["version"]

# A busy service still reports its version. Where no service listens, the server reports that at
# once.
_PATIENCE_S = 5.0


class ServiceVersion(Struct, frozen=True, kw_only=True):
    """One service of one node."""

    node: str
    """Empty: of the whole cluster."""
    service: str
    version: str
    """Empty: it is not known."""
    remark: str = ""


async def version(
    *,
    client: Annotated[bool, Parameter(help="Only this program's version, without a request to any service.")] = False,
    output: TextOrJson = "text",
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show the versions of this program, of the NATS server and of each running service.

    Services that are silent are named with the reason.
    """
    out = Output(is_json=options.json or output == "json")
    if client:
        out.document({"client": OWN_RELEASE})
        out.show(Text(f"topobus {OWN_RELEASE}"))
        return ExitCode.OK
    # First: it is known even if nothing answers.
    out.show(Text.assemble(("client       ", "faint"), OWN_RELEASE))
    server, services = await _ask(options)
    out.document({"client": OWN_RELEASE, "nats_server": server, "system": system_text(options), "services": services})
    out.show(Text.assemble(("nats-server  ", "faint"), server, (f"   {system_text(options)}", "faint")))
    alike: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for node, of_node in _by_node(services).items():
        alike.setdefault(tuple((service.service, service.version, service.remark) for service in of_node), []).append(
            node
        )
    for lines, nodes in alike.items():
        out.show(Text(_nodes_text(nodes), "name"))
        for service_name, release, service_remark in lines:
            style = "warn" if release and release != OWN_RELEASE else ""
            remark = service_remark or ("another version than this program" if style else "")
            out.show(
                Text.assemble(
                    f"  {service_name:<11}", (release or "-", style), (f"  {remark}" if remark else "", "faint")
                )
            )
    return ExitCode.OK


def _by_node(services: Sequence[ServiceVersion]) -> dict[str, list[ServiceVersion]]:
    of_node: dict[str, list[ServiceVersion]] = {}
    for service in services:
        of_node.setdefault(service.node, []).append(service)
    return of_node


def _nodes_text(nodes: Sequence[str]) -> str:
    """Name the nodes with an equal result.

    >>> _nodes_text([""]), _nodes_text(["a", "b"]), _nodes_text(["a", "b", "c", "d", "e"])
    ('cluster', '2 nodes: a, b', '5 nodes: a, b, c and 2 more')
    """
    if len(nodes) == 1:
        return nodes[0] or "cluster"
    return f"{len(nodes)} nodes: {first_of(nodes, 3)}"


async def _ask(options: BusOptions) -> tuple[str, list[ServiceVersion]]:
    async with open_bus(options, NamesSystem.NEVER) as bus:
        server = ".".join(map(str, bus.server_version))
        machines = {entry.parts["node"]: entry for entry in await bus.list(MACHINE)}
        relays = {entry.parts["node"]: entry for entry in await bus.list(RELAY)}
        inventories = [entry.value for entry in (await list_inventories(bus))[0]]
        classes = {node: {*DEVICE_SERVICES} for node in machines}
        for inventory in inventories:
            classes.setdefault(inventory.node, {*DEVICE_SERVICES}).add(inventory.device_class)
        nodes = sorted(classes)
        answers = dict(
            zip(nodes, await side_by_side(nodes, lambda node: _of_node(bus, node, sorted(classes[node]))), strict=True)
        )
        services: list[ServiceVersion] = []
        for node in nodes:
            # These answer no requests: what they wrote has their version.
            for service, entries in (("discovery", machines), ("relay", relays)):
                if (entry := entries.get(node)) is not None:
                    services.append(
                        ServiceVersion(
                            node=node, service=service, version=entry.origin.release, remark="wrote its state last"
                        )
                    )
            services += answers[node]
        controller = await bus.is_answered(PLAN, timeout_s=_PATIENCE_S, node=CLUSTER)
        return server, [*services, _service("", "controller", controller)]


async def _of_node(bus: Bus, node: str, classes: list[str]) -> list[ServiceVersion]:
    signs = await asyncio.gather(
        *(
            bus.is_answered(HINT, timeout_s=_PATIENCE_S, node=node, device_class=device_class)
            for device_class in classes
        ),
        bus.is_answered(PREFER, timeout_s=_PATIENCE_S, node=node),
        bus.is_answered(PODS, timeout_s=_PATIENCE_S, node=node),
    )
    return [
        _service(node, service, sign) for service, sign in zip((*classes, "topology", "gateway"), signs, strict=True)
    ]


def _service(node: str, service: str, sign: Answered | Silent) -> ServiceVersion:
    if isinstance(sign, Answered):
        return ServiceVersion(node=node, service=service, version=sign.release)
    return ServiceVersion(node=node, service=service, version="", remark=silence_text(sign, _PATIENCE_S))
