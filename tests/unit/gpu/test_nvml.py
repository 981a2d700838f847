"""NVML as the nvidia plugin uses it, with a library that a test sets by hand.

The stand-in has the very functions of pynvml that are used, with pynvml's own error classes and constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from topobus.devicekit.driver import PrepareContext
from topobus.domain.device import LinkClass
from topobus.domain.health import HealthState, Observation, RecoveryAction
from topobus.domain.pci import PciAddress
from topobus.domain.request import Owner, OwnerKind
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.gpu.plugins.nvml import Nvml, NvmlUnavailable, XidTable, load_nvml
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree

_FIRST, _SECOND = PciAddress.parse("0000:18:00.0"), PciAddress.parse("0000:1a:00.0")
_OWNER = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")
_PROFILE = Path(__file__).parent.parent.parent / "data" / "profiles" / "h100-pair.toml"


@dataclass
class _Gpu:
    """One GPU of the stand-in."""

    address: PciAddress
    links: list[str] = field(default_factory=list)
    """Per link: a peer's address, `switch`, or empty for a link that is down."""
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    clocks: int = 0
    recovery: int = 0
    is_lost: bool = False
    refuses: frozenset[str] = frozenset()
    error: int = 0
    """What every question to this GPU is answered with; 0: it answers."""


