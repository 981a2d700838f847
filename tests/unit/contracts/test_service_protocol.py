"""NATS' services protocol as it stands on the wire: the fields that tools check, and the subjects and places that rights are given for."""

from __future__ import annotations

import json

import msgspec
import pytest
from nats.micro import service as micro

from topobus.contracts.device_classes import class_complaint
from topobus.contracts.inboxes import connection_name
from topobus.contracts.principals import LEAF_PRINCIPALS
from topobus.contracts.service_protocol import (
    QUESTIONS,
    TOOLS_INBOX,
    EndpointInfo,
    EndpointStats,
    ServiceInfo,
    ServicePing,
    ServiceStats,
    is_service,
    listened_subjects,
    may_be_answered,
    semantic_version,
    service_description,
    service_id,
    service_metadata,
    service_name,
)

_METADATA = {"principal": "gpu", "release": "0.2.0", "node": "n1", "class": "gpu"}
_SUBJECT = "topobus.v1.prepare.n1.gpu"
_PING = ServicePing(name="topobus-gpu", id="n1-5f2c11aa", version="0.2.0", metadata=_METADATA)
_INFO = ServiceInfo(
    name="topobus-gpu",
    id="n1-5f2c11aa",
    version="0.2.0",
    metadata=_METADATA,
    description="Topobus",
    endpoints=(EndpointInfo(name="prepare", subject=_SUBJECT, queue_group="", metadata={"node": "n1"}),),
)
_STATS = ServiceStats(
    name="topobus-gpu",
    id="n1-5f2c11aa",
    version="0.2.0",
    metadata=_METADATA,
    started="2026-11-28T00:00:00.000000Z",
    endpoints=(
        EndpointStats(
            name="prepare",
            subject=_SUBJECT,
            queue_group="",
            num_requests=4,
            num_errors=1,
            last_error="busy: later",
            processing_time=400,
            average_processing_time=100,
            data={"outcomes": {"answered": 3, "busy": 1}},
        ),
    ),
)
_COMMON = {"name": "topobus-gpu", "id": "n1-5f2c11aa", "version": "0.2.0", "metadata": _METADATA}
# Field by field what io.nats.micro.v1.* of jsm.go asks for; `data` may be left out there, and is no null.
_WIRE = {
    "ping": (_PING, {"type": "io.nats.micro.v1.ping_response", **_COMMON}),
    "info": (
        _INFO,
        {
            "type": "io.nats.micro.v1.info_response",
            **_COMMON,
            "description": "Topobus",
            "endpoints": [{"name": "prepare", "subject": _SUBJECT, "queue_group": "", "metadata": {"node": "n1"}}],
        },
    ),
    "stats": (
        _STATS,
        {
            "type": "io.nats.micro.v1.stats_response",
            **_COMMON,
            "started": "2026-11-28T00:00:00.000000Z",
            "endpoints": [
                {
                    "name": "prepare",
                    "subject": _SUBJECT,
                    "queue_group": "",
                    "num_requests": 4,
                    "num_errors": 1,
                    "last_error": "busy: later",
                    "processing_time": 400,
                    "average_processing_time": 100,
                    "data": {"outcomes": {"answered": 3, "busy": 1}},
                }
            ],
        },
    ),
}


@pytest.mark.parametrize("name", list(_WIRE))
def test_answer_has_the_fields_that_tools_check(name: str) -> None:
    """Each answer is the protocol's object, with its type, and no field that a schema refuses."""
    answer, wanted = _WIRE[name]

    assert json.loads(msgspec.json.encode(answer)) == wanted


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ping", micro.ServicePing), ("info", micro.ServiceInfo), ("stats", micro.ServiceStats)],
    ids=["ping", "info", "stats"],
)
def test_answer_is_read_by_nats_own_types(name: str, kind: type[micro.ServicePing | micro.ServiceInfo | micro.ServiceStats]) -> None:
    """What nats-py's service types make of an answer and write again is the same answer."""
    answer, wanted = _WIRE[name]
    read = kind.from_dict(json.loads(msgspec.json.encode(answer)))
    written = read.to_dict()

    # That library writes milliseconds.
    assert written == {**wanted, **({"started": "2026-11-28T00:00:00.000Z"} if name == "stats" else {})}


@pytest.mark.parametrize("principal", [*(name for name in LEAF_PRINCIPALS if is_service(name)), "npu"])
def test_service_is_one_that_the_protocol_allows(principal: str) -> None:
    """Name and version pass the checks of nats-py's own service configuration, and each has a line that says what it is for."""
    config = micro.ServiceConfig(
        name=service_name(principal), version=semantic_version("0.3.0.dev1+g1.2"), description=service_description(principal)
    )

    assert config.version == "0.3.0-dev1+g1.2"
    assert config.description is not None
    assert config.description.startswith("Topobus: ")
    assert len(config.description) < 90


def test_subjects_are_those_that_nats_own_side_asks_at() -> None:
    """The three wildcards of a process cover each question to all, to its name and to itself, and none to another."""
    own_id = service_id("gpu", "node1.example", "gpu-5f2c11aa")
    covered = [subject.replace("*", verb.value) for verb in micro.ServiceVerb for subject in listened_subjects("gpu", own_id)]

    assert covered == [
        micro.control_subject(verb, *where)
        for verb in micro.ServiceVerb
        for where in ((None, None), ("topobus-gpu", None), ("topobus-gpu", own_id))
    ]
    assert [subject.count("*") for subject in QUESTIONS] == [1, 2, 3]


def test_inbox_of_tools_can_be_no_process() -> None:
    """No principal and no device class has the name at which tools await answers."""
    tools = TOOLS_INBOX.removeprefix("_INBOX.")

    assert tools not in {connection_name(principal) for principal in LEAF_PRINCIPALS}
    assert class_complaint(tools)


@pytest.mark.parametrize("has_users", [False, True])
@pytest.mark.parametrize(
    "reply",
    ["", "_INBOX", "_INBOX.", "_INBOX.>", "_INBOX.*", "_INBOX.TOOLS.*", "_INBOX..x", "$JS.API.INFO", "_R_.a.b", "a _INBOX.x", "_INBOX.x\n"],
)
def test_no_answer_goes_where_no_single_inbox_is(reply: str, has_users: bool) -> None:
    """Patterns, other subjects and what is no subject are never answered."""
    assert not may_be_answered(reply, has_users=has_users)


@pytest.mark.parametrize("principal", [name for name in LEAF_PRINCIPALS if name != "cli"])
def test_no_answer_goes_to_a_process_of_ours(principal: str) -> None:
    """A process awaits answers to its asks at its inboxes: what somebody else has sent there must not come from a peer that it trusts."""
    assert not may_be_answered(f"_INBOX.{connection_name(principal)}.gpu.a.b", has_users=False)


def test_cluster_wide_process_is_of_no_node() -> None:
    """A controller runs on some machine, and speaks for none."""
    assert service_metadata("controller", "host-7", "0.2.0") == {"principal": "controller", "release": "0.2.0"}
    assert service_id("gpu", "", "gpu-5f2c11aa") == "gpu-5f2c11aa"
