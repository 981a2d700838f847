"""Shapes with CPUs in the controllers: their CPUs are counted, and nothing of them is held before a claim is
prepared.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from support.shape_names import plain
from support.shape_nodes import (
    NODE,
    RecordingState,
    claim_for,
    holding,
    recorded,
    sick,
    state_of,
    store,
    structured,
    timeless,
)
from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.controller.commit.node_ledgers import Held, NodeLedgers
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.standalone_state import StandaloneState
from topobus.devicekit.settings import CpuGroupSettings
from topobus.engine.allocation.suggestions import would_fit
from topobus.engine.allocation.values import Allocated, DeviceId, Mode, NoFit, Outcome
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.shapes.shape_parts import without_shapes
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.formats.kubernetes.resource import AllocationResult, SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject, PlaceReply, PlaceRequest
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.outcome import Placement
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment
from unit.controller.allocation import solve

GROUPED = CpuGroupSettings(groups="numa")
WORKER = OwnShape(name="worker", parts={"gpu": 1, "nic": 1, "cpu": 50}, within="numa")
SETTING = '[{"name": "worker", "parts": {"gpu": 1, "nic": 1, "cpu": 50}, "within": "numa"}]'
ALIGNMENT = NodeAlignment(node=NODE, own_shapes=(WORKER,))
LEVEL = f'{class_selector("shape")} && device.attributes["topobus.dev"].level == "worker"'
CLASS = {"selectors": [{"cel": {"expression": LEVEL}}]}
POD = Owner(kind=OwnerKind.POD, namespace="default", name="p", uid="uid-p")


def node(profile: str = "dgx") -> StandaloneState:
    """A DGX of two sockets with 112 CPUs each, whose operator adds a shape with 50 CPUs."""
    state = state_of(profile, GROUPED)
    state.put_alignment(NODE, ALIGNMENT)
    state.put_object(
        ObjectKey("deviceclass", "", "worker.topobus.dev"),
        Stored(
            1,
            ApiObject(
                api_version="resource.k8s.io/v1",
                kind="DeviceClass",
                metadata={"name": "worker.topobus.dev"},
                spec=CLASS,
            ),
        ),
    )
    return state


def outcome_of(state: StandaloneState, *claims: Claim, mode: Mode = Mode.CORRECTED) -> Outcome:
    """Search the node for claims, as the controller does."""
    return solve(state.input_for(NODE, [(claim, claim.spec) for claim in claims], mode=mode))


def allocate(state: StandaloneState, *claims: Claim) -> list[list[str]]:
    """Allocate claims that fit, and name what each gets without digests."""
    outcome = outcome_of(state, *claims)
    assert isinstance(outcome, Allocated), outcome
    for claim, result in zip(claims, outcome.results, strict=True):
        store(state, claim, result)
    return [[plain(granted.device) for granted in result.devices.results] for result in outcome.results]


def cpus_of(owner: Owner, cpus: str, group: str = "") -> Ledger:
    """A ledger in which an owner holds CPUs, of a group or by their names."""
    held = CpuSet.parse(cpus)
    holdings = (Holding(cpus=held, groups={group: held} if group else {}),)
    allocation = Allocation(owner=owner, holdings=holdings, decision_id="d")
    return Ledger(node=NODE, epoch=1, sequence=1, allocations={owner.key: allocation})


def near(node_id: int, name: str, count: int) -> Claim:
    """Ask for so many single CPUs of a NUMA node."""
    selector = {"cel": {"expression": f'device.attributes["topobus.dev"].numaNode == {node_id}'}}
    exactly = {"deviceClassName": "cpu.topobus.dev", "count": count, "selectors": [selector]}
    return structured(name, {"devices": {"requests": [{"name": "r", "exactly": exactly}]}})


@pytest.mark.parametrize("is_late", [False, True], ids=["alignment-first", "alignment-last"])
@pytest.mark.parametrize("profile", ["dgx", "epyc-8numa"])
def test_controller_has_the_slices_that_the_command_prints(
    profile: str, *, is_late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPUs' own pool is empty, and reserved CPUs are in no counter."""
    words = ["--own-shapes", SETTING, "--cpus", '{"groups": "numa"}', "--reserved-cpus", "0-3"]
    assert run(["slices", "--machine", profile, "--shapes", "--node", NODE, "--output", "json", *words]) == ExitCode.OK
    printed = [read_as(item["spec"], SliceSpec, where="slice") for item in json.loads(capsys.readouterr().out)["items"]]
    machine, inventories = recorded(profile, GROUPED)
    alignment = structs.replace(ALIGNMENT, reserved_cpus=CpuSet.parse("0-3"))

    state = RecordingState()
    state.put_machine(machine)
    if not is_late:
        state.put_alignment(NODE, alignment)
    for inventory in inventories:
        state.put_inventory(inventory)
    state.put_alignment(NODE, alignment)

    derived = [each.spec for origin in sorted(state.seen) for each in state.seen[origin]]
    assert [timeless(spec) for spec in derived] == [timeless(spec) for spec in printed]
    assert [spec.devices for spec in derived if spec.pool.name == f"{NODE}/cpu"] == [()]