class _Library:
    """Stands for the module pynvml; what is not here (constants, errors) comes from pynvml itself."""

    def __init__(self, *gpus: _Gpu) -> None:
        self.gpus = {gpu.address: gpu for gpu in gpus}
        self.events: list[tuple[PciAddress, int]] = []
        self.session_error = 0
        """What every question of this session is answered with; 0: it is good."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> _Gpu:  # noqa: N802 - NVML's own name
        gpu = self.gpus.get(PciAddress.parse(bus_id))
        if self.session_error:
            raise pynvml.NVMLError(self.session_error)
        if gpu is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu

    def nvmlDeviceGetPciInfo(self, gpu: _Gpu) -> SimpleNamespace:  # noqa: N802
        if gpu.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(busId=f"{gpu.address.domain:08X}:{str(gpu.address).partition(':')[2].upper()}".encode())

    def nvmlDeviceGetUUID(self, gpu: _Gpu) -> str:  # noqa: N802
        self._check(gpu, "uuid")
        return f"GPU-nvml-{gpu.address.bus:x}"

    def nvmlDeviceGetName(self, gpu: _Gpu) -> str:  # noqa: N802
        self._check(gpu, "name")
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, gpu: _Gpu) -> SimpleNamespace:  # noqa: N802
        self._check(gpu, "memory")
        return SimpleNamespace(total=85_520_809_984)

    def nvmlDeviceGetMinorNumber(self, gpu: _Gpu) -> int:  # noqa: N802
        return gpu.address.bus

    def nvmlDeviceGetNvLinkState(self, gpu: _Gpu, link: int) -> int:  # noqa: N802
        if link >= len(gpu.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(bool(gpu.links[link]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: _Gpu, link: int) -> int:  # noqa: N802
        is_switch = gpu.links[link] == "switch"
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if is_switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: _Gpu, link: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"0000{gpu.links[link]}".upper().encode())

    def nvmlDeviceGetFieldValues(self, gpu: _Gpu, fields: Sequence[int]) -> list[SimpleNamespace]:  # noqa: N802
        values = {pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: 25_000, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: gpu.recovery}
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=values[each_field])) for each_field in fields]

    def nvmlDeviceGetRemappedRows(self, gpu: _Gpu) -> tuple[int, int, int, int]:  # noqa: N802
        self._check(gpu, "rows")
        return gpu.rows

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: _Gpu) -> int:  # noqa: N802
        return gpu.clocks

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        return "events"

    def nvmlDeviceRegisterEvents(self, gpu: _Gpu, _types: int, _events: str) -> None:  # noqa: N802
        self._check(gpu, "events")

    def nvmlEventSetWait_v2(self, _events: str, _timeout_ms: int) -> SimpleNamespace:  # noqa: N802
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        address, xid = self.events.pop(0)
        return SimpleNamespace(device=self.gpus[address], eventData=xid)

    def _check(self, gpu: _Gpu, what: str) -> None:
        if self.session_error or gpu.error:
            raise pynvml.NVMLError(self.session_error or gpu.error)
        if what in gpu.refuses:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class _MigLibrary(_Library):
    """The first GPU is in MIG mode."""

    def nvmlDeviceGetIndex(self, gpu: _Gpu) -> int:  # noqa: N802
        return list(self.gpus).index(gpu.address)

    def nvmlDeviceGetMigMode(self, gpu: _Gpu) -> list[int]:  # noqa: N802
        return [int(gpu.address == min(self.gpus)), 0]

    def nvmlDeviceGetArchitecture(self, _gpu: _Gpu) -> int:  # noqa: N802
        return int(pynvml.NVML_DEVICE_ARCH_HOPPER)

    def nvmlDeviceGetBrand(self, _gpu: _Gpu) -> int:  # noqa: N802
        return int(pynvml.NVML_BRAND_UNKNOWN)

    def nvmlDeviceGetCudaComputeCapability(self, _gpu: _Gpu) -> tuple[int, int]:  # noqa: N802
        return (9, 0)

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 12020


def _nvml(library: _Library, *successors: _Library | None) -> Nvml:
    """Give a session whose successors open in this order; None is an attempt that fails, and after the last nothing opens."""
    waiting = list(successors)

    def reopen(_module: Any) -> _Library:
        successor = waiting.pop(0) if waiting else None
        if successor is None:
            raise NvmlUnavailable("Driver/library version mismatch")
        return successor

    return Nvml(library, reopen=reopen)


def _observe(library: _Library) -> list[Observation]:
    nvml = _nvml(library)
    nvml.describe([_FIRST])
    return nvml.observe([_FIRST])[_FIRST]


def test_describe_gives_identity_and_memory_when_the_library_tells() -> None:
    """UUID, name, memory and minor come from NVML; a GPU that NVML does not know is left out with a warning."""
    nvml = _nvml(_Library(_Gpu(_FIRST)))

    nvml_gpus = nvml.describe([_FIRST, _SECOND])

    assert (nvml_gpus[_FIRST].uuid, nvml_gpus[_FIRST].memory_bytes, nvml_gpus[_FIRST].minor) == ("GPU-nvml-18", 85_520_809_984, 0x18)
    assert _SECOND not in nvml_gpus
    assert nvml.warnings == ["NVML: Not Found"]


def test_describe_tells_what_selectors_ask_for_when_the_library_does() -> None:
    """Under the names of NVIDIA's own driver; a GPU that refuses its MIG mode has MIG off, and what is not told is absent."""

    class Telling(_Library):
        """Tells all of it."""

        def nvmlDeviceGetIndex(self, gpu: _Gpu) -> int:  # noqa: N802
            return 3

        def nvmlDeviceGetArchitecture(self, gpu: _Gpu) -> int:  # noqa: N802
            return int(pynvml.NVML_DEVICE_ARCH_HOPPER)

        def nvmlDeviceGetBrand(self, gpu: _Gpu) -> int:  # noqa: N802
            return int(pynvml.NVML_BRAND_UNKNOWN)

        def nvmlDeviceGetCudaComputeCapability(self, gpu: _Gpu) -> tuple[int, int]:  # noqa: N802
            return (9, 0)

        def nvmlDeviceGetMigMode(self, gpu: _Gpu) -> list[int]:  # noqa: N802
            self._check(gpu, "mig")
            return [1, 0]

        def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
            return 12020

    nvml_gpus = _nvml(Telling(_Gpu(_FIRST), _Gpu(_SECOND, refuses=frozenset({"mig"})))).describe([_FIRST, _SECOND])

    facts = {"index": 3, "architecture": "Hopper", "cudaComputeCapability": "9.0", "cudaDriverVersion": "12.2.0"}
    assert nvml_gpus[_FIRST].facts == {**facts, "migEnabled": True}
    assert nvml_gpus[_SECOND].facts == {**facts, "migEnabled": False}
    assert _nvml(_Library(_Gpu(_FIRST))).describe([_FIRST])[_FIRST].facts == {}


def test_describe_adds_up_links_when_two_gpus_share_several() -> None:
    """Bandwidth to a peer is the sum of the links to it, in Gbit/s; links that are down count nothing."""
    nvml_gpus = _nvml(_Library(_Gpu(_FIRST, links=[str(_SECOND), str(_SECOND), ""]))).describe([_FIRST])

    assert nvml_gpus[_FIRST].links == {_SECOND: 400.0}


def test_describe_goes_on_when_the_library_refuses_one_question() -> None:
    """What a driver does not support is left empty and said; the rest is told."""
    nvml = _nvml(_Library(_Gpu(_FIRST, refuses=frozenset({"memory", "events"}))))

    nvml_gpus = nvml.describe([_FIRST])

    assert (nvml_gpus[_FIRST].memory_bytes, nvml_gpus[_FIRST].uuid) == (0, "GPU-nvml-18")
    assert len(nvml.warnings) == 2


