"""Our clock against the server's: judged by what cannot be explained by a slow way there and back."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from topobus.bus.connection.asker_releases import AskerReleases
from topobus.bus.connection.server_clock import ServerClock
from topobus.process.quiet import QuietLog
from topobus.process.readiness import Readiness
from topobus.testing.clock import ManualClock


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
    """The server read its clock at some moment between our two; only a difference to both of them is one of clocks. The process stays ready."""
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
    """Of a write of ours the stored time tells; what others wrote at the same place of another stream says nothing of our clock."""
    clock = ServerClock(Readiness())
    clock.note_write("KV_a", 7, 5_000, 5_010)

    clock.note_stored("KV_b", 7, 0.0)
    unmeasured = clock.ahead_s
    clock.note_stored("KV_a", 7, 0.0)

    assert unmeasured is None
    assert clock.ahead_s == pytest.approx(5.005)


def test_askers_of_other_releases_are_remarked_until_they_say_ours() -> None:
    """Each service that asks has one remark, the newest; who says nothing, a person's command and who has no name change nothing."""
    readiness = Readiness()
    askers = AskerReleases(readiness, "0.2.0", QuietLog(ManualClock()))
    askers.note("gateway", "0.2.9")
    askers.note("topobus-cli", "0.1.0")
    askers.note("", "0.1.0")
    quiet = readiness.report()
    askers.note("controller", "0.3.0")
    askers.note("controller", "")
    remarked = readiness.report()["releases"]
    askers.note("controller", "0.2.1")

    assert quiet == {}
    assert "controller runs release 0.3.0, newer than 0.2.0 here" in remarked
    assert readiness.report() == {"releases": "ready"}


def test_two_releases_of_one_asker_cost_a_line_each_ten_seconds() -> None:
    """While an older instance is replaced both ask in turn: the remark follows each, the log does not."""
    readiness, clock = Readiness(), ManualClock()
    askers = AskerReleases(readiness, "0.2.0", QuietLog(clock))
    with capture_logs() as lines:
        for release in ("0.1.0", "0.2.0") * 20:
            askers.note("gateway", release)
        clock.advance(10.0)
        askers.note("gateway", "0.1.0")

    assert [(line["event"], line["asker"], line["count"]) for line in lines] == [
        ("release.differs", "gateway", 1),
        ("release.differs", "gateway", 20),
    ]
    assert "gateway runs release 0.1.0" in readiness.report()["releases"]
