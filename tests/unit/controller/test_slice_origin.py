"""Which slices of our driver count: those of the node's own pools, with devices that it has."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.state.cluster.slice_origin import classes_in, only_known_devices, why_foreign
from topobus.formats.kubernetes.resource import Counter, CounterConsumption, CounterSet, Pool, SliceDevice, SliceSpec

OWNER = {"kind": "Node", "name": "n1", "uid": "u"}
KNOWN = {"gpu": {"gpu-0", "gpu-1"}, "nic": {"nic-0"}, "cpu": {"cpu-0", "cpu-numa-0"}}


def _spec(*devices: str, pool: str = "n1", counters: tuple[str, ...] = (), **fields: Any) -> SliceSpec:
    return SliceSpec(
        **{
            "driver": "topobus.dev",
            "node_name": "n1",
            "pool": Pool(name=pool, resource_slice_count=1),
            "devices": tuple(SliceDevice(name=name) for name in devices),
            "shared_counters": tuple(CounterSet(name=name) for name in counters),
            **fields,
        }
    )


def _why(spec: SliceSpec, owner: dict[str, str] = OWNER) -> str:
    return why_foreign(spec, [owner], node_uid="u", device_names=KNOWN)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(_spec("gpu-0", "gpu-9"), id="one-device-is-known"),
        pytest.param(_spec("cpu-0", pool="n1/cpu"), id="cpus"),
        pytest.param(_spec("cpu-numa-0", pool="n1/cpu"), id="groups-of-cpus"),
        pytest.param(_spec(counters=("gpu-0", "nic-0")), id="counters-of-several-classes"),
        pytest.param(_spec(), id="no-devices"),
        pytest.param(_spec("gpu-9", driver="gpu.example.com", node_name="n2"), id="of-another-driver"),
    ],
)
def test_slice_counts_when_it_is_of_its_node(spec: SliceSpec) -> None:
    """Whatever the class, in the pool that the class is in. Other drivers' slices are not judged."""
    assert _why(spec) == ""


@pytest.mark.parametrize(
    ("spec", "owner", "why"),
    [
        pytest.param(_spec("gpu-0", node_name="n2"), OWNER, "pool n1 of topobus.dev is of node n1", id="another-node"),
        pytest.param(
            _spec("cpu-0", pool="n1/cpu", node_name=None),
            OWNER,
            "pool n1/cpu of topobus.dev is of node n1",
            id="no-node",
        ),
        pytest.param(_spec("gpu-0"), {**OWNER, "uid": "v"}, "it is not owned by node n1", id="another-owner"),
        pytest.param(_spec("cpu-0"), OWNER, "pool n1 of topobus.dev has no devices of class cpu", id="cpu-elsewhere"),
        pytest.param(
            _spec("gpu-0", pool="n1/cpu"), OWNER, "pool n1/cpu of topobus.dev has no devices of class gpu", id="no-cpu"
        ),
        pytest.param(_spec("gpu-0", pool="n1/x"), OWNER, "pool n1/x of topobus.dev is of node n1/x", id="another-pool"),
        pytest.param(
            _spec("fpga-0"), OWNER, "node n1 has published no inventory of class fpga", id="class-not-heard-of"
        ),
        pytest.param(
            _spec(counters=("gpu-0", "fpga-0")), OWNER, "published no inventory of class fpga", id="its-counters"
        ),
        pytest.param(_spec("gpu-8", "gpu-9"), OWNER, "node n1 has no such device: gpu-8, gpu-9", id="unknown-devices"),
    ],
)
def test_slice_does_not_count_when_its_node_has_not_published_it(
    spec: SliceSpec, owner: dict[str, str], why: str
) -> None:
    """The reason names what the node has not."""
    assert why in _why(spec, owner)


def test_unknown_devices_are_left_out_of_a_slice_that_counts() -> None:
    """Each is looked for among the devices of its own class. Other drivers' slices stay as they are."""
    spec = _spec("gpu-1", "gpu-9", "nic-0", "fpga-0")
    foreign = _spec("gpu-9", driver="gpu.example.com")

    assert [device.name for device in only_known_devices(spec, KNOWN).devices] == ["gpu-1", "nic-0"]
    assert only_known_devices(foreign, KNOWN) is foreign
    assert (classes_in(spec), classes_in(foreign)) == (["fpga", "gpu", "nic"], [])


def _shape(*parts: str) -> SliceDevice:
    counters = {part: Counter(value="16") for part in parts}
    return SliceDevice(
        name="shape-half-0", consumes_counters=(CounterConsumption(counter_set="shape-0", counters=counters),)
    )


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        pytest.param(("gpu-0", "nic-0"), "", id="known"),
        pytest.param(("gpu-0", "nic-9"), "node n1 has no such device: shape-half-0", id="one-part-is-unknown"),
        pytest.param(("gpu-0", "fpga-0"), "node n1 has published no inventory of class fpga", id="no-inventory"),
        pytest.param(("gpu-0", "cpu-numa-0"), "", id="with-cpus"),
        pytest.param(("cpu-numa-0",), "", id="a-single-cpu"),
        pytest.param(("cpu-numa-9",), "node n1 has no such device: shape-half-0", id="a-single-cpu-of-no-group"),
        pytest.param((), "node n1 has published no inventory of class shape", id="no-parts"),
    ],
)
def test_slice_of_shapes_counts_when_the_node_has_the_parts(parts: tuple[str, ...], why: str) -> None:
    """No service publishes an inventory of shapes, so their parts tell whether the node has them."""
    assert _why(_spec(devices=(_shape(*parts),))) == why


def test_counters_of_shapes_count_when_the_node_has_the_classes_of_the_parts() -> None:
    """They share a slice with the counters of other classes."""
    names = ("cpu-numa-0", "gpu-0", "nic-0")
    counters = CounterSet(name="shape-0", counters=dict.fromkeys(names, Counter(value="16")))
    spec = _spec(shared_counters=(CounterSet(name="gpu-0"), counters))

    assert (classes_in(spec), _why(spec)) == (["cpu", "gpu", "nic"], "")


def test_shape_is_left_out_when_the_node_lacks_a_part() -> None:
    """It would be prepared as its parts."""
    kept = only_known_devices(_spec(devices=(SliceDevice(name="gpu-0"), _shape("gpu-0", "gpu-9"))), KNOWN)

    assert [device.name for device in kept.devices] == ["gpu-0"]
