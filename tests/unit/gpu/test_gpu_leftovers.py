"""What a tenant leaves on a GPU: seen by NVML, by open nodes, by KFD.

Waited for, killed where that is wanted, and named otherwise.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from support.fake_nvml import GIB, FakeGpu, FakeNvml, fake_nvml, needs_gcc
from support.gpu_processes import POD_UID, add_process, end_recorded
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.pauses import Pauses
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.leftovers import ChecksLeftovers, GpuUse, Leftovers
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.gpu.processes import GpuProcess, end_process, holders_of, process_of
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

_PROFILES = Path(__file__).parent.parent.parent / "data" / "profiles"
_OWNER = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")


class _Time:
    """A clock that moves when somebody sleeps, and what happens meanwhile."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.at: dict[float, Callable[[], None]] = {}

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.now_s += seconds
        for due in [due for due in self.at if due <= self.now_s]:
            self.at.pop(due)()

    @property
    def pauses(self) -> Pauses:
        """Give it to a check."""
        return Pauses(now=lambda: self.now_s, sleep=self.sleep)


class _Nvidia:
    """Two H100 of a recorded machine, with NVML, of which a test uses the first."""

    def __init__(self, recorded: RecordedMachine, library: FakeNvml) -> None:
        self.recorded, self.library = recorded, library
        self.time = _Time()
        self.tree = Tree(HardwareSettings(root=str(recorded.root), library_path=str(library.folder)))
        self.address = recorded.pci("h100")[0]
        self.driver = NvidiaDriver()
        self.driver.leftovers = Leftovers(pauses=self.time.pauses)
        self.device = self.driver.discover(self.tree, read_machine(self.tree, "n1")).devices[0]

    def come(self) -> None:
        """Have an owner come to the idle GPU."""
        self.driver.prepare(self.tree, [self.device], PrepareContext(owner=_OWNER, free=frozenset({self.device.name})))

    def clean(self) -> Refusal | None:
        """Clean it."""
        return self.driver.clean(self.tree, self.device, DeviceRecord())


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedMachine:
    """Give two H100 under one switch."""
    return build(_PROFILES / "h100-pair.toml", tmp_path / "machine")


@pytest.fixture
def nvidia(recorded: RecordedMachine, tmp_path: Path) -> Iterator[_Nvidia]:
    """Give the GPUs with a libnvidia-ml of their own."""
    addresses = recorded.pci("h100")
    with fake_nvml(
        tmp_path / "lib", *(FakeGpu(address=address, minor=minor) for minor, address in enumerate(addresses))
    ) as library:
        yield _Nvidia(recorded, library)


@needs_gcc
def test_clean_refuses_and_names_pod_and_process_when_one_is_left(nvidia: _Nvidia) -> None:
    """After the bounded wait the refusal says which process of which pod holds how much.

    The neighbour's processes count nothing.
    """
    nvidia.come()
    add_process(nvidia.recorded.root, 4711, pod="trainer-0")
    nvidia.library.set(nvidia.address, processes=((4711, 10 * GIB),), used_bytes=11 * GIB)

    refusal = nvidia.clean()

    assert refusal is not None
    assert refusal.reasons[0].message == "still on it: process 4711 (python3) of pod trainer-0 with 10240 MiB"
    assert refusal.reasons[0].facts == {"pids": "4711", "pods": "trainer-0", "used_bytes": str(11 * GIB)}
    assert nvidia.time.now_s == pytest.approx(LeftoverSettings().wait_s, abs=0.2)


@needs_gcc
def test_clean_waits_for_a_process_that_ends_in_time(nvidia: _Nvidia) -> None:
    """The driver takes a moment to give a killed job's memory back: that is no dirt."""
    nvidia.come()
    nvidia.library.set(nvidia.address, processes=((4711, 10 * GIB),), used_bytes=11 * GIB)
    nvidia.time.at = {
        1.0: lambda: nvidia.library.set(nvidia.address, processes=()),
        2.0: lambda: nvidia.library.set(nvidia.address, used_bytes=0),
    }

    assert nvidia.clean() is None
    assert 2.0 <= nvidia.time.now_s < 2.2


@needs_gcc
def test_clean_refuses_when_the_memory_is_not_back_at_its_baseline(nvidia: _Nvidia) -> None:
    """No process is seen (another namespace has it), and the memory tells."""
    nvidia.come()
    nvidia.library.set(nvidia.address, used_bytes=5 * GIB)

    refusal = nvidia.clean()

    assert refusal is not None
    assert (
        "5120 MiB of its memory are in use by no process that is seen, 500 MiB were before"
        in refusal.reasons[0].message
    )


