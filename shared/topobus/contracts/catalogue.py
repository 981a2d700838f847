"""Everything that crosses NATS: subject, message, stream or bucket, writer, readers. The one place where a subject is written.

The grammar is `topobus.v1.<noun>.<node>[.<class>[.<device>]]`: the node stands at one fixed place, so one wildcard is one node's rights.
The reference page, the AsyncAPI document and the NATS permissions are generated from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from topobus.contracts import messages as m
from topobus.domain.device import Inventory
from topobus.domain.errors import ContractError
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.domain.view import NodeAlignment

__all__ = [
    "ADOPT",
    "ALIGNMENT",
    "ALL",
    "ASKS",
    "CLUSTER",
    "COMMIT",
    "DECISION",
    "DISAGREEMENT",
    "EVENTS",
    "HEALTH",
    "HINTS",
    "INVENTORY",
    "LEDGER",
    "MACHINE",
    "OBJECT",
    "PLACE",
    "PLAN",
    "PODS",
    "PREFER",
    "PREFIX",
    "PREPARE",
    "PROVISIONER",
    "RELEASE",
    "STATES",
    "UNPREPARE",
    "Ask",
    "Event",
    "Noun",
    "State",
    "from_token",
    "to_token",
]

PREFIX = "topobus.v1"
# Stands where a node's name would, for what belongs to no node; `_` is illegal in node names, so it cannot collide.
CLUSTER = "_"

# The one process that makes streams and updates those of older releases, where each process is a NATS user of its own. It runs in every installation.
PROVISIONER = "controller"
DEVICE_SERVICES = ("gpu", "nic", "fpga", "cpu")
# Who serves a class: its own service, and the gateway for classes of device plugins that are somebody else's.
_CLASS_SERVERS = (*DEVICE_SERVICES, "gateway")

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
# The longest DNS name. nats-server ends the connection of a client whose subject and reply do not fit into 4096 bytes.
_LONGEST_NAME = 253


def to_token(name: str) -> str:
    """Turn a name into one subject token or key part: `.` becomes `_` (reversible, since `_` is illegal in DNS names).

    Errors: raises ContractError for a name that no token can hold.

    >>> to_token("node1.example.com")
    'node1_example_com'
    """
    token = name.replace(".", "_")
    if (_TOKEN.fullmatch(token) is None or "_" in name or len(name) > _LONGEST_NAME) and name != CLUSTER:
        shown = f"{name[:60]!r} and {len(name) - 60} more" if len(name) > _LONGEST_NAME else repr(name)
        raise ContractError(f"cannot put {shown} into a subject: wanted a DNS name (lower-case letters, digits, '-' and '.')")
    return token


def from_token(token: str) -> str:
    """Turn a subject's token back into the name, the inverse of `to_token`; the token that stands for the whole cluster stays as it is.

    >>> from_token("node-1_example_com")
    'node-1.example.com'
    """
    return token if token == CLUSTER else token.replace("_", ".")


@dataclass(frozen=True, kw_only=True)
class Noun:
    """What all entries share. `parts` names the tokens after the noun."""

    name: str
    parts: tuple[str, ...]
    writer: tuple[str, ...]
    """Processes that write (state, event) or answer (ask)."""
    readers: tuple[str, ...]
    description: str

    def _tokens(self, values: dict[str, str], *, is_pattern: bool) -> Iterator[str]:
        unknown = values.keys() - set(self.parts)
        if unknown:
            raise ContractError(f"{self.name} has no part {sorted(unknown)}; its parts are {list(self.parts)}")
        for part in self.parts:
            value = values.get(part, "")
            if not value and not is_pattern:
                raise ContractError(f"{self.name} needs {part}")
            yield to_token(value) if value else "*"


@dataclass(frozen=True, kw_only=True)
class State(Noun, Generic[M]):
    """A KV bucket: the newest value of a key is the present state."""

    bucket: str
    message: type[M]
    history: int = 8
    max_value_bytes: int = 512 * 1024
    max_bucket_bytes: int
    """What all keys with their history may take on the disk together, so that one bucket's writers cannot starve another's."""
    may_be_compressed: bool = False
    """True when a value larger than the bucket takes is stored as gzip (ADR 0019); one that fits is always plain JSON."""
    is_rewritten: bool = False
    """True when each writer compares its keys with what it knows and writes again what is gone: then a full bucket may drop its oldest values."""

    def key(self, **values: str) -> str:
        """Build the key of one entry: `key(node="n1", device_class="gpu")`."""
        return ".".join(self._tokens(values, is_pattern=False))

    def key_pattern(self, **values: str) -> str:
        """Build a filter over keys; a part left out matches anything."""
        return ".".join(self._tokens(values, is_pattern=True))

    def parse_key(self, key: str) -> dict[str, str]:
        """Split a key into its parts; ContractError when it has not that shape, or is none that `key` makes."""
        tokens = key.split(".")
        if len(tokens) != len(self.parts):
            raise ContractError(f"bucket {self.bucket}: key {key!r} has {len(tokens)} parts, wanted {list(self.parts)}")
        parts = {part: from_token(token) for part, token in zip(self.parts, tokens, strict=True)}
        # What a key names is asked and written to later: it must fit into a subject again.
        self.key(**parts)
        return parts

    def read_as(self, message: type[Q]) -> State[Q]:
        """The same bucket for a reader that needs only some of the fields: what it does not name is skipped, not decoded."""
        return State(**{**vars(self), "message": message})

    def check_place(self, value: object, parts: dict[str, str]) -> None:
        """Refuse a value that says of itself that it belongs elsewhere: readers keep values by the names inside, and would mix up two nodes.

        Errors: raises ContractError.
        """
        for part, wanted in parts.items():
            content = getattr(value, part, None)
            # A kind stands in lower case in the key.
            if isinstance(content, str) and content != wanted and content.lower() != wanted:
                raise ContractError(f"{self.bucket}/{self.key(**parts)}: the value says {part} {content[:60]!r}, its key says {wanted!r}")


@dataclass(frozen=True, kw_only=True)
class Event(Noun, Generic[M]):
    """A stream of CloudEvents (binary mode: `ce-*` headers, JSON data)."""

    stream: str
    message: type[M]
    event_type: str
    max_per_subject: int
    """How many events of one subject are kept. There is no age limit: the newest of each subject is the present state and must stay."""
    max_stream_bytes: int
    max_event_bytes: int = 64 * 1024
    """The largest event that the stream takes."""

    def subject(self, **values: str) -> str:
        """Build the subject of one event."""
        return ".".join((PREFIX, self.name, *self._tokens(values, is_pattern=False)))

    def pattern(self, **values: str) -> str:
        """Build a subscription; a part left out matches anything."""
        return ".".join((PREFIX, self.name, *self._tokens(values, is_pattern=True)))


@dataclass(frozen=True, kw_only=True)
class Ask(Noun, Generic[Q, R]):
    """A request with one answer."""

    request: type[Q]
    reply: type[R]
    timeout_s: float
    """How long an asker waits unless it says otherwise."""
    queue_group: str = ""
    """Given: any one of the replicas answers."""

    def subject(self, **values: str) -> str:
        """Build the subject to ask at."""
        return ".".join((PREFIX, self.name, *self._tokens(values, is_pattern=False)))


MACHINE = State(
    name="machine",
    parts=("node",),
    bucket="topobus_machines",
    message=Machine,
    writer=("discovery",),
    readers=(*_CLASS_SERVERS, "topology", "controller", "cli"),
    description="NUMA nodes and distances, CPUs, caches, memory and the PCI tree of one node.",
    max_value_bytes=900 * 1024,
    max_bucket_bytes=192 * 1024 * 1024,
    may_be_compressed=True,
    is_rewritten=True,
)
INVENTORY = State(
    name="inventory",
    parts=("node", "device_class"),
    bucket="topobus_inventories",
    message=Inventory,
    writer=_CLASS_SERVERS,
    readers=("topology", "gateway", "controller", "cli"),
    description="All devices of one class on one node with their health.",
    max_bucket_bytes=384 * 1024 * 1024,
    may_be_compressed=True,
    is_rewritten=True,
)
LEDGER = State(
    name="ledger",
    parts=("node",),
    bucket="topobus_ledgers",
    message=Ledger,
    writer=("topology",),
    readers=(*DEVICE_SERVICES, "gateway", "controller", "cli"),
    description="Who holds what on one node, with the answers of the newest operations.",
    history=16,
    max_value_bytes=900 * 1024,
    # The most of all: sixteen revisions a node, each with its newest answers, and without room for them nothing can be placed.
    max_bucket_bytes=768 * 1024 * 1024,
)
ALIGNMENT = State(
    name="alignment",
    parts=("node",),
    bucket="topobus_alignments",
    message=NodeAlignment,
    writer=("topology",),
    readers=("topology", "controller", "cli"),
    description="How one node aligns: policy, scope, mode, reserved CPUs and memory, as its operator set them.",
    max_bucket_bytes=32 * 1024 * 1024,
)
OBJECT = State(
    name="object",
    parts=("kind", "namespace", "name"),
    bucket="topobus_objects",
    message=m.ApiObject,
    writer=("cli", "controller"),
    readers=("controller", "gateway", "cli"),
    description="The stand-alone API: DeviceClasses, ResourceClaims and Pods in Kubernetes' wire shape. CLI writes spec, controller status.",
    # A claim may have 32 configurations of 10 KiB, and its allocation has them once more (resource.k8s.io/v1): 640 KiB.
    max_value_bytes=900 * 1024,
    max_bucket_bytes=256 * 1024 * 1024,
)
HEALTH = Event(
    name="health",
    parts=("node", "device_class", "device"),
    stream="TOPOBUS_HEALTH",
    message=m.HealthEvent,
    event_type="dev.topobus.health.v1",
    writer=_CLASS_SERVERS,
    readers=("users", "gateway", "cli"),
    description="A device's health, complete in each event; the newest of a subject is the present state.",
    max_per_subject=64,
    max_stream_bytes=256 * 1024 * 1024,
)
DECISION = Event(
    name="decision",
    parts=("node",),
    stream="TOPOBUS_DECISIONS",
    message=m.DecisionEvent,
    event_type="dev.topobus.decision.v1",
    writer=("topology", "controller"),
    readers=("users", "cli"),
    description="Every decision with its inputs, enough to replay it offline.",
    max_per_subject=4096,
    max_stream_bytes=512 * 1024 * 1024,
    # A decision carries the node as it was seen: as large as a message may be (render_nats.render_server).
    max_event_bytes=1020 * 1024,
)
DISAGREEMENT = Event(
    name="disagreement",
    parts=("node", "device_class", "device"),
    stream="TOPOBUS_DISAGREEMENTS",
    message=m.DisagreementEvent,
    event_type="dev.topobus.disagreement.v1",
    writer=("gateway",),
    readers=("users", "gateway", "cli"),
    description="A device that kubelet gives to one and the ledger to another, with both sides; the newest of a subject is the present state.",
    max_per_subject=16,
    max_stream_bytes=64 * 1024 * 1024,
)
PLACE = Ask(
    name="place",
    parts=("node",),
    request=m.PlaceRequest,
    reply=m.PlaceReply,
    timeout_s=5.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Place all containers of a pod on this node, or say why not.",
)
PREFER = Ask(
    name="prefer",
    parts=("node",),
    request=m.PreferRequest,
    reply=m.PreferReply,
    timeout_s=1.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Choose the best devices out of those available.",
)
ADOPT = Ask(
    name="adopt",
    parts=("node",),
    request=m.AdoptRequest,
    reply=m.AdoptReply,
    timeout_s=5.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Write into the ledger what kubelet or a claim has decided.",
)
COMMIT = Ask(
    name="commit",
    parts=("node",),
    request=m.CommitRequest,
    reply=m.CommitReply,
    timeout_s=5.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Keep what an owner has reserved; release aborts it.",
)
RELEASE = Ask(
    name="release",
    parts=("node",),
    request=m.ReleaseRequest,
    reply=m.ReleaseReply,
    timeout_s=5.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Let go of all that an owner holds.",
)
HINTS = Ask(
    name="hints",
    parts=("node", "device_class"),
    request=m.HintsRequest,
    reply=m.HintsReply,
    # The architecture's budget for a provider with custom hints; later it counts as "no opinion, said so".
    timeout_s=0.02,
    writer=_CLASS_SERVERS,
    # The controller asks for no hints: it only looks whether anybody would answer.
    readers=("topology", "controller", "cli"),
    description="Hints of one class, by the device service itself.",
)
PREPARE = Ask(
    name="prepare",
    parts=("node", "device_class"),
    request=m.PrepareRequest,
    reply=m.PrepareReply,
    timeout_s=10.0,
    writer=_CLASS_SERVERS,
    readers=("gateway", "cli"),
    description="Make devices ready and say what a container needs to use them.",
)
UNPREPARE = Ask(
    name="unprepare",
    parts=("node", "device_class"),
    request=m.UnprepareRequest,
    reply=m.UnprepareReply,
    timeout_s=10.0,
    writer=_CLASS_SERVERS,
    readers=("gateway",),
    description="Undo prepare.",
)
PLAN = Ask(
    name="plan",
    parts=("node",),
    request=m.PlanRequest,
    reply=m.PlanReply,
    timeout_s=10.0,
    queue_group="controller",
    writer=("controller",),
    readers=("cli",),
    description="Find a node for a pod and place it there; the node in the subject is always `_`.",
)
PODS = Ask(
    name="pods",
    parts=("node",),
    request=m.PodsRequest,
    reply=m.PodsReply,
    timeout_s=6.0,
    writer=("gateway",),
    readers=("cli",),
    description="Which containers have which devices, as kubelet tells it, and where the ledger says something else.",
)

STATES: tuple[State[Machine] | State[Inventory] | State[Ledger] | State[NodeAlignment] | State[m.ApiObject], ...] = (
    MACHINE,
    INVENTORY,
    LEDGER,
    ALIGNMENT,
    OBJECT,
)
EVENTS: tuple[Event[m.HealthEvent] | Event[m.DecisionEvent] | Event[m.DisagreementEvent], ...] = (HEALTH, DECISION, DISAGREEMENT)
ASKS = (PLACE, PREFER, ADOPT, COMMIT, RELEASE, HINTS, PREPARE, UNPREPARE, PLAN, PODS)
ALL: tuple[Noun, ...] = (*STATES, *EVENTS, *ASKS)
