"""What a claim's containers get besides a GPU's own nodes: the driver's files by a way that their
door has words for, groups, names by address, and what the claim asks for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from support.driver_roots import VERSION, driver_root
from topobus.devicekit.driver import DeviceDriver, PrepareContext
from topobus.gpu.driver_root import bring
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

_PROFILES = Path(__file__).parent.parent.parent / "data" / "profiles"
_CLAIM = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")
_PLUGIN = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/gpu", uid="u")
_HOOK = "/usr/local/bin/topobus-gpu-hook"


@pytest.fixture
def pair(tmp_path: Path) -> RecordedMachine:
    """Give two H100 with a loaded module."""
    recorded = build(_PROFILES / "h100-pair.toml", tmp_path / "machine")
    recorded.write(
        "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Mon Sep  1"
    )
    return recorded


def _tree(recorded: RecordedMachine, **settings: Any) -> Tree:
    return Tree(HardwareSettings(root=str(recorded.root), driver_files=DriverFilesSettings(**settings)))


def _prepare(
    driver: DeviceDriver, tree: Tree, owner: Owner = _CLAIM, *config: dict[str, Any]
) -> dict[str, ContainerEdits] | Refusal:
    devices = driver.discover(tree, read_machine(tree, "n1")).devices
    answer = driver.prepare(tree, devices, PrepareContext(owner=owner, config=config))
    assert isinstance(answer, dict | Refusal)
    return answer


def _common(answer: dict[str, ContainerEdits] | Refusal) -> ContainerEdits:
    assert isinstance(answer, dict), answer
    return answer[""]


def test_uuids_are_named_when_nvidias_runtime_brings_the_files(pair: RecordedMachine) -> None:
    """Without files of ours the variable says which GPUs, as before, and no file comes along."""
    common = _common(_prepare(NvidiaDriver(), _tree(pair, bring="never")))

    assert common.env["NVIDIA_VISIBLE_DEVICES"].count("GPU-") == 2
    assert (common.mounts, common.hooks) == ((), ())


def test_void_and_the_hook_come_with_the_files_of_a_claim(pair: RecordedMachine, tmp_path: Path) -> None:
    """Libraries lie in a folder of ours, the hook is told which and of which version, and NVIDIA's
    runtime has nothing to add.
    """
    root = driver_root(tmp_path / "driver")

    common = _common(_prepare(NvidiaDriver(), _tree(pair, root=str(root), hook=_HOOK)))

    assert common.env == {"NVIDIA_VISIBLE_DEVICES": "void"}
    (hook,) = common.hooks
    assert (hook.name, hook.path) == ("createContainer", _HOOK)
    assert hook.args == ("topobus-gpu-hook", "--folder", "/opt/topobus/nvidia/lib64", "--driver-version", VERSION)
    inside = {mount.container_path: mount.host_path for mount in common.mounts}
    assert inside["/opt/topobus/nvidia/lib64/libcuda.so.1"] == f"{root}/usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}"


def test_device_plugins_answer_has_no_words_that_kubelet_lacks(pair: RecordedMachine, tmp_path: Path) -> None:
    """A pod by resource gets the files with a variable, neither hook nor group: kubelet's API knows
    none, and the gateway would refuse them.
    """
    root = driver_root(tmp_path / "driver")
    answer = _prepare(NvidiaDriver(), _tree(pair, root=str(root), hook=_HOOK), _PLUGIN)

    common = _common(answer)

    assert isinstance(answer, dict)
    assert not any(edits.needs_runtime for edits in answer.values())
    assert common.env["LD_LIBRARY_PATH"].startswith("/usr/local/nvidia/lib64:")
    assert "/usr/local/nvidia/lib64/libcuda.so.1" in {mount.container_path for mount in common.mounts}


def test_nothing_is_set_when_images_look_by_themselves(pair: RecordedMachine, tmp_path: Path) -> None:
    """The loader's way `image`: the files alone, where NVIDIA's images look."""
    common = _common(
        _prepare(NvidiaDriver(), _tree(pair, root=str(driver_root(tmp_path / "driver")), loader="image", hook=_HOOK))
    )

    assert (common.env, common.hooks) == ({"NVIDIA_VISIBLE_DEVICES": "void"}, ())
    assert "/usr/local/nvidia/lib64/libcuda.so.1" in {mount.container_path for mount in common.mounts}


def test_claim_is_refused_when_the_hook_must_run_and_is_not_known(pair: RecordedMachine, tmp_path: Path) -> None:
    """The reason names the setting that would help."""
    refused = _prepare(NvidiaDriver(), _tree(pair, root=str(driver_root(tmp_path / "driver")), loader="hook"))

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "loader-hook-missing"
    assert "hardware.driver_files.hook" in refused.reasons[0].message


def test_inventory_warns_and_the_runtime_is_left_to_bring_the_files_when_they_are_incomplete(
    pair: RecordedMachine, tmp_path: Path
) -> None:
    """Auto falls back to NVIDIA's runtime and says so; always refuses the claim.

    Whole again they come, without a restart.
    """
    root = driver_root(tmp_path / "driver")
    missing = root / "usr/lib/x86_64-linux-gnu" / f"libnvidia-ml.so.{VERSION}"
    data = missing.read_bytes()
    missing.unlink()
    driver, tree = NvidiaDriver(), _tree(pair, root=str(root))

    common = _common(_prepare(driver, tree))
    (warning,) = [text for text in driver.discover(tree, read_machine(tree, "n1")).warnings if "driver's files" in text]
    refused = _prepare(NvidiaDriver(), _tree(pair, root=str(root), bring="always"))
    missing.write_bytes(data)
    healed = _common(_prepare(driver, tree))

    assert common.mounts == ()
    assert common.env["NVIDIA_VISIBLE_DEVICES"].count("GPU-") == 2
    assert all(
        word in warning
        for word in (str(root), missing.name, "install all of the driver's packages", "NVIDIA's container runtime")
    )
    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "driver-files-incomplete"
    assert healed.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert not [text for text in driver.discover(tree, read_machine(tree, "n1")).warnings if "driver's files" in text]


def test_files_are_found_once_when_nothing_changes(
    pair: RecordedMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look every few seconds must not read all libraries again."""
    looks: list[str] = []
    root = driver_root(tmp_path / "driver")
    driver, tree = NvidiaDriver(), _tree(pair, root=str(root))
    # A folder that changed just now is looked at again, for it may change without another time.
    for folder in (root / "usr/lib", root / "usr/lib/x86_64-linux-gnu", root / "lib"):
        os.utime(folder, (0, 0))
    real = bring.find_driver_files
    monkeypatch.setattr(
        bring, "find_driver_files", lambda settings, version: looks.append(version) or real(settings, version)
    )

    for _ in range(3):
        _prepare(driver, tree)

    assert looks == [VERSION]


