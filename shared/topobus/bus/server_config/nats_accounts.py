"""Describes the accounts of a NATS server: the users of each, what each user may do there, and what
crosses from one to another. All of it comes from the catalogue.

Subject rights alone do not stop a hostile process. A process that may publish to any stream of an
account can name any subject as the reply, and the server writes its acknowledgement there. A
consumer delivers to any subject. Neither leaves the account. So device services, discovery, the
console, subscribers, those who report verdicts and (at a hub) nodes have accounts without
JetStream, and reach single subjects of the account that has it. The server gives each such request
a reply subject of its own (`_R_.…`). See docs/adr/0029.

Stable for other modules: `accounts(shape, nodes=…)` gives the description,
`topobus.bus.server_config.nats_accounts_config` renders it. What a user of this needs to know:
`Account.users`, each with `name`, `principal`, `node` and `variable` (of its password).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct

from topobus.bus.server_config.inboxes import IMPORTED_REPLIES, connection_name
from topobus.bus.server_config.nats_permissions import PRINCIPALS, Rights, rights
from topobus.bus.server_config.up_subjects import up_mappings
from topobus.formats.messages.catalogue import ASKS, EVENTS, NOTICES, REPORT, REPORTER, STATES
from topobus.formats.messages.device_classes import DEVICE_SERVICES, has_own_service, principal_role
from topobus.formats.messages.nouns import PREFIX, Noun, stored_subject, to_token

__all__ = [
    "DEFAULT_ACCOUNT",
    "IMPORTED_API",
    "STREAMS_ACCOUNT",
    "Account",
    "Crossing",
    "CrossingKind",
    "Shape",
    "User",
    "accounts",
    "crossings",
    "is_outside",
    "node_account",
    "own_account",
    "readable_streams",
    "vendor_account",
]


IMPORTED_API = "$JS.topobus.API"
"""Where an account without JetStream asks for what another one has stored. Not at `$JS.API`: there
the server itself answers that this account has no JetStream. Any client can do so by its own option
for JetStream domains (`topobus`)."""
_API = "$JS.API"
STREAMS_ACCOUNT = "NODE"
"""The account that has the streams, of a central server and of a node's own one: a folder of this
name in their stores."""
DEFAULT_ACCOUNT = "$G"
"""The only account of a server that has none configured: a folder of this name in its store."""


class Shape(StrEnum):
    """What a server, or a cluster of them, is for."""

    CENTRAL = "central"
    """One for everything."""
    LEAF = "leaf"
    """One beside the services of one node."""
    HUB = "hub"
    """Where the leaves of all nodes meet: controllers, the CLI and subscribers."""


class CrossingKind(StrEnum):
    """In which direction messages go."""

    SERVICE = "service"
    """Requests from the importer to the owner, and the answers back."""
    STREAM = "stream"
    """Messages from the owner to the importer."""


class Crossing(Struct, frozen=True, kw_only=True, order=True):
    """A subject of one account that another one reaches."""

    owner: str
    kind: CrossingKind
    subject: str
    importer: str
    local: str = ""
    """The importer's name for it, with the same wildcards in the same order; empty: the same."""


class User(Struct, frozen=True, kw_only=True):
    """One login that may connect."""

    name: str
    principal: str
    """The kind of process; `leaf`: the nats-server of a node."""
    node: str
    """The only node that it may act for; empty: any."""
    rights: Rights
    may_respond: bool = False
    """True: may answer each request that it receives, once, at the reply subject; so it needs no
    right to `_R_.>`."""

    @property
    def connection_types(self) -> tuple[str, ...]:
        """How it may connect.

        Only a node's server may come as a leaf: the messages of a leaf are checked less, for
        example their reply subjects.
        """
        return () if self.principal == _LEAF else ("STANDARD", "WEBSOCKET")

    @property
    def variable(self) -> str:
        """Name the variable that holds the password, in the server's environment or in a file that
        its configuration includes.

        The name differs for each user. Otherwise nodes `a-b` and `a.b` would have one password.

        >>> User(name="gpu-node-1_example", principal="gpu", node="node-1.example", rights={}).variable
        'TOPOBUS_GPU_NODE_1_dot_EXAMPLE_PASSWORD'
        """
        return f"TOPOBUS_{self.name.upper().replace('_', '_dot_').replace('-', '_')}_PASSWORD"


class Account(Struct, frozen=True, kw_only=True):
    """One account with its users and what it shares."""

    name: str
    users: tuple[User, ...]
    exports: tuple[Crossing, ...]
    """What of this account others reach: those whose `owner` it is."""
    imports: tuple[Crossing, ...]
    """What of others this one reaches."""
    has_jetstream: bool = False
    is_system: bool = False


