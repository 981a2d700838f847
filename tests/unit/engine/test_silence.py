"""When a service counts as silent, case by case."""

from __future__ import annotations

import pytest

from topobus.engine.health.silence import (
    TOPOLOGY,
    Announcements,
    Answered,
    Silence,
    SilenceSettings,
    Silent,
    SilentBecause,
    next_silence,
)
from topobus.values.view import NodeAlignment

HEARD = Answered()
NOBODY = Silent(because=SilentBecause.NOBODY)
TIMEOUT = Silent(because=SilentBecause.TIMEOUT)
NO_BUS = Silent(because=SilentBecause.NO_BUS)


def silent_after(*answers: Answered | Silent) -> int | None:
    """The number of the look, one a second from 0 on, at which the service is silent first."""
    silence = Silence()
    for second, answer in enumerate(answers):
        silence = next_silence(silence, answer, at=float(second), settings=SilenceSettings())
        if silence.is_silent:
            return second
    return None


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        pytest.param([HEARD, *[NOBODY] * 9], 6, id="killed"),
        pytest.param([HEARD, *[TIMEOUT] * 20], 16, id="hung"),
        pytest.param([HEARD, *[TIMEOUT] * 3, *[NOBODY] * 9], 9, id="hung-then-killed"),
        pytest.param([HEARD, *[NOBODY, TIMEOUT] * 9], 16, id="neither-for-long"),
        pytest.param([HEARD, *[NOBODY] * 5, HEARD, *[NOBODY] * 5], None, id="restarted-twice"),
        pytest.param([*[NOBODY] * 15], None, id="starting"),
        pytest.param([*[NOBODY] * 20], 15, id="never-started"),
        pytest.param([HEARD, *[NO_BUS] * 60], None, id="nats-away"),
        pytest.param([HEARD, NO_BUS, *[NOBODY] * 14, HEARD], None, id="back-later-than-nats"),
        pytest.param([HEARD, *[NOBODY] * 4, NO_BUS, *[NOBODY] * 20], 21, id="gone-while-nats-was-away"),
    ],
)
def test_service_is_silent_after_the_time_of_its_kind_when_it_does_not_answer(
    answers: list[Answered | Silent], wanted: int | None
) -> None:
    """Five seconds of nobody, fifteen of no answer, and the longer time for all who may still be
    coming.
    """
    assert silent_after(*answers) == wanted


def test_words_tell_who_is_silent_when_a_service_or_topology_stops() -> None:
    """Device services by topology's word, topology by the lack of it.

    A bus that was away is no silence, a node that is gone neither.
    """
    announcements = Announcements()
    for node in ("n1", "gone"):
        announcements.note(node, NodeAlignment(node=node, unheard_classes={"nic": "08:00"}), at=0.0, said_at="09:00")
    announcements.drop("gone")

    late = announcements.silent("n1", 101.0)
    announcements.excuse(101.0)

    assert late == {"nic": "08:00", TOPOLOGY: "09:00"}
    assert announcements.silent("n1", 102.0) == {"nic": "08:00"}
    assert (announcements.silent("gone", 1e6), announcements.nodes) == ({}, ("n1",))
