"""NATS' services protocol as our processes speak it: where they are asked who they are, where they answer, who may ask, and what they say.

Flows in: names of principals, nodes and releases. Flows out: subjects for subscriptions, permissions and accounts, and the three answers. Tools as `nats micro ls` ask all services at
once and await the answers at an inbox. No answer proves its sender, so nothing in Topobus decides by one; who must know asks `Bus.is_answered`. Source: NATS ADR-32, and the
JSON schemas `io.nats.micro.v1` of jsm.go. See docs/adr/0064.
"""

from __future__ import annotations

import re

from msgspec import Struct

from topobus.contracts.device_classes import has_own_service
from topobus.contracts.inboxes import connection_name
from topobus.contracts.nouns import to_token
from topobus.contracts.principals import CLUSTER_WIDE, LEAF_PRINCIPALS

__all__ = [
    "QUESTIONS",
    "TOOLS_ANSWERS",
    "TOOLS_INBOX",
    "EndpointInfo",
    "EndpointStats",
    "ServiceInfo",
    "ServicePing",
    "ServiceStats",
    "is_question",
    "is_service",
    "listened_subjects",
    "may_be_answered",
    "question_subjects",
    "semantic_version",
    "service_description",
    "service_id",
    "service_metadata",
    "service_name",
    "verb_of",
]

_PREFIX = "$SRV"
QUESTIONS = (f"{_PREFIX}.*", f"{_PREFIX}.*.*", f"{_PREFIX}.*.*.*")
"""All questions: `$SRV.<verb>[.<name of the service>[.<id of the process>]]`."""
# Upper case: no principal and no device class can have this name.
_TOOLS = "TOOLS"
TOOLS_INBOX = f"_INBOX.{_TOOLS}"
"""Where a server with users lets tools await answers: `nats --inbox-prefix _INBOX.TOOLS`."""
TOOLS_ANSWERS = f"{TOOLS_INBOX}.>"

_INBOX = re.compile(r"_INBOX\.([A-Za-z0-9_-]+)(\.[A-Za-z0-9_-]+)*")
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?((?:a|b|rc|dev|post)\d*[a-z0-9.]*))?(?:\+([A-Za-z0-9.-]+))?")
# Who connects and serves nothing.
_ASKERS = ("cli", "user")
_PURPOSES = {
    "discovery": "reads the machine of its node: NUMA nodes, CPUs, memory, the PCI tree",
    "topology": "keeps the ledger of its node and chooses devices and CPUs",
    "gateway": "serves kubelet, the container runtime and this node's ResourceSlices",
    "relay": "says to the hub what its node's own server stores",
    "controller": "allocates claims and schedules pods",
    "console": "shows the fleet to a browser",
}


class EndpointInfo(Struct, frozen=True, kw_only=True):
    """An ask that a process answers."""

    name: str
    """The ask's noun."""
    subject: str
    """Where it is asked."""
    queue_group: str
    """Empty: each of several instances answers."""
    metadata: dict[str, str]
    """The parts of the subject by name."""


class EndpointStats(Struct, frozen=True, kw_only=True):
    """How an ask was answered so far. Times are in nanoseconds."""

    name: str
    subject: str
    queue_group: str
    num_requests: int
    num_errors: int
    """Of these, those whose answer was an error: unreadable, too late, busy, or failed. A refusal with reasons is an answer."""
    last_error: str
    processing_time: int
    """All of it in handlers; what was busy or too late had none."""
    average_processing_time: int
    data: dict[str, dict[str, int]]
    """`outcomes`: requests by outcome, as `topobus_bus_answer_seconds` counts them."""


class ServicePing(Struct, frozen=True, kw_only=True, tag_field="type", tag="io.nats.micro.v1.ping_response"):
    """That a process is there."""

    name: str
    """The kind of service, the same for all its processes."""
    id: str
    """This process until it ends: its node and 32 random bits."""
    version: str
    """The release as SemVer."""
    metadata: dict[str, str]
    """`principal`, `release` (as it calls itself), and `node` and `class` where it has them."""


class ServiceInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="io.nats.micro.v1.info_response"):
    """What a process is and answers."""

    name: str
    """As in `ServicePing`, like the next three."""
    id: str
    version: str
    metadata: dict[str, str]
    description: str
    """What the service is for."""
    endpoints: tuple[EndpointInfo, ...]
    """In the order in which the process began to answer them."""


class ServiceStats(Struct, frozen=True, kw_only=True, tag_field="type", tag="io.nats.micro.v1.stats_response"):
    """What a process has answered since it was started."""

    name: str
    """As in `ServicePing`, like the next three."""
    id: str
    version: str
    metadata: dict[str, str]
    started: str
    """RFC 3339, UTC."""
    endpoints: tuple[EndpointStats, ...]


