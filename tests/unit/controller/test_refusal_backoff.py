"""What the controller remembers of failures: devices that a node refused."""

from __future__ import annotations

from topobus.controller.state.refusal_backoff import RefusalBackoff
from topobus.engine.allocation.values import DeviceId

ONE, TWO = DeviceId("d", "n", "one"), DeviceId("d", "n", "two")


def test_refusals_keep_devices_away_for_a_growing_while() -> None:
    """Each refusal of a claim doubles the time until its devices are tried again."""
    refusals: RefusalBackoff[DeviceId] = RefusalBackoff(1.0)
    refusals.add("c", [ONE], "reserved", now_s=0.0)
    assert refusals.refused("c") == {ONE: "refused by the node: reserved"}
    assert refusals.expire(now_s=1.9, is_done=lambda _: False) == []

    assert refusals.expire(now_s=2.0, is_done=lambda _: False) == ["c"]
    assert refusals.refused("c") == {}
    assert not refusals.is_waiting

    refusals.add("c", [TWO], "reserved", now_s=2.0)
    assert refusals.expire(now_s=5.9, is_done=lambda _: False) == []
    assert refusals.expire(now_s=6.0, is_done=lambda _: False) == ["c"]


def test_refusals_are_forgotten_when_the_claim_is_done() -> None:
    """An allocated or deleted claim leaves nothing behind."""
    refusals: RefusalBackoff[DeviceId] = RefusalBackoff(1.0)
    refusals.add("c", [ONE], "reserved", now_s=0.0)

    assert refusals.expire(now_s=0.0, is_done=lambda _: True) == []
    assert not refusals.is_waiting