_NODE, _CORE, _NODES, _OBSERVERS, _SYSTEM = STREAMS_ACCOUNT, "CORE", "NODES", "OBS", "SYS"
_DISCOVERY, _CONSOLE = "discovery", "console"
# The processes in the account with the streams. Where there is one server, the controllers and the
# CLI are among the processes that serve the node.
_CLUSTER_PROCESSES = ("controller", "cli")
_NODE_PROCESSES = tuple(
    name
    for name in PRINCIPALS
    if name not in (*DEVICE_SERVICES, *_CLUSTER_PROCESSES, _DISCOVERY, _CONSOLE, "user", REPORTER)
)
_LEAF = "leaf"
_RELAY = "relay"
_LEAF_PROVISIONER = "topology"


def vendor_account(device_class: str, node: str = "") -> str:
    """Name the account of a device service: of one node, or of all when no node is given.

    >>> vendor_account("gpu"), vendor_account("gpu", "node1.example")
    ('V_GPU', 'V_GPU-node1_example')
    """
    return f"V_{device_class.upper()}-{to_token(node)}" if node else f"V_{device_class.upper()}"


def own_account(principal: str, node: str = "") -> str:
    """Name the account of a process that has one of its own besides device services: of one node,
    or of all.

    >>> own_account("console"), own_account("discovery", "node1.example")
    ('CONSOLE', 'DISCOVERY-node1_example')
    """
    return f"{principal.upper()}-{to_token(node)}" if node else principal.upper()


def is_outside(principal: str) -> bool:
    """Say whether a principal is in an account without streams, where a server has accounts.

    >>> [name for name in PRINCIPALS if not is_outside(name)], is_outside("npu")
    (['topology', 'gateway', 'controller', 'cli'], True)
    """
    return principal in (_DISCOVERY, _CONSOLE, "user", REPORTER) or has_own_service(principal)


def node_account(node: str = "") -> str:
    """Name the account at a hub of a node's server: of one node, or of all when no node is given.

    >>> node_account("node1.example"), node_account()
    ('NODES-node1_example', 'NODES')
    """
    return f"{_NODES}-{to_token(node)}" if node else _NODES


def accounts(shape: Shape, *, nodes: Sequence[str] = (), classes: Sequence[str] = ()) -> tuple[Account, ...]:
    """Describe all accounts of a server, sorted by name.

    Shapes: nodes — central: none, and each kind of process is a user that may act for any node, or
    the nodes whose processes are users of their own (`gpu-n1`), their device services and discovery
    in accounts of their own (`V_GPU-n1`, `DISCOVERY-n1`); leaf: the node's own name, or none for a
    file that fits every node; hub: the nodes whose leaves may connect, each as its own user
    (`leaf-n1`) in an account of its own (`NODES-n1`), or none for a single user that may act for
    any node. classes — device classes besides ours, which `topobus-device` serves: each has users
    and accounts as ours have (`V_NPU`).
    Errors: raises ValueError for a leaf with several nodes, ContractError for a name that no
    subject can hold.
    """
    if shape is Shape.LEAF and len(nodes) > 1:
        raise ValueError(f"a leaf server has one node, got {list(nodes)}")
    users = dict(_users(shape, nodes, classes))
    exports: dict[str, list[Crossing]] = {}
    imports: dict[str, list[Crossing]] = {}
    for crossing in crossings(shape, nodes=nodes, classes=classes):
        exports.setdefault(crossing.owner, []).append(crossing)
        imports.setdefault(crossing.importer, []).append(crossing)
    return tuple(
        Account(
            name=name,
            users=users.get(name, ()),
            exports=tuple(exports.get(name, ())),
            imports=tuple(imports.get(name, ())),
            has_jetstream=name == _owner(shape),
            is_system=name == _SYSTEM,
        )
        for name in sorted({*users, _SYSTEM})
    )


def crossings(shape: Shape, *, nodes: Sequence[str] = (), classes: Sequence[str] = ()) -> tuple[Crossing, ...]:
    """List what crosses between the accounts of a server, sorted. `nodes` and `classes` as for
    `accounts`.

    Crossings and rights come from one source: what a user of an account without JetStream may
    publish or hear besides its inboxes and its asks is what crosses.
    """
    crossed: set[Crossing] = set()
    owner = _owner(shape)
    if shape is Shape.HUB:
        for node in nodes or ("",):
            crossed.update(_crossings_of_node(node))
    else:
        for device_class in (*DEVICE_SERVICES, *classes):
            for node in nodes or ("",):
                account = vendor_account(device_class, node if shape is Shape.CENTRAL else "")
                crossed.update(_crossings_of(rights_across(device_class, node=node), owner, account))
        for node in nodes or ("",):
            account = own_account(_DISCOVERY, node if shape is Shape.CENTRAL else "")
            crossed.update(_crossings_of(rights_across(_DISCOVERY, node=node), owner, account))
    if shape is not Shape.LEAF:
        crossed.update(_crossings_of(rights_across(_CONSOLE, node=""), owner, own_account(_CONSOLE)))
    crossed.update(_crossings_of(rights_across("user", node=""), owner, _OBSERVERS))
    return tuple(sorted(crossed))