@pytest.mark.parametrize("mode", [Mode.COMPATIBLE, Mode.CORRECTED])
def test_shapes_and_single_cpus_share_the_cpus_of_their_node(mode: Mode) -> None:
    """Two shapes take 100 of 112 CPUs of the first socket: a third one does not fit there, 12 single CPUs
    do, and one more does not.
    """
    state = node()
    allocate(state, claim_for("worker", "first"), claim_for("worker", "second"))

    third = allocate(state, claim_for("worker", "third"))
    rest = allocate(state, near(0, "rest", 12))

    assert [name for names in third for name in names] == ["shape-worker-0000-9a-00-0"]
    assert len(rest[0]) == 12
    assert isinstance(outcome_of(state, near(0, "more", 1), mode=mode), NoFit)
    assert isinstance(outcome_of(state, near(1, "there", 32), mode=mode), Allocated)


def test_shape_with_cpus_and_its_parts_exclude_each_other() -> None:
    """As without CPUs: it takes its GPU and NIC, and a half takes them from it."""
    state = node()
    (first,) = allocate(state, claim_for("worker", "first"))
    gpu = first[0].replace("shape-worker", "gpu")

    (half,) = allocate(state, claim_for("half", "half"))
    (others,) = allocate(state, claim_for("gpu", "gpus", count=3))

    assert half == ["shape-half-1"]
    assert gpu not in others
    assert isinstance(outcome_of(state, claim_for("gpu", "one")), NoFit)


def test_cpus_count_once_when_claim_and_ledger_have_the_shape() -> None:
    """The ledger holds its GPU and NIC, and CPUs when it is prepared. They are free when both have let go."""
    state = node()
    claim = claim_for("worker", "first")
    (result,) = outcome_of(state, claim).results  # type: ignore[union-attr]  # it fits
    store(state, claim, result)
    held = holding(claim.owner, "gpu-0000-18-00-0", "nic-0000-19-00-0")
    of_claim = cpus_of(claim.owner, "0-24,112-136", "cpu-numa-0").allocations[claim.owner.key].holdings
    allocation = held.allocations[claim.owner.key]
    prepared = structs.replace(allocation, holdings=(*allocation.holdings, *of_claim))
    store(state, claim_for("worker", "second"), outcome_of(state, claim_for("worker", "second")).results[0])  # type: ignore[union-attr]

    fits = []
    for ledger in (held, structs.replace(held, allocations={claim.owner.key: prepared}, sequence=2)):
        state.put_ledger(ledger)
        fits.append([isinstance(outcome_of(state, near(0, "n", count)), Allocated) for count in (12, 13)])
    store(state, claim, AllocationResult(), revision=2)
    state.drop_ledger(NODE)

    assert fits == [[True, False], [True, False]]
    assert isinstance(outcome_of(state, near(0, "n", 32), near(0, "m", 30)), Allocated)
    assert isinstance(outcome_of(state, near(0, "n", 32), near(0, "m", 31)), NoFit)


def test_cpus_that_a_pod_holds_are_not_given_to_claims() -> None:
    """They are back when it ends."""
    state = node()
    state.put_ledger(cpus_of(POD, "0-55,112-155"))
    during = [isinstance(outcome_of(state, near(0, "n", count)), Allocated) for count in (12, 13)]
    away = [name for names in allocate(state, claim_for("worker")) for name in names]

    state.drop_ledger(NODE)

    assert during == [True, False]
    assert away == ["shape-worker-0000-9a-00-0"]
    assert isinstance(outcome_of(state, near(0, "n", 32), near(0, "m", 32)), Allocated)


def test_sick_cpus_make_their_shapes_unallocatable() -> None:
    """Those of the other node are given."""
    state = node()
    cpus = next(each for each in recorded("dgx", GROUPED)[1] if each.device_class == "cpu")

    state.put_inventory(sick(cpus, "cpu-numa-0"))

    assert allocate(state, claim_for("worker")) == [["shape-worker-0000-9a-00-0"]]
    assert isinstance(outcome_of(state, near(0, "n", 1)), NoFit)