@pytest.mark.parametrize(
    ("gpu", "wanted"),
    [
        pytest.param(_Gpu(_FIRST), [], id="healthy"),
        pytest.param(_Gpu(_FIRST, is_lost=True), [("gpu-lost", HealthState.UNHEALTHY, RecoveryAction.REBOOT_NODE)], id="lost"),
        pytest.param(
            _Gpu(_FIRST, rows=(0, 9, 0, 1)), [("row-remap-failed", HealthState.UNHEALTHY, RecoveryAction.REPLACE)], id="no spare row"
        ),
        pytest.param(
            _Gpu(_FIRST, rows=(0, 1, 1, 0)), [("row-remap-pending", HealthState.DEGRADED, RecoveryAction.RESET_DEVICE)], id="row waits"
        ),
        pytest.param(_Gpu(_FIRST, clocks=0x40), [("thermal-slowdown", HealthState.DEGRADED, RecoveryAction.WAIT)], id="too hot"),
        pytest.param(_Gpu(_FIRST, clocks=0x4), [], id="power cap is no fault"),
        pytest.param(
            _Gpu(_FIRST, recovery=2), [("recovery-advised", HealthState.UNHEALTHY, RecoveryAction.REBOOT_NODE)], id="driver advises reboot"
        ),
        pytest.param(_Gpu(_FIRST, refuses=frozenset({"rows"})), [], id="no row remapping on this GPU"),
    ],
)
def test_observe_tells_what_is_wrong_when_the_library_knows(gpu: _Gpu, wanted: list[tuple[str, HealthState, RecoveryAction]]) -> None:
    """Each of NVML's signs becomes one observation with what to do about it."""
    assert [(observation.reason, observation.state, observation.action) for observation in _observe(_Library(gpu))] == wanted


def test_observe_tells_a_lost_link_when_links_were_up_before() -> None:
    """Fewer NVLinks than were seen before is Degraded."""
    gpu = _Gpu(_FIRST, links=["switch", "switch"])
    nvml = _nvml(_Library(gpu))
    nvml.describe([_FIRST])
    before = nvml.observe([_FIRST])[_FIRST]
    gpu.links[1] = ""

    assert before == []
    assert [observation.reason for observation in nvml.observe([_FIRST])[_FIRST]] == ["nvlink-down"]


def test_observe_reports_xid_of_its_gpu_when_an_event_came() -> None:
    """An Xid makes exactly its own GPU Unhealthy, once; application faults make none."""
    library = _Library(_Gpu(_FIRST), _Gpu(_SECOND))
    nvml = _nvml(library)
    nvml.describe([_FIRST, _SECOND])
    library.events = [(_SECOND, 79), (_FIRST, 31)]

    seen = nvml.observe([_FIRST, _SECOND])

    assert seen[_FIRST] == []
    assert [(observation.evidence, observation.action, observation.is_sticky) for observation in seen[_SECOND]] == [
        ({"xid": "79"}, RecoveryAction.REBOOT_NODE, True)
    ]
    assert nvml.observe([_SECOND])[_SECOND] == []


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
    """A driver that was replaced below the session makes its GPUs Unknown, `unmonitored`: no answer is no health."""
    library = _Library(_Gpu(_FIRST), _Gpu(_SECOND))
    nvml = _nvml(library)
    nvml.describe([_FIRST, _SECOND])
    library.session_error = error

    seen = nvml.observe([_FIRST, _SECOND])

    assert {address: [(sign.reason, sign.state) for sign in signs] for address, signs in seen.items()} == {
        _FIRST: [("unmonitored", HealthState.UNKNOWN)],
        _SECOND: [("unmonitored", HealthState.UNKNOWN)],
    }


def test_describe_keeps_what_was_told_last_when_the_session_is_stale() -> None:
    """The inventory does not change because a driver is being replaced; a GPU that left the bus is forgotten."""
    library = _Library(_Gpu(_FIRST), _Gpu(_SECOND))
    nvml = _nvml(library)
    before = nvml.describe([_FIRST, _SECOND])
    library.session_error = pynvml.NVML_ERROR_UNKNOWN

    assert nvml.describe([_FIRST, _SECOND]) == before
    assert nvml.describe([_FIRST]) == {_FIRST: before[_FIRST]}
    assert nvml.describe([_FIRST, _SECOND]) == {_FIRST: before[_FIRST]}


