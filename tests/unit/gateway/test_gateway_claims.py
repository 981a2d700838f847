"""Promises of reading a claim: exactly our devices on this node, of all classes, or a refusal that
names the place.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.formats.containers.cdi import parse, problems, render
from topobus.formats.kubernetes.alignment_request import PARAMETERS_KIND, PARAMETERS_VERSION, RESULT_KIND
from topobus.formats.messages.messages import ApiObject, Prepared
from topobus.gateway.claims.rules.claim_allocation import (
    AllocatedDevice,
    ClaimAllocation,
    allocation_of,
    is_allocated_here,
)
from topobus.gateway.claims.rules.claim_cdi import cdi_spec
from topobus.values.edits import ContainerEdits, DeviceNode, Mount
from topobus.values.outcome import Refusal

UID = "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"


def result(
    device: str = "gpu-0", request: str = "gpus", driver: str = "topobus.dev", pool: str = "n1", **more: Any
) -> dict[str, Any]:
    """One line of an allocation."""
    return {"request": request, "driver": driver, "pool": pool, "device": device, **more}


def claim(*results: Any, config: list[Any] | None = None, uid: str = UID) -> ApiObject:
    """An allocated claim."""
    devices: dict[str, Any] = {"results": list(results)}
    if config is not None:
        devices["config"] = config
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": uid},
        status={"allocation": {"devices": devices}},
    )


PARTS = {"shape-half-0": ("gpu-0", "gpu-1", "nic-0"), "shape-gpu-nic-0": ("gpu-0", "nic-0")}


def read(api_object: ApiObject | None) -> ClaimAllocation | Refusal:
    """Read it as the gateway of node n1, whose machine has two shapes."""
    return allocation_of(api_object, namespace="default", name="c", uid=UID, node="n1", parts=PARTS)


def test_allocation_gives_our_devices_of_all_classes_when_several_drivers_share_a_claim() -> None:
    """Other drivers' lines are left to them; an alternative's name is cut.

    A part has the devices of one class, and what the ledger must hold of all.
    """
    allocation = read(
        claim(
            result("gpu-1", "main/big"),
            result("gpu-0"),
            result("nic-0", "net"),
            result("x", "other", "gpu.example.com"),
            result("gpu-2", "watch", adminAccess=True),
        )
    )

    gpus = (
        AllocatedDevice(request="main", pool="n1", device="gpu-1", alternative="big"),
        AllocatedDevice(request="gpus", pool="n1", device="gpu-0"),
    )
    nic = AllocatedDevice(request="net", pool="n1", device="nic-0")
    watched = AllocatedDevice(request="watch", pool="n1", device="gpu-2", is_shared=True)
    held = {"gpu": ("gpu-0", "gpu-1"), "nic": ("nic-0",)}
    assert isinstance(allocation, ClaimAllocation)
    assert allocation == ClaimAllocation(devices=(*gpus, nic, watched), held=held)
    assert allocation.classes == ("gpu", "nic")
    assert allocation.part("gpu") == ClaimAllocation(devices=(*gpus, watched), held=held)
    assert allocation.part("nic") == ClaimAllocation(devices=(nic,), held=held)


def test_allocation_has_its_cpu_in_the_pool_of_cpus_when_it_has_other_devices_too() -> None:
    """CPUs lie in a pool of their own; the claim is one all the same."""
    allocation = read(claim(result("gpu-0", "a"), result("nic-0", "b"), result("cpu-4", "c", pool="n1/cpu")))

    assert isinstance(allocation, ClaimAllocation)
    assert allocation.held == {"cpu": ("cpu-4",), "gpu": ("gpu-0",), "nic": ("nic-0",)}
    assert [(device.device, device.pool) for device in allocation.part("cpu").devices] == [("cpu-4", "n1/cpu")]


def test_allocation_has_the_parts_of_a_shape_as_the_shape_was_granted() -> None:
    """Each part is a device of its own class, which the ledger and the class's service know.

    Kubelet knows the shape alone.
    """
    toleration = {"key": "topobus.dev/health", "operator": "Exists"}
    allocation = read(claim(result("shape-half-0", "half/big", tolerations=[toleration]), result("nic-1", "net")))

    assert isinstance(allocation, ClaimAllocation)
    assert [(device.device, device.allocated, device.request) for device in allocation.devices] == [
        ("gpu-0", "shape-half-0", "half"),
        ("gpu-1", "shape-half-0", "half"),
        ("nic-0", "shape-half-0", "half"),
        ("nic-1", "nic-1", "net"),
    ]
    assert allocation.held == {"gpu": ("gpu-0", "gpu-1"), "nic": ("nic-0", "nic-1")}
    assert (allocation.classes, allocation.tolerated) == (("gpu", "nic"), ("gpu-0", "gpu-1", "nic-0"))
    assert allocation.part("nic").requests == {"half": ("nic-0",), "net": ("nic-1",)}


def test_config_of_a_shape_reaches_its_parts_of_that_class_alone() -> None:
    """Parameters of NICs are for the NICs of the request, those of no class for each part."""
    config = [
        {
            "source": "FromClaim",
            "requests": ["half"],
            "opaque": {"driver": "topobus.dev", "parameters": {"apiVersion": version, "kind": "X"}},
        }
        for version in ("nic.topobus.dev/v1", "shape.topobus.dev/v1")
    ]

    allocation = read(claim(result("shape-half-0", "half"), result("nic-1", "net"), config=config))

    assert isinstance(allocation, ClaimAllocation)
    assert {device: [entry["apiVersion"] for entry in given] for device, given in allocation.config.items()} == {
        "gpu-0": ["shape.topobus.dev/v1"],
        "gpu-1": ["shape.topobus.dev/v1"],
        "nic-0": ["nic.topobus.dev/v1", "shape.topobus.dev/v1"],
    }


def test_shape_with_admin_access_holds_nothing() -> None:
    """Its parts are looked at like any other device."""
    allocation = read(claim(result("shape-gpu-nic-0", "watch", adminAccess=True)))

    assert isinstance(allocation, ClaimAllocation)
    assert (allocation.held, [device.is_shared for device in allocation.devices]) == ({}, [True, True])


@pytest.mark.parametrize("other", ["gpu-0", "shape-gpu-nic-0"], ids=["by-itself", "by-another-shape"])
def test_device_is_held_once_when_a_claim_has_it_twice(other: str) -> None:
    """No scheduler grants that, because a shape takes all of its parts' counters."""
    allocation = read(claim(result("shape-half-0", "half"), result(other, "other")))

    assert isinstance(allocation, ClaimAllocation)
    assert allocation.held == {"gpu": ("gpu-0", "gpu-1"), "nic": ("nic-0",)}
    assert allocation.by_share == {}


