"""The state of a fleet in `topobus top`: a row per node, made from inventories, ledgers and each
node's alignment, and the waiting objects.

The nodes with sick devices come first. Of an inventory only names and unhealthy devices are kept,
equal sets once. A row is made again when something of its node changed. It holds values only: it
draws nothing and reads nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from msgspec import Struct

from topobus.bus.bus import Change, ChangeKind
from topobus.cli.objects.applying import condition_of, is_allocated
from topobus.engine.health.silence import TOPOLOGY, Announcements
from topobus.formats.kubernetes.objects import metadata_of
from topobus.formats.messages.messages import ApiObject
from topobus.sysfs.tree import natural_key
from topobus.values.dra_names import CPU_CLASS
from topobus.values.health import HEALTHY, DeviceHealth, HealthState
from topobus.values.ledger import Holders
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.node_text import first_of
from topobus.values.view import NodeAlignment

__all__ = [
    "MOST_STRANGERS",
    "ClassUse",
    "CountedDevice",
    "CountedInventory",
    "Fleet",
    "NodeRow",
    "Rank",
    "class_order",
    "is_shown",
]

# Nodes that have inventories and no machine are shown like others while they are few. A larger
# number than this is likely invented.
MOST_STRANGERS = 16


class CountedDevice(Struct, frozen=True, kw_only=True):
    """The fields of a device that a row needs."""

    name: str
    health: DeviceHealth = HEALTHY
    maintenance: Maintenance | None = None
    is_spare: bool = False

    @property
    def trouble(self) -> str:
        """Why it is unhealthy or withheld, in a word. Empty for a healthy device."""
        worst = self.health.worst
        if self.maintenance is not None:
            return "excluded" if self.maintenance.verb is DeviceVerb.EXCLUDE else "under maintenance"
        return worst.reason if worst is not None else "" if self.health.is_allocatable else self.health.state.value


class CountedInventory(Struct, frozen=True, kw_only=True):
    """The fields of an inventory that a row needs. The rest of what is stored is skipped, not
    decoded.
    """

    node: str
    device_class: str
    devices: tuple[CountedDevice, ...] = ()


class Rank(IntEnum):
    """The order of nodes."""

    UNHEALTHY = 0
    UNKNOWN = 1
    """A device of unknown health, or a service that does not answer."""
    UNWELL = 2
    """Degraded, recovering, or withheld by an operator."""
    FULL = 3
    """Of some class all devices are in use."""
    WELL = 4


@dataclass(frozen=True, kw_only=True)
class ClassUse:
    """The devices of one class on one node, or on many."""

    device_class: str
    total: int
    used: int
    free: int
    """Neither in use nor unfit."""
    sick: int
    """Unhealthy, or withheld."""
    is_silent: bool = False

    @property
    def is_full(self) -> bool:
        """Say whether no more can be allocated, since all usable devices are in use."""
        return self.used > 0 and self.free == 0


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One node."""

    node: str
    rank: Rank
    uses: tuple[ClassUse, ...]
    sick: int
    waits: int = 0
    """Pods and claims that wait and can go nowhere else."""
    why: str = ""
    """The worst: a sick device with its reason, a silent service, or the class of which nothing is
    free."""
    states: frozenset[str] = frozenset()
    """Words by which a filter finds it: `sick`, `full`, and the states of its devices."""
    troubles: frozenset[str] = frozenset()
    """The reasons of all its unhealthy devices."""

    @property
    def order(self) -> tuple[object, ...]:
        """The key by which rows are sorted: rank, the number of sick devices, the name with its
        numbers as numbers.
        """
        return (self.rank, -self.sick, natural_key(self.node))


@dataclass(frozen=True)
class _Counted:
    names: frozenset[str]
    unfit: frozenset[str]
    unwell: tuple[CountedDevice, ...]


@dataclass(frozen=True)
class _Waiting:
    kind: str
    node: str
    reason: str