def test_observe_opens_the_session_anew_when_it_went_stale() -> None:
    """The next look opens another session, which is asked from then on and watches Xid errors; failed attempts are further and further apart."""
    library, successor = _Library(_Gpu(_FIRST)), _Library(_Gpu(_FIRST))
    nvml = _nvml(library, None, None, successor)
    nvml.describe([_FIRST])
    library.session_error = pynvml.NVML_ERROR_UNINITIALIZED

    looks = [bool(nvml.observe([_FIRST])[_FIRST]) for _ in range(8)]
    successor.events = [(_FIRST, 79)]

    # Attempts at looks 2, 4 and 7: after each failure twice as many looks are waited.
    assert looks == [True, True, True, True, True, True, False, False]
    assert [observation.evidence for observation in nvml.observe([_FIRST])[_FIRST]] == [{"xid": "79"}]


def test_observe_blames_one_gpu_when_it_alone_does_not_answer() -> None:
    """A single GPU that NVML fails on is Unknown; the others are looked at on, in the same session."""
    library = _Library(_Gpu(_FIRST), _Gpu(_SECOND))
    nvml = _nvml(library, _Library())
    nvml.describe([_FIRST, _SECOND])
    library.gpus[_FIRST].error = pynvml.NVML_ERROR_UNKNOWN

    seen = [nvml.observe([_FIRST, _SECOND]) for _ in range(3)]

    assert [[observation.reason for observation in look[_FIRST]] for look in seen] == [["unmonitored"]] * 3
    assert [look[_SECOND] for look in seen] == [[]] * 3
    library.gpus[_FIRST].error = 0
    assert nvml.observe([_FIRST, _SECOND]) == {_FIRST: [], _SECOND: []}


def test_observe_tells_a_lost_gpu_at_every_look_when_it_stays_lost() -> None:
    """A GPU that NVML lost does not become well because NVML does not list it any more."""
    library = _Library(_Gpu(_FIRST), _Gpu(_SECOND))
    nvml = _nvml(library)
    nvml.describe([_FIRST, _SECOND])
    library.gpus[_FIRST].is_lost = True
    first = nvml.observe([_FIRST, _SECOND])[_FIRST]
    del library.gpus[_FIRST]

    later = [nvml.observe([_FIRST, _SECOND])[_FIRST] for _ in range(2)]
    nvml.describe([_FIRST, _SECOND])

    assert [observation.reason for observation in first] == ["gpu-lost"]
    assert [[observation.reason for observation in look] for look in (*later, nvml.observe([_FIRST, _SECOND])[_FIRST])] == [
        ["gpu-lost"]
    ] * 3


def test_observe_advises_a_reset_when_the_gpu_refuses_to_work_without() -> None:
    """NVML's "reset required" is evidence, not silence."""
    seen = _observe(_Library(_Gpu(_FIRST, error=pynvml.NVML_ERROR_RESET_REQUIRED)))

    assert [(observation.reason, observation.state, observation.action) for observation in seen] == [
        ("recovery-advised", HealthState.UNHEALTHY, RecoveryAction.RESET_DEVICE)
    ]


@pytest.mark.parametrize("xid", [8, 13, 31, 43, 45, 63, 68, 94, 106, 137, 154])
def test_xid_table_says_nothing_when_the_catalogue_restarts_or_ignores(xid: int) -> None:
    """RESTART_APP and IGNORE of NVIDIA's catalogue say nothing of the GPU: a contained memory error (94) does not take it out."""
    assert XidTable().observation(xid) is None


@pytest.mark.parametrize("xid", [92, 144, 149, 157])
def test_xid_table_degrades_when_the_catalogue_leaves_it_to_the_driver(xid: int) -> None:
    """What the driver's own recovery advice decides leaves the GPU in use."""
    observation = XidTable().observation(xid)

    assert observation is not None
    assert (observation.state, observation.is_sticky) == (HealthState.DEGRADED, False)


@pytest.mark.parametrize(
    ("xid", "action"),
    [
        (48, RecoveryAction.RESET_DEVICE),
        (74, RecoveryAction.RESET_DEVICE),
        (79, RecoveryAction.REBOOT_NODE),
        (109, RecoveryAction.RESET_DEVICE),
        (110, RecoveryAction.RESET_DEVICE),
        (136, RecoveryAction.RESET_DEVICE),
        (140, RecoveryAction.RESET_DEVICE),
        (151, RecoveryAction.REBOOT_NODE),
        (999, RecoveryAction.WAIT),
    ],
)
def test_xid_table_says_what_to_do_when_a_number_is_known(xid: int, action: RecoveryAction) -> None:
    """Known numbers have their action; an unknown one is a fault that may pass."""
    observation = XidTable().observation(xid)

    assert observation is not None
    assert (observation.action, observation.is_sticky) == (action, action is not RecoveryAction.WAIT)


