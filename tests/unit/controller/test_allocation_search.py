"""The allocator: which devices a claim gets, in which order they are tried, and when it must not
get any.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.values import (
    Allocated,
    Fault,
    Gate,
    Mode,
    NoFit,
)
from topobus.formats.kubernetes.resource import DeviceClassSpec
from topobus.formats.kubernetes.shape import read_as
from unit.controller.allocation import NODE, claim, device, devices_of, given, gpus, request, slice_of, solve

ROOT = "resource.kubernetes.io/pcieRoot"
NIC_NAMES = ["nic-0", "nic-1"]


def _roots(*roots: str) -> dict[str, Any]:
    return {ROOT: roots}


@pytest.mark.parametrize(
    ("slices", "claims", "held", "wanted"),
    [
        pytest.param(
            [slice_of(gpus(3))], [claim(request(count=2))], [], [["dev-0", "dev-1"]], id="first-devices-first"
        ),
        pytest.param(
            [slice_of(gpus(3))], [claim(request(count=2))], ["gpu/dev-0"], [["dev-1", "dev-2"]], id="held-is-skipped"
        ),
        pytest.param(
            [slice_of(gpus(2, model=["a100", "h100"]))],
            [claim(request(where=['device.attributes["gpu.example.com"].model == "h100"']))],
            [],
            [["dev-1"]],
            id="selector-decides",
        ),
        pytest.param(
            [slice_of([device("dev-0", "16Gi"), device("dev-1", "80Gi")])],
            [claim(request(where=['device.capacity["gpu.example.com"].memory.compareTo(quantity("40Gi")) >= 0']))],
            [],
            [["dev-1"]],
            id="capacity-selector",
        ),
        pytest.param(
            [slice_of(gpus(2), name="b", pool="b"), slice_of([device("other")], name="a", pool="a")],
            [claim(request())],
            [],
            [["other"]],
            id="pools-by-name-whatever-the-order-given",
        ),
        pytest.param(
            [slice_of([device("late")], name="s-1", count=2), slice_of([device("early")], name="s-0", count=2)],
            [claim(request())],
            [],
            [["early"]],
            id="slices-by-object-name",
        ),
        pytest.param(
            [slice_of([device("bound", bindingConditions=["ready"])], pool="a"), slice_of([device("free")], pool="b")],
            [claim(request())],
            [],
            [["free"]],
            id="pools-with-binding-conditions-last",
        ),
        pytest.param(
            [slice_of([device("old")], generation=1), slice_of([device("new")], generation=2, name="n")],
            [claim(request())],
            [],
            [["new"]],
            id="only-the-newest-generation",
        ),
        pytest.param(
            [
                slice_of(gpus(2, **_roots("r0", "r1"))),
                slice_of([device("nic-0", attributes={ROOT: "r1"})], driver="nic"),
            ],
            [claim(request("g"), request("n", device_class="nic"), constraints=[{"matchAttribute": ROOT}])],
            [],
            [["dev-1", "nic-0"]],
            id="match-attribute-backtracks",
        ),
        pytest.param(
            [slice_of(gpus(3, numa=[0, 1, 1]))],
            [claim(request(count=2), constraints=[{"matchAttribute": "gpu.example.com/numa"}])],
            [],
            [["dev-1", "dev-2"]],
            id="bare-name-stands-in-the-drivers-domain",
        ),
        pytest.param(
            [slice_of(gpus(3, numa=[(0, 1), (1, 2), (2, 3)]))],
            [claim(request(count=2), constraints=[{"matchAttribute": "gpu.example.com/numa"}])],
            [],
            [["dev-0", "dev-1"]],
            id="lists-match-when-they-meet",
        ),
        pytest.param(
            [slice_of(gpus(4, numa=[0, 0, 1, 2]))],
            [claim(request(count=3), constraints=[{"distinctAttribute": "gpu.example.com/numa"}])],
            [],
            [["dev-0", "dev-2", "dev-3"]],
            id="distinct-attribute",
        ),
        pytest.param(
            [slice_of(gpus(3))], [claim(request(allocationMode="All"))], [], [["dev-0", "dev-1", "dev-2"]], id="all"
        ),
        pytest.param(
            [slice_of(gpus(3))],
            [claim(request(), name="a/1"), claim(request(), name="a/2")],
            [],
            [["dev-0"], ["dev-1"]],
            id="claims-do-not-share",
        ),
        pytest.param(
            [slice_of(gpus(1))],
            [claim(request(count=1, adminAccess=True))],
            ["gpu/dev-0"],
            [["dev-0"]],
            id="admin-access-minds-no-holder",
        ),
        pytest.param(
            [slice_of([device("sick", taints=[{"key": "k", "effect": "NoSchedule"}]), device("well")])],
            [claim(request())],
            [],
            [["well"]],
            id="taint-keeps-away",
        ),
        pytest.param(
            [slice_of([device("sick", taints=[{"key": "k", "effect": "NoExecute"}])])],
            [claim(request(tolerations=[{"operator": "Exists"}]))],
            [],
            [["sick"]],
            id="toleration-bears-it",
        ),
        pytest.param(
            [slice_of([device("odd", taints=[{"key": "k", "effect": "None"}])])],
            [claim(request())],
            [],
            [["odd"]],
            id="taint-none-is-a-dry-run",
        ),
        pytest.param(
            [slice_of(gpus(2))],
            [
                claim(
                    {
                        "name": "r",
                        "firstAvailable": [
                            {"name": "many", "deviceClassName": "gpu", "count": 3},
                            {"name": "few", "deviceClassName": "gpu", "count": 2},
                        ],
                    }
                )
            ],
            [],
            [["dev-0", "dev-1"]],
            id="second-alternative",
        ),
        pytest.param(
            [slice_of(gpus(1), allNodes=True, pool="net"), slice_of([device("far")], nodeName="node-2", pool="p")],
            [claim(request())],
            [],
            [["dev-0"]],
            id="other-nodes-devices-are-out-of-reach",
        ),
    ],
)
def test_allocate_gives_the_first_solution_when_there_is_one(
    slices: list[Any], claims: list[Any], held: list[str], wanted: list[list[str]]
) -> None:
    """The first solution in upstream's order is the answer."""
    assert devices_of(solve(given(slices, *claims, held=held))) == wanted