class Fleet:
    """The present state of all nodes."""

    def __init__(self, wall: Callable[[], float] = lambda: 0.0) -> None:
        """Begin with an empty fleet. `wall` returns the seconds of one monotonic clock, by which
        silent topologies are noticed.
        """
        self.is_settled = False
        """Whether everything that existed at the start has been read."""
        self.members: frozenset[str] | None = None
        """The nodes that report a machine. None: not known yet."""
        self._wall = wall
        self._counted: dict[str, dict[str, _Counted]] = {}
        self._held: dict[str, dict[str, frozenset[str]]] = {}
        self._waiting: dict[tuple[str, str, str], _Waiting] = {}
        self._announcements = Announcements()
        self._silent: dict[str, dict[str, str]] = {}
        self._rows: dict[str, NodeRow] = {}
        self._sorted: tuple[NodeRow, ...] | None = None
        self._equal: dict[frozenset[str], frozenset[str]] = {}

    @property
    def counted(self) -> set[str]:
        """The nodes that have an inventory."""
        return set(self._counted)

    @property
    def strangers(self) -> tuple[str, ...]:
        """The nodes that have inventories and no machine, if they are too many to be real."""
        if not self.members:
            return ()
        strangers = sorted(self._counted.keys() - self.members)
        return tuple(strangers) if len(strangers) > MOST_STRANGERS else ()

    @property
    def rows(self) -> tuple[NodeRow, ...]:
        """All nodes, sick ones first."""
        if self._sorted is None:
            nodes = (self._counted.keys() | (self.members or frozenset())) - set(self.strangers)
            self._sorted = tuple(sorted((self._row(node) for node in nodes), key=lambda row: row.order))
        return self._sorted

    @property
    def unplaced(self) -> dict[str, Counter[str]]:
        """By kind (pod, claim): the reasons for waiting, and how often each occurs."""
        counts: dict[str, Counter[str]] = {}
        for waiting in self._waiting.values():
            counts.setdefault(waiting.kind, Counter())[waiting.reason] += 1
        return counts

    def totals(self) -> tuple[ClassUse, ...]:
        """Sum all rows up, by class."""
        sums: dict[str, list[int]] = {}
        for row in self.rows:
            for use in row.uses:
                numbers = sums.setdefault(use.device_class, [0, 0, 0, 0])
                for place, number in enumerate((use.total, use.used, use.free, use.sick)):
                    numbers[place] += number
        return tuple(
            ClassUse(device_class=name, total=total, used=used, free=free, sick=sick)
            for name, (total, used, free, sick) in sorted(sums.items(), key=lambda entry: class_order(entry[0]))
        )

    def know_members(self, members: Iterable[str]) -> bool:
        """Store which nodes report a machine. Returns whether that changed."""
        nodes = frozenset(members)
        is_news = nodes != self.members
        self.members = nodes
        if is_news:
            self._sorted = None
        return is_news

    def take_inventory(self, change: Change[CountedInventory]) -> None:
        """Apply a change of an inventory."""
        if change.kind is ChangeKind.RESET:
            self._counted.clear()
            self._forget_rows()
            return
        node, device_class = change.parts.get("node", ""), change.parts.get("device_class", "")
        if change.kind is ChangeKind.DELETE:
            classes = self._counted.get(node, {})
            classes.pop(device_class, None)
            if not classes:
                self._counted.pop(node, None)
        elif change.value is not None:
            self._counted.setdefault(node, {})[device_class] = self._count(change.value)
        self._touch(node)

    def take_ledger(self, change: Change[Holders]) -> None:
        """Apply a change of a ledger."""
        if change.kind is ChangeKind.RESET:
            self._held.clear()
            self._forget_rows()
            return
        node = change.parts.get("node", "")
        if change.kind is ChangeKind.DELETE:
            self._held.pop(node, None)
        elif change.value is not None:
            self._held[node] = {
                device_class: self._share(names) for device_class, names in _held_names(change.value).items()
            }
        self._touch(node)

    def take_alignment(self, change: Change[NodeAlignment]) -> None:
        """Apply a change of an alignment, by which a topology names the silent services and gives a
        sign of life.
        """
        if change.kind is ChangeKind.RESET:
            self._announcements.excuse(self._wall())
            return
        node = change.parts.get("node", "")
        if change.kind is ChangeKind.DELETE:
            self._announcements.drop(node)
        elif change.value is not None:
            self._announcements.note(node, change.value, at=self._wall(), said_at=change.origin.stored_at)
        self._note_silence(node)

    def take_object(self, change: Change[ApiObject]) -> None:
        """Apply a change of a claim or pod."""
        if change.kind is ChangeKind.RESET:
            self._waiting.clear()
            self._forget_rows()
            return
        place = (change.parts.get("kind", ""), change.parts.get("namespace", ""), change.parts.get("name", ""))
        before = self._waiting.pop(place, None)
        after = _waiting(change.value) if change.kind is ChangeKind.PUT and change.value is not None else None
        if after is not None:
            self._waiting[place] = after
        for waiting in (before, after):
            if waiting is not None:
                self._touch(waiting.node)

    def listen(self, *, is_connected: bool = True) -> bool:
        """Find the topologies that have become silent. Returns whether that changed.

        While the bus is disconnected, no topology counts as silent.
        """
        if not is_connected:
            self._announcements.excuse(self._wall())
        # A list, so that every node is checked.
        return bool([node for node in self._announcements.nodes if self._note_silence(node)])

    def _note_silence(self, node: str) -> bool:
        silent = self._announcements.silent(node, self._wall())
        if silent == self._silent.get(node, {}):
            return False
        self._silent[node] = silent
        self._touch(node)
        return True

    def _touch(self, node: str) -> None:
        self._rows.pop(node, None)
        self._sorted = None

    def _forget_rows(self) -> None:
        self._rows.clear()
        self._sorted = None

    def _count(self, inventory: CountedInventory) -> _Counted:
        return _Counted(
            self._share(sys.intern(device.name) for device in inventory.devices),
            self._share(
                sys.intern(device.name)
                for device in inventory.devices
                if device.maintenance is not None or device.is_spare or not device.health.is_allocatable
            ),
            tuple(device for device in inventory.devices if device.trouble),
        )

    def _share(self, names: Iterable[str]) -> frozenset[str]:
        """Return equal sets as one object: nodes of a kind have the same names."""
        wanted = frozenset(names)
        return self._equal.setdefault(wanted, wanted)

    def _row(self, node: str) -> NodeRow:
        row = self._rows.get(node)
        if row is None:
            waits = sum(1 for waiting in self._waiting.values() if waiting.node == node)
            row = self._rows[node] = _row(
                node, self._counted.get(node, {}), self._held.get(node, {}), self._silent.get(node, {}), waits
            )
        return row


