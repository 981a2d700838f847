"""The controller's copy of the world: what is free to whom, and which nodes are tried."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.values import Allocated, AllocationInput, Fault
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.lifecycle import read_claim
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import claim_from_template, owner_pod_uid, wanted_claims
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Device, Inventory
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Machine, NumaNode
from topobus.values.request import Owner, OwnerKind
from unit.controller.allocation import solve


def _claim(name: str, count: int = 1, **metadata: Any) -> ApiObject:
    request = {"name": "r", "exactly": {"deviceClassName": "gpu.topobus.dev", "count": count}}
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": f"uid-{name}", **metadata},
        spec={"devices": {"requests": [request]}},
    )


def _state(*nodes: str) -> StandaloneState:
    state = StandaloneState()
    for node in nodes:
        devices = tuple(Device(name=f"gpu-{index}", device_class="gpu") for index in range(4))
        state.put_inventory(Inventory(node=node, device_class="gpu", generation=1, devices=devices))
    return state


def _put(state: StandaloneState, api_object: ApiObject, revision: int = 1) -> None:
    state.put_object(
        ObjectKey(api_object.kind.lower(), "default", api_object.metadata["name"]), Stored(revision, api_object)
    )


def _input(state: StandaloneState, api_object: ApiObject, node: str = "n1") -> AllocationInput:
    return state.input_for(node, [(Claim(api_object), read_claim(api_object))])


def _devices(given: AllocationInput) -> list[str]:
    outcome = solve(given)
    assert isinstance(outcome, Allocated), outcome
    return [granted_device.device for granted_device in outcome.results[0].devices.results]


def _ledger(owner: Owner, *devices: str) -> Ledger:
    return Ledger(
        node="n1", allocations={owner.key: Allocation(owner=owner, holdings=(Holding(devices={"gpu": devices}),))}
    )


def test_world_offers_a_class_for_each_device_class_when_none_is_stored() -> None:
    """`gpu.topobus.dev` works without anybody storing it; a stored class of that name wins."""
    state = _state("n1")
    assert _devices(_input(state, _claim("a"))) == ["gpu-0"]

    selectors = [{"cel": {"expression": "device.driver == 'nobody'"}}]
    stored = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="DeviceClass",
        metadata={"name": "gpu.topobus.dev"},
        spec={"selectors": selectors},
    )
    state.put_object(ObjectKey("deviceclass", "_", "gpu.topobus.dev"), Stored(1, stored))

    assert not isinstance(solve(_input(state, _claim("a"))), Allocated | Fault)


def test_world_counts_ledger_and_attempts_of_others_as_taken() -> None:
    """What a pod holds in the ledger and what another claim is about to hold are both taken."""
    state = _state("n1")
    state.put_ledger(_ledger(Owner(kind=OwnerKind.POD, name="p", uid="u"), "gpu-0"))
    other = _claim("other")
    outcome = solve(_input(state, other))
    assert isinstance(outcome, Allocated)
    _put(state, attempts.with_attempt(other, attempts.Attempt(number=1, node="n1", allocation=outcome.results[0])))

    assert _devices(_input(state, _claim("mine"))) == ["gpu-2"]


def test_world_gives_a_claim_what_it_holds_already_when_it_was_interrupted() -> None:
    """A claim that holds devices in the ledger gets exactly those, on that node, and no others."""
    state = _state("n1", "n2")
    claim = _claim("mine", count=2)
    state.put_ledger(_ledger(lifecycle.owner_of(claim), "gpu-1", "gpu-3"))

    assert state.nodes_for(Claim(claim)) == ("n1",)
    assert _devices(_input(state, claim)) == ["gpu-1", "gpu-3"]
    assert not isinstance(solve(_input(state, _claim("mine", count=3))), Allocated)


def test_world_tries_the_named_node_alone_when_the_claim_names_one() -> None:
    """An annotation restricts the search; without it all nodes are tried by name."""
    state = _state("n2", "n1")

    assert state.nodes_for(Claim(_claim("any"))) == ("n1", "n2")
    assert state.nodes_for(Claim(_claim("one", annotations={"topobus.dev/node": "n2"}))) == ("n2",)


def test_world_keeps_a_pods_claims_on_one_node() -> None:
    """A claim follows the other claims of its pod.

    Until one is allocated they are served together.
    """
    state = _state("n1", "n2")
    first, second = _claim("first"), _claim("second")
    spec = {
        "resourceClaims": [{"name": "a", "resourceClaimName": "first"}, {"name": "b", "resourceClaimName": "second"}]
    }
    _put(state, first)
    _put(state, second)
    _put(state, ApiObject(api_version="v1", kind="Pod", metadata={"name": "p", "uid": "pod-1"}, spec=spec))
    together = [(Claim(api_object), read_claim(api_object)) for api_object in (first, second)]

    assert [key.name for key, _ in state.mates(Claim(first))] == ["second"]
    outcome = solve(state.input_for("n2", together))
    assert isinstance(outcome, Allocated)
    assert [[granted_device.device for granted_device in result.devices.results] for result in outcome.results] == [
        ["gpu-0"],
        ["gpu-1"],
    ]

    _put(state, lifecycle.with_allocation(first, outcome.results[0], now="t"), revision=2)
    assert state.nodes_for(Claim(second)) == ("n2",)
    assert state.nodes_for(Claim(_claim("stranger"))) == ("n1", "n2")
    state.drop_object(ObjectKey("pod", "default", "p"))
    assert state.mates(Claim(first)) == ()


def test_world_tells_when_something_became_free_on_a_node_and_only_then() -> None:
    """What is taken changes nothing for a claim that did not fit.

    What is let go, published or defined may.
    """
    state = _state("n1", "n2")
    owner = Owner(kind=OwnerKind.POD, name="p", uid="u")
    state.put_ledger(_ledger(owner))
    start, elsewhere, supply = state.stock.freedom_of("n1"), state.stock.freedom_of("n2"), state.supply

    state.put_ledger(_ledger(owner, "gpu-0"))
    claim = _claim("one")
    outcome = solve(_input(state, claim))
    assert isinstance(outcome, Allocated)
    _put(state, lifecycle.with_allocation(claim, outcome.results[0], now="t"))
    assert (state.stock.freedom_of("n1"), state.supply) == (start, supply)

    state.put_ledger(_ledger(owner))
    after_ledger = state.stock.freedom_of("n1")
    state.drop_object(ObjectKey("resourceclaim", "default", "one"))
    assert len({start, after_ledger, state.stock.freedom_of("n1")}) == 3
    assert state.stock.freedom_of("n2") == elsewhere


@pytest.mark.parametrize(
    ("kind", "spec", "wanted"),
    [
        ("DeviceClass", {"selectors": "x"}, "selectors"),
        ("DeviceClass", {"selectors": [{}]}, "wanted cel"),
        (
            "ResourceSlice",
            {"driver": "d.example.com", "pool": {"name": "p", "resourceSliceCount": 1}},
            "exactly one of nodeName",
        ),
        (
            "ResourceSlice",
            {
                "driver": "d.example.com",
                "pool": {"name": "p", "resourceSliceCount": 1},
                "allNodes": True,
                "devices": [{"name": "x", "capacity": {"memory": {"value": "1KiB"}}}],
            },
            "not a quantity",
        ),
    ],
)
def test_world_refuses_a_class_or_slice_when_it_breaks_a_limit(kind: str, spec: dict[str, Any], wanted: str) -> None:
    """One wrong object is left out with its reason; it must not end the searches of others."""
    state = _state("n1")
    api_object = ApiObject(api_version="resource.k8s.io/v1", kind=kind, metadata={"name": "odd"}, spec=spec)

    with pytest.raises(ContractError, match=wanted):
        state.put_object(ObjectKey(kind.lower(), "_", "odd"), Stored(1, api_object))

    assert _devices(_input(state, _claim("a"))) == ["gpu-0"]


def test_pod_claims_have_stable_names_that_fit_when_the_pods_name_is_long() -> None:
    """The name follows from pod and entry, is a DNS label, and tells pods of one name apart."""
    spec = {"containers": [{"name": "c"}], "resourceClaims": [{"name": "card", "resourceClaimTemplateName": "t"}]}
    pods = [
        ApiObject(api_version="v1", kind="Pod", metadata={"name": "p" * 60, "uid": uid}, spec=spec)
        for uid in ("a", "a", "b")
    ]
    template = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaimTemplate",
        metadata={"name": "t"},
        spec={"spec": {"devices": {"requests": []}}},
    )

    names = [wanted_claims(pod)[0].name for pod in pods]
    made = claim_from_template(pods[0], wanted_claims(pods[0])[0], template, now="t")

    assert names[0] == names[1] != names[2]
    assert len(names[0]) <= 63
    assert owner_pod_uid(made) == "a"


def test_world_keeps_the_other_classes_of_a_pool_when_one_changes() -> None:
    """Silence, a new inventory and its end concern the devices of their class alone: those of the
    others are not even converted again.
    """
    state = _state("n1")
    nics = Inventory(node="n1", device_class="nic", generation=1, devices=(Device(name="nic-0", device_class="nic"),))
    state.put_inventory(nics)

    def shown() -> dict[str, tuple[bool, int]]:
        """Whether each device may be had, and which value its attributes are."""
        return {
            candidate.id.device: (not candidate.device.taints, id(candidate.device.attributes))
            for pool in state.stock.table_of("n1").pools
            for candidate in pool.candidates
            if not candidate.id.device.startswith("shape-")
        }

    before = shown()
    state.note_silence({("n1", "nic"): "2026-01-01T00:00:00Z"})
    silent = shown()
    state.note_silence({})
    heard = shown()
    state.drop_inventory("n1", "nic")
    gone = shown()

    gpus = {f"gpu-{index}" for index in range(4)}
    assert [names.keys() for names in (before, silent, gone)] == [gpus | {"nic-0"}, gpus | {"nic-0"}, gpus]
    assert [names["nic-0"][0] for names in (before, silent, heard)] == [True, False, True]
    assert all(names[gpu] == before[gpu] for names in (silent, heard, gone) for gpu in gpus)
    assert not isinstance(solve(_input(state, _claim("a", 5))), Allocated)


def test_world_follows_a_claim_to_the_node_of_its_cpus() -> None:
    """CPUs are in a pool of their own, and it names its node."""
    state = _state("n1", "n2")
    cpus = tuple(Device(name=f"cpu-{index}", device_class="cpu", cpu=index) for index in range(2))
    state.put_inventory(Inventory(node="n2", device_class="cpu", generation=1, devices=cpus))
    first, second = _claim("first"), _claim("second")
    first.spec["devices"]["requests"][0]["exactly"]["deviceClassName"] = "cpu.topobus.dev"
    spec = {"resourceClaims": [{"name": name, "resourceClaimName": name} for name in ("first", "second")]}
    _put(state, first)
    _put(state, second)
    _put(state, ApiObject(api_version="v1", kind="Pod", metadata={"name": "p", "uid": "pod-1"}, spec=spec))
    outcome = solve(_input(state, first, node="n2"))
    assert isinstance(outcome, Allocated)

    _put(state, lifecycle.with_allocation(first, outcome.results[0], now="t"), revision=2)

    assert [granted.pool for granted in outcome.results[0].devices.results] == ["n2/cpu"]
    assert state.nodes_for(Claim(second)) == ("n2",)


def _machine(*nodes: int) -> Machine:
    numa_nodes = tuple(NumaNode(id=node, cpus=CpuSet(), memory_bytes=0) for node in nodes)
    return Machine(node="n1", numa_nodes=numa_nodes, cpus=())


def test_world_gives_nobody_a_device_on_a_node_that_the_machine_lacks() -> None:
    """A device of a node that nobody has is set aside by itself, and is back as soon as discovery
    tells of the node.
    """
    state = StandaloneState()
    devices = (
        Device(name="gpu-0", device_class="gpu", numa_nodes=NodeSet(1)),
        Device(name="gpu-1", device_class="gpu", numa_nodes=NodeSet(0)),
    )
    state.put_inventory(Inventory(node="n1", device_class="gpu", generation=1, devices=devices))
    state.put_machine(_machine(0))
    claim = _claim("one")
    _put(state, claim)

    before = _devices(_input(state, claim))
    state.put_machine(_machine(0, 1))

    assert (before, _devices(_input(state, claim))) == (["gpu-1"], ["gpu-0"])


def test_assumed_claim_holds_its_devices_until_it_is_restored() -> None:
    """While an attempt is being written the next decision does not see its devices.

    When it was not written, it does.
    """
    state = _state("n1")
    waiting = _claim("waiting")
    _put(state, waiting)
    drafted = _drafted(state, waiting)
    state.assume(ObjectKey("resourceclaim", "default", "waiting"), drafted)
    while_written = _devices(_input(state, _claim("next", 3)))

    state.restore(ObjectKey("resourceclaim", "default", "waiting"))

    assert while_written == ["gpu-1", "gpu-2", "gpu-3"]
    assert _devices(_input(state, _claim("next", 4))) == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert state.objects[ObjectKey("resourceclaim", "default", "waiting")].value is waiting


def test_nothing_changes_when_a_claim_is_written_as_it_was_assumed() -> None:
    """The copy learns the revision.

    What is free is as before, so no other claim is tried again for it.
    """
    state = _state("n1")
    waiting = _claim("waiting")
    _put(state, waiting)
    drafted = _drafted(state, waiting)
    state.assume(ObjectKey("resourceclaim", "default", "waiting"), drafted)
    mark = state.stock.changes_since((0, -1)).mark

    _put(state, drafted, revision=2)

    assert state.stock.changes_since(mark).nodes == ()
    assert _devices(_input(state, _claim("next", 3))) == ["gpu-1", "gpu-2", "gpu-3"]


def _drafted(state: StandaloneState, waiting: ApiObject) -> ApiObject:
    """Make the next version of a claim, with an attempt at the first device."""
    outcome = solve(_input(state, waiting))
    assert isinstance(outcome, Allocated)
    return attempts.with_attempt(waiting, attempts.Attempt(number=1, node="n1", allocation=outcome.results[0]))


def test_claims_have_a_next_step_when_they_changed_since_they_were_settled() -> None:
    """A round looks at these alone.

    The oldest comes first, and a claim that is gone is not looked for.
    """
    state = _state("n1")
    for name, day in (("young", 2), ("old", 1), ("gone", 3)):
        _put(state, _claim(name, creationTimestamp=f"2026-01-0{day}T00:00:00Z"))
    keys = {name: ObjectKey("resourceclaim", "default", name) for name in ("young", "old", "gone")}
    state.drop_object(keys["gone"])
    all_keys = state.unsettled_claims()
    state.settle(keys["young"])
    settled = state.unsettled_claims()

    _put(state, _claim("young", creationTimestamp="2026-01-02T00:00:00Z"), revision=2)

    assert all_keys == (keys["old"], keys["young"])
    assert settled == (keys["old"],)
    assert state.unsettled_claims() == (keys["old"], keys["young"])
    assert [key for key, _ in state.claims()] == [keys["old"], keys["young"]]
