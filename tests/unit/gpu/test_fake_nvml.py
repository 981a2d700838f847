"""The libnvidia-ml of a profile through the real pynvml and the plugin's own session: layouts,
answers, events, errors, a session that ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from support.fake_nvml import GIB, FakeGpu, FakeNvml, fake_nvml, needs_gcc
from topobus.gpu.nvml.nvml import Nvml, load_nvml
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.health import HealthState
from topobus.values.pci import PciAddress

pytestmark = needs_gcc

FIRST, SECOND = "0000:18:00.0", "0000:1a:00.0"

_STRUCTURES = {
    "nvmlMemory_t": "c_nvmlMemory_t",
    "nvmlMemory_v2_t": "c_nvmlMemory_v2_t",
    "nvmlUtilization_t": "c_nvmlUtilization_t",
    "nvmlPciInfo_t": "nvmlPciInfo_t",
    "nvmlProcessInfo_t": "c_nvmlProcessInfo_v3_t",
    "nvmlEventData_t": "c_nvmlEventData_t",
    "nvmlFieldValue_t": "c_nvmlFieldValue_t",
    "nvmlGpuFabricInfo_v2_t": "c_nvmlGpuFabricInfo_v2_t",
    "nvmlGpuInstancePlacement_t": "c_nvmlGpuInstancePlacement_t",
    "nvmlGpuInstanceProfileInfo_v2_t": "c_nvmlGpuInstanceProfileInfo_v2_t",
    "nvmlGpuInstanceInfo_t": "c_nvmlGpuInstanceInfo_t",
    "nvmlComputeInstanceProfileInfo_v2_t": "c_nvmlComputeInstanceProfileInfo_v2_t",
    "nvmlComputeInstanceInfo_t": "c_nvmlComputeInstanceInfo_t",
    "nvmlDeviceAttributes_t": "c_nvmlDeviceAttributes",
    "nvmlGpmMetric_t": "c_nvmlGpmMetric_t",
    "nvmlGpmMetricsGet_t": "c_nvmlGpmMetricsGet_t",
    "nvmlGpmSupport_t": "c_nvmlGpmSupport_t",
}


@pytest.fixture
def library(tmp_path: Path) -> Iterator[FakeNvml]:
    """Two GPUs, idle."""
    with fake_nvml(
        tmp_path / "lib", FakeGpu(address=FIRST), FakeGpu(address=SECOND, uuid="GPU-second", minor=1)
    ) as fake:
        yield fake


def _session(library: FakeNvml) -> Nvml:
    tree = Tree(HardwareSettings(root=str(library.folder), library_path=str(library.folder)))
    return load_nvml(tree)


@pytest.mark.parametrize("name", sorted(_STRUCTURES))
def test_structure_lies_in_memory_as_pynvml_expects_it(library: FakeNvml, name: str) -> None:
    """Size and the place of every member are those of the real API, so what is read through pynvml
    is what the library wrote.
    """
    question = ctypes.CDLL(str(library.folder / "libnvidia-ml.so.1")).fake_layout
    question.restype = ctypes.c_size_t
    structure = getattr(pynvml, _STRUCTURES[name])

    places = {member: question(f"{name}.{member}".encode()) for member, _ in structure._fields_}

    assert question(name.encode()) == ctypes.sizeof(structure)
    assert places == {member: getattr(structure, member).offset for member, _ in structure._fields_}


def test_session_tells_identity_and_memory_of_each_gpu(library: FakeNvml) -> None:
    """UUID, name, memory, minor and the facts for selectors come through the real pynvml."""
    gpus = _session(library).describe([PciAddress.parse(FIRST), PciAddress.parse(SECOND)])

    first, second = gpus[PciAddress.parse(FIRST)], gpus[PciAddress.parse(SECOND)]
    assert (first.name, first.memory_bytes, first.minor) == ("NVIDIA H100 80GB HBM3", 80 * GIB, 0)
    assert (second.uuid, second.minor) == ("GPU-second", 1)
    assert first.facts["cudaComputeCapability"] == "9.0"
    assert first.facts["cudaDriverVersion"] == "13.0.0"


def test_event_reaches_its_gpu_once_when_the_driver_reports_an_xid(library: FakeNvml) -> None:
    """Registered for one set, delivered by nvmlEventSetWait, and gone after that.

    The neighbour has none.
    """
    session = _session(library)
    addresses = [PciAddress.parse(FIRST), PciAddress.parse(SECOND)]
    session.describe(addresses)
    library.raise_xid(SECOND, 79)

    seen, again = session.observe(addresses), session.observe(addresses)

    assert [observation.evidence["xid"] for observation in seen[addresses[1]]] == ["79"]
    assert seen[addresses[0]] == again[addresses[0]] == again[addresses[1]] == []


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, HealthState.UNHEALTHY, "gpu-lost"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, HealthState.UNHEALTHY, "recovery-advised"),
        (pynvml.NVML_ERROR_UNKNOWN, HealthState.UNKNOWN, "unmonitored"),
    ],
)
def test_error_of_one_gpu_hits_that_gpu_alone(library: FakeNvml, code: int, state: HealthState, reason: str) -> None:
    """The neighbour answers as before."""
    session = _session(library)
    addresses = [PciAddress.parse(FIRST), PciAddress.parse(SECOND)]
    session.describe(addresses)
    library.set(FIRST, error=code)

    seen = session.observe(addresses)

    assert [(observation.state, observation.reason) for observation in seen[addresses[0]]] == [(state, reason)]
    assert seen[addresses[1]] == []


def test_session_is_opened_anew_when_the_driver_was_reloaded_under_it(library: FakeNvml) -> None:
    """Driver gone: Unknown, never healthy.

    Driver back: the session reopens with the library from the disk, and events arrive again.
    """
    session = _session(library)
    address = PciAddress.parse(FIRST)
    session.describe([address])
    library.end_session(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    gone = [session.observe([address])[address] for _ in range(2)]
    library.end_session(0)
    # The pause between two attempts is counted in looks, one after the first failure.
    back = [session.observe([address])[address] for _ in range(3)]
    library.raise_xid(FIRST, 79)

    after = session.observe([address])[address]

    assert [[observation.reason for observation in look] for look in gone] == [["unmonitored"], ["unmonitored"]]
    assert back[-1] == []
    assert [observation.reason for observation in after] == ["xid"]


def test_refusal_of_one_function_leaves_the_others(library: FakeNvml) -> None:
    """As a driver that does not support one query."""
    library.set(FIRST, refuses=(("nvmlDeviceGetName", pynvml.NVML_ERROR_NOT_SUPPORTED),))

    gpu = _session(library).describe([PciAddress.parse(FIRST)])[PciAddress.parse(FIRST)]

    assert (gpu.name, gpu.memory_bytes) == ("", 80 * GIB)
