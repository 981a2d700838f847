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
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.machines import RecordedMachine, build

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


class _Library:
    """Stands for the module pynvml; what is not here (constants, errors) comes from pynvml itself."""

    def __init__(self, *gpus: _Gpu) -> None:
        self.gpus = {one.address: one for one in gpus}
        self.events: list[tuple[PciAddress, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> _Gpu:  # noqa: N802 - NVML's own name
        gpu = self.gpus.get(PciAddress.parse(bus_id))
        if gpu is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu

    def nvmlDeviceGetPciInfo(self, gpu: _Gpu) -> SimpleNamespace:  # noqa: N802
        if gpu.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(busId=f"{gpu.address.domain:08X}:{str(gpu.address).partition(':')[2].upper()}".encode())

    def nvmlDeviceGetUUID(self, gpu: _Gpu) -> str:  # noqa: N802
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
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=values[one])) for one in fields]

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
        if what in gpu.refuses:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _observe(library: _Library) -> list[Observation]:
    nvml = Nvml(library)
    nvml.describe([_FIRST])
    return nvml.observe([_FIRST])[_FIRST]


def test_describe_gives_identity_and_memory_when_the_library_tells() -> None:
    """UUID, name, memory and minor come from NVML; a GPU that NVML does not know is left out with a warning."""
    nvml = Nvml(_Library(_Gpu(_FIRST)))

    told = nvml.describe([_FIRST, _SECOND])

    assert (told[_FIRST].uuid, told[_FIRST].memory_bytes, told[_FIRST].minor) == ("GPU-nvml-18", 85_520_809_984, 0x18)
    assert _SECOND not in told
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

    told = Nvml(Telling(_Gpu(_FIRST), _Gpu(_SECOND, refuses=frozenset({"mig"})))).describe([_FIRST, _SECOND])

    facts = {"index": 3, "architecture": "Hopper", "cudaComputeCapability": "9.0", "cudaDriverVersion": "12.2.0"}
    assert told[_FIRST].facts == {**facts, "migEnabled": True}
    assert told[_SECOND].facts == {**facts, "migEnabled": False}
    assert Nvml(_Library(_Gpu(_FIRST))).describe([_FIRST])[_FIRST].facts == {}


def test_describe_adds_up_links_when_two_gpus_share_several() -> None:
    """Bandwidth to a peer is the sum of the links to it, in Gbit/s; links that are down count nothing."""
    told = Nvml(_Library(_Gpu(_FIRST, links=[str(_SECOND), str(_SECOND), ""]))).describe([_FIRST])

    assert told[_FIRST].links == {_SECOND: 400.0}


def test_describe_goes_on_when_the_library_refuses_one_question() -> None:
    """What a driver does not support is left empty and said; the rest is told."""
    nvml = Nvml(_Library(_Gpu(_FIRST, refuses=frozenset({"memory", "events"}))))

    told = nvml.describe([_FIRST])

    assert (told[_FIRST].memory_bytes, told[_FIRST].uuid) == (0, "GPU-nvml-18")
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
    assert [(one.reason, one.state, one.action) for one in _observe(_Library(gpu))] == wanted


def test_observe_tells_a_lost_link_when_links_were_up_before() -> None:
    """Fewer NVLinks than were seen before is Degraded."""
    gpu = _Gpu(_FIRST, links=["switch", "switch"])
    nvml = Nvml(_Library(gpu))
    nvml.describe([_FIRST])
    before = nvml.observe([_FIRST])[_FIRST]
    gpu.links[1] = ""

    assert before == []
    assert [one.reason for one in nvml.observe([_FIRST])[_FIRST]] == ["nvlink-down"]


def test_observe_reports_xid_of_its_gpu_when_an_event_came() -> None:
    """An Xid makes exactly its own GPU Unhealthy, once; application faults make none."""
    library = _Library(_Gpu(_FIRST), _Gpu(_SECOND))
    nvml = Nvml(library)
    nvml.describe([_FIRST, _SECOND])
    library.events = [(_SECOND, 79), (_FIRST, 31)]

    seen = nvml.observe([_FIRST, _SECOND])

    assert seen[_FIRST] == []
    assert [(one.evidence, one.action, one.is_sticky) for one in seen[_SECOND]] == [({"xid": "79"}, RecoveryAction.REBOOT_NODE, True)]
    assert nvml.observe([_SECOND])[_SECOND] == []


@pytest.mark.parametrize(
    ("xid", "action"), [(48, RecoveryAction.RESET_DEVICE), (79, RecoveryAction.REBOOT_NODE), (999, RecoveryAction.WAIT)]
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
    driver = NvidiaDriver(Nvml(_Library(*(_Gpu(one, links=["switch"] * 18) for one in addresses))))

    first, second = driver.discover(tree, read_machine(tree, "n1"))

    assert first.uuid == f"GPU-nvml-{addresses[0].bus:x}"
    assert first.capacity == {"memory": 85_520_809_984}
    assert [(one.peer, one.kind, one.bandwidth_gbps) for one in first.links] == [(second.name, LinkClass.FABRIC, 3600.0)]


def test_driver_degrades_to_sysfs_when_the_library_does_not_load(recorded: RecordedMachine, tmp_path: Path) -> None:
    """Without the library the GPUs are found all the same, and a warning says what is missing."""
    tree = Tree(HardwareSettings(root=str(recorded.root), library_path=str(tmp_path)))
    driver = NvidiaDriver()

    devices = driver.discover(tree, read_machine(tree, "n1"))

    assert [one.uuid[:4] for one in devices] == ["GPU-", "GPU-"]
    assert "without NVLink and ECC" in driver.warnings[0]


def test_driver_never_asks_nvml_when_the_tree_is_recorded(recorded: RecordedMachine) -> None:
    """A recorded machine's GPUs must not mix with those of the machine that runs this."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    driver = NvidiaDriver()

    assert len(driver.discover(tree, read_machine(tree, "n1"))) == 2
    assert driver.warnings == ()


def test_driver_leaves_the_variable_out_when_a_uuid_is_unknown(recorded: RecordedMachine) -> None:
    """A list that lacks one GPU would hide it from the container, so there is no list then."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    recorded.write(f"proc/driver/nvidia/gpus/{recorded.pci('h100')[0]}/information", "Device Minor: \t 0")
    driver = NvidiaDriver()
    devices = driver.discover(tree, read_machine(tree, "n1"))

    edits = driver.prepare(tree, devices, PrepareContext(owner=_OWNER))

    assert isinstance(edits, dict)
    assert edits[""].env == {}
    assert [node.path for node in edits[devices[0].name].device_nodes][:1] == ["/dev/nvidia0"]


def test_driver_tells_an_excluded_gpu_when_the_module_leaves_it_alone(recorded: RecordedMachine) -> None:
    """A GPU that the kernel module was told to leave alone is listed, and Unhealthy with the reason."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    recorded.write(f"proc/driver/nvidia/gpus/{recorded.pci('h100')[0]}/information", "Device Minor: \t 0\nGPU Excluded:\t Yes")
    driver = NvidiaDriver()
    devices = driver.discover(tree, read_machine(tree, "n1"))

    seen = driver.observe(tree, devices)

    assert [one.reason for one in seen[devices[0].name]] == ["gpu-excluded"]
    assert list(seen[devices[1].name]) == []
