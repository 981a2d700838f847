"""MIG instances that are made for claims: what is offered, what is made and destroyed, and what
somebody else has made.

Through the real pynvml and the kit's verbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pynvml
import pytest

from support.fake_mig import A100_40, as_somebody
from support.fake_nvml import needs_gcc
from support.mig_life import OTHER, MigLife, mig_life
from topobus.devicekit.device_record import Step
from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import PartitionSettings
from topobus.gpu.mig.nvml_mig import destroy_instance
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal
from topobus.values.partitions import partitioned

pytestmark = needs_gcc


@pytest.fixture
def life(tmp_path: Path) -> Iterator[MigLife]:
    """An H100 in MIG mode beside an L4, cut on demand, and the service's journal."""
    with mig_life(tmp_path) as made:
        yield made


def test_every_placement_is_a_device_with_counters(life: MigLife) -> None:
    """All of NVML's places, none of the GPU itself; the L4 is offered as ever and counts nothing.

    The kit finds no fault with any of them.
    """
    devices = life.discover()

    names = [name.removeprefix(f"{life.parent}-mig-") for name in devices if name.startswith(life.parent)]
    assert len(names) == 7 + 7 + 4 + 3 + 2 + 1 + 1
    assert {"1g-10gb-6", "1g-10gb-me-0", "1g-20gb-6", "2g-20gb-4", "3g-40gb-4", "4g-40gb-0", "7g-80gb-0"} <= set(names)
    (counted,) = life.node.discovery.counter_sets
    assert counted.name == life.parent
    assert partitioned(list(devices.values()), [counted])[2] == {}
    (other,) = [device for device in devices.values() if not device.parent]
    assert (other.model, other.consumes) == ("NVIDIA L4", ())
    assert not any("uuid" in device.attributes or device.uuid for device in devices.values() if device.parent)


def test_instance_is_made_for_a_claim_and_destroyed_after_it(life: MigLife) -> None:
    """The container gets the capabilities of what was made; asked again the same instance is given.

    Afterwards nothing is left, in NVML and in the journal.
    """
    device = life.device("2g-20gb-2")

    first, again = life.prepare(device), life.prepare(device)

    assert not isinstance(first, Refusal)
    assert first == again
    (instance,) = life.instances()
    assert (instance.profile, instance.start, len(instance.computes)) == (14, 2, 1)
    assert [node.path for node in first[device.name].device_nodes] == [
        "/dev/nvidia0", f"/dev/nvidia-caps/nvidia-cap{3 + instance.id * 9}", f"/dev/nvidia-caps/nvidia-cap{4 + instance.id * 9}",  # noqa: E501
    ]  # fmt: skip
    assert first[""].env["NVIDIA_VISIBLE_DEVICES"] == instance.computes[0].uuid
    life.unprepare(device)
    assert life.instances() == ()
    assert life.journal.steps_of(device.name) == ()


def test_claims_instances_are_destroyed_one_by_one(life: MigLife) -> None:
    """Two claims on one GPU: who leaves takes nothing of the other's."""
    first, second = life.device("3g-40gb-0"), life.device("1g-10gb-me-4")
    assert not isinstance(life.prepare(first), Refusal)
    assert not isinstance(life.prepare(second, owner=OTHER), Refusal)

    life.unprepare(first)

    assert [(instance.profile, instance.start) for instance in life.instances()] == [(20, 4)]


def test_instance_that_somebody_made_is_left_alone_and_counted(life: MigLife) -> None:
    """It is named in the warnings; what does not fit beside it is sick and says so.

    The counters lack what it takes; all else can be had.
    """
    gi = life.node.make("1g.10gb+me", 4)

    devices = life.discover()

    blocked = {
        name for name, seen in life.node.observe(list(devices.values())).items() if seen == [("mig-occupied", "")]
    }
    wanted = {
        "7g-80gb-0",
        "3g-40gb-4",
        "2g-20gb-4",
        "1g-20gb-4",
        "1g-10gb-4",
        *(f"1g-10gb-me-{start}" for start in range(7)),
    }
    assert blocked == {f"{life.parent}-mig-{name}" for name in wanted}
    (counted,) = life.node.discovery.counter_sets
    assert {key: counted.counters[key] for key in ("memory-slice-4", "memory-slice-5", "compute-slices", "ofa-engines", "profile-20")} == {  # noqa: E501
        "memory-slice-4": 0, "memory-slice-5": 1, "compute-slices": 6, "ofa-engines": 0, "profile-20": 0,
    }  # fmt: skip
    assert any(
        f"GPU instance {gi} (1g.10gb+me from memory slice 4 on) is somebody else's" in warning
        for warning in life.node.discovery.warnings
    )
    assert partitioned(list(devices.values()), [counted])[2] == {}
    assert not isinstance(life.prepare(devices[f"{life.parent}-mig-4g-40gb-0"]), Refusal)
    life.unprepare(devices[f"{life.parent}-mig-4g-40gb-0"])
    assert [instance.id for instance in life.instances()] == [gi]


def test_own_instances_are_not_somebody_elses_after_a_restart(life: MigLife) -> None:
    """The journal tells whose they are: the counters are whole, and nothing is reported."""
    device = life.device("2g-20gb-2")
    life.prepare(device)
    life.restart()

    devices = life.discover()

    assert life.node.observe(list(devices.values())) == {}
    assert life.node.discovery.counter_sets[0].counters["memory-slice-2"] == 1
    assert not any("somebody else" in warning for warning in life.node.discovery.warnings)


