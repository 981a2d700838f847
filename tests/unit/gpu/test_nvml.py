"""NVML as the nvidia plugin uses it, with a library that a test sets by hand."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from topobus.gpu.nvml.nvml import load_nvml
from topobus.gpu.nvml.nvml_library import NvmlUnavailable
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.health import HealthState, RecoveryAction
from unit.gpu.nvml_stand_in import FIRST, SECOND, Gpu, Library, observed, started


def test_describe_gives_identity_and_memory_when_the_library_tells() -> None:
    """UUID, name, memory and minor come from NVML.

    A GPU that NVML does not know is left out with a warning.
    """
    nvml = started(Library(Gpu(FIRST)))

    nvml_gpus = nvml.describe([FIRST, SECOND])

    assert (nvml_gpus[FIRST].uuid, nvml_gpus[FIRST].memory_bytes, nvml_gpus[FIRST].minor) == (
        "GPU-nvml-18",
        85_520_809_984,
        0x18,
    )
    assert SECOND not in nvml_gpus
    assert nvml.warnings == ["NVML: Not Found"]


def test_describe_tells_what_selectors_ask_for_when_the_library_does() -> None:
    """Under the names of NVIDIA's own driver.

    A GPU that refuses its MIG mode has MIG off, and what is not told is absent.
    """

    class Telling(Library):
        """Tells all of it."""

        def nvmlDeviceGetIndex(self, gpu: Gpu) -> int:  # noqa: N802
            return 3

        def nvmlDeviceGetArchitecture(self, gpu: Gpu) -> int:  # noqa: N802
            return int(pynvml.NVML_DEVICE_ARCH_HOPPER)

        def nvmlDeviceGetBrand(self, gpu: Gpu) -> int:  # noqa: N802
            return int(pynvml.NVML_BRAND_UNKNOWN)

        def nvmlDeviceGetCudaComputeCapability(self, gpu: Gpu) -> tuple[int, int]:  # noqa: N802
            return (9, 0)

        def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:  # noqa: N802
            self._check(gpu, "mig")
            return [1, 0]

        def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
            return 12020

    nvml_gpus = started(Telling(Gpu(FIRST), Gpu(SECOND, refuses=frozenset({"mig"})))).describe([FIRST, SECOND])

    facts = {"index": 3, "architecture": "Hopper", "cudaComputeCapability": "9.0", "cudaDriverVersion": "12.2.0"}
    assert nvml_gpus[FIRST].facts == {**facts, "migCapable": True, "migEnabled": True}
    assert nvml_gpus[SECOND].facts == {**facts, "migCapable": False, "migEnabled": False}
    assert started(Library(Gpu(FIRST))).describe([FIRST])[FIRST].facts == {}


def test_describe_adds_up_links_when_two_gpus_share_several() -> None:
    """Bandwidth to a peer is the sum of the links to it, in Gbit/s.

    Links that are down count nothing.
    """
    nvml_gpus = started(Library(Gpu(FIRST, links=[str(SECOND), str(SECOND), ""]))).describe([FIRST])

    assert nvml_gpus[FIRST].links == {SECOND: 400.0}


def test_describe_goes_on_when_the_library_refuses_one_question() -> None:
    """What a driver does not support is left empty and said; the rest is told."""
    nvml = started(Library(Gpu(FIRST, refuses=frozenset({"memory", "events"}))))

    nvml_gpus = nvml.describe([FIRST])

    assert (nvml_gpus[FIRST].memory_bytes, nvml_gpus[FIRST].uuid) == (0, "GPU-nvml-18")
    assert len(nvml.warnings) == 2


@pytest.mark.parametrize(
    ("gpu", "wanted"),
    [
        pytest.param(Gpu(FIRST), [], id="healthy"),
        pytest.param(
            Gpu(FIRST, is_lost=True), [("gpu-lost", HealthState.UNHEALTHY, RecoveryAction.REBOOT_NODE)], id="lost"
        ),
        pytest.param(
            Gpu(FIRST, rows=(0, 9, 0, 1)),
            [("row-remap-failed", HealthState.UNHEALTHY, RecoveryAction.REPLACE)],
            id="no spare row",
        ),
        pytest.param(
            Gpu(FIRST, rows=(0, 1, 1, 0)),
            [("row-remap-pending", HealthState.DEGRADED, RecoveryAction.RESET_DEVICE)],
            id="row waits",
        ),
        pytest.param(
            Gpu(FIRST, clocks=0x40), [("thermal-slowdown", HealthState.DEGRADED, RecoveryAction.WAIT)], id="too hot"
        ),
        pytest.param(Gpu(FIRST, clocks=0x4), [], id="power cap is no fault"),
        pytest.param(
            Gpu(FIRST, recovery=2),
            [("recovery-advised", HealthState.UNHEALTHY, RecoveryAction.REBOOT_NODE)],
            id="driver advises reboot",
        ),
        pytest.param(Gpu(FIRST, refuses=frozenset({"rows"})), [], id="no row remapping on this GPU"),
    ],
)
def test_observe_tells_what_is_wrong_when_the_library_knows(
    gpu: Gpu, wanted: list[tuple[str, HealthState, RecoveryAction]]
) -> None:
    """Each of NVML's signs becomes one observation with what to do about it."""
    assert [
        (observation.reason, observation.state, observation.action) for observation in observed(Library(gpu))
    ] == wanted


def test_observe_tells_a_lost_link_when_links_were_up_before() -> None:
    """Fewer NVLinks than were seen before is Degraded."""
    gpu = Gpu(FIRST, links=["switch", "switch"])
    nvml = started(Library(gpu))
    nvml.describe([FIRST])
    before = nvml.observe([FIRST])[FIRST]
    gpu.links[1] = ""

    assert before == []
    assert [observation.reason for observation in nvml.observe([FIRST])[FIRST]] == ["nvlink-down"]


