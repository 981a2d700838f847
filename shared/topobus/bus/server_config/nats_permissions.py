"""What a NATS server needs in its configuration: each principal's permissions, from writers and
readers.

A principal is a process, `user` for programs that follow events, or `verdicts` for programs that
report how devices are. Rights may be narrowed to one
node, whose token is at one fixed position in every subject.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from topobus.bus.server_config.inboxes import connection_name, inbox_branch
from topobus.bus.server_config.principals import CLUSTER_WIDE, LEAF_PRINCIPALS, PRINCIPALS
from topobus.bus.server_config.streams import ACCOUNT_INFO, STREAM_LISTS, stream_names
from topobus.bus.server_config.up_subjects import up_branch, up_nouns
from topobus.formats.messages.catalogue import (
    ALL,
    DECISION,
    DISAGREEMENT,
    FORGETTER,
    HEALTH,
    INVENTORY,
    OBJECT,
    PROVISIONER,
    REPORTER,
)
from topobus.formats.messages.device_classes import DEVICE_SERVICES, has_own_service, principal_role
from topobus.formats.messages.nouns import PREFIX, Ask, Event, Notice, Noun, State, stored_subject, to_token

__all__ = [
    "LEAF_PRINCIPALS",
    "PRINCIPALS",
    "Rights",
    "makes_consumers",
    "render_open_api",
    "render_permissions",
    "rights",
]

# Principals that the catalogue names otherwise than their connection.
_READER_NAMES = {"user": "users"}

# What the node's processes read by patterns, with a consumer. All else they read key by key and
# subject by subject, without one. Device services, discovery and the console make no consumers at
# all: a consumer's messages may be delivered to any subject, which no server checks, so a process
# with a consumer could have others' messages stored under a name of its choice. Patterns are read
# by `topobus.bus.feeds.pattern_feed` there.
_PATTERNS_READ: Mapping[str, tuple[Noun, ...]] = {
    **dict.fromkeys(("discovery", *DEVICE_SERVICES, "console", REPORTER), ()),
    "topology": (INVENTORY, DECISION),
    "gateway": (INVENTORY, HEALTH, DISAGREEMENT),
}
# Read when it is needed and never followed: its reader gets no hint of a write.
_READ_AT_NEED: Mapping[str, tuple[Noun, ...]] = {"gateway": (OBJECT,)}

Rights = dict[str, list[str]]


def rights(principal: str, *, node: str = "", may_create: bool = True, provisioner: str = PROVISIONER) -> Rights:
    """Return the subjects that a principal publishes and subscribes, sorted.

    Every device class is a principal, one that `topobus-device` serves included. `node` narrows a
    node's process to its own node. `may_create`: false when the streams are made by none of these
    principals, else by the `provisioner`.

    Errors: raises ValueError for an unknown principal.
    """
    where = "*" if not node or principal in CLUSTER_WIDE else to_token(node)
    role = principal_role(principal)
    if role not in LEAF_PRINCIPALS:
        raise ValueError(f"unknown principal {principal!r}; known are {', '.join(LEAF_PRINCIPALS)} and device classes")
    publish: set[str] = set()
    subscribe: set[str] = set()
    # Our inboxes: every answerer's answers come there. We publish there only the canary, and
    # answers to twins.
    name = connection_name(principal)
    subscribe.add(f"_INBOX.{name}.>")
    # Users bring clients of their own, which put a random token there.
    publish.add(f"_INBOX.{name}.>" if principal == "user" else f"{inbox_branch(name, name)}.>")
    reads = _READER_NAMES.get(role, role)
    for noun in ALL:
        if role in noun.writer:
            _add_writer(noun, principal, where, publish, subscribe)
        if reads in noun.readers or role in noun.writer:
            _add_reader(
                noun, principal, where, publish, subscribe, is_writer=role in noun.writer and reads not in noun.readers
            )
            if isinstance(noun, State | Event) and noun in _PATTERNS_READ.get(role, ALL):
                # A node's processes read the classes' own buckets key by key.
                for bucket in noun.buckets() if isinstance(noun, State) and role not in _PATTERNS_READ else (noun,):
                    _add_consumers(bucket, principal, publish, subscribe)
            elif isinstance(noun, Event) and reads in noun.readers:
                # The subject at which the stream announces a stored event. A principal without a
                # consumer learns by it of the event, and reads it then.
                subscribe.add(stored_subject(f"{PREFIX}.{noun.name}.>"))
    if principal == FORGETTER:
        _add_removal(publish, subscribe)
    if principal not in ("user", REPORTER):
        publish.update(f"$JS.API.STREAM.INFO.{stream}" for stream in stream_names())
    if principal == "relay":
        # At its node's own server, which passes it on to the hub.
        publish.add(up_branch(node))
    if principal == "cli":
        # To check whether the server stores anything at all. One whose disk was full still answers
        # other questions, and not this one.
        publish.add(ACCOUNT_INFO)
        # NATS' own tools list streams and buckets.
        publish.update(STREAM_LISTS)
    if principal == provisioner and may_create:
        # A stream made by another process may send a copy of each value elsewhere. So only one
        # principal makes them, and an operator edits them by its login.
        publish.update(f"$JS.API.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE") for stream in stream_names())
        publish.add("$JS.API.STREAM.NAMES")
    return {"publish": sorted(publish), "subscribe": sorted(subscribe)}


def makes_consumers(principal: str) -> bool:
    """Return whether a principal may make consumers.

    One that may not reads patterns of keys and subjects message by message. A subscriber may where
    the server has no accounts, and does nowhere: its programs work at either.

    >>> makes_consumers("controller"), makes_consumers("console"), makes_consumers("npu"), makes_consumers("user")
    (True, False, False, False)
    """
    return principal != "user" and _PATTERNS_READ.get(principal_role(principal), ALL) != ()


def _add_writer(noun: Noun, principal: str, where: str, publish: set[str], subscribe: set[str]) -> None:
    if isinstance(noun, State):
        # A service whose class has a bucket of its own writes to no other: it may fill that one.
        home = noun.home(device_class=principal)
        publish.add(f"$KV.{home.bucket}.{_tokens(noun, principal, where)}")
        # A writer reads its own value back before it compares and sets. What a relay reported of
        # its node to this server is in the common bucket.
        publish.update(f"$JS.API.STREAM.MSG.GET.KV_{bucket.bucket}" for bucket in (home, noun))
    elif isinstance(noun, Event | Notice):
        publish.add(f"{PREFIX}.{noun.name}.{_tokens(noun, principal, where)}")
    else:
        subject = f"{PREFIX}.{noun.name}.{_tokens(noun, principal, where)}"
        subscribe.add(subject)
        # Our own branch of each asker's inboxes: no other principal can answer in our place, nor we
        # in its.
        publish.update(
            f"{inbox_branch(connection_name(reader), connection_name(principal))}.>" for reader in noun.readers
        )
        if isinstance(noun, Ask) and not noun.queue_group:
            # A starting instance asks at its own subject whether another one answers there already,
            # and answers such questions itself.
            publish.add(subject)


def _add_reader(
    noun: Noun, principal: str, where: str, publish: set[str], subscribe: set[str], *, is_writer: bool
) -> None:
    if isinstance(noun, Ask):
        if not is_writer:
            publish.add(
                f"{PREFIX}.{noun.name}.{'*.' * (len(noun.parts) - 1)}*".replace(
                    f"{noun.name}.*", f"{noun.name}.{where}", 1
                )
            )
        return
    if isinstance(noun, Notice):
        if not is_writer:
            # As a person asks for them with NATS' own tools.
            subscribe.add(f"{PREFIX}.{noun.name}.>")
        return
    buckets = noun.buckets() if isinstance(noun, State) and not is_writer else (noun,)
    for stream in map(_stream, buckets):
        publish.add(f"$JS.API.STREAM.MSG.GET.{stream}")
        publish.add(f"$JS.API.STREAM.INFO.{stream}")
    if isinstance(noun, State) and noun not in _READ_AT_NEED.get(principal, ()):
        # Where the server announces that a key was written.
        subscribe.add(f"{PREFIX}.{noun.name}.{_tokens(noun, principal, where)}")


def _add_consumers(noun: State[Any] | Event[Any], principal: str, publish: set[str], subscribe: set[str]) -> None:
    stream = _stream(noun)
    filter_subject = f"$KV.{noun.bucket}.>" if isinstance(noun, State) else f"{PREFIX}.{noun.name}.>"
    publish.add(f"$JS.API.CONSUMER.CREATE.{stream}.*.{filter_subject}")
    publish.add(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*")
    publish.add(f"$JS.API.CONSUMER.DELETE.{stream}.*")
    if principal == "user":
        # Users bring clients of their own: these find the stream by its subject, make unnamed push
        # consumers and answer their flow control.
        publish.update(
            {
                "$JS.API.STREAM.NAMES",
                f"$JS.API.CONSUMER.CREATE.{stream}",
                f"$JS.API.CONSUMER.INFO.{stream}.*",
                f"$JS.FC.{stream}.>",
            }
        )
        subscribe.add(filter_subject)


def _add_removal(publish: set[str], subscribe: set[str]) -> None:
    """Let a process remove what is stored of any node. A deletion is a write of the key, and a
    device that is gone is an event of its own.

    Decisions are the past of a node and stay.
    """
    for noun in up_nouns():
        if noun is DECISION:
            continue
        for bucket in noun.buckets() if isinstance(noun, State) else (noun,):
            publish.add(
                f"$KV.{bucket.bucket}.{bucket.key_pattern()}" if isinstance(bucket, State) else bucket.pattern()
            )
            publish.add(f"$JS.API.STREAM.MSG.GET.{_stream(bucket)}")
            _add_consumers(bucket, FORGETTER, publish, subscribe)


def _tokens(noun: Noun, principal: str, where: str) -> str:
    """Build the tail of a writer's subject: its own node, its own class, anything else."""
    fixed = {"node": where, "device_class": principal if has_own_service(principal) else "*"}
    return ".".join(fixed.get(part, "*") for part in noun.parts)