@pytest.mark.parametrize(
    ("slices", "claims", "held", "wanted"),
    [
        pytest.param(
            [slice_of(gpus(3))],
            [claim(request(count=3))],
            ["gpu/dev-1"],
            "node node-1: request r wants 3 devices of class gpu, found 2 of 3 (1 device: held by claim a/b)",
            id="held",
        ),
        pytest.param(
            [slice_of(gpus(2))],
            [claim(request(where=["false"]))],
            [],
            "node node-1: request r wants 1 device of class gpu, found 0 of 2 (2 devices: selector #0 is false: false)",
            id="selector",
        ),
        pytest.param(
            [
                slice_of(gpus(1, **_roots("r0"))),
                slice_of([device("nic-0", attributes={ROOT: "r1"}), device("nic-1")], driver="nic"),
            ],
            [claim(request("g"), request("n", device_class="nic"), constraints=[{"matchAttribute": ROOT}])],
            [],
            "node node-1: request n wants 1 device of class nic, found 0 of 2 "
            "(2 devices: constraint #0 wants resource.kubernetes.io/pcieRoot = r0)",
            id="constraint",
        ),
        pytest.param(
            [
                slice_of(
                    [
                        device(
                            "sick", taints=[{"key": "topobus.dev/health", "value": "unhealthy", "effect": "NoExecute"}]
                        )
                    ]
                )
            ],
            [claim(request())],
            [],
            "node node-1: request r wants 1 device of class gpu, found 0 of 1 (1 device: tainted "
            "topobus.dev/health=unhealthy:NoExecute)",
            id="taint",
        ),
        pytest.param(
            [slice_of(gpus(1), count=2)],
            [claim(request())],
            [],
            "node node-1: request r wants 1 device of class gpu, and there is no device here "
            "(pool gpu.example.com/node-1 is incomplete: 1 of 2 slices of generation 1 are published)",
            id="incomplete-pool",
        ),
        pytest.param(
            [slice_of(gpus(2))],
            [claim(request(device_class="nic"), name="a/1"), claim(request(), name="a/2")],
            [],
            "node node-1: claim a/1, request r wants 1 device of class nic, and none of the 2 devices here "
            "is of that class",
            id="no-device-of-the-class-and-several-claims",
        ),
        pytest.param(
            [],
            [claim(request(allocationMode="All"))],
            [],
            "node node-1: request r wants all devices of class gpu, and there is no device here",
            id="all-of-nothing",
        ),
    ],
)
def test_allocate_says_why_when_nothing_fits(
    slices: list[Any], claims: list[Any], held: list[str], wanted: str
) -> None:
    """A refusal names, for each device at the nearest miss, the first check that it fails, in
    groups.
    """
    outcome = solve(given(slices, *claims, held=held))

    assert isinstance(outcome, NoFit)
    assert summarize(outcome.reasons) == wanted