def _why(uses: Sequence[ClassUse], unwell: Sequence[tuple[Rank, CountedDevice]], silent: Collection[str]) -> str:
    """Say what is wrong with a node, else of which classes nothing is free. `unwell`: the worst first."""
    if not unwell and not silent:
        full = [use.device_class for use in uses if use.is_full]
        return f"no {' and no '.join(full)} free" if full else ""
    services = ", ".join(name if name == TOPOLOGY else f"{name} service" for name in sorted(silent))
    words = [f"{services} silent"] if silent else []
    if unwell:
        # A device that is known to be sick is more important than a service that does not answer.
        place = 0 if unwell[0][0] is Rank.UNHEALTHY else len(words)
        words.insert(place, first_of([f"{device.name} {device.trouble}" for _, device in unwell], 1))
    return "; ".join(words)


def _row(
    node: str,
    counted: Mapping[str, _Counted],
    held: Mapping[str, Collection[str]],
    silent: Mapping[str, str],
    waits: int,
) -> NodeRow:
    uses, rank = [], Rank.WELL
    unwell: list[tuple[Rank, CountedDevice]] = []
    states: set[str] = set()
    for device_class in sorted(counted, key=class_order):
        count = counted[device_class]
        used = count.names & frozenset(held.get(device_class, ()))
        use = ClassUse(
            device_class=device_class,
            total=len(count.names),
            used=len(used),
            free=len(count.names - used - count.unfit),
            sick=len(count.unwell),
            is_silent=device_class in silent,
        )
        uses.append(use)
        unwell += [(_rank_of(device), device) for device in count.unwell]
        of_class = {
            "kept-back" if device.maintenance is not None else device.health.state.value for device in count.unwell
        }
        of_class |= {"sick"} if count.unwell else set()
        of_class |= {"silent", "unknown"} if use.is_silent else set()
        of_class |= {"full"} if use.is_full else {"free"} if use.free else set()
        states |= of_class | {f"{device_class}:{state}" for state in of_class} | {device_class}
        rank = min(rank, Rank.FULL) if use.is_full else rank
    unwell.sort(key=lambda entry: entry[0])
    if silent:
        rank = min(rank, Rank.UNKNOWN)
        states |= {"silent", "unknown"}
    if unwell:
        rank = min(rank, unwell[0][0])
    if rank in (Rank.FULL, Rank.WELL):
        states.add("well")
    if waits:
        states.add("waiting")
    return NodeRow(
        node=node,
        rank=rank,
        uses=tuple(uses),
        sick=len(unwell),
        waits=waits,
        why=_why(uses, unwell, silent),
        states=frozenset(states),
        troubles=frozenset(device.trouble for _, device in unwell),
    )


