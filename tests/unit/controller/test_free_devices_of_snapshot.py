"""What is free in a snapshot, held against the search itself: a device is free when a claim for just
that device is allocated, and as many more pods fit as are allocated one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topobus.controller.dry_run.rules.run import DryRun
from topobus.controller.dry_run.rules.situation import Situation
from topobus.controller.snapshots.rules.cluster_view import ClusterView
from topobus.controller.snapshots.rules.free import add_pod, count_fits, device_states, free_rows
from topobus.controller.snapshots.rules.snapshot import Server, Snapshot
from topobus.engine.allocation.values import Mode
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from unit.controller.allocation import COMPILER
from unit.controller.gpu_cluster import DRA, gpu_class

_ROOT = "resource.kubernetes.io/pcieRoot"


def _node(name: str, *, cpu: str = "8") -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": name}
    status = {"allocatable": {"cpu": cpu, "pods": "20"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


def _slice(
    node: str, devices: list[dict[str, Any]], counters: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 2 if counters else 1}
    of_node = {"driver": "gpu.example.com", "nodeName": node, "pool": pool}
    slices = [{**of_node, "devices": devices}, *([{**of_node, "sharedCounters": counters}] if counters else [])]
    return [
        {"apiVersion": DRA, "kind": "ResourceSlice", "metadata": {"name": f"{node}-{place}"}, "spec": spec}
        for place, spec in enumerate(slices)
    ]


def _device(node: str, index: int, **more: Any) -> dict[str, Any]:
    attributes = {
        "type": {"string": "gpu"},
        "model": {"string": "Big"},
        "uuid": {"string": f"{node}-{index}"},
        "numaNode": {"int": index // 4},
        _ROOT: {"string": f"root-{index // 2}"},
    }
    return {"name": f"gpu-{index}", "attributes": attributes, **more}


def _claim(
    name: str, count: int, *, selector: str = "", is_near: bool = False, held: list[str] | None = None
) -> dict[str, Any]:
    exactly: dict[str, Any] = {"deviceClassName": "gpu", "count": count}
    if selector:
        exactly["selectors"] = [{"cel": {"expression": selector}}]
    devices = {"requests": [{"name": "r", "exactly": exactly}]}
    if is_near:
        devices["constraints"] = [{"matchAttribute": _ROOT}]  # type: ignore[assignment]
    results = [
        {"request": "r", "driver": "gpu.example.com", "pool": place.split("/")[0], "device": place.split("/")[1]}
        for place in held or ()
    ]
    return {
        "apiVersion": DRA,
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
        "spec": {"devices": devices},
        "status": {"allocation": {"devices": {"results": results}}} if held else {},
    }


def _dry_run(items: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[bool]:
    """Allocate claims one after the other as kube-scheduler would."""
    objects = [
        ApiObject(
            api_version=each["apiVersion"],
            kind=each["kind"],
            metadata=each["metadata"],
            spec=each.get("spec") or {},
            status=each.get("status") or {},
        )
        for each in [*items, *wanted]
    ]
    situation = Situation(
        wanted=tuple(objects[len(items) :]), objects=tuple(objects[: len(items)]), mode=Mode.COMPATIBLE
    )
    return [answer.condition == "Allocated" for answer in DryRun(situation, COMPILER).answer_all(situation.wanted)]


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    held=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=8),
    tainted=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=4),
    paying=st.booleans(),
    count=st.integers(1, 3),
    is_near=st.booleans(),
)
def test_free_is_what_a_claim_would_get(
    sizes: list[int],
    held: set[tuple[int, int]],
    tainted: set[tuple[int, int]],
    paying: bool,
    count: int,
    is_near: bool,
) -> None:
    """For random clusters, with devices that are held, tainted, or pay for counters of which there is
    enough for half of them.
    """
    items = [gpu_class()]
    for number, size in enumerate(sizes):
        name = f"n{number}"
        taint = {"taints": [{"key": "sick", "value": "", "effect": "NoSchedule"}]}
        consumes = {"consumesCounters": [{"counterSet": "card", "counters": {"part": {"value": "1"}}}]}
        devices = [
            _device(name, index, **(taint if (number, index) in tainted else {}), **(consumes if paying else {}))
            for index in range(size)
        ]
        counters = [{"name": "card", "counters": {"part": {"value": str((size + 1) // 2)}}}] if paying else None
        items += [_node(name), *_slice(name, devices, counters)]
        places = [f"{name}/gpu-{index}" for at, index in sorted(held) if at == number and index < size]
        # No more than there are counters for.
        places = places[: (size + 1) // 2] if paying else places
        items += [_claim(f"held-{number}", len(places), held=places)] if places else []
    # The release whose search mode `compatible` of the dry run has.
    view = ClusterView(Snapshot(server=Server(version="v1.36.2"), items=tuple(items)))

    states = list(device_states(view, COMPILER))
    fits = count_fits(view, add_pod(view, [_claim("like", count, is_near=is_near)], "default"), COMPILER)

    for state in states:
        selector = f'device.attributes["gpu.example.com"].uuid == "{state.node}-{state.device[4:]}"'
        assert _dry_run(items, [_claim("just", 1, selector=selector)]) == [state.state == "free"], state
    (row,) = free_rows(states, ("driver",))
    assert row.devices == sum(sizes)
    assert row.free == sum(state.state == "free" for state in states)
    more = [_claim(f"more-{number}", count, is_near=is_near) for number in range(sum(sizes) + 1)]
    assert sum(fit.count * fit.nodes for fit in fits) == sum(_dry_run(items, more))


def test_rows_say_what_lies_together() -> None:
    """Five are free: three on one NUMA node and no two under one PCIe root; the drawing shows it."""
    held = [f"n1/gpu-{index}" for index in (1, 3, 5)]
    devices = [_device("n1", index) for index in (0, 1, 2, 3, 4, 5, 6)]
    items = [gpu_class(), _node("n1"), *_slice("n1", devices), _claim("taken", 3, held=held)]

    (row,) = free_rows(
        list(device_states(ClusterView(Snapshot(items=tuple(items))), COMPILER)), ("kind", "model", "node")
    )

    assert row.group == {"kind": "gpu", "model": "Big", "node": "n1"}
    assert (row.devices, row.free, row.held) == (7, 4, 3)
    assert (row.on_one_node, row.on_one_numa_node, row.under_one_root) == (4, 2, 1)
    assert row.drawing == "[□■][□■] | [□■][□]"


def test_spare_is_told_from_a_device_with_another_taint() -> None:
    """One that is sick as well is tainted."""
    spare, sick = (
        {"key": key, "value": "true", "effect": "NoSchedule"} for key in ("topobus.dev/spare", "topobus.dev/health")
    )
    devices = [
        _device("n1", 0, taints=[spare]),
        _device("n1", 1, taints=[sick]),
        _device("n1", 2, taints=[sick, spare]),
        _device("n1", 3),
    ]
    view = ClusterView(Snapshot(items=(gpu_class(), _node("n1"), *_slice("n1", devices))))

    states = list(device_states(view, COMPILER))
    (row,) = free_rows(states, ("node",))

    assert [state.state for state in states] == ["spare", "tainted", "tainted", "free"]
    assert (row.free, row.others_text) == (1, "1 spare, 2 tainted")


def test_shared_device_says_what_is_left_of_it() -> None:
    """Two claims have 3 and 4 of 10 Gi; the device is free as long as something is left."""
    device = _device("n1", 0, allowMultipleAllocations=True, capacity={"memory": {"value": "10Gi"}})
    shares = []
    for name, amount in (("a", "3Gi"), ("b", "4Gi")):
        claim = _claim(name, 1, held=["n1/gpu-0"])
        result = claim["status"]["allocation"]["devices"]["results"][0]
        result |= {
            "shareID": f"00000000-0000-0000-0000-00000000000{len(shares)}",
            "consumedCapacity": {"memory": amount},
        }
        shares.append(claim)
    view = ClusterView(Snapshot(items=(gpu_class(), _node("n1"), *_slice("n1", [device]), *shares)))

    (state,) = device_states(view, COMPILER)
    (row,) = free_rows([state], ("class",))

    assert state.capacity == {"memory": ("3Gi", "10Gi")}
    assert row.capacity == {"memory": ("3Gi", "10Gi")}
    assert row.group == {"class": "gpu"}


def test_device_of_no_class_has_a_row_by_class() -> None:
    """No class selects it, or only one whose expression does not compile."""
    broken = gpu_class("broken")
    broken["spec"]["selectors"][0]["cel"]["expression"] = "device.driver =="
    for classes in ((), (broken,)):
        view = ClusterView(Snapshot(items=(*classes, _node("n1"), *_slice("n1", [_device("n1", 0)]))))

        (row,) = free_rows(list(device_states(view, COMPILER)), ("class",))

        assert (row.group, row.devices, row.free) == ({"class": ""}, 1, 1)


def test_slice_with_an_amount_that_is_none_counts_as_absent() -> None:
    """The answer names the slice, the device and the amount, and the other slices are as they are."""
    wrong = _device("n1", 0, capacity={"memory": {"value": "lots"}})
    view = ClusterView(
        Snapshot(items=(gpu_class(), *_slice("n1", [wrong]), _node("n2"), *_slice("n2", [_device("n2", 0)])))
    )

    assert [(state.node, state.state) for state in device_states(view, COMPILER)] == [("n2", "free")]
    (fault,) = view.faults.values()
    assert fault.startswith("ResourceSlice n1-0: device gpu-0: capacity memory: not a quantity: 'lots'")


def test_pods_that_fit_are_limited_by_their_room_as_well() -> None:
    """Four GPUs are free, and the node has CPUs for two pods of one GPU each."""
    items = (gpu_class(), _node("n1", cpu="7"), *_slice("n1", [_device("n1", index) for index in range(4)]))
    template = {
        "apiVersion": DRA,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "one"},
        "spec": {"spec": _claim("x", 1)["spec"]},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}],
            "resourceClaims": [{"name": "g", "resourceClaimTemplateName": "one"}],
        },
    }
    view = ClusterView(Snapshot(items=items))

    (fit,) = count_fits(view, add_pod(view, [template, pod], "default"), COMPILER)

    assert (fit.count, fit.nodes, fit.such_as) == (2, 1, ("n1",))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([_node("n1")], "no Pod, ResourceClaim or ResourceClaimTemplate in the manifest"),
        (
            [
                {
                    "kind": "Pod",
                    "metadata": {"name": "p"},
                    "spec": {"resourceClaims": [{"name": "g", "resourceClaimName": "x"}]},
                }
            ],
            "there is no ResourceClaim default/x in the manifest or the cluster",
        ),
    ],
)
def test_manifest_without_a_pod_is_refused(wanted: list[dict[str, Any]], message: str) -> None:
    """What is missing, with its name."""
    with pytest.raises(ContractError, match=message):
        add_pod(ClusterView(Snapshot()), wanted, "default")
