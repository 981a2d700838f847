"""Promises of joined edits and of the fallback choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topobus.formats.messages.messages import Prepared
from topobus.gateway.device_plugins.rules.edits import container_edits, foreign_variables
from topobus.gateway.device_plugins.rules.preference import fall_back, is_legal
from topobus.values.edits import ContainerEdits, DeviceNode, Mount
from topobus.values.outcome import Refusal

NAMES = st.sets(st.sampled_from([f"gpu-{n}" for n in range(8)]), max_size=8)


def test_container_edits_join_common_and_each_device_when_prepared() -> None:
    """A container gets the common edits and those of its own devices, each device node and mount
    once.
    """
    shared = DeviceNode(path="/dev/ctl")
    prepared = Prepared(
        common=ContainerEdits(env={"ALL": "a,b"}, device_nodes=(shared,)),
        edits={
            "a": ContainerEdits(env={"A": "1"}, device_nodes=(shared, DeviceNode(path="/dev/a"))),
            "b": ContainerEdits(env={"B": "1"}, mounts=(Mount(host_path="/h", container_path="/c"),)),
        },
    )

    edits = container_edits(prepared, ["b", "a"])

    assert isinstance(edits, ContainerEdits)
    assert edits.env == {"ALL": "a,b", "A": "1", "B": "1"}
    assert [device_node.path for device_node in edits.device_nodes] == ["/dev/ctl", "/dev/a"]
    assert [mount.container_path for mount in edits.mounts] == ["/c"]


def test_container_edits_are_refused_when_a_device_was_not_prepared() -> None:
    """A container never starts with less than it was given."""
    refused = container_edits(Prepared(edits={"a": ContainerEdits()}), ["a", "b"])

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].facts == {"devices": ("b",)}


def test_foreign_variables_are_those_of_another_class_when_shared() -> None:
    """A class may set its own variables again; only those that another class set first are told."""
    edits = ContainerEdits(env={"MINE": "1", "THEIRS": "1", "NEW": "1"})

    assert foreign_variables(edits, "gpu", {"MINE": "gpu", "THEIRS": "nic"}) == ("THEIRS",)


@given(available=NAMES, kept=NAMES, size=st.integers(0, 10))
def test_fall_back_is_always_legal_when_the_question_is(available: set[str], kept: set[str], size: int) -> None:
    """Whatever kubelet asks, the choice has the size, keeps what must be kept, and takes only what
    there is.
    """
    everything = available | kept
    wanted = max(size, len(kept))

    chosen = fall_back(sorted(everything), sorted(kept), wanted)

    assert is_legal(chosen, sorted(everything), sorted(kept), wanted)
    assert list(chosen) == sorted(chosen)


@pytest.mark.parametrize(
    ("chosen", "is_good"),
    [
        pytest.param(["a", "b"], True, id="good"),
        pytest.param(["b", "c"], False, id="drops-what-must-be-kept"),
        pytest.param(["a"], False, id="too-few"),
        pytest.param(["a", "b", "c"], False, id="too-many"),
        pytest.param(["a", "z"], False, id="not-available"),
        pytest.param(["a", "a"], False, id="twice-the-same"),
    ],
)
def test_choice_of_the_topology_service_counts_only_when_legal(chosen: list[str], *, is_good: bool) -> None:
    """A wrong answer of a peer never reaches kubelet."""
    assert is_legal(chosen, ["a", "b", "c"], ["a"], 2) is is_good
