"""What would change for the pods of a snapshot: those that wait are placed one after the other, with
and without the change.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.snapshots.rules.cluster_view import ClusterView, Plain
from topobus.controller.snapshots.rules.snapshot import Snapshot
from topobus.controller.snapshots.rules.what_if import edits_of, what_if
from topobus.values.cluster_answers import PodChange
from topobus.values.errors import ContractError
from unit.controller.allocation import COMPILER
from unit.controller.gpu_cluster import gpu_class, gpu_node, gpu_pod


def _changes(items: list[dict[str, Any]], put: list[Plain], *without: tuple[str, tuple[str, str]]) -> list[PodChange]:
    view = ClusterView(Snapshot(items=tuple(items)))
    before = dict(view.objects)
    changes = what_if(view, edits_of(view, put, without), COMPILER)
    assert view.objects == before
    return list(changes)


def test_pods_of_a_node_that_goes_are_placed_elsewhere_as_far_as_there_is_room() -> None:
    """Of two pods of two GPUs each one fits on the other node: the more important one."""
    items = [gpu_class("gpu"), *gpu_node("n1", 4), *gpu_node("n2", 3)]
    items += [
        *gpu_pod("low", 2, node="n1"),
        *gpu_pod("high", 2, node="n1", priority=5),
        *gpu_pod("other", 1, node="n2"),
    ]

    changes = _changes(items, [], ("Node", ("", "n1")))

    assert [(change.name, change.before.code, change.before.node, change.after.code) for change in changes] == [
        ("high", "scheduled", "n1", "fits"),
        ("low", "scheduled", "n1", "no-node-fits"),
    ]
    assert changes[0].after.node == "n2"


def test_pods_that_wait_are_placed_on_a_node_more() -> None:
    """The first that waits gets its place; the second lacks it then, as without the change."""
    items = [gpu_class("gpu"), *gpu_node("n1", 1), *gpu_pod("a", 2), *gpu_pod("b", 2)]

    changes = _changes(items, [*gpu_node("n2", 3)])

    assert [(change.name, change.before.code, change.after.code, change.after.node) for change in changes] == [
        ("a", "no-node-fits", "fits", "n2")
    ]


def test_class_that_is_added_helps_the_pod_that_names_it() -> None:
    """A claim of a class that does not exist is wrong on every node, until it does."""
    items = [gpu_class("gpu"), *gpu_node("n1", 2), *gpu_pod("a", 1, device_class="gpus"), *gpu_pod("b", 1)]

    (change,) = _changes(items, [gpu_class("gpus")])

    assert (change.name, change.before.code, change.after.code) == ("a", "invalid", "fits")


def test_other_slices_of_a_driver_count_in_place_of_these() -> None:
    """A release of the driver that shows one device less: the second pod loses its place."""
    items = [gpu_class("gpu"), *gpu_node("n1", 2), *gpu_pod("a", 1), *gpu_pod("b", 1)]

    (change,) = _changes(items, [gpu_node("n1", 1)[1]])

    assert (change.name, change.before.code, change.after.code) == ("b", "fits", "no-node-fits")


def test_pod_that_goes_leaves_its_devices_to_the_next() -> None:
    """The claims that only it has are released. A pod that waits can go as well: the others are
    compared.
    """
    items = [gpu_class("gpu"), *gpu_node("n1", 2), *gpu_pod("holder", 2, node="n1"), *gpu_pod("a", 2), *gpu_pod("b", 2)]

    (change,) = _changes(items, [], ("Pod", ("default", "holder")))

    assert (change.name, change.before.code, change.after.code) == ("a", "no-node-fits", "fits")
    assert _changes(items, [], ("Pod", ("default", "a"))) == []
    (later,) = _changes(items, [], ("Pod", ("default", "holder")), ("Pod", ("default", "a")))
    assert (later.name, later.after.code) == ("b", "fits")


def test_pod_that_is_added_is_told_whether_it_fits_or_not() -> None:
    """It was not there before."""
    items = [gpu_class("gpu"), *gpu_node("n1", 2)]

    changes = _changes(items, [*gpu_pod("a", 2), *gpu_pod("b", 1)])

    assert [(change.name, change.before.code, change.after.code) for change in changes] == [
        ("a", "absent", "fits"),
        ("b", "absent", "no-node-fits"),
    ]


def test_pod_of_a_manifest_without_a_namespace_is_in_the_one_asked_for() -> None:
    """It uses a claim of the cluster there."""
    items = [gpu_class("gpu"), *gpu_node("n1", 2), gpu_pod("a", 2)[0]]
    pod = gpu_pod("a", 2)[1]
    pod["metadata"] = {"name": "a", "uid": "uid-a"}

    (change,) = _changes(items, [pod])

    assert (change.namespace, change.name, change.after.code) == ("default", "a", "fits")


def test_object_without_a_name_is_refused() -> None:
    """It would be none of those that are there."""
    with pytest.raises(ContractError, match=r"a Node has no metadata\.name"):
        _changes([gpu_class("gpu")], [{"apiVersion": "v1", "kind": "Node", "metadata": {}}])


def test_object_that_is_not_there_cannot_go() -> None:
    """It is named, with the next step."""
    with pytest.raises(ContractError, match="there is no Pod default/x to do without"):
        _changes([gpu_class("gpu")], [], ("Pod", ("default", "x")))


@pytest.mark.parametrize(
    ("number", "wrong"),
    [(0, {"spec": {"taints": "none"}}), (1, {"spec": {"driver": "gpu.example.com", "devices": 8}})],
    ids=["node", "slice"],
)
def test_an_object_that_cannot_be_read_is_refused_and_changes_nothing(number: int, wrong: Plain) -> None:
    """Its old reading would stay, and the answer would be about a cluster that nobody asked about."""
    view = ClusterView(Snapshot(items=(gpu_class("gpu"), *gpu_node("n1", 4))))
    before = dict(view.objects)
    named = gpu_node("n1", 4)[number]

    with pytest.raises(ContractError, match=rf"{named['kind']} {named['metadata']['name']} cannot be read: "):
        edits_of(view, [{**named, **wrong}], [])

    assert view.objects == before
    assert not view.faults
