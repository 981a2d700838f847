"""Outcomes of the planner as tests look at them."""

from __future__ import annotations

from support.outcome_text import explain_text
from topobus.values.outcome import ContainerPlacement, Placement, Refusal


def placed(outcome: Placement | Refusal) -> tuple[ContainerPlacement, ...]:
    """The containers of a placement; a refusal fails the test with its text."""
    assert isinstance(outcome, Placement), explain_text(outcome)
    return outcome.containers


def codes(outcome: Placement | Refusal) -> list[str]:
    """The reason codes of a refusal."""
    assert isinstance(outcome, Refusal), explain_text(outcome)
    return [reason.code for reason in outcome.reasons]
