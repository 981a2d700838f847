"""Names and health of somebody else's devices."""

from __future__ import annotations

import pytest

from topobus.gateway.device_plugins.rules.foreign import (
    ForeignDevice,
    class_of_resource,
    foreign_devices,
    foreign_names,
    observations_of,
)
from topobus.values.dra_names import class_of_device
from topobus.values.health import HealthState
from topobus.values.names import is_dns_label


@pytest.mark.parametrize(
    ("resource", "device_class"),
    [
        pytest.param("nvidia.com/gpu", "gpu-nvidia", id="not-our-gpu"),
        pytest.param("amd.com/GPU_v2.1", "gpu-v2-1-amd", id="other-characters"),
        pytest.param("rdma/hca", "hca-rdma", id="short-domain"),
        pytest.param(f"a.b/{'x' * 63}", f"{'x' * 33}-9787f3", id="long"),
    ],
)
def test_class_is_a_label_that_fits_into_socket_names(resource: str, device_class: str) -> None:
    """A class has the resource's and the vendor's name, and at most 40 characters."""
    found_class = class_of_resource(resource)

    assert found_class == device_class
    assert is_dns_label(found_class)
    assert len(found_class) <= 40


def test_names_differ_when_ids_do() -> None:
    """Ids that only differ in what a label cannot hold keep apart; any text gets a legal name."""
    ids = ["GPU-1", "gpu_1", "gpu-1", "", "***", "x" * 80, "Ümlaut"]

    found_foreign_names = foreign_names("gpu-acme", ids)

    assert sorted(found_foreign_names.values()) == sorted(ids)
    assert all(is_dns_label(name) for name in found_foreign_names)
    assert found_foreign_names["gpu-acme--gpu-1"] == "gpu-1"


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "amd.com/GPU__v2", "xn--a.example/npu", f"a.b/{'x' * 63}"])
@pytest.mark.parametrize("id_", ["dev-0", "a--b", "--", "x" * 80, "GPU-1"])
def test_names_tell_the_class_whatever_the_plugin_calls_its_devices(resource: str, id_: str) -> None:
    """The class is read from the name, so nothing in an id or a resource may look like its end."""
    device_class = class_of_resource(resource)

    (name,) = foreign_names(device_class, [id_])

    assert class_of_device("topobus.dev", name) == device_class
    assert is_dns_label(name)


def test_devices_carry_what_the_plugin_told() -> None:
    """NUMA nodes where it names some, its own id for selectors, and a fault where it says so."""
    listed = [ForeignDevice(id="b", is_healthy=False), ForeignDevice(id="a", nodes=(0, 1))]

    devices = foreign_devices("w-acme", "acme.example/w", listed)
    faults = observations_of("w-acme", listed)

    assert [(device.name, device.numa_nodes.ids if device.numa_nodes else None) for device in devices] == [
        ("w-acme--a", (0, 1)),
        ("w-acme--b", None),
    ]
    assert devices[0].attributes == {"resource": "acme.example/w", "id": "a"}
    assert [observation.state for observation in faults["w-acme--b"]] == [HealthState.UNHEALTHY]
    assert faults["w-acme--a"] == ()
