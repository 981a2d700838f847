"""The allocator's mode `compatible` answers as Kubernetes' own allocator did."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.conformance.allocator_checks import answer_case
from support.laws import share
from topobus.engine.allocation import search
from topobus.engine.cel.selector import CelCompiler

DATA = Path(__file__).parent.parent / "data" / "allocation" / "structured-allocation.jsonl.gz"
CHUNKS = 10


def _cases(chunk: int) -> Iterator[dict[str, Any]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % CHUNKS == chunk:
                yield json.loads(line)


@pytest.mark.law
@pytest.mark.parametrize("chunk", share(range(CHUNKS)))
def test_allocate_equals_upstream_when_compatible(chunk: int) -> None:
    """Outcome and results equal what Kubernetes 1.36.2 answered, in every recorded case."""
    compiler = CelCompiler()
    different: list[tuple[str, object, object]] = []
    for case in _cases(chunk):
        expect, got = case["expect"], answer_case(case, compiler)
        if (got["outcome"], got.get("results")) != (expect["outcome"], expect.get("results")):
            different.append((case["id"], got, expect))

    assert different == []


def test_allocate_equals_upstream_when_every_search_counts_as_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short cuts for hard searches give the same answers when they are taken from the first
    step on.
    """
    monkeypatch.setattr(search, "_HARD_STEPS", 0)
    compiler = CelCompiler()
    different: list[tuple[str, object, object]] = []
    for case in _cases(1):
        expect, got = case["expect"], answer_case(case, compiler)
        if (got["outcome"], got.get("results")) != (expect["outcome"], expect.get("results")):
            different.append((case["id"], got, expect))

    assert different == []


def test_allocate_takes_the_very_steps_of_upstream_when_told_to() -> None:
    """Without its short cuts the search is upstream's, step by step.

    So the order of its checks is, too.
    """
    compiler = CelCompiler()
    different: list[tuple[str, object, object]] = []
    for case in _cases(0):
        steps = case["expect"].get("steps")
        if steps is not None and steps < 1000:
            got = answer_case(case, compiler, is_clever=False)["steps"]
            if got != steps:
                different.append((case["id"], got, steps))

    assert different == []
