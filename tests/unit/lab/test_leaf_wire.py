"""The leaf protocol's lines, the figures and the plot of the leaf benchmark.

Nothing here connects or is timed.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from lab.bench import leaves
from lab.leaves.hub import HubCounts, hub_use
from lab.leaves.hub_measures import draw_growth
from lab.leaves.leaf_wire import (
    Failed,
    Frame,
    HubInfo,
    Interest,
    LeafParser,
    Message,
    Ping,
    Pong,
    connect_line,
    message_bytes,
)
from lab.leaves.node_content import NodeContent, Saying
from lab.leaves.open_files import check_open_files
from lab.leaves.simulated_node import asked_subjects, stored_messages
from topobus.formats.messages.catalogue import LEDGER
from topobus.values.errors import ConfigError, ContractError

STREAM = (
    b'INFO {"server_name":"hub","version":"2.15.1","max_payload":1048576,"nonce":"x"}\r\n'
    b"LS+ topobus.v1.up.*.machine\r\nLS+ work pool 3\r\nLS- gone\r\nPING\r\nPONG\r\n-ERR 'Stale Connection'\r\n"
    b"LMSG a 2\r\nhi\r\nLMSG a b 4\r\n\r\n\r\n\r\nLMSG a + b q1 q2 2\r\nhi\r\nLMSG a | q1 2\r\nhi\r\n"
    b"HMSG a b 18 20\r\nNATS/1.0\r\nx: 1\r\n\r\nhi\r\n"
)
FRAMES: list[Frame] = [
    HubInfo("hub", "2.15.1", 1048576),
    Interest("topobus.v1.up.*.machine", "", is_wanted=True),
    Interest("work", "pool", is_wanted=True),
    Interest("gone", "", is_wanted=False),
    Ping(),
    Pong(),
    Failed("Stale Connection"),
    Message("a", "", b"", b"hi"),
    Message("a", "b", b"", b"\r\n\r\n"),
    Message("a", "b", b"", b"hi"),
    Message("a", "", b"", b"hi"),
    Message("a", "b", b"NATS/1.0\r\nx: 1\r\n\r\n", b"hi"),
]


@pytest.mark.parametrize("size", [1, 2, 7, 64, len(STREAM)])
def test_parser_gives_the_same_frames_when_bytes_come_in_pieces(size: int) -> None:
    """Where the network cuts the bytes changes nothing of what they say."""
    parser = LeafParser()

    frames = [frame for at in range(0, len(STREAM), size) for frame in parser.feed(STREAM[at : at + size])]

    assert frames == FRAMES


@pytest.mark.parametrize("line", [b"LMSG a x\r\n", b"LMSG\r\n", b"HMSG a 5\r\n", b"HELLO\r\n", b"x" * 70_000])
def test_parser_refuses_a_line_when_it_is_none_of_the_protocol(line: bytes) -> None:
    """What cannot be read ends the connection with a sentence, and is not skipped."""
    with pytest.raises(ContractError, match="leaf protocol"):
        list(LeafParser().feed(line))


def test_message_bytes_are_read_again_when_they_have_headers() -> None:
    """What is written as a message is read as the same one."""
    headers = b"NATS/1.0\r\na: b\r\n\r\n"

    frames = list(LeafParser().feed(message_bytes("a.b", b"data", reply="c", headers=headers)))

    assert frames == [Message("a.b", "c", headers, b"data")]


def test_connect_line_leaves_out_what_is_not_given() -> None:
    """A leaf without a user sends no empty one, which a server would take for a wrong one."""
    said = json.loads(connect_line(name="n1", server_id="NX", account="$G", cluster="fleet").removeprefix(b"CONNECT "))

    assert (said["name"], said["cluster"], said["headers"]) == ("n1", "fleet", True)
    assert not {"user", "pass", "domain", "deny_pub"} & said.keys()


def test_content_names_the_node_when_another_one_says_it() -> None:
    """Each simulated node speaks of itself alone, at its own subjects,
    with event ids of its own.
    """
    health = Saying("health", {"device_class": "gpu", "device": "gpu-0"}, b'{"node":"old"}', {"Nats-Msg-Id": "old-1"})
    content = NodeContent(node="old", sayings=(Saying("ledger", {}, b'{"node":"old"}'), health))

    messages = stored_messages("new", msgspec.json.decode(msgspec.json.encode(content), type=NodeContent))

    assert messages == [
        (f"$KV.{LEDGER.bucket}.new", b"", b'{"node":"new"}'),
        ("topobus.v1.health.new.gpu.gpu-0", b"NATS/1.0\r\nNats-Msg-Id: new-1\r\n\r\n", b'{"node":"new"}'),
    ]
    assert (content.bytes_of(), content.bytes_of("ledger")) == (28, 14)


def test_asked_subjects_are_all_asks_of_a_node_when_it_has_two_classes() -> None:
    """A node's leaf tells the hub of each ask once for the node, or once for each class.

    Of plans, which a controller answers, never.
    """
    subjects = asked_subjects("n1", ["nic", "gpu"])

    assert len(subjects) == len(set(subjects)) == 8 + 2 * 8
    assert "topobus.v1.prepare.n1.nic" in subjects
    assert not [subject for subject in subjects if ".plan." in subject]


def test_hub_use_divides_by_the_time_when_counts_have_grown() -> None:
    """What grew is told a second, and what leaves sent and got is added up."""
    before = HubCounts(
        at=10.0,
        processor_s=1.0,
        resident_mib=20.0,
        leaves=5,
        subscriptions=9,
        messages_in=100,
        messages_out=200,
        bytes_in=1000,
        bytes_out=2000,
        leaf_messages_in=10,
        leaf_messages_out=20,
    )
    after = msgspec.structs.replace(
        before, at=20.0, processor_s=1.5, resident_mib=21.0, messages_in=150, bytes_out=2500, leaf_messages_out=45
    )

    use = hub_use(before, after)

    assert (use.processor_percent, use.messages_in_per_s, use.messages_out_per_s) == pytest.approx((5.0, 5.0, 0.0))
    assert (use.bytes_out_per_s, use.leaf_messages_per_s, use.resident_mib) == pytest.approx((50.0, 2.5, 21.0))


def test_open_files_are_refused_before_the_bench_begins_when_there_are_too_few() -> None:
    """A fleet that the system's limit cannot hold is an error with the number that would do.

    No limit is enough.
    """
    with pytest.raises(ConfigError, match=r"may have 1024, wanted 2256.*ulimit -n 2256"):
        check_open_files(2256, 1024)
    check_open_files(2256, -1)


@pytest.mark.parametrize("nodes", ["many", "0", "1,,2", "-5"])
def test_bench_refuses_sizes_when_they_are_no_numbers(nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake on the command line is said in a sentence, before anything is started."""
    assert leaves.main(["--nodes", nodes]) == 64

    assert f"--nodes is {nodes!r}" in capsys.readouterr().err


def test_plot_has_each_size_and_leaves_out_figures_that_were_not_measured() -> None:
    """A run without a controller still draws the hub. A chart ends at its largest measured size."""
    rows: list[dict[str, Any]] = [
        {"nodes": 100, "idle: hub_mib": 50.0, "join: all are known_s": 3.0, "idle: hub's messages_per_s": 1.0},
        {"nodes": 1000, "idle: hub_mib": 400.0, "controller_mib": 700.0, "join: all are known_s": 30.0},
    ]

    drawing = draw_growth(rows)

    assert drawing.count("<circle") == 2 + 1 + 2 + 1
    assert drawing.count(">1000</text>") == 2