_ACCESS = {"apiVersion": "gpu.topobus.dev/v1", "kind": "Access"}


def test_claim_gets_storage_copies_and_channels_when_it_asks_for_them(pair: RecordedMachine, tmp_path: Path) -> None:
    """GPUDirect Storage with its configuration, GDRCopy, and the IMEX channels that the claim
    names, and no other.
    """
    for node in (
        "nvidia-fs0",
        "nvidia-fs1",
        "gdrdrv",
        "nvidia-caps-imex-channels/channel0",
        "nvidia-caps-imex-channels/channel7",
    ):
        pair.write(f"dev/{node}", "")
    root = driver_root(tmp_path / "driver")
    (root / "etc/cufile.json").write_text("{}")
    tree = _tree(pair, root=str(root), loader="image")

    common = _common(
        _prepare(
            NvidiaDriver(), tree, _CLAIM, {**_ACCESS, "gpuDirectStorage": True, "gdrCopy": True, "imexChannels": [7]}
        )
    )
    without = _common(_prepare(NvidiaDriver(), tree))

    more = {node.path for node in common.device_nodes} - {node.path for node in without.device_nodes}
    assert more == {"/dev/nvidia-fs0", "/dev/nvidia-fs1", "/dev/gdrdrv", "/dev/nvidia-caps-imex-channels/channel7"}
    assert {mount.container_path for mount in common.mounts} - {mount.container_path for mount in without.mounts} == {
        "/etc/cufile.json"
    }


