"""Sharing strategies on NVIDIA GPUs, on a recorded pair of H100."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from topobus.devicekit.driver import PrepareContext
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

_PROFILES = Path(__file__).parent.parent.parent / "data" / "profiles"
_OWNER = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")


@pytest.fixture
def pair(tmp_path: Path) -> RecordedMachine:
    """Give two H100."""
    return build(_PROFILES / "h100-pair.toml", tmp_path / "machine")


def _prepare(recorded: RecordedMachine, **sharing: Any) -> ContainerEdits | Refusal:
    """Prepare both GPUs; gives what is common to them."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    driver = NvidiaDriver()
    devices = driver.discover(tree, read_machine(tree, "n1")).devices
    config = {"apiVersion": "topobus.dev/v1", "kind": "SharingParameters", **sharing}
    answer = driver.prepare(tree, devices, PrepareContext(owner=_OWNER, config=(config,)))
    return answer if isinstance(answer, Refusal) else answer[""]


def _daemon(recorded: RecordedMachine, environment: str = "") -> None:
    for pid, name in (("7", "bash"), ("71", "nvidia-cuda-mps")):
        folder = recorded.root / "proc" / pid
        folder.mkdir(parents=True)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "environ").write_text(environment)


def test_time_slicing_needs_nothing_when_the_slice_is_the_default(pair: RecordedMachine) -> None:
    """A GPU slices its time by itself."""
    shared, alone = _prepare(pair, strategy="TimeSlicing"), _prepare(pair, strategy="Exclusive")

    assert isinstance(shared, ContainerEdits)
    assert shared == alone


def test_mps_is_refused_when_no_daemon_runs(pair: RecordedMachine) -> None:
    """The reason says what to run, and where."""
    refused = _prepare(pair, strategy="MPS")

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "mps-not-running"
    assert "nvidia-cuda-mps-control -d" in refused.reasons[0].message


def test_mps_gives_the_daemons_folder_and_the_limits_when_one_runs(pair: RecordedMachine) -> None:
    """The container reaches the daemon, and its processes keep to share and memory of each GPU."""
    _daemon(pair)

    common = _prepare(
        pair, strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 25, "defaultPinnedDeviceMemoryLimit": "10Gi"}
    )

    assert isinstance(common, ContainerEdits)
    variables = {name: value for name, value in common.env.items() if name.startswith("CUDA_MPS")}
    assert variables.pop("CUDA_MPS_PIPE_DIRECTORY") == common.mounts[-2].host_path
    assert variables == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=10240M,1=10240M",
    }
    assert [mount.container_path for mount in common.mounts][-1] == "/dev/shm"
    assert all("rw" in mount.options for mount in common.mounts)


def test_mps_takes_the_folder_that_the_daemons_environment_names(pair: RecordedMachine) -> None:
    """An operator may have it listen elsewhere."""
    _daemon(pair, "HOME=/\0CUDA_MPS_PIPE_DIRECTORY=/run/mps\0")

    common = _prepare(pair, strategy="MPS")

    assert isinstance(common, ContainerEdits)
    assert common.env["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
    assert [mount.host_path for mount in common.mounts] == ["/run/mps", "/dev/shm"]