def test_observe_reports_xid_of_its_gpu_when_an_event_came() -> None:
    """An Xid makes exactly its own GPU Unhealthy, once; application faults make none."""
    library = Library(Gpu(FIRST), Gpu(SECOND))
    nvml = started(library)
    nvml.describe([FIRST, SECOND])
    library.events = [(SECOND, 79), (FIRST, 31)]

    seen = nvml.observe([FIRST, SECOND])

    assert seen[FIRST] == []
    assert [(observation.evidence, observation.action, observation.is_sticky) for observation in seen[SECOND]] == [
        ({"xid": "79"}, RecoveryAction.REBOOT_NODE, True)
    ]
    assert nvml.observe([SECOND])[SECOND] == []


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_UNKNOWN,
    ],
)
def test_observe_knows_nothing_when_the_session_is_stale(error: int) -> None:
    """A driver that was replaced below the session makes its GPUs Unknown, `unmonitored`: no answer
    is no health.
    """
    library = Library(Gpu(FIRST), Gpu(SECOND))
    nvml = started(library)
    nvml.describe([FIRST, SECOND])
    library.session_error = error

    seen = nvml.observe([FIRST, SECOND])

    assert {address: [(sign.reason, sign.state) for sign in signs] for address, signs in seen.items()} == {
        FIRST: [("unmonitored", HealthState.UNKNOWN)],
        SECOND: [("unmonitored", HealthState.UNKNOWN)],
    }


def test_describe_keeps_what_was_told_last_when_the_session_is_stale() -> None:
    """The inventory does not change because a driver is being replaced.

    A GPU that left the bus is forgotten.
    """
    library = Library(Gpu(FIRST), Gpu(SECOND))
    nvml = started(library)
    before = nvml.describe([FIRST, SECOND])
    library.session_error = pynvml.NVML_ERROR_UNKNOWN

    assert nvml.describe([FIRST, SECOND]) == before
    assert nvml.describe([FIRST]) == {FIRST: before[FIRST]}
    assert nvml.describe([FIRST, SECOND]) == {FIRST: before[FIRST]}


def test_observe_opens_the_session_anew_when_it_went_stale() -> None:
    """The next look opens another session, which is asked from then on and watches Xid errors.

    Failed attempts are further and further apart.
    """
    library, successor = Library(Gpu(FIRST)), Library(Gpu(FIRST))
    nvml = started(library, None, None, successor)
    nvml.describe([FIRST])
    library.session_error = pynvml.NVML_ERROR_UNINITIALIZED

    looks = [bool(nvml.observe([FIRST])[FIRST]) for _ in range(8)]
    successor.events = [(FIRST, 79)]

    # Attempts at looks 2, 4 and 7: after each failure twice as many looks are waited.
    assert looks == [True, True, True, True, True, True, False, False]
    assert [observation.evidence for observation in nvml.observe([FIRST])[FIRST]] == [{"xid": "79"}]


def test_observe_blames_one_gpu_when_it_alone_does_not_answer() -> None:
    """A single GPU that NVML fails on is Unknown.

    The others are looked at on, in the same session.
    """
    library = Library(Gpu(FIRST), Gpu(SECOND))
    nvml = started(library, Library())
    nvml.describe([FIRST, SECOND])
    library.gpus[FIRST].error = pynvml.NVML_ERROR_UNKNOWN

    seen = [nvml.observe([FIRST, SECOND]) for _ in range(3)]

    assert [[observation.reason for observation in look[FIRST]] for look in seen] == [["unmonitored"]] * 3
    assert [look[SECOND] for look in seen] == [[]] * 3
    library.gpus[FIRST].error = 0
    assert nvml.observe([FIRST, SECOND]) == {FIRST: [], SECOND: []}


def test_observe_tells_a_lost_gpu_at_every_look_when_it_stays_lost() -> None:
    """A GPU that NVML lost does not become well because NVML does not list it any more."""
    library = Library(Gpu(FIRST), Gpu(SECOND))
    nvml = started(library)
    nvml.describe([FIRST, SECOND])
    library.gpus[FIRST].is_lost = True
    first = nvml.observe([FIRST, SECOND])[FIRST]
    del library.gpus[FIRST]

    later = [nvml.observe([FIRST, SECOND])[FIRST] for _ in range(2)]
    nvml.describe([FIRST, SECOND])

    assert [observation.reason for observation in first] == ["gpu-lost"]
    assert [
        [observation.reason for observation in look] for look in (*later, nvml.observe([FIRST, SECOND])[FIRST])
    ] == [["gpu-lost"]] * 3


def test_observe_advises_a_reset_when_the_gpu_refuses_to_work_without() -> None:
    """NVML's "reset required" is evidence, not silence."""
    seen = observed(Library(Gpu(FIRST, error=pynvml.NVML_ERROR_RESET_REQUIRED)))

    assert [(observation.reason, observation.state, observation.action) for observation in seen] == [
        ("recovery-advised", HealthState.UNHEALTHY, RecoveryAction.RESET_DEVICE)
    ]


def test_load_nvml_says_why_when_there_is_no_library(tmp_path: Path) -> None:
    """A library folder without the library is an ordinary state with a sentence, not a crash."""
    with pytest.raises(NvmlUnavailable, match=r"libnvidia-ml\.so\.1 cannot be used"):
        load_nvml(Tree(HardwareSettings(root=str(tmp_path), library_path=str(tmp_path))))