def test_allocation_keeps_this_drivers_config_in_order_when_given() -> None:
    """Class configs precede claim configs, however the allocation lists them.

    Other drivers' are none of ours, nor those of a name that once was a driver of ours.
    """
    config = [
        {"source": "FromClaim", "opaque": {"driver": "topobus.dev", "parameters": {"c": 3}}},
        {"source": "FromClass", "opaque": {"driver": "topobus.dev", "parameters": {"a": 1}}},
        {"source": "FromClaim", "opaque": {"driver": "nic.topobus.dev", "parameters": {"b": 2}}},
        {"source": "FromClaim", "opaque": {"driver": "gpu.topobus.dev", "parameters": {"d": 4}}},
    ]

    allocation = read(claim(result(), config=config))

    assert isinstance(allocation, ClaimAllocation)
    assert allocation.config == {"gpu-0": ({"a": 1}, {"c": 3})}


@pytest.mark.parametrize(
    ("parameters", "reached"),
    [
        pytest.param({"apiVersion": "nic.topobus.dev/v1", "kind": "Interface"}, ["nic-0"], id="a-class"),
        pytest.param({"apiVersion": "cpu.topobus.dev/v1", "kind": "CpuParameters"}, [], id="a-class-it-has-not"),
        pytest.param({"apiVersion": "acme.example/v1", "kind": "X"}, ["gpu-0", "nic-0"], id="another-group"),
        pytest.param({"apiVersion": "nics.topobus.dev/v1", "kind": "X"}, ["gpu-0", "nic-0"], id="misspelt-class"),
        pytest.param({"apiVersion": "fpga.topobus.dev/v1", "kind": "X"}, [], id="class-that-the-claim-has-not"),
        pytest.param({"apiVersion": "resource.topobus.dev/v1", "kind": "X"}, ["gpu-0", "nic-0"], id="no-class"),
        pytest.param({"apiVersion": "v1", "kind": "X"}, ["gpu-0", "nic-0"], id="no-group"),
        pytest.param({"kind": "X"}, ["gpu-0", "nic-0"], id="no-version"),
        pytest.param({"apiVersion": 7}, ["gpu-0", "nic-0"], id="a-version-that-is-no-text"),
        pytest.param({"apiVersion": PARAMETERS_VERSION, "kind": PARAMETERS_KIND}, [], id="wishes-of-the-controller"),
        pytest.param({"apiVersion": PARAMETERS_VERSION, "kind": RESULT_KIND}, [], id="its-answer"),
    ],
)
def test_config_reaches_the_devices_of_its_class_when_its_group_is_a_class(
    parameters: dict[str, Any], reached: list[str]
) -> None:
    """The group of the parameters tells whose they are.

    Those of no class reach all devices, whose services refuse what they do not know. What is for
    the controller reaches none.
    """
    config = [{"source": "FromClaim", "opaque": {"driver": "topobus.dev", "parameters": parameters}}]

    allocation = read(claim(result("gpu-0", "a"), result("nic-0", "b"), config=config))

    assert isinstance(allocation, ClaimAllocation)
    assert allocation.config == dict.fromkeys(reached, (parameters,))
    assert allocation.part("nic").config == {device: (parameters,) for device in reached if device == "nic-0"}


