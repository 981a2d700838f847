"""Binding conditions: when an allocated claim's devices are ready, waited for, or given back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from topobus.engine.claims.binding import (
    BindingFailed,
    BindingReady,
    BindingState,
    BindingWaits,
    binding_state,
)
from topobus.formats.kubernetes.resource import ClaimStatus
from topobus.formats.kubernetes.shape import read_as

START = datetime(2026, 1, 1, tzinfo=UTC)


def state(*reported: dict[str, Any], after_s: float = 1, share: str | None = None, **device: Any) -> BindingState:
    """Judge a claim with one device with conditions, and one without."""
    granted = {
        "request": "r",
        "driver": "d.io",
        "pool": "p",
        "device": "d",
        **({"shareID": share} if share else {}),
        **device,
    }
    other = {"request": "r", "driver": "d.io", "pool": "p", "device": "plain"}
    status = {
        "allocation": {"devices": {"results": [other, granted]}, "allocationTimestamp": "2026-01-01T00:00:00Z"},
        "devices": [
            {"driver": "d.io", "pool": "p", "device": "d", "conditions": [condition]} for condition in reported
        ],
    }
    return binding_state(
        read_as(status, ClaimStatus, where="status"), now=START + timedelta(seconds=after_s), timeout_s=600
    )


BINDING = {"bindingConditions": ["attached", "linked"], "bindingFailureConditions": ["broken"]}
ATTACHED, LINKED = {"type": "attached", "status": "True"}, {"type": "linked", "status": "True"}
BROKEN = {"type": "broken", "status": "True", "message": "no cable"}


@pytest.mark.parametrize(
    ("binding", "wanted"),
    [
        pytest.param(state(), BindingReady(), id="nothing-to-wait-for"),
        pytest.param(state(ATTACHED, LINKED, **BINDING), BindingReady(), id="all-true"),
        pytest.param(
            state(**BINDING),
            BindingWaits(("d: attached", "d: linked"), START + timedelta(seconds=600)),
            id="nothing-said",
        ),
        pytest.param(
            state(ATTACHED, **BINDING), BindingWaits(("d: linked",), START + timedelta(seconds=600)), id="one-missing"
        ),
        pytest.param(
            state({**ATTACHED, "status": "Unknown"}, LINKED, **BINDING),
            BindingWaits(("d: attached",), START + timedelta(seconds=600)),
            id="unknown-is-not-true",
        ),
        pytest.param(
            state(ATTACHED, LINKED, BROKEN, **BINDING),
            BindingFailed("device d reports broken: no cable"),
            id="failure-wins",
        ),
        pytest.param(
            state({**BROKEN, "status": "False"}, ATTACHED, LINKED, **BINDING),
            BindingReady(),
            id="a-failure-that-is-not-true-is-none",
        ),
        pytest.param(
            state(ATTACHED, after_s=600, **BINDING),
            BindingFailed("d: linked not true 600 s after the allocation"),
            id="too-late",
        ),
        pytest.param(state(ATTACHED, LINKED, after_s=9999, **BINDING), BindingReady(), id="late-and-ready"),
        pytest.param(
            state(ATTACHED, LINKED, share="another", **BINDING),
            BindingWaits(("d: attached", "d: linked"), START + timedelta(seconds=600)),
            id="another-share",
        ),
    ],
)
def test_claim_is_ready_waits_or_fails_by_its_devices_conditions(binding: BindingState, wanted: BindingState) -> None:
    """All conditions True is ready.

    A failure condition that is True, or time that is over, is failed; else it waits.
    """
    assert binding == wanted