def _rank_of(device: CountedDevice) -> Rank:
    if device.health.state is HealthState.UNHEALTHY:
        return Rank.UNHEALTHY
    return Rank.UNKNOWN if device.health.state is HealthState.UNKNOWN else Rank.UNWELL


def is_shown(row: NodeRow, wanted: str) -> bool:
    """Say whether a filter finds a row: each of its words is in the name or in a reason, or is a
    class or a state. A leading `!` negates a word.

    >>> row = NodeRow(node="rack-7", rank=Rank.FULL, uses=(), sick=0, states=frozenset({"gpu", "full", "gpu:full"}))
    >>> [is_shown(row, wanted) for wanted in ("", "rack full", "gpu:full !sick", "sick", "RACK")]
    [True, True, True, False, True]
    """
    return all(
        _finds(row, word.removeprefix("!")) is not word.startswith("!")
        for word in wanted.lower().split()
        if word != "!"
    )


def _finds(row: NodeRow, word: str) -> bool:
    return word in row.node.lower() or word in row.states or any(word in trouble.lower() for trouble in row.troubles)


def class_order(device_class: str) -> tuple[bool, bool, str]:
    """Sort classes: GPUs first, CPUs last, as a narrow terminal leaves out the last ones."""
    return (device_class == CPU_CLASS, device_class != "gpu", device_class)


def _held_names(ledger: Holders) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for allocation in ledger.allocations.values():
        for holding in allocation.holdings:
            names.setdefault(CPU_CLASS, set()).update(sys.intern(f"cpu-{cpu}") for cpu in holding.cpus)
            for device_class, devices in holding.devices.items():
                names.setdefault(device_class, set()).update(map(sys.intern, devices))
    return names


def _waiting(api_object: ApiObject) -> _Waiting | None:
    """Return why a claim or a pod waits, and for which node if for only one.

    None for what does not wait.
    """
    condition = condition_of(api_object) or {}
    spec = api_object.spec
    if api_object.kind == "ResourceClaim":
        kind, is_done = "claim", is_allocated(api_object)
    elif api_object.kind == "Pod":
        kind, is_done = (
            "pod",
            condition.get("status") == "True" or api_object.status.get("phase") in ("Succeeded", "Failed"),
        )
    else:
        return None
    if is_done or metadata_of(api_object).deletion_timestamp:
        return None
    selector = spec.get("nodeSelector")
    node = spec.get("nodeName") or (selector.get("kubernetes.io/hostname") if isinstance(selector, dict) else "")
    return _Waiting(kind, str(node or ""), str(condition.get("reason") or "not looked at yet"))