def test_config_reaches_only_the_devices_of_its_requests_when_it_names_some() -> None:
    """A request's name means all of its alternatives, `request/alternative` that one.

    No name means every device.
    """
    config = [
        {
            "source": "FromClaim",
            "requests": requests,
            "opaque": {"driver": "topobus.dev", "parameters": {"for": name}},
        }
        for name, requests in (
            ("all", []),
            ("main", ["main"]),
            ("big", ["main/big"]),
            ("small", ["main/small"]),
            ("watch", ["watch"]),
        )
    ]

    allocation = read(
        claim(result("gpu-0", "main/big"), result("gpu-1", "other"), result("gpu-2", "watch"), config=config)
    )

    assert isinstance(allocation, ClaimAllocation)
    assert {device: [entry["for"] for entry in given] for device, given in allocation.config.items()} == {
        "gpu-0": ["all", "main", "big"],
        "gpu-1": ["all"],
        "gpu-2": ["all", "watch"],
    }


def test_allocation_tells_shares_from_whole_devices_when_some_have_an_id() -> None:
    """Shares are held, but not alone.

    Two shares of one device are two devices of the answer and one of the ledger.
    """
    allocation = read(
        claim(result("gpu-0", "a", shareID="s-1"), result("gpu-0", "b", shareID="s-2"), result("gpu-1", "c"))
    )

    assert isinstance(allocation, ClaimAllocation)
    assert [(device.device, device.share_id) for device in allocation.devices] == [
        ("gpu-0", "s-1"),
        ("gpu-0", "s-2"),
        ("gpu-1", ""),
    ]
    assert (allocation.held, allocation.by_share) == ({"gpu": ("gpu-0", "gpu-1")}, {"gpu": ("gpu-0",)})
    assert allocation.names == ("gpu-0", "gpu-1")


@pytest.mark.parametrize(
    ("stored", "code", "part"),
    [
        pytest.param(None, "claim-missing", "default/c", id="missing"),
        pytest.param(claim(result(), uid="another"), "claim-replaced", "another", id="same-name-other-claim"),
        pytest.param(
            ApiObject(api_version="v1", kind="ResourceClaim", metadata={"uid": UID}),
            "claim-unallocated",
            "not allocated",
            id="unallocated",
        ),
        pytest.param(
            claim(result(driver="gpu.example.com")), "claim-elsewhere", "topobus.dev", id="no-device-of-this-driver"
        ),
        pytest.param(claim(result(pool="n2")), "claim-elsewhere", "n2", id="other-node"),
        pytest.param(claim(result(), result("nic-0", pool="n2")), "claim-elsewhere", "n2", id="one-on-another-node"),
        pytest.param(claim(result(pool="n1/cpu")), "claim-elsewhere", "n1/cpu", id="gpu-in-the-pool-of-cpus"),
        pytest.param(
            claim(result(), result("nic-0", pool="n1/cpu")), "claim-elsewhere", "nic-0", id="nic-in-the-pool-of-cpus"
        ),
        pytest.param(
            claim(result(), result("cpu-4")), "claim-elsewhere", "wanted n1/cpu", id="cpu-in-the-pool-of-the-others"
        ),
        pytest.param(claim(result("cpu-4", pool="n2/cpu")), "claim-elsewhere", "n2/cpu", id="cpu-of-another-node"),
        pytest.param(claim(result(), result("shape-half-7")), "shape-unknown", "shape-half-7", id="unknown-shape"),
        pytest.param(
            claim(result("shape-half-0", pool="n2")), "claim-elsewhere", "shape-half-0", id="shape-of-another-node"
        ),
        pytest.param(claim(result(), {"request": "r"}), "claim-malformed", "results[1]", id="line-without-device"),
        pytest.param(claim("nonsense"), "claim-malformed", "results[0]", id="line-that-is-no-object"),
        pytest.param(claim(result(shareID=7)), "claim-malformed", "results[0].shareID", id="share-that-is-no-text"),
        pytest.param(claim(result(pool="")), "claim-malformed", "results[0]", id="line-without-pool"),
        pytest.param(
            claim(result(request="A/b")), "claim-malformed", "results[0].request", id="request-that-is-no-label"
        ),
        pytest.param(
            claim(result(tolerations=["x"])),
            "claim-malformed",
            "results[0].tolerations",
            id="toleration-that-is-no-object",
        ),
        pytest.param(
            claim(result(shareID="s", consumedCapacity={"memory": "much"})),
            "claim-malformed",
            "results[0].consumedCapacity",
            id="amount-that-is-no-quantity",
        ),
        pytest.param(
            claim(result(shareID="s", consumedCapacity={"memory": "-1"})),
            "claim-malformed",
            "results[0].consumedCapacity",
            id="amount-below-none",
        ),
        pytest.param(
            claim(result(), result("cpu-numa-0", "r", pool="n1/cpu", shareID="s", consumedCapacity={"cpus": "500m"})),
            "claim-malformed",
            "results[1].consumedCapacity",
            id="part-of-a-cpu",
        ),
        pytest.param(
            claim(result(), config=[{"opaque": {"driver": "topobus.dev", "parameters": "x"}}]),
            "claim-malformed",
            "config[0]",
            id="parameters-that-are-no-object",
        ),
        pytest.param(
            claim(result(), config=[{"requests": "gpus", "opaque": {"driver": "topobus.dev", "parameters": {}}}]),
            "claim-malformed",
            "config[0]",
            id="requests-that-are-no-list",
        ),
        pytest.param(
            ApiObject(api_version="v1", kind="ResourceClaim", metadata={"uid": UID}, status={"allocation": []}),
            "claim-unallocated",
            "not allocated",
            id="allocation-that-is-no-object",
        ),
    ],
)
def test_allocation_is_refused_with_the_place_when_unusable(stored: ApiObject | None, code: str, part: str) -> None:
    """Nothing is prepared by guess."""
    refused = read(stored)

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == code
    assert part in refused.reasons[0].message


