"""The page of what has met what names each feature gate that the tests on a real kubelet switch."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def test_page_names_each_gate_that_is_switched_on_a_real_kubelet() -> None:
    """Its table is the one of the test, so nothing is claimed that did not run."""
    switched = set(re.findall(r"\b([A-Z]\w+)=(?:true|false)\b", (_ROOT / "tests/vm/node/test_gates.py").read_text()))
    page = (_ROOT / "docs/reference/support.md").read_text()

    assert switched
    assert sorted(gate for gate in switched if f"`{gate}`" not in page) == []
