"""Our clock against the server's: judged by what cannot be explained by
a slow way there and back.
"""

from __future__ import annotations

import pytest

from topobus.bus.connection.server_clock import ServerClock
from topobus.process.readiness import Readiness


@pytest.mark.parametrize(
    ("asked_ms", "answered_ms", "text"),
    [
        (0, 4000, ""),
        (0, 60_000, ""),
        (3_500, 3_600, "3.5 s ahead of"),
        (2_900, 9_000, ""),
        (-9_000, -4_000, "6.5 s behind"),
        (-9_000, -2_000, ""),
    ],
    ids=["slow", "very-slow", "ahead", "perhaps-ahead", "behind", "perhaps-behind"],
)
def test_clock_differs_only_when_no_delay_explains_it(asked_ms: int, answered_ms: int, text: str) -> None:
    """The server read its clock at some moment between our two.

    Only a difference to both of them is one of clocks. The process stays ready.
    """
    readiness = Readiness()
    readiness.set("work", is_ready=True)
    clock = ServerClock(readiness)

    clock.note(asked_ms, answered_ms, 0.0)

    assert text in readiness.report().get("clock", "")
    assert bool(text) == ("clock" in readiness.report())
    assert readiness.is_ready


def test_remark_ends_when_the_clock_was_set() -> None:
    """A clock that agrees again is said once, and the remark is gone."""
    readiness = Readiness()
    clock = ServerClock(readiness)
    clock.note(10_000, 10_001, 0.0)
    before = readiness.report()["clock"]

    clock.note(0, 1, 0.0)

    assert "10.0 s ahead" in before
    assert readiness.report() == {"clock": "ready"}


def test_write_is_compared_once_with_the_time_at_which_it_was_stored() -> None:
    """Of a write of ours the stored time tells.

    What others wrote at the same place of another stream says nothing of our clock.
    """
    clock = ServerClock(Readiness())
    clock.note_write("KV_a", 7, 5_000, 5_010)

    clock.note_stored("KV_b", 7, 0.0)
    unmeasured = clock.ahead_s
    clock.note_stored("KV_a", 7, 0.0)

    assert unmeasured is None
    assert clock.ahead_s == pytest.approx(5.005)