@pytest.mark.parametrize(
    ("slices", "claims", "gates", "code", "wanted"),
    [
        pytest.param(
            [],
            [claim(request(device_class="tpu"))],
            frozenset(Gate),
            "unknown-class",
            "'tpu'; known are gpu, nic",
            id="class",
        ),
        pytest.param(
            [],
            [claim(request(device_class="gpus"))],
            frozenset(Gate),
            "unknown-class",
            "did you mean gpu? known are",
            id="misspelt-class",
        ),
        pytest.param([], [claim(request(allocationMode="Some"))], frozenset(Gate), "unknown-mode", "'Some'", id="mode"),
        pytest.param([], [claim({"name": "r"})], frozenset(Gate), "unknown-request", "request r", id="request"),
        pytest.param(
            [], [claim(request(selectors=[{}]))], frozenset(Gate), "unknown-selector", "selector #0", id="selector-kind"
        ),
        pytest.param(
            [],
            [claim(request(), constraints=[{}])],
            frozenset(Gate),
            "unknown-constraint",
            "constraint #0",
            id="constraint-kind",
        ),
        pytest.param([], [claim(request(count=33))], frozenset(Gate), "claim-too-large", "at least 33", id="too-many"),
        pytest.param(
            [], [claim(request(adminAccess=True))], frozenset(), "gate-off", "DRAAdminAccess", id="gate-admin"
        ),
        pytest.param(
            [],
            [claim(request(capacity={"requests": {"memory": "1"}}))],
            frozenset(),
            "gate-off",
            "DRAConsumable",
            id="gate-capacity",
        ),
        pytest.param(
            [slice_of(gpus(1))],
            [claim(request(where=["device.drivr == 1"]))],
            frozenset(Gate),
            "selector-error",
            "line 1, column 7",
            id="cel",
        ),
        pytest.param(
            [slice_of(gpus(2, **_roots("a", "b")))],
            [claim(request(allocationMode="All"), constraints=[{"matchAttribute": ROOT}])],
            frozenset(Gate),
            "constraint-on-all",
            "dev-1",
            id="all-breaks-constraint",
        ),
        pytest.param(
            [slice_of(gpus(1), count=2)],
            [claim(request(allocationMode="All"))],
            frozenset(Gate),
            "pool-incomplete",
            "1 of 2",
            id="all-incomplete",
        ),
    ],
)
def test_allocate_stops_on_every_node_when_the_claim_is_wrong(
    slices: list[Any], claims: list[Any], gates: frozenset[Gate], code: str, wanted: str
) -> None:
    """What is wrong whatever the node is told apart from what does not fit."""
    outcome = solve(given(slices, *claims, gates=gates))

    assert isinstance(outcome, Fault)
    assert (outcome.reason.code, outcome.is_local) == (code, False)
    assert wanted in outcome.reason.message


def test_allocate_blames_the_node_when_a_pool_there_is_invalid() -> None:
    """Two devices of one name make a pool unusable.

    That is this node's trouble alone, and other pools still serve.
    """
    twice = slice_of([device("same"), device("same")], pool="bad")

    outcome = solve(given([twice], claim(request())))

    assert isinstance(outcome, Fault)
    assert (outcome.reason.code, outcome.is_local) == ("pool-invalid", True)
    assert "pool gpu.example.com/bad is invalid: two devices are named same" in outcome.reason.message
    assert devices_of(solve(given([twice, slice_of([device("good")], pool="z")], claim(request())))) == [["good"]]


def test_allocate_takes_partitions_while_counters_last() -> None:
    """Partitions of one card share its counters, those of allocated devices included."""
    counters = [{"name": "card", "counters": {"memory": {"value": "40Gi"}}}]
    parts = [
        device(f"part-{index}", consumesCounters=[{"counterSet": "card", "counters": {"memory": {"value": "20Gi"}}}])
        for index in range(4)
    ]
    slices = [slice_of([], name="a-counters", count=2, sharedCounters=counters), slice_of(parts, name="b", count=2)]

    assert devices_of(solve(given(slices, claim(request(count=2))))) == [["part-0", "part-1"]]
    assert isinstance(solve(given(slices, claim(request(count=2)), held=["gpu/part-3"])), NoFit)