@pytest.mark.parametrize(
    ("config", "code", "word"),
    [
        pytest.param({"gdrCopy": True}, "access-unavailable", "/dev/gdrdrv", id="no gdrdrv"),
        pytest.param({"gpuDirectStorage": True}, "access-unavailable", "/dev/nvidia-fs0", id="no nvidia-fs"),
        pytest.param({"imexChannels": [3]}, "access-unavailable", "channel3", id="no channel"),
        pytest.param({"imexChannels": [-1]}, "access-malformed", "imexChannels", id="a channel below 0"),
        pytest.param({"imexChannels": [1 << 20]}, "access-malformed", "imexChannels", id="a channel beyond the last"),
        pytest.param({"imexChannels": list(range(65))}, "access-malformed", "imexChannels", id="too many"),
        pytest.param({"gdrcopy": True}, "access-malformed", "gdrcopy", id="a field that does not exist"),
        pytest.param({"gdrCopy": 1}, "access-malformed", "gdrCopy", id="no truth"),
        pytest.param(
            {"apiVersion": "gpu.topobus.dev/v2"}, "access-malformed", "gpu.topobus.dev/v2", id="another version"
        ),
    ],
)
def test_claim_is_refused_when_what_it_asks_for_cannot_be_had(
    pair: RecordedMachine, config: dict[str, Any], code: str, word: str
) -> None:
    """The reason names the field, or the node that the host lacks."""
    refused = _prepare(NvidiaDriver(), _tree(pair), _CLAIM, {**_ACCESS, **config})

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == code
    assert word in refused.reasons[0].message


@pytest.fixture(params=["mi210-pair", "laptop"])
def other_gpus(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DeviceDriver, RecordedMachine]:
    """Give AMD's cards and Intel's graphics with real nodes, as a distribution has them: card of
    group 44, render and kfd of group 105.
    """
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root makes device nodes, so that no groups of nodes were read")
    profile = _PROFILES / "mi210-pair.toml" if request.param == "mi210-pair" else "laptop"
    recorded = build(profile, tmp_path / "machine", has_device_nodes=True)
    for node in (recorded.root / "dev/dri").glob("*"):
        os.chown(node, 0, 44 if node.name.startswith("card") else 105)
        node.chmod(0o660)
    kfd = recorded.root / "dev/kfd"
    if kfd.exists():
        os.chown(kfd, 0, 105)
        kfd.chmod(0o660)
    return (AmdDriver() if kfd.exists() else IntelDriver()), recorded


def test_groups_of_nodes_come_along_when_not_everybody_may_open_them(
    other_gpus: tuple[DeviceDriver, RecordedMachine],
) -> None:
    """Video and render reach a claim's container, and no device plugin's."""
    driver, recorded = other_gpus
    answer = _prepare(driver, _tree(recorded))
    by_plugin = _prepare(driver, _tree(recorded), _PLUGIN)

    assert isinstance(answer, dict)
    assert isinstance(by_plugin, dict)
    assert {gid for edits in answer.values() for gid in edits.additional_gids} == {44, 105}
    assert not any(edits.needs_runtime for edits in by_plugin.values())


def test_no_group_comes_along_when_everybody_may_open_the_nodes(
    other_gpus: tuple[DeviceDriver, RecordedMachine],
) -> None:
    """A node of mode 0666 needs none, and root's group is never given."""
    driver, recorded = other_gpus
    for node in (recorded.root / "dev/dri").glob("*"):
        node.chmod(0o666)
    if (recorded.root / "dev/kfd").exists():
        os.chown(recorded.root / "dev/kfd", 0, 0)

    answer = _prepare(driver, _tree(recorded))

    assert isinstance(answer, dict)
    assert [edits.additional_gids for edits in answer.values() if edits.additional_gids] == []


def test_names_by_address_come_along_when_the_host_has_them(other_gpus: tuple[DeviceDriver, RecordedMachine]) -> None:
    """Media libraries find a GPU by its address: each name is a node of the same device."""
    driver, recorded = other_gpus
    tree = _tree(recorded)
    first = driver.discover(tree, read_machine(tree, "n1")).devices[0]
    (recorded.root / "dev/dri/by-path").mkdir()
    (recorded.root / f"dev/dri/by-path/pci-{first.pci}-render").symlink_to("../renderD128")

    answer = _prepare(driver, _tree(recorded))

    assert isinstance(answer, dict)
    named = [node for edits in answer.values() for node in edits.device_nodes if "by-path" in node.path]
    assert [(node.path, node.host_path) for node in named] == [
        (f"/dev/dri/by-path/pci-{first.pci}-render", "/dev/dri/renderD128")
    ]
    assert structs.replace(named[0], path=named[0].host_path, host_path="") in answer[first.name].device_nodes