def test_instance_that_is_given_back_during_a_look_is_nobody_elses(life: MigLife) -> None:
    """The look asks NVML, then a claim gives its instance back, then the look reads the journal:
    nothing is reported, and nothing gets sick.
    """
    device = life.device("2g-20gb-2")
    life.prepare(device)
    acts = [lambda: life.unprepare(device)]

    def recorded(name: str) -> Sequence[Step]:
        while acts:
            acts.pop()()
        return life.journal.steps_of(name)

    life.driver.configure(HostServices(partitions=PartitionSettings(on_demand=True), recorded=recorded))
    devices = life.discover()

    assert acts == []
    assert life.node.observe(list(devices.values())) == {}
    assert life.node.discovery.counter_sets[0].counters["memory-slice-2"] == 1
    assert not any("somebody else" in warning for warning in life.node.discovery.warnings)


def test_prepare_is_refused_when_somebody_was_quicker(life: MigLife) -> None:
    """Between the allocation and the claim's pod somebody made an instance there: it stays, and the
    claim says why.
    """
    device = life.device("2g-20gb-2")
    gi = life.node.make("1g.10gb", 3)

    answer = life.prepare(device)

    assert isinstance(answer, Refusal)
    assert (answer.reasons[0].code, f"GPU instance {gi}" in answer.reasons[0].message) == ("mig-occupied", True)
    assert [instance.id for instance in life.instances()] == [gi]
    assert life.journal.steps_of(device.name) == ()


def test_what_nvml_refuses_leaves_nothing(life: MigLife) -> None:
    """The compute instance cannot be made: the GPU instance goes again, and the journal has
    forgotten it.
    """
    device = life.device("1g-10gb-0")
    life.node.library.set(
        life.node.first, refuses=(("nvmlGpuInstanceGetComputeInstanceProfileInfoV", pynvml.NVML_ERROR_NOT_SUPPORTED),)
    )

    answer = life.prepare(device)

    assert isinstance(answer, Refusal)
    assert answer.reasons[0].code == "mig-unreadable"
    assert life.instances() == ()
    assert life.journal.steps_of(device.name) == ()


def test_claim_with_a_refused_instance_keeps_none(life: MigLife) -> None:
    """Two instances for one claim, of which the second does not fit: the first one goes again."""
    devices = [life.device("1g-10gb-0"), life.device("1g-10gb-3")]
    gi = life.node.make("1g.10gb", 3)

    assert isinstance(life.prepare(*devices), Refusal)

    assert [instance.id for instance in life.instances()] == [gi]


def test_instance_in_use_is_not_given_up(life: MigLife) -> None:
    """A program outlives its pod: giving back fails with its name, and succeeds when it has ended.

    Meanwhile the place is nobody's.
    """
    device = life.device("1g-10gb-0")
    life.prepare(device)
    (instance,) = life.instances()
    life.node.library.set(life.node.first, processes=((4711, 1 << 30, instance.id, 0),))

    with pytest.raises(HardwareError, match="process 4711"):
        life.unprepare(device)
    half_done = life.journal.entries[device.name].half_done
    life.node.library.set(life.node.first, processes=())
    life.mend()

    assert [entry.owner for entry in half_done] == [life.owner]
    assert life.instances() == ()
    assert life.journal.steps_of(device.name) == ()


def test_instance_of_an_earlier_boot_is_made_anew_and_anothers_stays(life: MigLife) -> None:
    """A reboot takes all instances.

    What stands at the place now is somebody else's, also when it has the same number.
    """
    device = life.device("1g-10gb-0")
    life.prepare(device)
    life.reboot()
    answer = life.prepare(device)
    assert not isinstance(answer, Refusal)
    life.reboot()
    gi = life.node.make("1g.10gb", 0)

    life.unprepare(device)

    assert [instance.id for instance in life.instances()] == [gi]
    assert life.journal.steps_of(device.name) == ()


def test_instance_that_replaced_ours_stays(life: MigLife) -> None:
    """Somebody destroyed it and made another of the same size there: the UUID tells them apart."""
    device = life.device("1g-10gb-0")
    life.prepare(device)
    (instance,) = life.instances()
    with as_somebody(life.node.library.folder):
        destroy_instance(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(life.node.first), instance.id)
    gi = life.node.make("1g.10gb", 0)

    life.unprepare(device)

    assert [instance.id for instance in life.instances()] == [gi]


def test_mode_that_went_off_is_refused(life: MigLife) -> None:
    """The operator has switched MIG off since: nothing is made, and nobody gets the whole GPU for a
    slice.
    """
    device = life.device("1g-10gb-0")
    life.node.library.set(life.node.first, mig=(0, 0))

    answer = life.prepare(device)

    assert isinstance(answer, Refusal)
    assert answer.reasons[0].code == "device-not-offered"


def test_fault_of_an_instance_reaches_the_device_it_was_made_for(life: MigLife) -> None:
    """It was made after the last look."""
    device = life.device("1g-10gb-5")
    devices = list(life.discover().values())
    life.prepare(device)
    life.node.library.raise_xid(life.node.first, 109, 12, 0)

    assert life.node.observe(devices) == {device.name: [("xid", "109")]}


def test_placements_of_an_a100_share_one_jpeg_engine(tmp_path: Path) -> None:
    """An A100 has one JPEG engine, which the whole and the one +me take."""
    with mig_life(tmp_path, A100_40) as life:
        life.discover()
        (counted,) = life.node.discovery.counter_sets

    assert {key: counted.counters[key] for key in ("compute-slices", "decoders", "jpeg-engines", "ofa-engines", "profile-20")} == {  # noqa: E501
        "compute-slices": 7, "decoders": 5, "jpeg-engines": 1, "ofa-engines": 1, "profile-20": 1,
    }  # fmt: skip