def test_load_nvml_says_why_when_there_is_no_library(tmp_path: Path) -> None:
    """A library folder without the library is an ordinary state with a sentence, not a crash."""
    with pytest.raises(NvmlUnavailable, match=r"libnvidia-ml\.so\.1 cannot be used"):
        load_nvml(Tree(HardwareSettings(root=str(tmp_path), library_path=str(tmp_path))))


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedMachine:
    """Give two H100 under one switch."""
    return build(_PROFILE, tmp_path / "machine")


def test_driver_prefers_nvml_when_it_is_there(recorded: RecordedMachine) -> None:
    """With NVML a GPU has its UUID, exact memory and fabric peers; through switches every GPU on them is one."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    addresses = [PciAddress.parse(one) for one in recorded.pci("h100")]
    driver = NvidiaDriver(_nvml(_Library(*(_Gpu(address, links=["switch"] * 18) for address in addresses))))

    first, second = driver.discover(tree, read_machine(tree, "n1"))

    assert first.uuid == f"GPU-nvml-{addresses[0].bus:x}"
    assert first.capacity == {"memory": 85_520_809_984}
    assert [(link.peer, link.kind, link.bandwidth_gbps) for link in first.links] == [(second.name, LinkClass.FABRIC, 3600.0)]


def test_driver_degrades_to_sysfs_when_the_library_does_not_load(recorded: RecordedMachine, tmp_path: Path) -> None:
    """Without the library the GPUs are found all the same, and a warning says what is missing."""
    tree = Tree(HardwareSettings(root=str(recorded.root), library_path=str(tmp_path)))
    driver = NvidiaDriver()

    devices = driver.discover(tree, read_machine(tree, "n1"))

    assert [device.uuid[:4] for device in devices] == ["GPU-", "GPU-"]
    assert "without NVLink and ECC" in driver.warnings[0]


def test_driver_never_asks_nvml_when_the_tree_is_recorded(recorded: RecordedMachine) -> None:
    """A recorded machine's GPUs must not mix with those of the machine that runs this."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    driver = NvidiaDriver()

    assert len(driver.discover(tree, read_machine(tree, "n1"))) == 2
    assert driver.warnings == ()


def test_driver_does_not_offer_a_gpu_when_nvml_says_that_mig_is_on(recorded: RecordedMachine) -> None:
    """CUDA finds no device on a GPU in MIG mode, so it is not offered whole; its neighbour is."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    addresses = [PciAddress.parse(one) for one in recorded.pci("h100")]
    driver = NvidiaDriver(_nvml(_MigLibrary(*map(_Gpu, addresses))))

    devices = driver.discover(tree, read_machine(tree, "n1"))

    assert [device.pci for device in devices] == [addresses[1]]
    assert driver.warnings == (f"{addresses[0]} is not offered: MIG mode is on, and CUDA finds no device on the whole GPU",)


@pytest.mark.parametrize("is_known", [True, False], ids=["uuids-known", "one-uuid-unknown"])
def test_driver_never_leaves_the_variable_to_the_image(recorded: RecordedMachine, is_known: bool) -> None:
    """Images of CUDA say "all", which NVIDIA's runtime obeys where nobody says otherwise; a list that lacks one GPU would hide it."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    if not is_known:
        recorded.write(f"proc/driver/nvidia/gpus/{recorded.pci('h100')[0]}/information", "Device Minor: \t 0")
    driver = NvidiaDriver()
    devices = driver.discover(tree, read_machine(tree, "n1"))

    edits = driver.prepare(tree, devices, PrepareContext(owner=_OWNER))

    assert isinstance(edits, dict)
    assert edits[""].env["NVIDIA_VISIBLE_DEVICES"] == (",".join(device.uuid for device in devices) if is_known else "void")
    assert [node.path for node in edits[devices[0].name].device_nodes][:1] == ["/dev/nvidia0"]


def test_driver_tells_an_excluded_gpu_when_the_module_leaves_it_alone(recorded: RecordedMachine) -> None:
    """A GPU that the kernel module was told to leave alone is listed, and Unhealthy with the reason."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    recorded.write(f"proc/driver/nvidia/gpus/{recorded.pci('h100')[0]}/information", "Device Minor: \t 0\nGPU Excluded:\t Yes")
    driver = NvidiaDriver()
    devices = driver.discover(tree, read_machine(tree, "n1"))

    seen = driver.observe(tree, devices)

    assert [observation.reason for observation in seen[devices[0].name]] == ["gpu-excluded"]
    assert list(seen[devices[1].name]) == []