@needs_gcc
def test_clean_passes_over_an_mps_daemon_unless_a_tenant_runs_it(nvidia: _Nvidia) -> None:
    """Daemon and server of the node serve the next owner, too.

    A process of the same name in a tenant's pod is the tenant's.
    """
    nvidia.come()
    for pid in (700, 701):
        add_process(nvidia.recorded.root, pid, program="nvidia-cuda-mps")
    nvidia.library.set(nvidia.address, processes=((700, 0), (701, GIB // 8)), used_bytes=5 * GIB // 8)

    of_node = nvidia.clean()
    add_process(nvidia.recorded.root, 702, program="nvidia-cuda-mps", pod="trainer-0")
    nvidia.library.set(nvidia.address, processes=((700, 0), (702, GIB // 8)))
    of_tenant = nvidia.clean()

    assert of_node is None
    assert of_tenant is not None
    assert of_tenant.reasons[0].facts["pids"] == "702"


@needs_gcc
def test_clean_passes_over_what_was_there_before_the_owner(nvidia: _Nvidia) -> None:
    """A display server or a monitor is no leftover, and its memory is the baseline.

    Another process with its pid is.
    """
    add_process(nvidia.recorded.root, 900, program="Xorg", started=5)
    nvidia.library.set(nvidia.address, graphics=((900, GIB),), used_bytes=2 * GIB)
    nvidia.come()

    before = nvidia.clean()
    end_recorded(nvidia.recorded.root, 900)
    add_process(nvidia.recorded.root, 900, program="miner", pod="trainer-0", started=77)
    after = nvidia.clean()

    assert before is None
    assert after is not None
    assert "process 900 (miner) of pod trainer-0" in after.reasons[0].message


@needs_gcc
@pytest.mark.parametrize(
    ("program", "pod", "used_bytes", "is_clean"),
    [("Xorg", "", GIB // 2, True), ("python3", "trainer-0", GIB // 2, False), ("Xorg", "", 2 * GIB, False)],
    ids=["host process", "pod process", "much memory"],
)
def test_clean_passes_over_the_hosts_own_when_nobody_knows_what_was_before(
    nvidia: _Nvidia, program: str, pod: str, used_bytes: int, is_clean: bool
) -> None:
    """After a restart of the service with the GPU in use: a pod's process is a leftover, a process
    of the host's is not, and a limit stands for the memory.
    """
    add_process(nvidia.recorded.root, 900, program=program, pod=pod)
    nvidia.library.set(nvidia.address, processes=((900, GIB // 2),), used_bytes=used_bytes)

    assert (nvidia.clean() is None) is is_clean


@needs_gcc
@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_clean_refuses_when_nvml_does_not_answer(nvidia: _Nvidia, code: int) -> None:
    """What cannot be seen is not clean."""
    nvidia.come()
    nvidia.library.set(nvidia.address, error=code)

    assert nvidia.clean() is not None


def test_clean_sees_who_has_the_node_open_when_there_is_no_nvml(recorded: RecordedMachine) -> None:
    """By the links of /proc: who has this GPU's node open holds it, who has its neighbour's does
    not.
    """
    tree, time = Tree(HardwareSettings(root=str(recorded.root))), _Time()
    driver = NvidiaDriver()
    driver.leftovers = Leftovers(pauses=time.pauses)
    first, second = driver.discover(tree, read_machine(tree, "n1")).devices
    minor = _minor(recorded, first)
    add_process(recorded.root, 4711, pod="trainer-0", node=f"nvidia{minor}")

    refusal, neighbour = driver.clean(tree, first, DeviceRecord()), driver.clean(tree, second, DeviceRecord())
    end_recorded(recorded.root, 4711)
    after = driver.clean(tree, first, DeviceRecord())

    assert refusal is not None
    assert "process 4711 (python3) of pod trainer-0" in refusal.reasons[0].message
    assert (neighbour, after) == (None, None)


def test_clean_sees_kfds_processes_and_memory_when_the_gpu_is_amds(tmp_path: Path) -> None:
    """A process with memory on the GPU holds it; one that KFD lists with 0 does not; amdgpu tells
    the memory.
    """
    recorded = build(_PROFILES / "mi210-pair.toml", tmp_path / "machine")
    tree, driver = Tree(HardwareSettings(root=str(recorded.root))), AmdDriver()
    driver.leftovers = Leftovers(pauses=_Time().pauses)
    first, second = driver.discover(tree, read_machine(tree, "n1")).devices
    nodes = sorted(
        path
        for path in (recorded.root / "sys/class/kfd/kfd/topology/nodes").iterdir()
        if "simd_count 416" in (path / "properties").read_text()
    )
    add_process(recorded.root, 4711, pod="trainer-0")
    process = recorded.root / "sys/class/kfd/kfd/proc/4711"
    process.mkdir(parents=True)
    for gpu_id, (node, used) in enumerate(zip(nodes, (3 * GIB, 0), strict=True), start=1000):
        (node / "gpu_id").write_text(f"{gpu_id}\n", encoding="utf-8")
        (process / f"vram_{gpu_id}").write_text(f"{used}\n", encoding="utf-8")

    uses = [driver.use(tree, device).processes for device in (first, second)]
    refusals = [driver.clean(tree, device, DeviceRecord()) for device in (first, second)]

    assert sorted(len(use) for use in uses) == [0, 1]
    assert sorted(refusal is not None for refusal in refusals) == [False, True]
    assert "process 4711 (python3) of pod trainer-0 with 3072 MiB" in "".join(str(refusal) for refusal in refusals)


def test_clean_sees_who_has_the_render_node_open_when_the_gpu_is_intels(tmp_path: Path) -> None:
    """Card and render node alike."""
    driver, tree, device = _intel(tmp_path)
    add_process(tree.root, 4711, pod="trainer-0", node="dri/renderD128")

    refusal = driver.clean(tree, device, DeviceRecord())

    assert refusal is not None
    assert "process 4711 (python3) of pod trainer-0" in refusal.reasons[0].message


def _intel(tmp_path: Path) -> tuple[ChecksLeftovers, Tree, Device]:
    recorded = build("laptop", tmp_path / "machine")
    tree, driver = Tree(HardwareSettings(root=str(recorded.root))), IntelDriver()
    driver.leftovers = Leftovers(pauses=_Time().pauses)
    return driver, tree, driver.discover(tree, read_machine(tree, "n1")).devices[0]


def test_check_that_is_switched_off_is_no_cleaning(recorded: RecordedMachine) -> None:
    """The kit then writes no journal for GPUs and cleans nothing."""
    driver = NvidiaDriver()
    before = driver.capabilities.cleans
    driver.configure(GpuServices(leftovers=LeftoverSettings(check=False)))

    assert (before, driver.capabilities.cleans) == (True, False)


@pytest.mark.parametrize("kill", [False, True])
def test_leftover_of_a_pod_is_killed_only_when_the_setting_says_so(tmp_path: Path, kill: bool) -> None:
    """A real process, said to be in a pod: with `kill` it is gone and the GPU clean.

    Without it lives, and is named.
    """
    victim = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    tree = Tree()
    seen = process_of(tree, victim.pid)
    in_pod = GpuProcess(pid=seen.pid, started=seen.started, program=seen.program, pod_uid=POD_UID)
    check = Leftovers(LeftoverSettings(kill=kill), pauses=_Time().pauses)
    try:
        refusal = check.clean(tree, "gpu-0", lambda: GpuUse(processes=() if victim.poll() is not None else (in_pod,)))
        if kill:
            # SIGKILL takes a moment, in which the check's clock has not moved: whether
            # it ended is asked of the kernel.
            victim.wait(timeout=60)
            refusal = check.clean(
                tree, "gpu-0", lambda: GpuUse(processes=() if victim.poll() is not None else (in_pod,))
            )

        assert (refusal is None) is kill
        assert (victim.poll() is not None) is kill
    finally:
        victim.kill()
        victim.communicate()


def test_end_process_spares_another_process_that_has_the_pid_now() -> None:
    """A pid is given out again: the start time tells."""
    victim = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    try:
        why = end_process(Tree(), GpuProcess(pid=victim.pid, started="1", program="cat"))

        assert "another process" in why
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.communicate()


def test_end_process_is_done_when_the_process_is_gone() -> None:
    """Nothing is left to kill."""
    victim = subprocess.Popen(["/bin/true"])
    victim.wait(timeout=60)

    assert end_process(Tree(), GpuProcess(pid=victim.pid, started="1")) == ""


def test_holders_counts_processes_that_it_may_not_look_into(tmp_path: Path) -> None:
    """Blindness is a number, not an empty answer."""
    add_process(tmp_path, 4711, node="nvidia0")
    add_process(tmp_path, 4712, node="nvidia0")
    # A file where a folder should be reads as an error, also for root.
    end_recorded(tmp_path, 4712)
    (tmp_path / "proc" / "4712").mkdir()
    (tmp_path / "proc" / "4712" / "fd").symlink_to("fd")

    holders = holders_of(Tree(HardwareSettings(root=str(tmp_path))), ["nvidia0"])

    assert ([process.pid for process in holders.processes], holders.unseen) == ([4711], 1)


def _minor(recorded: RecordedMachine, device: Device) -> str:
    text = (recorded.root / f"proc/driver/nvidia/gpus/{device.pci}/information").read_text(encoding="utf-8")
    return next(line.split(":")[1].strip() for line in text.splitlines() if line.startswith("Device Minor"))
