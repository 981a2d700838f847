"""MIG of the libnvidia-ml of a profile through the real pynvml: placements, what fits beside what,
instances that outlive a session, and what is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_uint
from pathlib import Path

import pynvml
import pytest

from support.fake_mig import A100_40, H100_80, MODELS, MigModel, as_somebody, make_instance, mig_gpu
from support.fake_nvml import FakeGpu, FakeNvml, fake_nvml, needs_gcc
from topobus.gpu.mig.nvml_mig import destroy_instance, make_compute_instance, make_gpu_instance, read_mig, read_profiles
from topobus.gpu.mig.values import MigGpu

pytestmark = needs_gcc

FIRST, SECOND = "0000:18:00.0", "0000:1a:00.0"


@pytest.fixture
def library(tmp_path: Path) -> Iterator[FakeNvml]:
    """An A100 in MIG mode beside a GPU that cannot be cut."""
    with fake_nvml(
        tmp_path / "lib", mig_gpu(A100_40, FIRST), FakeGpu(address=SECOND, name="NVIDIA L4", minor=1)
    ) as fake:
        yield fake


def _read(library: FakeNvml, address: str = FIRST) -> MigGpu:
    with as_somebody(library.folder):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(address)
        return read_mig(pynvml, handle, read_profiles(pynvml, handle))


def _remaining(library: FakeNvml, model: MigModel, address: str = FIRST) -> dict[str, int]:
    with as_somebody(library.folder):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(address)
        ids = {name: profile for (name, _), (profile, _) in model.placements().items()}
        return {
            name: pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile) for name, profile in ids.items()
        }


@pytest.mark.parametrize("model", sorted(MODELS))
def test_profiles_and_placements_are_those_of_the_model(tmp_path: Path, model: str) -> None:
    """What is written into the profile comes back through the real pynvml, with NVIDIA's ids."""
    with fake_nvml(tmp_path / "lib", mig_gpu(MODELS[model], FIRST)) as fake:
        seen = _read(fake)

    places = {
        (profile.name, start): (profile.id, profile.size) for profile in seen.profiles for start in profile.starts
    }
    assert places == MODELS[model].placements()
    assert [profile.id for profile in seen.profiles] == [0, 5, 9, 14, 15, 19, 20]


def test_gpu_without_mig_has_no_profiles(library: FakeNvml) -> None:
    """As an L4 beside an A100."""
    with as_somebody(library.folder):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(SECOND)

        assert read_profiles(pynvml, handle) == ()
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceCreateGpuInstance(handle, 19)


def test_capacity_shrinks_as_nvidias_guide_shows_when_a_half_is_made(library: FakeNvml) -> None:
    """One 3g takes four memory slices: four of seven 1g are left when it lies in the front, three
    when it lies behind.
    """
    before = _remaining(library, A100_40)
    make_instance(library.folder, FIRST, A100_40, "3g.20gb", 4)

    after = _remaining(library, A100_40)

    assert before == {"1g.5gb": 7, "1g.5gb+me": 1, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1}
    assert after == {"1g.5gb": 4, "1g.5gb+me": 1, "1g.10gb": 2, "2g.10gb": 2, "3g.20gb": 1, "4g.20gb": 1, "7g.40gb": 0}


def test_instance_outlives_the_session_and_has_the_drivers_numbers(library: FakeNvml) -> None:
    """Somebody makes instances and goes.

    Whoever comes next sees them, with their places, sizes, UUIDs and memory.
    """
    make_instance(library.folder, FIRST, A100_40, "3g.20gb", 4, computes=(0, 1))
    make_instance(library.folder, FIRST, A100_40, "1g.5gb+me", 0)

    half, slice_ = _read(library).instances

    assert (half.id, half.profile, half.start, half.size) == (2, 9, 4, 4)
    assert [(compute.id, compute.name, compute.slices, compute.start) for compute in half.computes] == [
        (0, "1c.3g.20gb", 1, 0),
        (1, "2c.3g.20gb", 2, 1),
    ]
    assert (slice_.id, slice_.start, slice_.computes[0].name, slice_.computes[0].share.jpeg_engines) == (
        7,
        0,
        "1g.5gb+me",
        1,
    )
    assert len({compute.uuid for instance in (half, slice_) for compute in instance.computes}) == 3


def test_place_that_is_taken_is_refused(library: FakeNvml) -> None:
    """INSUFFICIENT_RESOURCES, as the driver answers, and nothing has changed."""
    make_instance(library.folder, FIRST, A100_40, "3g.20gb", 4)
    before = _read(library)
    with as_somebody(library.folder):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(FIRST)
        profile = before.profile(19)
        assert profile is not None

        with pytest.raises(pynvml.NVMLError_InsufficientResources):
            make_gpu_instance(pynvml, handle, profile, 5)

    assert _read(library) == before


def test_instance_in_use_stays(library: FakeNvml) -> None:
    """A program in it: IN_USE, also for the GPU instance; when it has ended, both go."""
    gi = make_instance(library.folder, FIRST, A100_40, "2g.10gb", 2)
    library.set(FIRST, processes=((4711, 1 << 30, gi, 0),))
    with as_somebody(library.folder):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(FIRST)
        with pytest.raises(pynvml.NVMLError_InUse):
            destroy_instance(pynvml, handle, gi)
        library.set(FIRST, processes=())
        destroy_instance(pynvml, handle, gi)
        # Once more is no error.
        destroy_instance(pynvml, handle, gi)

    assert _read(library).instances == ()


def test_gpu_instance_without_a_compute_instance_is_seen(library: FakeNvml) -> None:
    """No MIG device stands for it, and its memory slices are taken all the same."""
    make_instance(library.folder, FIRST, A100_40, "2g.10gb", 2, computes=())

    seen = _read(library)

    assert [(instance.id, instance.start, instance.computes) for instance in seen.instances] == [(4, 2, ())]


def test_instance_made_anew_has_another_uuid(tmp_path: Path) -> None:
    """The numbers return, the UUID does not."""
    with fake_nvml(tmp_path / "lib", mig_gpu(H100_80, FIRST)) as fake, as_somebody(fake.folder):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(FIRST)
        profile = next(profile for profile in read_profiles(pynvml, handle) if profile.id == 14)
        made = []
        for _ in range(2):
            gi = make_gpu_instance(pynvml, handle, profile, 4)
            made.append((gi, make_compute_instance(pynvml, handle, gi, profile.slices)))
            destroy_instance(pynvml, handle, gi)

    assert made[0][0] == made[1][0] == 5
    assert made[0][1].uuid != made[1][1].uuid


def test_memory_of_an_instance_is_its_own(library: FakeNvml) -> None:
    """And a function that NVML does not know for MIG devices is refused."""
    gi = make_instance(library.folder, FIRST, A100_40, "1g.10gb", 6)
    library.set(FIRST, processes=((4711, 1 << 30, gi, 0), (4712, 2 << 30, 99, 0)))
    with as_somebody(library.folder):
        device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(pynvml.nvmlDeviceGetHandleByPciBusId(FIRST), 0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)

        assert (memory.total, memory.used) == (9856 << 20, 1 << 30)
        assert [process.pid for process in processes] == [4711]
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetRemappedRows(device)
        count = c_uint(0)
        assert (
            pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(
                pynvml.nvmlDeviceGetHandleByPciBusId(FIRST), 15, None, byref(count)
            )
            == 0
        )
        assert count.value == 4
