"""What a row of free devices says in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from topobus.values.cluster_answers import FreeRow

_EMPTY = FreeRow(
    group={},
    nodes=1,
    such_as=("n1",),
    devices=0,
    free=0,
    held=0,
    tainted=0,
    other=0,
    on_one_node=0,
    on_one_numa_node=0,
    under_one_root=0,
)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        pytest.param({}, "-", id="none"),
        pytest.param({"held": 3}, "3 held", id="one-kind"),
        pytest.param(
            {"held": 3, "spares": 1, "tainted": 1, "other": 2},
            "3 held, 1 spare, 1 tainted, 2 used up or withheld",
            id="all",
        ),
    ],
)
def test_devices_that_are_not_free_are_counted_by_why(counts: dict[str, int], text: str) -> None:
    """A kind of which there is none is left out."""
    assert _replaced(counts).others_text == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({}, "-", id="none-free"),
        pytest.param({"free": 1, "on_one_node": 1, "on_one_numa_node": 1}, "1 on a node, 1 on a NUMA node", id="one"),
        pytest.param(
            {"free": 2, "on_one_node": 2, "on_one_numa_node": 1, "under_one_root": 1},
            "2 on a node, no pair on a NUMA node, no pair under a PCIe root",
            id="no-pair",
        ),
        pytest.param(
            {"free": 2, "on_one_node": 2, "capacity": {"memory": ("10Gi", "80Gi")}},
            "2 on a node, memory 10Gi of 80Gi left",
            id="shared-without-places",
        ),
    ],
)
def test_what_is_free_is_counted_by_how_near_it_lies(fields: dict[str, Any], text: str) -> None:
    """Devices without a NUMA node or a root say nothing of them."""
    assert _replaced(fields).together_text == text


def _replaced(fields: dict[str, Any]) -> FreeRow:
    return msgspec.structs.replace(_EMPTY, **fields)
