"""What the controller remembers of failures: devices that a node refused."""

from __future__ import annotations

import math

from topobus.controller.commit.refusal_backoff import RefusalBackoff
from topobus.engine.allocation.values import DeviceId
from topobus.testing.clock import ManualClock

ONE, TWO = DeviceId("d", "n", "one"), DeviceId("d", "n", "two")


def test_refusals_keep_devices_away_for_a_growing_while() -> None:
    """Each refusal of a claim doubles the time until its devices are tried again.

    What was excluded before that is over.
    """
    clock = ManualClock()
    refusals: RefusalBackoff[DeviceId] = RefusalBackoff(clock, 1.0)
    refusals.add("c", [ONE], "reserved")
    first = refusals.refused("c"), refusals.wait_s(["b", "c"])
    clock.advance(2.0)
    over = refusals.refused("c"), refusals.wait_s(["c"])

    refusals.add("c", [TWO], "reserved")

    assert first == ({ONE: "refused by the node: reserved"}, 2.0)
    assert over == ({}, math.inf)
    assert refusals.refused("c") == {TWO: "refused by the node: reserved"}
    assert (refusals.wait_s(["c"]), refusals.count("c")) == (4.0, 2)


def test_refusals_are_forgotten_when_the_claim_is_done() -> None:
    """An allocated or deleted claim leaves nothing behind."""
    refusals: RefusalBackoff[DeviceId] = RefusalBackoff(ManualClock(), 1.0)
    refusals.add("c", [ONE], "reserved")
    refusals.drop(lambda asker: asker == "b")
    kept = refusals.count("c")

    refusals.drop(lambda asker: asker == "c")

    assert (kept, refusals.count("c"), refusals.refused("c")) == (1, 0, {})