def is_service(principal: str) -> bool:
    """Say whether a principal's processes are services.

    >>> is_service("gpu"), is_service("console"), is_service("cli"), is_service("user")
    (True, True, False, False)
    """
    return principal not in _ASKERS


def is_question(subject: str) -> bool:
    """Say whether a subject, or a pattern of subjects, is of this protocol.

    >>> is_question("$SRV.*.topobus-gpu"), is_question("_INBOX.TOOLS.>")
    (True, False)
    """
    return subject.startswith(f"{_PREFIX}.")


def service_name(principal: str) -> str:
    """Name the kind of service, as all its processes do.

    >>> service_name("gpu"), service_name("npu")
    ('topobus-gpu', 'topobus-npu')
    """
    return f"topobus-{principal}"


def service_id(principal: str, node: str, instance: str) -> str:
    """Name one process: by its node where it is of one, and by what ends its connection's name.

    Errors: raises ContractError for a node that no subject can hold.

    >>> service_id("gpu", "node1.example", "gpu-5f2c11aa"), service_id("controller", "host-7", "controller-5f2c11aa")
    ('node1_example-5f2c11aa', 'controller-5f2c11aa')
    """
    is_of_node = node and principal not in CLUSTER_WIDE
    return f"{to_token(node)}-{instance.rpartition('-')[2]}" if is_of_node else instance


def service_metadata(principal: str, node: str, release: str) -> dict[str, str]:
    """Say whose process it is: principal, release, and node and device class where it has them.

    >>> service_metadata("gpu", "n1", "0.2.0")
    {'principal': 'gpu', 'release': '0.2.0', 'node': 'n1', 'class': 'gpu'}
    """
    made = {"principal": principal, "release": release}
    if node and principal not in CLUSTER_WIDE:
        made["node"] = node
    if has_own_service(principal):
        made["class"] = principal
    return made


def service_description(principal: str) -> str:
    """Say in a line what a service is for.

    >>> service_description("npu")
    'Topobus: finds, watches and prepares the npu devices of its node'
    """
    return f"Topobus: {_PURPOSES.get(principal) or f'finds, watches and prepares the {principal} devices of its node'}"


def semantic_version(release: str) -> str:
    """Write a release (PEP 440) as the protocol wants it (SemVer); one that is neither becomes 0.0.0, for `release` in the metadata says what it is.

    >>> [semantic_version(release) for release in ("0.2.0", "1.4", "1.0.0rc1", "0.3.0.dev4+g12ab", "tip")]
    ['0.2.0', '1.4.0', '1.0.0-rc1', '0.3.0-dev4+g12ab', '0.0.0']
    """
    match = _RELEASE.fullmatch(release)
    if match is None:
        return "0.0.0"
    numbers = ".".join(str(int(number or 0)) for number in match.group(1, 2, 3))
    return f"{numbers}{f'-{match[4]}' if match[4] else ''}{f'+{match[5]}' if match[5] else ''}"


def question_subjects(principal: str) -> tuple[str, ...]:
    """List the questions that a principal's processes are asked, for their permissions and for what their account imports.

    >>> question_subjects("gpu")
    ('$SRV.*', '$SRV.*.topobus-gpu', '$SRV.*.topobus-gpu.*')
    """
    return listened_subjects(principal, "*")


def listened_subjects(principal: str, own_id: str) -> tuple[str, ...]:
    """List what one process listens to: three subscriptions for all verbs, since each is known at every server of a cluster."""
    name = service_name(principal)
    return (f"{_PREFIX}.*", f"{_PREFIX}.*.{name}", f"{_PREFIX}.*.{name}.{own_id}")


def verb_of(subject: str) -> str:
    """Give the verb of a question.

    >>> verb_of("$SRV.INFO.topobus-gpu")
    'INFO'
    """
    return subject.split(".")[1]


def may_be_answered(reply: str, *, has_users: bool) -> bool:
    """Say whether a question may be answered there. A process that answered anywhere would lend its rights to who asks: it would write a ledger for somebody who may not.

    Shapes: has_users — whether the server has users; where it has none, tools await answers at inboxes of their own making.

    >>> may_be_answered("_INBOX.TOOLS.x1", has_users=True), may_be_answered("_INBOX.x1.y2", has_users=True), may_be_answered("_INBOX.x1.y2", has_users=False)
    (True, False, True)
    >>> may_be_answered("_INBOX.gateway.gpu.x1", has_users=False), may_be_answered("$KV.topobus_ledgers.n1", has_users=False)
    (False, False)
    """
    match = _INBOX.fullmatch(reply)
    if match is None:
        return False
    return match[1] == _TOOLS or (not has_users and match[1] not in {connection_name(principal) for principal in LEAF_PRINCIPALS})
