"""Transcripts as values: what was done in one, and how two differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from topobus.testing.kubelet import KubeletTimings
from topobus.testing.kubelet.transcript import Action, differences, read_transcript

TRANSCRIPT = Path(__file__).resolve().parents[2] / "data" / "kubelet" / "kubelet-1.36-transcript.jsonl"


def test_deeds_are_found_when_the_recording_is_read() -> None:
    """What somebody did, in its order, is told from kubelet's calls and the markers, for both lives
    of the plugin.
    """
    first, second = read_transcript(TRANSCRIPT.read_text(encoding="utf-8"))
    registering = [Action.REGISTER] * 5

    assert [step.action for step in first.steps] == [
        *registering,
        Action.START_DRIVER,
        Action.CREATE_PODS,
        Action.RESTART_CONTAINER,
        Action.SHOW,
        Action.SHOW,
        Action.STOP_KUBELET,
        Action.START_KUBELET,
        Action.REGISTER,
    ]
    assert [step.action for step in second.steps] == [
        *registering,
        Action.START_DRIVER,
        Action.CREATE_PODS,
        Action.DELETE_PODS,
        Action.SHOW,
        Action.STOP_PLUGIN,
    ]
    assert (first.owes, second.owes) == (False, True)
    assert (first.resource, first.socket, second.socket) == ("rec.example.com/x", "rec-1.sock", "rec-2.sock")


def test_limits_are_the_recorded_ones_when_nothing_is_set() -> None:
    """The patience with a socket and the deadlines are the recorded ones, as the simulator has them
    by default.
    """
    lines = [json.loads(line) for line in TRANSCRIPT.read_text(encoding="utf-8").splitlines()]
    timings = KubeletTimings()
    by_event = {line["event"]: line["deadline_s"] for line in lines if "deadline_s" in line}

    assert {line["took"] for line in lines if "failed to dial" in line.get("details", "") and "took" in line} == {
        timings.dial_s
    }
    assert by_event["GetInfo"] == timings.get_info_s
    assert by_event["NotifyRegistrationStatus"] == timings.notify_s
    assert by_event["PreStartContainer"] == timings.pre_start_s
    assert by_event["NodePrepareResources"] == by_event["NodeUnprepareResources"] == timings.dra_s
    assert by_event["Allocate"] is by_event["GetPreferredAllocation"] is None


def test_order_is_free_only_where_kubelet_does_two_things_at_once() -> None:
    """The answer to Register and the stream's begin may come in any order.

    A request and an answer may not.
    """
    at_once: list[dict[str, Any]] = [{"event": "Register.ok"}, {"event": "ListAndWatch.open"}]
    in_turn: list[dict[str, Any]] = [{"event": "GetInfo"}, {"event": "NotifyRegistrationStatus"}]
    sets = [
        {"event": "Allocate", "req": {"container_requests": [{"devices_ids": ids}]}} for ids in (["a", "b"], ["b", "a"])
    ]

    assert differences(at_once, at_once[::-1]) == []
    assert differences(in_turn, in_turn[::-1]) != []
    assert differences(sets[:1], sets[1:]) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "no lines", id="empty"),
        pytest.param("{", "line 1", id="no-json"),
        pytest.param('{"session": "a"}', "line 1", id="no-event"),
        pytest.param('{"session": "a", "event": "GetInfo"}', "session a", id="nothing-to-tell"),
    ],
)
def test_transcript_is_refused_when_nothing_can_be_done_with_it(text: str, words: str) -> None:
    """The error says where, and what was wanted."""
    with pytest.raises(ValueError, match=words):
        read_transcript(text)
