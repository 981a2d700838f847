"""The overlay kubernetes-gpu gives containers the files of the host's driver: its own settings and
mounts, on hosts of every kind, against the gateway's settings of the same overlay.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import yaml

from support.driver_pods import DriverPod, start_pod
from support.driver_roots import FIRMWARE, LIBRARIES, VERSION, driver_root, library, require_compiler
from support.kustomize import DEPLOY, built
from topobus.devicekit.driver import PrepareContext
from topobus.formats.messages.messages import Prepared
from topobus.gateway.containers.rules.edit_limits import refuse_forbidden
from topobus.gpu.driver_root.bring import DriverFileSource
from topobus.gpu.driver_root.driver_files import DriverFiles
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import build
from topobus.sysfs.driver_files import LIBRARY_PATH
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import Tree
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

_PROFILE = Path(__file__).resolve().parents[2] / "data" / "profiles" / "h100-pair.toml"
_PAGE = DEPLOY.parent / "docs/how-to/cuda-without-a-toolkit.md"
_GKE = "home/kubernetes/bin/nvidia"


def _alternatives(host: Path) -> None:
    """Debian's own packages: links to the programs lead through /etc,
    which the pod does not see.
    """
    driver_root(host, folder="usr/lib/x86_64-linux-gnu/nvidia/current", programs="usr/lib/nvidia/current")
    (host / "usr/bin").mkdir()
    (host / "usr/bin/nvidia-smi").symlink_to("/etc/alternatives/nvidia--nvidia-smi")
    (host / "etc/alternatives").mkdir()
    (host / "etc/alternatives/nvidia--nvidia-smi").symlink_to("/usr/lib/nvidia/current/nvidia-smi")


def _driver_container(host: Path) -> None:
    """The host itself has none; the container's root is a whole system with absolute links."""
    root = driver_root(host / "run/nvidia/driver")
    folder = root / "usr/lib/x86_64-linux-gnu"
    (folder / "libcuda.so.1").unlink()
    (folder / "libcuda.so.1").symlink_to(f"/usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}")


_LAYOUTS: Mapping[str, Callable[[Path], object]] = {
    "Ubuntu's packages": driver_root,
    "Red Hat": lambda host: driver_root(host, folder="usr/lib64"),
    "Debian's packages": _alternatives,
    "plain folder": lambda host: driver_root(host / "usr/local/nvidia", folder="lib64", programs="bin"),
    "driver container": _driver_container,
}


def _start(tmp_path: Path, lay_out: Callable[[Path], object], overlay: Path | str = "kubernetes-gpu") -> DriverPod:
    require_compiler()
    host = tmp_path / "host"
    machine = build(_PROFILE, host)
    (machine.root / "proc/driver/nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Mon Sep  1\n"
    )
    lay_out(host)
    (host / "usr").mkdir(exist_ok=True)
    if (host / "lib").is_dir():
        # As on every host of today, /lib is a link.
        (host / "usr/lib").mkdir(exist_ok=True)
        (host / "lib/firmware").rename(host / "usr/lib/firmware")
        (host / "lib").rmdir()
        (host / "lib").symlink_to("usr/lib")
    return start_pod(built(overlay), host, tmp_path / "pod")


def _prepare(pod: DriverPod, kind: OwnerKind = OwnerKind.CLAIM) -> Prepared | Refusal:
    # A recorded machine's files are brought on demand alone; a test of its own has `auto`.
    files = msgspec.structs.replace(pod.hardware.driver_files, bring="always")
    tree = Tree(msgspec.structs.replace(pod.hardware, driver_files=files))
    driver = NvidiaDriver()
    devices = tuple(driver.discover(tree, read_machine(tree, "n1")).devices)
    edits = driver.prepare(tree, devices, PrepareContext(owner=Owner(kind=kind, name="c", uid="u1")))
    if isinstance(edits, Refusal):
        return edits
    assert isinstance(edits, Mapping)
    return Prepared(edits={name: edit for name, edit in edits.items() if name}, common=edits[""])


def _common(prepared: Prepared | Refusal) -> ContainerEdits:
    assert isinstance(prepared, Prepared), prepared
    return prepared.common


