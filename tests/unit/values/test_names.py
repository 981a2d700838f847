"""Promises of the search for the name that a misspelt one stands for."""

from __future__ import annotations

import pytest

from topobus.values.names import meant_name


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        pytest.param("gpus", "gpu", id="plural"),
        pytest.param("GPU", "gpu", id="capitals"),
        pytest.param("gup", "gpu", id="letters-swapped"),
        pytest.param("demo-nod", "demo-node", id="letter-missing"),
        pytest.param("npu", "", id="another-word-of-three-letters"),
        pytest.param("quantum", "", id="unlike-any"),
    ],
)
def test_meant_name_is_the_nearest_known_one_when_one_is_near(written: str, meant: str) -> None:
    """A slip of the hand is understood, and another word is not taken for one."""
    assert meant_name(written, ["cpu", "demo-node", "gpu", "nic"]) == meant
