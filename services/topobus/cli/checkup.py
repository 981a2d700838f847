"""What a deployment should look like: facts in, findings out, each with a next step. Pure; `topobus doctor` gathers the facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from topobus.contracts.catalogue import DEVICE_SERVICES
from topobus.domain.device import Inventory
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.domain.silence import SERVICE_SILENT

__all__ = ["MISSING", "Finding", "Level", "check_clock", "check_node", "check_server", "check_streams"]

# Before 2.9 there is no direct get and no per-subject newest message in consumers, on which watches and followers stand.
_OLDEST_SERVER = (2, 9, 0)


# Below, an answer's way through a busy machine looks the same; above the second, requests with short deadlines are refused as stale.
_CLOCK_AGREES_S, _CLOCK_SERVES_S = 1.0, 2.0

MISSING = "it does not exist"
"""What the bus's inspection says of a stream that nobody has made."""


class Level(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Struct, frozen=True, kw_only=True):
    """One line of a check-up."""

    level: Level
    what: str
    """What was looked at: `nats`, `stream KV_topobus_machines`, `n1: inventory gpu`."""
    found: str
    next_step: str = ""


def check_server(url: str, version: tuple[int, int, int]) -> Finding:
    """Judge the server's version."""
    text = ".".join(map(str, version))
    if version < _OLDEST_SERVER:
        wanted = ".".join(map(str, _OLDEST_SERVER))
        return Finding(level=Level.FAIL, what="nats", found=f"{url} runs {text}, wanted {wanted} or later", next_step="upgrade nats-server")
    return Finding(level=Level.OK, what="nats", found=f"{url} answers, version {text}")


def check_streams(differences: Mapping[str, str]) -> list[Finding]:
    """Judge what provisioning made."""
    bad = [
        Finding(
            level=Level.FAIL,
            what=f"stream {name}",
            found=trouble,
            next_step="start topobus-controller: it makes what is missing"
            if trouble == MISSING
            else f"mend it (nats stream edit {name}) or remove it if its content may go",
        )
        for name, trouble in differences.items()
        if trouble
    ]
    good = sum(1 for trouble in differences.values() if not trouble)
    return [
        *([Finding(level=Level.OK, what="streams", found=f"{good} of {len(differences)} as the catalogue wants them")] if good else []),
        *bad,
    ]


def check_clock(node: str, ahead_s: float) -> Finding | None:
    """Judge a node's clock against ours; None when they agree within a second. Requests are refused as stale by a node more than two seconds ahead."""
    if abs(ahead_s) < _CLOCK_AGREES_S:
        return None
    text = f"clock of {node} is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    step = "set both clocks by the same time service (chrony, ntp)"
    return Finding(level=Level.FAIL if ahead_s > _CLOCK_SERVES_S else Level.WARN, what=f"{node}: clock", found=text, next_step=step)


def check_node(
    node: str, machine: Machine | None, inventories: Sequence[Inventory], ledger: Ledger | None, silent: Mapping[str, str]
) -> Iterable[Finding]:
    """Judge one node: machine, inventories and their generations, ledger, and which services keep silent.

    Shapes: silent — service to why it did not answer, for those that did not.
    """
    yield _machine_finding(node, machine)
    by_class = {inventory.device_class: inventory for inventory in inventories}
    for device_class in sorted({*DEVICE_SERVICES, *by_class}):
        yield _inventory_finding(node, device_class, by_class.get(device_class), machine, silent)
    if ledger is None:
        step = "topobus-topology writes one as soon as it knows the machine: is it running?"
        yield Finding(level=Level.FAIL, what=f"{node}: ledger", found="there is none", next_step=step)
    else:
        text = f"sequence {ledger.sequence}, {len(ledger.allocations)} owners hold something"
        yield Finding(level=Level.OK, what=f"{node}: ledger", found=text)
    if "topology" in silent:
        yield Finding(level=Level.FAIL, what=f"{node}: topology", found=silent["topology"], next_step="start topobus-topology on this node")
    else:
        yield Finding(level=Level.OK, what=f"{node}: topology", found="answers")


def _machine_finding(node: str, machine: Machine | None) -> Finding:
    what = f"{node}: machine"
    if machine is None:
        return Finding(level=Level.FAIL, what=what, found="not reported", next_step="start topobus-discovery on this node")
    text = f"generation {machine.generation}, {len(machine.numa_nodes)} NUMA nodes, {len(machine.online_cpus)} CPUs"
    if machine.warnings:
        return Finding(
            level=Level.WARN,
            what=what,
            found=f"{text}; {len(machine.warnings)} warnings: {machine.warnings[0]}",
            next_step="see `topobus machine`",
        )
    return Finding(level=Level.OK, what=what, found=text)


def _inventory_finding(
    node: str, device_class: str, inventory: Inventory | None, machine: Machine | None, silent: Mapping[str, str]
) -> Finding:
    what = f"{node}: inventory {device_class}"
    start = f"start topobus-{device_class} on this node"
    if inventory is None:
        return Finding(level=Level.FAIL, what=what, found="not published", next_step=start)
    text = f"generation {inventory.generation}, {len(inventory.devices)} devices"
    if device_class in silent:
        text += f", unknown ({SERVICE_SILENT}: {silent[device_class]}): new pods get none, what is held stays held"
        return Finding(level=Level.FAIL, what=what, found=text, next_step=start)
    if machine is not None and inventory.machine_generation < machine.generation:
        # No finding: a machine that changed without changing a device of this class is no news, so the inventory is not written again.
        text += f", unchanged since machine generation {inventory.machine_generation}"
    sick = [device.name for device in inventory.devices if not device.health.is_allocatable]
    if sick:
        return Finding(level=Level.WARN, what=what, found=f"{text}, not well: {', '.join(sick[:6])}", next_step="`topobus health` says why")
    if inventory.warnings:
        return Finding(
            level=Level.WARN, what=what, found=f"{text}; {inventory.warnings[0]}", next_step=f"see the log of topobus-{device_class}"
        )
    return Finding(level=Level.OK, what=what, found=text)