def _stream(noun: Noun) -> str:
    return noun.stream if isinstance(noun, Event) else f"KV_{noun.bucket}" if isinstance(noun, State) else ""


def render_permissions(
    *,
    may_create: bool = True,
    nodes: Mapping[str, str] = MappingProxyType({}),
    logins: Mapping[str, Sequence[str]] = MappingProxyType({}),
    classes: Sequence[str] = (),
) -> str:
    """Render deploy/nats/permissions.conf: one user per principal, passwords from the server's
    environment.

    `nodes` narrows principals to one node each: `{"gpu": "worker-1"}`. `logins`: by which names a
    principal logs in, where that is not its own alone. `classes`: device classes that
    `topobus-device` serves, each a principal of its own.
    """
    lines = [
        "# Generated by tools/render-docs from shared/topobus/formats/messages. Do not edit.",
        "#",
        "# One user for each kind of process. Passwords come from the server's environment "
        "(TOPOBUS_GPU_PASSWORD=…), which reads them as values of",
        "# its configuration: begin each with a letter, or one that begins like a number keeps the server "
        "from starting. Rights are for any node;",
        "# topobus.bus.server_config.nats_permissions.rights(principal, node=…) gives them for one node. "
        "`user` follows events: inbox prefix _INBOX.user.",
        "# Rights keep honest processes apart. They do not stop a hostile one in the same account: a process "
        "that may publish to any stream can name a",
        "# bucket's key as the reply subject, and the server writes its acknowledgement there. Distrusted "
        "services need an account of their own.",
        f"# The {PROVISIONER} alone makes the streams that are missing; the others wait for it."
        if may_create
        else "# No user here may make streams: provision them first, as another user.",
        "authorization {",
        "  users: [",
    ]
    for principal, login in _logins(logins, classes):
        lines += [f"    {{ user: {login}, password: $TOPOBUS_{login.upper()}_PASSWORD, permissions: {{"]
        for verb, subjects in rights(principal, node=nodes.get(principal, ""), may_create=may_create).items():
            lines += [f"      {verb}: {{ allow: ["]
            lines += [f'        "{subject}"' for subject in subjects]
            lines += ["      ] }"]
        lines += ["    } }"]
    return "\n".join([*lines, "  ]", "}"]) + "\n"


def _logins(logins: Mapping[str, Sequence[str]], classes: Sequence[str]) -> Iterator[tuple[str, str]]:
    for principal in (*PRINCIPALS, *classes):
        for login in logins.get(principal, (principal,)):
            yield principal, login


def render_open_api() -> str:
    """Make a server without accounts answer also at the name that JetStream's interface has behind
    an account.

    A process that is configured for an account, and a subscriber written for either, is answered as
    well. No user of `permissions.conf` may publish there.
    """
    return 'mappings { "$JS.topobus.API.>": "$JS.API.>" }\n'


# A subject that a server would refuse must fail here, not at the operator's server.
_SUBJECT = re.compile(r"[$A-Za-z0-9_>*-]+(\.[$A-Za-z0-9_>*-]+)*")
assert all(
    _SUBJECT.fullmatch(subject)
    for principal in LEAF_PRINCIPALS
    for subjects in rights(principal).values()
    for subject in subjects
)
