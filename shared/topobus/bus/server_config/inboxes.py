"""Inboxes: the subjects at which answers are awaited, with the askers of each ask and its answerer.

An inbox is `_INBOX.<asker>.<answerer>.<random>…`. The server's permissions let each principal
publish at its own branch of an asker's inboxes only, so that the branch at which an answer arrives
proves its sender (docs/adr/0029). Both names are connection names.
"""

from __future__ import annotations

import re
from typing import Any

from topobus.formats.messages.device_classes import class_server
from topobus.formats.messages.nouns import Ask

__all__ = [
    "IMPORTED_REPLIES",
    "SERVER",
    "answerer_of",
    "askers_of",
    "connection_name",
    "inbox_branch",
    "is_imported_reply",
    "is_inbox_of",
]

SERVER = "nats"
"""The name of the answerer where the server itself answers: JetStream's interface and its
deliveries. No principal
may publish there."""

IMPORTED_REPLIES = "_R_."
"""How the reply subjects begin that a server makes for requests from another account. A client that
names such a subject as its reply is refused by the server."""

# Principals that connect under another name than their own.
_CONNECTION_NAMES = {"cli": "topobus-cli"}
_IMPORTED_REPLY = re.compile(r"_R_(\.[A-Za-z0-9]+)+")
_INBOX = re.compile(r"_INBOX\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_.-]+")


def connection_name(principal: str) -> str:
    """Give the name under which a principal's process connects: the second token of its inboxes.

    >>> connection_name("gpu"), connection_name("cli")
    ('gpu', 'topobus-cli')
    """
    return _CONNECTION_NAMES.get(principal, principal)


def inbox_branch(asker: str, answerer: str) -> str:
    """Give the branch of an asker's inboxes at which one answerer's answers come, both by
    connection name.

    >>> inbox_branch("gateway", "gpu")
    '_INBOX.gateway.gpu'
    """
    return f"_INBOX.{asker}.{answerer}"


def askers_of(ask: Ask[Any, Any]) -> tuple[str, ...]:
    """Give the connection names that may ask: the catalogue's readers.

    >>> from topobus.formats.messages.catalogue import UNPREPARE
    >>> askers_of(UNPREPARE)
    ('gateway', 'topobus-cli')
    """
    return tuple(map(connection_name, ask.readers))


def answerer_of(ask: Ask[Any, Any], device_class: str = "") -> str:
    """Return the connection name of an ask's answerer: a class's own service, or the gateway for
    classes of foreign device plugins.

    >>> from topobus.formats.messages.catalogue import PLACE, PREPARE
    >>> answerer_of(PLACE), answerer_of(PREPARE, "gpu"), answerer_of(PREPARE, "npu"), answerer_of(PREPARE, "gpu-nvidia")
    ('topology', 'gpu', 'npu', 'gateway')
    """
    if len(ask.writer) == 1:
        return connection_name(ask.writer[0])
    return connection_name(class_server(device_class))


def is_inbox_of(askers: tuple[str, ...], reply: str) -> bool:
    """Say whether a reply subject is an inbox of one of these connections.

    >>> is_inbox_of(("gateway",), "_INBOX.gateway.gpu.1.2"), is_inbox_of(("gateway",), "_INBOX.nic.gpu.1.2"), is_inbox_of(("gateway",), "$KV.a.b")
    (True, False, False)
    """  # noqa: E501
    match = _INBOX.fullmatch(reply)
    return match is not None and match[1] in askers


def is_imported_reply(reply: str) -> bool:
    """Say whether a reply subject is the server's own, for a request from another account.

    >>> is_imported_reply("_R_.KNTehE.LnmP1Y"), is_imported_reply("_R_"), is_imported_reply("$KV.a.b")
    (True, False, False)
    """
    return _IMPORTED_REPLY.fullmatch(reply) is not None