@pytest.mark.parametrize("kind", [OwnerKind.CLAIM, OwnerKind.DEVICE_PLUGIN])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_container_gets_the_loaded_drivers_files_by_the_overlay_s_own_settings(
    tmp_path: Path, layout: str, kind: OwnerKind
) -> None:
    """Each library by a path of the host that is a file there and no link.

    A variable leads to them; no program on the host is needed; the gateway allows all.
    """
    pod = _start(tmp_path, _LAYOUTS[layout])

    prepared = _prepare(pod, kind)

    common = _common(prepared)
    assert isinstance(prepared, Prepared)
    assert refuse_forbidden("gpu", prepared, pod.rights) is None
    assert (common.env["LD_LIBRARY_PATH"], common.env["NVIDIA_VISIBLE_DEVICES"], common.hooks) == (
        LIBRARY_PATH,
        "void",
        (),
    )
    inside = {mount.container_path: tmp_path / "host" / mount.host_path.lstrip("/") for mount in common.mounts}
    folders = LIBRARY_PATH.split(":")
    for base, soname in LIBRARIES.items():
        for name in (f"{base}.so.{VERSION}", soname):
            assert not name or any(f"{folder}/{name}" in inside for folder in folders), name
    assert inside[f"{folders[0]}/libcuda.so.1"].name == f"libcuda.so.{VERSION}"
    assert {"/usr/bin/nvidia-smi", *(f"/lib/firmware/nvidia/{VERSION}/{name}" for name in FIRMWARE)} <= inside.keys()
    assert {str(path) for path in inside.values() if not path.is_file() or os.path.realpath(path) != str(path)} == set()
    assert not [mount for mount in common.mounts if mount.host_path.startswith(("/host", str(tmp_path)))]


@pytest.mark.parametrize("overlay", ["kubernetes-gpu", "kubernetes-gpu-mps", "kubernetes-gpu-partitions"])
def test_files_are_brought_when_the_pod_sees_the_kernels_own_sysfs(tmp_path: Path, overlay: str) -> None:
    """By the settings as they are, `bring` too, in each overlay that builds on it."""
    pod = _start(tmp_path, driver_root, overlay)
    sysfs = Path(pod.hardware.root) / "sys"
    sysfs.rename(sysfs.with_name("recorded"))
    sysfs.symlink_to("/sys")

    tree = Tree(pod.hardware)
    files = DriverFileSource().find(tree, VERSION)

    assert (tree.is_recorded, tree.is_live) == (False, False)
    assert isinstance(files, DriverFiles)
    assert files.root == "/"


def test_driver_of_another_version_is_not_brought(tmp_path: Path) -> None:
    """The loaded module's version counts; the message says what is there."""
    refused = _prepare(_start(tmp_path, lambda host: library(host / "usr/lib64/libcuda.so.570.86.10", "libcuda.so.1")))

    assert isinstance(refused, Refusal)
    assert [(reason.code, reason.facts["got"]) for reason in refused.reasons] == [
        ("driver-files-incomplete", ("570.86.10",))
    ]


def test_page_s_lines_bring_a_driver_of_another_folder(tmp_path: Path) -> None:
    """Without them the pod does not see GKE's folder; with them all is brought, and the gateway
    needs no setting.
    """

    def lay_out(host: Path) -> None:
        driver_root(host / _GKE, folder="lib64", programs="bin")

    blocks = re.findall(r"^```yaml\n(.*?)^```$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (patch,) = [block for block in blocks if block.startswith("- op:")]
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    patches = [{"target": {"kind": "DaemonSet", "name": "topobus-gpu"}, "patch": patch}]
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": [str(DEPLOY / "kubernetes-gpu")], "patches": patches})
    )

    without = _prepare(_start(tmp_path / "without", lay_out))
    pod = _start(tmp_path / "with", lay_out, overlay)
    prepared = _prepare(pod)

    assert isinstance(without, Refusal)
    sources = {mount.host_path for mount in _common(prepared).mounts}
    assert f"/{_GKE}/lib64/libcuda.so.{VERSION}" in sources
    assert isinstance(prepared, Prepared)
    assert refuse_forbidden("gpu", prepared, pod.rights) is None