def test_allocate_shares_a_device_while_its_capacity_lasts() -> None:
    """Two requests share one device by capacity, each with its own share id.

    A third does not go in.
    """
    shared = slice_of([device("big", "10Gi", allowMultipleAllocations=True)])
    part = {"capacity": {"requests": {"memory": "4Gi"}}}

    outcome = solve(given([shared], claim(request("a", **part), request("b", **part))))
    refused = solve(given([shared], claim(request("a", **part), request("b", **part), request("c", **part))))

    assert isinstance(outcome, Allocated)
    results = outcome.results[0].devices.results
    assert [granted_device.consumed_capacity for granted_device in results] == [{"memory": "4Gi"}, {"memory": "4Gi"}]
    assert len({granted_device.share_id for granted_device in results}) == 2
    assert isinstance(refused, NoFit)


def test_allocate_copies_configurations_of_class_before_claim() -> None:
    """Class configurations stand first, so the claim's win.

    One for a request not chosen is left out.
    """
    settings = {"config": [{"opaque": {"driver": "gpu.example.com", "parameters": {"from": "class"}}}]}
    classes = {"gpu": read_as(settings, DeviceClassSpec, where="class")}
    config = [
        {"requests": ["g"], "opaque": {"driver": "gpu.example.com", "parameters": {"from": "claim"}}},
        {"requests": ["g/other"], "opaque": {"driver": "gpu.example.com", "parameters": {}}},
    ]

    outcome = solve(given([slice_of(gpus(1))], claim(request("g"), config=config), classes=classes))

    assert isinstance(outcome, Allocated)
    assert [
        (granted_configuration.source, granted_configuration.requests)
        for granted_configuration in outcome.results[0].devices.config
    ] == [("FromClass", ("g",)), ("FromClaim", ("g",))]


def test_allocate_copies_a_configuration_once_for_each_request_only_in_mode_compatible() -> None:
    """The documented difference of mode `corrected`: a configuration for two requests stands in the
    result once.
    """
    config = [{"requests": ["a", "b"], "opaque": {"driver": "gpu.example.com", "parameters": {}}}]

    counts = {}
    for mode in Mode:
        outcome = solve(given([slice_of(gpus(2))], claim(request("a"), request("b"), config=config), mode=mode))
        assert isinstance(outcome, Allocated)
        counts[mode] = len(outcome.results[0].devices.config)

    assert counts == {Mode.COMPATIBLE: 2, Mode.CORRECTED: 1}


def test_allocate_selects_this_node_when_a_device_is_local() -> None:
    """A node-local device pins the claim to its node.

    A network device leaves the slice's own selector.
    """
    term = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r1"]}]}]}
    network = slice_of([device("net")], driver="nic", nodeSelector=term, pool="net")

    local = solve(given([slice_of(gpus(1))], claim(request())))
    reached = solve(given([network], claim(request(device_class="nic")), labels={"rack": "r1"}))
    unreached = solve(given([network], claim(request(device_class="nic")), labels={"rack": "r2"}))

    assert isinstance(local, Allocated)
    assert local.results[0].node_selector is not None
    assert local.results[0].node_selector.node_selector_terms[0].match_fields[0].values == (NODE,)
    assert isinstance(reached, Allocated)
    assert reached.results[0].node_selector == network.spec.node_selector
    assert isinstance(unreached, NoFit)


def test_allocate_keeps_counters_of_a_refused_device_only_in_mode_compatible() -> None:
    """The documented difference of mode `corrected`: a tainted device costs no counters."""
    counters = [{"name": "card", "counters": {"memory": {"value": "20Gi"}}}]
    use = [{"counterSet": "card", "counters": {"memory": {"value": "20Gi"}}}]
    parts = [
        device("a-sick", consumesCounters=use, taints=[{"key": "k", "effect": "NoSchedule"}]),
        device("b-well", consumesCounters=use),
    ]
    slices = [slice_of([], name="a-counters", count=2, sharedCounters=counters), slice_of(parts, name="b", count=2)]

    corrected = solve(given(slices, claim(request())))
    compatible = solve(given(slices, claim(request()), mode=Mode.COMPATIBLE))

    assert devices_of(corrected) == [["b-well"]]
    assert isinstance(compatible, NoFit)