def rights_across(principal: str, *, node: str) -> Rights:
    """Narrow a principal's rights to what it may do in an account without JetStream.

    It gets no consumers: a server does not check a consumer's delivery subject, so a process that
    may make one could have the server write stored messages anywhere. It gets no inboxes of others:
    an answer goes to the subject that the server made. Streams are visible to those that read or
    write them.
    """
    granted = rights(principal, node=node)
    name = connection_name(principal)
    publish = {
        subject
        for subject in granted["publish"]
        if not subject.startswith(("$JS.", "_INBOX.")) or subject.startswith(f"_INBOX.{name}.")
    }
    publish.update(
        f"{IMPORTED_API}.STREAM.{verb}.{stream}"
        for verb in ("INFO", "MSG.GET")
        for stream in readable_streams(principal)
    )
    subscribe = {*granted["subscribe"], *_state_subjects(principal, node)}
    return {"publish": sorted(publish), "subscribe": sorted(subscribe)}


def readable_streams(principal: str) -> tuple[str, ...]:
    """Name the streams of which a principal may read messages: those that it reads or writes.

    >>> readable_streams("gpu")
    ('KV_topobus_inventories', 'KV_topobus_inventories_gpu', 'KV_topobus_ledgers', 'KV_topobus_machines', 'KV_topobus_maintenances', 'KV_topobus_maintenances_gpu', 'TOPOBUS_HEALTH')
    """  # noqa: E501
    reading = f"{_API}.STREAM.MSG.GET."
    return tuple(
        subject.removeprefix(reading) for subject in rights(principal)["publish"] if subject.startswith(reading)
    )


def _owner(shape: Shape) -> str:
    """Name the account that has the streams."""
    return _CORE if shape is Shape.HUB else _NODE


def _users(shape: Shape, nodes: Sequence[str], classes: Sequence[str]) -> Iterator[tuple[str, tuple[User, ...]]]:
    if shape is Shape.HUB:
        yield _CORE, tuple(_user(name, "", rights(name)) for name in _CLUSTER_PROCESSES)
        for node in nodes or ("",):
            yield node_account(node), (_leaf_user(node),)
    else:
        # A leaf's users need no node in their names, because it has only one.
        named = nodes if shape is Shape.CENTRAL else ()
        for device_class in (*DEVICE_SERVICES, *classes):
            for node in nodes or ("",):
                yield (
                    vendor_account(device_class, node if named else ""),
                    (_outsider(device_class, node, is_named=bool(named)),),
                )
        for node in nodes or ("",):
            yield own_account(_DISCOVERY, node if named else ""), (_outsider(_DISCOVERY, node, is_named=bool(named)),)
        if shape is Shape.CENTRAL:
            core = [
                _user(name, node, rights(name, node=node), is_named=bool(named))
                for name in _NODE_PROCESSES
                for node in nodes or ("",)
            ]
            core += [_user(name, "", rights(name)) for name in _CLUSTER_PROCESSES]
        else:
            core = [_leaf_process(name, nodes[0] if nodes else "") for name in (*_NODE_PROCESSES, _RELAY, "cli")]
        yield _NODE, tuple(core)
    if shape is not Shape.LEAF:
        yield own_account(_CONSOLE), (_outsider(_CONSOLE, "", is_named=False),)
    yield _OBSERVERS, (_user("user", "", rights_across("user", node="")),)
    # Alone: in an account with subscribers it could have answers sent to their subjects.
    yield own_account(REPORTER), (_user(REPORTER, "", rights_across(REPORTER, node="")),)


def _user(principal: str, node: str, granted: Rights, *, is_named: bool = False, may_respond: bool = False) -> User:
    name = f"{principal}-{to_token(node)}" if is_named else principal
    return User(name=name, principal=principal, node=node, rights=granted, may_respond=may_respond)


def _outsider(principal: str, node: str, *, is_named: bool) -> User:
    """A process in an account without streams, which answers NATS' own tools at least."""
    return _user(principal, node, rights_across(principal, node=node), is_named=is_named, may_respond=True)


def _leaf_process(principal: str, node: str) -> User:
    """A process of the node's core on its leaf.

    It gets asks from the hub as well, and one process makes the leaf's streams.
    """
    answers = any(principal in ask.writer for ask in ASKS)
    return _user(principal, node, rights(principal, node=node, provisioner=_LEAF_PROVISIONER), may_respond=answers)