def test_advice_names_who_has_the_shape_when_its_parts_are_wanted() -> None:
    """The holder of a shape with CPUs holds its GPU."""
    state = node()
    for number in range(4):
        allocate(state, claim_for("worker", f"w{number}"))
    half = claim_for("gpu", "all", count=8)

    (advice, *_) = would_fit(state.input_for(NODE, [(half, half.spec)], mode=Mode.CORRECTED), solve)

    assert "when claim default/w0 (1 device), claim default/w1 (1 device)" in advice.message


class _Node:
    """A bus behind which one node places what is asked."""

    def __init__(self) -> None:
        self.asked: list[PlaceRequest] = []

    async def ask(self, _: Any, request: PlaceRequest, **__: Any) -> PlaceReply:
        """Answer."""
        self.asked.append(request)
        return PlaceReply(decision_id="d2", node=NODE, result=Placement(containers=()), ledger_sequence=4)


async def newest() -> bool:
    """Say that the attempt is the claim's newest."""
    return True


@pytest.mark.parametrize(
    ("claim", "held"),
    [
        (claim_for("worker"), [{"gpu": ("gpu-0000-18-00-0",), "nic": ("nic-0000-19-00-0",)}]),
        (claim_for("cpu", count=2), []),
    ],
    ids=["shape", "single-cpus"],
)
async def test_ledger_holds_no_cpus_of_a_claim_that_is_not_prepared(
    claim: Claim, held: list[dict[str, tuple[str, ...]]]
) -> None:
    """Which they are is decided when it is prepared. A claim for CPUs alone asks the node nothing."""
    state, bus = node(), _Node()
    outcome = outcome_of(state, claim)
    assert isinstance(outcome, Allocated)
    attempt = Attempt(number=1, node=NODE, allocation=outcome.results[0])
    shared: Any = bus

    answer = await NodeLedgers(shared, state, 1.0).hold(claim, attempt, newest)

    assert isinstance(answer, Held)
    asked = [
        {device.device_class: device.names for device in request.pod.containers[0].devices} for request in bus.asked
    ]
    assert asked == held
    assert without_shapes(outcome.results[0], {}) == outcome.results[0]


def test_groups_are_offered_again_when_no_shape_has_cpus() -> None:
    """The setting went, or the CPUs are offered by socket."""
    state = node()
    state.put_alignment(NODE, None)

    names = {candidate.id.device for candidate in state.stock.table_of(NODE).candidates}
    assert {"cpu-numa-0", "cpu-numa-1"} <= names
    assert not any(name.startswith(("shape-worker", "shape-cpu")) for name in names)


def test_cluster_home_allocates_shapes_with_cpus_from_the_slices(capsys: pytest.CaptureFixture[str]) -> None:
    """The slices count, although they are in the pool of other classes, and a single CPU is in use itself."""
    words = ["--own-shapes", SETTING, "--cpus", '{"groups": "numa"}', "--shapes", "--node", NODE, "--output", "json"]
    assert run(["slices", "--machine", "dgx", *words]) == ExitCode.OK
    state = ApiServerState()
    for inventory in recorded("dgx", GROUPED)[1]:
        state.put_inventory(inventory)
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "u"}
    for item in json.loads(capsys.readouterr().out)["items"]:
        item["metadata"]["ownerReferences"] = [owner]
        state.put("ResourceSlice", "v1", item)
    for name, spec in (("worker", CLASS), ("cpu", {"selectors": [{"cel": {"expression": class_selector("cpu")}}]})):
        state.put("DeviceClass", "v1", {"metadata": {"name": f"{name}.topobus.dev"}, "spec": spec})

    outcome = solve(
        state.input_for(
            NODE,
            [(claim, claim.spec) for claim in (claim_for("worker", "w", count=2), claim_for("cpu", "c"))],
            mode=Mode.CORRECTED,
        )
    )

    assert state.foreign == {}
    assert isinstance(outcome, Allocated)
    devices = [granted.device for result in outcome.results for granted in result.devices.results]
    assert [plain(name) for name in devices] == [
        "shape-worker-0000-18-00-0",
        "shape-worker-0000-1a-00-0",
        "shape-cpu-numa-0-0",
    ]
    single = DeviceId("topobus.dev", NODE, devices[2])
    assert state.taints.parts[single] == ()
    for name in ("a", "b"):
        claim = {"metadata": {"name": name, "namespace": "d", "uid": name}, "spec": {}}
        result = {"request": "r", "driver": "topobus.dev", "pool": NODE, "device": devices[2]}
        state.put("ResourceClaim", "v1", claim | {"status": {"allocation": {"devices": {"results": [result]}}}})
    assert [device for device, _ in state.doubles()] == [single]