@pytest.mark.parametrize(
    ("stored", "is_here"),
    [
        pytest.param(claim(result()), True, id="still-allocated"),
        pytest.param(claim(result("cpu-4", pool="n1/cpu")), True, id="still-has-a-cpu"),
        pytest.param(claim(result(pool="n2")), False, id="allocated-elsewhere"),
        pytest.param(claim("nonsense"), True, id="allocation-that-cannot-be-read"),
        pytest.param(claim(result(), uid="another"), False, id="another-claim-of-the-name"),
        pytest.param(ApiObject(api_version="v1", kind="ResourceClaim", metadata={"uid": UID}), False, id="deallocated"),
        pytest.param(None, False, id="gone"),
    ],
)
def test_claim_keeps_its_devices_only_when_still_allocated_here(stored: ApiObject | None, *, is_here: bool) -> None:
    """An unprepare releases only what the claim does not own any more."""
    assert is_allocated_here(stored, UID, "n1") is is_here


def test_cdi_spec_has_unique_names_and_passes_a_runtime_when_devices_have_no_edits_of_their_own() -> None:
    """Names carry the claim's uid, a device without edits takes the common ones, and every rule of
    CDI holds.
    """
    prepared = Prepared(
        edits={"gpu-1": ContainerEdits(), "gpu-0": ContainerEdits(device_nodes=(DeviceNode(path="/dev/nvidia0"),))},
        common=ContainerEdits(env={"ALL": "gpu-0,gpu-1"}, annotations={"note": "not for CDI"}),
    )

    spec = cdi_spec(UID, "gpu", prepared)

    assert spec is not None
    assert [device.name for device in spec.devices] == [f"claim-{UID}-gpu-0", f"claim-{UID}-gpu-1"]
    assert problems(spec) == ()
    assert spec.common == ContainerEdits(env={"ALL": "gpu-0,gpu-1"})


def test_cdi_spec_is_none_when_nothing_is_edited() -> None:
    """A runtime refuses an empty file, so none is written."""
    assert cdi_spec(UID, "gpu", Prepared(edits={"gpu-0": ContainerEdits()})) is None


def test_cdi_spec_has_a_legal_kind_when_the_class_begins_with_a_digit() -> None:
    """A class made of somebody else's resource name, such as acme.com/10g-nic, is prepared like any
    other.
    """
    spec = cdi_spec(UID, "10g-nic-acme", Prepared(edits={"nic-0": ContainerEdits(env={"A": "1"})}))

    assert spec is not None
    assert parse(render(spec)) == spec
    assert spec.kind == "topobus.dev/c-10g-nic-acme"


def test_cdi_spec_binds_every_mount_when_a_driver_did_not_say_so() -> None:
    """What is not said to be a bind, runc mounts as a file system without a type: an error at the
    start of the container.
    """
    own = Mount(host_path="/a", container_path="/a", options=("ro",))
    common = Mount(host_path="/b", container_path="/b", options=("bind", "rw"))

    spec = cdi_spec(
        UID, "gpu", Prepared(edits={"gpu-0": ContainerEdits(mounts=(own,))}, common=ContainerEdits(mounts=(common,)))
    )

    assert spec is not None
    assert spec.devices[0].edits.mounts[0].options == ("ro", "rbind")
    assert spec.common.mounts == (common,)