def _leaf_user(node: str) -> User:
    """The nats-server of a node, as a user of the hub: publishes what its node stores, and receives
    what its node is asked.
    """
    where = to_token(node) if node else "*"
    publish = [f"{IMPORTED_REPLIES}>", f"{PREFIX}.up.{where}.>"]
    # Acknowledgements of what the leaf publishes come back to the inboxes of its relay.
    subscribe = ["_INBOX.relay.>", *_asks_of_nodes(where)]
    granted = {"publish": sorted(publish), "subscribe": sorted(subscribe)}
    return User(name=f"{_LEAF}-{where}" if node else _LEAF, principal=_LEAF, node=node, rights=granted)


def _crossings_of_node(node: str) -> Iterator[Crossing]:
    """Yield what a node's server publishes to the hub, and what it is asked there.

    Each node is alone in its account. In a common one it could name another node's subjects as the
    reply of its messages, and hear what is answered to others.
    """
    where = to_token(node) if node else "*"
    for up, subject in up_mappings():
        yield Crossing(
            owner=_CORE,
            kind=CrossingKind.SERVICE,
            subject=subject.replace("*", where, 1),
            importer=node_account(node),
            local=up.replace("*", where, 1),
        )
    for subject in _asks_of_nodes(where):
        for asker in _askers_at(subject, _CORE):
            yield Crossing(owner=node_account(node), kind=CrossingKind.SERVICE, subject=subject, importer=asker)


def _crossings_of(granted: Rights, owner: str, importer: str) -> Iterator[Crossing]:
    """Yield what the rights of a user without JetStream need of the account that has it."""
    for subject in granted["publish"]:
        if subject.startswith(IMPORTED_API):
            api = f"{_API}{subject.removeprefix(IMPORTED_API)}"
            yield Crossing(owner=owner, kind=CrossingKind.SERVICE, subject=api, importer=importer, local=subject)
        elif subject.startswith("$") or _noun(subject) in _EVENT_NAMES:
            yield Crossing(owner=owner, kind=CrossingKind.SERVICE, subject=subject, importer=importer)
        elif _noun(subject) in _NOTICE_NAMES:
            # Shared with each account: a server passes what came in from one account to no other.
            for hearer in (owner, _OBSERVERS):
                yield Crossing(owner=importer, kind=CrossingKind.STREAM, subject=subject, importer=hearer)
    for subject in granted["subscribe"]:
        if _noun(subject) in (_STATE_NAMES | _NOTICE_NAMES) or subject.startswith(stored_subject("")):
            yield Crossing(owner=owner, kind=CrossingKind.STREAM, subject=subject, importer=importer)
        elif _noun(subject) in _EVENT_NAMES:
            # A server passes what came in from one account to no other, but it does pass what a
            # stream republishes.
            again = stored_subject(subject)
            yield Crossing(owner=owner, kind=CrossingKind.STREAM, subject=again, importer=importer, local=subject)
        elif _noun(subject):
            for asker in _askers_at(subject, owner):
                yield Crossing(owner=importer, kind=CrossingKind.SERVICE, subject=subject, importer=asker)


_EVENT_NAMES = frozenset(event.name for event in EVENTS)
_STATE_NAMES = frozenset(state.name for state in STATES)
_NOTICE_NAMES = frozenset(notice.name for notice in NOTICES)


def _askers_at(subject: str, owner: str) -> tuple[str, ...]:
    """Name the accounts from which an ask of a node's process is asked: that with the streams, and
    where a verdict is reported also that of the reporters.
    """
    return (owner, own_account(REPORTER)) if _noun(subject) == REPORT.name else (owner,)


def _noun(subject: str) -> str:
    """Return the noun of a subject of the grammar. Empty for any other."""
    return subject.removeprefix(f"{PREFIX}.").partition(".")[0] if subject.startswith(f"{PREFIX}.") else ""


def _state_subjects(principal: str, node: str) -> set[str]:
    """Return the subjects at which a principal without consumers gets the hints of the states that
    it reads or writes.
    """
    role = principal_role(principal)
    return {
        _pattern(state, node, principal if role in state.writer else "*")
        for state in STATES
        if role in (*state.writer, *state.readers)
    }


def _pattern(noun: Noun, node: str, device_class: str) -> str:
    fixed = {"node": to_token(node) if node else "*", "device_class": device_class}
    return ".".join((PREFIX, noun.name, *(fixed.get(part, "*") for part in noun.parts)))


def _asks_of_nodes(where: str) -> tuple[str, ...]:
    """List the subjects at which processes of nodes answer."""
    return tuple(
        ".".join((PREFIX, ask.name, where, *["*"] * (len(ask.parts) - 1)))
        for ask in ASKS
        if not set(ask.writer) <= set(_CLUSTER_PROCESSES)
    )
