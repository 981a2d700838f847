"""CUDA by plain runc, without NVIDIA's toolkit: containers of one claim find the driver's library
by their loader's cache, and see their own GPU alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, structs

from support.driver_pods import start_pod
from support.driver_roots import VERSION, driver_root, library, musl_probe, probe_program, require_compiler
from support.kustomize import built
from topobus.devicekit.containers.oci_host import look_up, read_cdi_files
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.verbs.prepare import place_nodes
from topobus.formats.containers.cdi import render
from topobus.formats.containers.oci import OciResult, device_paths, oci_spec
from topobus.formats.messages.messages import Prepared
from topobus.gateway.claims.rules.claim_cdi import cdi_names, cdi_spec
from topobus.gateway.containers.rules.edit_limits import EditRights, refuse_forbidden, rights_of
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import build
from topobus.sysfs.driver_files import DriverFilesSettings, LoaderWay
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

_PROFILES = Path(__file__).resolve().parents[2] / "data" / "profiles"
_LIMIT_S = 60.0
_UID = ClaimUid("u1")
_GROUP = 4711
_LIBRARY_FOLDER = "/opt/topobus/nvidia/lib64"


class Node(Struct, frozen=True, kw_only=True):
    """A machine with two GPUs and a driver, and the CDI file of a claim with requests `a` and `b`
    for one each.
    """

    folder: Path
    tree: Tree
    devices: tuple[Device, ...]
    hook: Path

    def write_claim(self) -> Path:
        """Prepare as device service and gateway do: for the claim, and for each request alone.

        Gives the folder of the CDI file.
        """
        requests = {request: self._prepared((device,)) for request, device in zip("ab", self.devices, strict=True)}
        spec = cdi_spec(_UID, "gpu", self._prepared(self.devices), requests)
        assert spec is not None
        cdi = self.folder / "cdi"
        cdi.mkdir(exist_ok=True)
        (cdi / "topobus.dev-gpu_u1.json").write_bytes(render(spec))
        return cdi

    def names(self, cdi: Path, request: str) -> list[str]:
        """List the CDI devices that kubelet gives a container which names one request."""
        files, _ = read_cdi_files([cdi])
        device = self.devices["ab".index(request)].name
        return list(cdi_names(files[0].spec, _UID, device, request))

    def _prepared(self, devices: tuple[Device, ...]) -> Prepared:
        context = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid=_UID))
        edits = NvidiaDriver().prepare(self.tree, devices, context)
        assert not isinstance(edits, Refusal), edits
        seen = self.tree.settings.runtime_dev
        prepared = Prepared(
            edits={name: place_nodes(edit, seen) for name, edit in edits.items() if name},
            common=place_nodes(edits[""], seen),
        )
        own = EditRights(device_nodes=(f"{seen}/",), mounts=(f"{self.folder}/driver",), hooks=(str(self.hook),))
        assert refuse_forbidden("gpu", prepared, rights_of("gpu", own, is_foreign=False)) is None
        return prepared


class ShippedNode(Node, frozen=True, kw_only=True):
    """The same with the settings and mounts of the overlay `kubernetes-gpu`, on a host that is the
    folder `host`.
    """

    rights: EditRights

    def _prepared(self, devices: tuple[Device, ...]) -> Prepared:
        edits = NvidiaDriver().prepare(
            self.tree, devices, PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid=_UID))
        )
        assert isinstance(edits, Mapping), edits
        prepared = Prepared(edits={name: edit for name, edit in edits.items() if name}, common=edits[""])
        assert refuse_forbidden("gpu", prepared, self.rights) is None
        return Prepared(
            edits={name: self._on_host(edit) for name, edit in prepared.edits.items()},
            common=self._on_host(prepared.common),
        )

    def _on_host(self, edits: ContainerEdits) -> ContainerEdits:
        """What the runtime of that host would take from its own paths, this machine's takes from
        below the folder.
        """
        mounts = tuple(
            structs.replace(mount, host_path=f"{self.folder}/host{mount.host_path}") for mount in edits.mounts
        )
        return place_nodes(structs.replace(edits, mounts=mounts), f"{self.folder}/host/dev")


MakeNode = Callable[[LoaderWay], Node]


@pytest.fixture
def make_node(tmp_path: Path) -> MakeNode:
    """Make nodes; skips where no container can be run."""
    if shutil.which("runc") is None or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs runc and root, so that no container was run with a driver's files")
    require_compiler()

    def make(loader: LoaderWay) -> Node:
        recorded = build(_PROFILES / "h100-pair.toml", tmp_path / "machine", has_device_nodes=True)
        (recorded.root / "proc/driver/nvidia/version").write_text(
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Mon Sep  1\n"
        )
        for node in (recorded.root / "dev").glob("nvidia*"):
            node.chmod(0o660)
            os.chown(node, 0, _GROUP)
        driver_root(tmp_path / "driver")
        hook = tmp_path / "topobus-gpu-hook"
        hook.write_text(f"#!{sys.executable}\nfrom topobus.gpu.driver_root.oci_hook import main\nmain()\n")
        hook.chmod(0o755)
        files = DriverFilesSettings(root=str(tmp_path / "driver"), loader=loader, hook=str(hook))
        tree = Tree(
            HardwareSettings(root=str(recorded.root), runtime_dev=str(recorded.root / "dev"), driver_files=files)
        )
        devices = tuple(NvidiaDriver().discover(tree, read_machine(tree, "n1")).devices)
        return Node(folder=tmp_path, tree=tree, devices=devices, hook=hook)

    return make


def _bundle(folder: Path) -> Path:
    """Make a bundle with an image that has nothing: no libc, no shell, no /etc."""
    for name in ("proc", "dev", "sys", "bin"):
        (folder / "rootfs" / name).mkdir(parents=True)
    subprocess.run(["runc", "spec"], cwd=folder, check=True)
    return folder


def _distroless(folder: Path) -> Path:
    """An image with glibc and the program, without a shell, and without a cache of its loader."""
    bundle = _bundle(folder)
    root = bundle / "rootfs"
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    listed = subprocess.run(
        [str(loader), "--list", str(probe_program())], check=True, capture_output=True, text=True
    ).stdout
    for word in (word for line in listed.splitlines() for word in line.split() if word.startswith("/")):
        target = root / word.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(word, target)
    (root / "lib64").mkdir(exist_ok=True)
    shutil.copy(loader, root / "lib64")
    shutil.copy(probe_program(), root / "bin/cuda-probe")
    return bundle


def _debian(folder: Path) -> Path:
    """An image with a shell, and with a cache that has a library in a folder of the image's own."""
    bundle = _distroless(folder)
    root = bundle / "rootfs"
    shutil.copy("/bin/busybox", root / "bin/sh")
    (root / "etc/ld.so.conf.d").mkdir(parents=True)
    (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (root / "etc/ld.so.conf.d/app.conf").write_text("/srv/app/lib\n")
    library(root / "srv/app/lib/libapp.so.1", "libapp.so.1")
    subprocess.run(["ldconfig", "-r", str(root)], check=True)
    return bundle


def _run(
    bundle: Path,
    node: Node,
    request: str,
    *arguments: str,
    uid: int = 0,
    env: tuple[str, ...] = (),
    keeps_groups: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a container of one request by runc, on the spec that a runtime makes of the CDI file."""
    base: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    base["process"] |= {"terminal": False, "args": list(arguments), "user": {"uid": uid, "gid": uid}}
    base["process"]["env"] += env
    base["process"].pop("oomScoreAdj", None)
    cdi = node.write_claim()
    names = node.names(cdi, request)
    files, problems = read_cdi_files([cdi])
    assert not problems
    merged = oci_spec(base, cdi_devices=names, files=files, nodes=look_up(device_paths((), names, files)))
    assert isinstance(merged, OciResult), merged
    assert merged.missing == ()
    if keeps_groups:
        # Some runtimes give a node of the container the host's owner and mode.
        for device in merged.spec["linux"]["devices"]:
            device |= {"fileMode": 0o660, "uid": 0, "gid": _GROUP}
    (bundle / "config.json").write_text(json.dumps(merged.spec))
    command = [
        "runc",
        "--root",
        str(bundle / "state"),
        "run",
        "--bundle",
        str(bundle),
        f"tb-cuda-{uuid.uuid4().hex[:8]}",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)


def _probed(gpus: int, folder: str = _LIBRARY_FOLDER) -> list[str]:
    return [f"library {folder}/libcuda.so.1", "init 0", f"gpus {gpus}"]


def test_two_containers_of_a_claim_see_their_own_gpu_when_each_names_its_request(
    make_node: MakeNode, tmp_path: Path
) -> None:
    """Each program finds libcuda.so.1 by its loader's cache, and opens the node of its request's
    GPU and no other.
    """
    node = make_node("hook")

    seen = [_run(_debian(tmp_path / request), node, request, "/bin/cuda-probe") for request in "ab"]

    assert [done.stdout.splitlines() for done in seen] == [_probed(0b01), _probed(0b10)], [done.stderr for done in seen]


def test_container_has_nothing_of_the_driver_when_no_device_is_given(make_node: MakeNode, tmp_path: Path) -> None:
    """The same image without a claim finds no library: the test above can fail."""
    make_node("hook")
    bundle = _debian(tmp_path / "bundle")
    base = json.loads((bundle / "config.json").read_text())
    base["process"] |= {"terminal": False, "args": ["/bin/cuda-probe"]}
    base["process"].pop("oomScoreAdj", None)
    (bundle / "config.json").write_text(json.dumps(base))

    command = [
        "runc",
        "--root",
        str(bundle / "state"),
        "run",
        "--bundle",
        str(bundle),
        f"tb-cuda-{uuid.uuid4().hex[:8]}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)

    assert done.returncode == 1
    assert "libcuda.so.1: cannot open shared object file" in done.stdout


@pytest.mark.parametrize("make_image", [_debian, _distroless], ids=["debian", "no shell and no cache"])
def test_program_of_no_root_opens_its_gpu_by_the_nodes_group_when_nodes_are_0660(
    make_node: MakeNode, tmp_path: Path, make_image: Callable[[Path], Path]
) -> None:
    """A runtime that keeps a node's owner and mode lets in who is in its group, and the claim
    brings the group.
    """
    node = make_node("hook")

    done = _run(make_image(tmp_path / "bundle"), node, "b", "/bin/cuda-probe", uid=1000, keeps_groups=True)

    assert done.stdout.splitlines() == _probed(0b10), done.stderr


def test_images_own_libraries_are_found_when_its_cache_was_extended(make_node: MakeNode, tmp_path: Path) -> None:
    """An image's cache keeps what it had, in a form that ldconfig itself reads."""
    node = make_node("hook")
    bundle = _debian(tmp_path / "bundle")

    done = _run(bundle, node, "a", "/bin/cuda-probe")
    shown = subprocess.run(
        ["ldconfig", "-p", "-C", str(bundle / "rootfs/etc/ld.so.cache")], capture_output=True, text=True, check=True
    ).stdout

    assert done.returncode == 0, done.stderr
    assert "libapp.so.1 (libc6,x86-64) => /srv/app/lib/libapp.so.1" in shown
    assert f"libnvidia-nvvm.so.4 (libc6,x86-64) => {_LIBRARY_FOLDER}/libnvidia-nvvm.so.4" in shown
    assert (bundle / "rootfs/etc/ld.so.conf.d/00-topobus-driver.conf").read_text() == f"{_LIBRARY_FOLDER}\n"


def test_library_is_found_still_when_the_program_runs_ldconfig(make_node: MakeNode, tmp_path: Path) -> None:
    """Entry points of images make the cache anew: the folder is in the image's list, too."""
    node = make_node("hook")
    bundle = _debian(tmp_path / "bundle")
    # Ubuntu's /sbin/ldconfig is a script before it.
    program = next(path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if Path(path).exists())
    shutil.copy(program, bundle / "rootfs/bin/ldconfig")
    config = json.loads((bundle / "config.json").read_text())
    config["root"]["readonly"] = False
    (bundle / "config.json").write_text(json.dumps(config))

    done = _run(
        bundle, node, "a", "/bin/sh", "-ec", "rm /etc/ld.so.cache; ldconfig; test -s /etc/ld.so.cache; cuda-probe"
    )

    assert done.stdout.splitlines() == _probed(0b01), done.stderr


def test_files_come_without_a_cache_when_the_image_has_no_loader(make_node: MakeNode, tmp_path: Path) -> None:
    """A static program (busybox, as images with musl have it) sees its GPU and the files, and no
    file that no loader reads is made.
    """
    node = make_node("hook")
    bundle = _bundle(tmp_path / "bundle")
    shutil.copy("/bin/busybox", bundle / "rootfs/bin/busybox")
    if subprocess.run(["ldd", "/bin/busybox"], capture_output=True, check=False).returncode == 0:
        pytest.skip("NOT TESTED: /bin/busybox is not static, so that no image without a loader was run")

    done = _run(bundle, node, "a", "/bin/busybox", "ls", _LIBRARY_FOLDER, "/dev", "/usr/bin")

    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert {"libcuda.so.1", "libcuda.so", f"libcuda.so.{VERSION}", "nvidia0", "nvidiactl", "nvidia-smi"} <= set(words)
    assert "nvidia1" not in words
    assert not (bundle / "rootfs/etc/ld.so.cache").exists()


def test_musls_loader_finds_the_library_when_the_image_is_made_of_musl(make_node: MakeNode, tmp_path: Path) -> None:
    """An image like Alpine's: musl's own loader opens libcuda.so.1 by its path file, and glibc's
    cache is not made.
    """
    node = make_node("hook")
    loader, program = musl_probe()
    bundle = _bundle(tmp_path / "bundle")
    root = bundle / "rootfs"
    (root / "lib").mkdir()
    shutil.copy(loader, root / "lib/ld-musl-x86_64.so.1")
    shutil.copy(program, root / "bin/cuda-probe")

    done = _run(bundle, node, "b", "/bin/cuda-probe")

    assert done.stdout.splitlines() == _probed(0b10), done.stderr
    assert not (root / "etc/ld.so.cache").exists()


def test_image_gets_its_own_gpu_alone_when_it_says_all(make_node: MakeNode, tmp_path: Path) -> None:
    """`NVIDIA_VISIBLE_DEVICES=all` of a CUDA image is replaced by `void`: where NVIDIA's runtime is
    installed, too, it adds nothing.
    """
    node = make_node("hook")

    done = _run(
        _debian(tmp_path / "bundle"),
        node,
        "a",
        "/bin/sh",
        "-c",
        "echo $NVIDIA_VISIBLE_DEVICES; cuda-probe",
        env=("NVIDIA_VISIBLE_DEVICES=all",),
    )

    assert done.stdout.splitlines() == ["void", *_probed(0b01)], done.stderr


def test_variable_leads_to_the_libraries_when_hooks_cannot_run(make_node: MakeNode, tmp_path: Path) -> None:
    """No program of ours runs for the container, and no loader's file in its root is made."""
    node = make_node("variable")
    node.hook.unlink()
    bundle = _distroless(tmp_path / "bundle")

    done = _run(bundle, node, "a", "/bin/cuda-probe")

    assert done.stdout.splitlines() == _probed(0b01, "/usr/local/nvidia/lib64"), done.stderr
    assert not (bundle / "rootfs/etc/ld.so.cache").exists()


@pytest.mark.parametrize("place", ["", "run/nvidia/driver"], ids=["on the host", "in a driver container"])
def test_shipped_overlay_brings_the_libraries_of_the_hosts_driver(
    make_node: MakeNode, tmp_path: Path, place: str
) -> None:
    """Device service and gateway have the settings of deploy/kubernetes-gpu, and its pod's view of
    the host.

    The container's program finds libcuda and its own GPU.
    """
    recorded = make_node("variable").tree.root
    host = tmp_path / "host"
    recorded.rename(host)
    driver_root(host / place)
    (host / "usr").mkdir(exist_ok=True)
    pod = start_pod(built("kubernetes-gpu"), host, tmp_path / "pod")
    # Only of a kernel's own sysfs are files brought without being asked for
    # (tests/unit/build/test_driver_files_overlay.py).
    files = structs.replace(pod.hardware.driver_files, bring="always")
    tree = Tree(structs.replace(pod.hardware, driver_files=files))
    devices = tuple(NvidiaDriver().discover(tree, read_machine(tree, "n1")).devices)
    node = ShippedNode(folder=tmp_path, tree=tree, devices=devices, hook=tmp_path / "none", rights=pod.rights)

    seen = [_run(_distroless(tmp_path / request), node, request, "/bin/cuda-probe") for request in "ab"]

    libraries = "/usr/local/nvidia/lib64"
    assert [done.stdout.splitlines() for done in seen] == [_probed(0b01, libraries), _probed(0b10, libraries)], [
        done.stderr for done in seen
    ]


@pytest.mark.parametrize(
    ("image_version", "notes", "is_used"),
    [
        pytest.param("590.44.01", "", True, id="newer"),
        pytest.param("570.86.10", "", False, id="older"),
        pytest.param("580.99.01", "", False, id="newer in its minor version alone"),
        pytest.param("590.44.01", '"{\\"Format\\":1,\\"Driver\\":[535,580]}"', True, id="its note serves this driver"),
        pytest.param(
            "590.44.01", '"{\\"Format\\":1,\\"Driver\\":[535,550]}"', False, id="its note serves other drivers"
        ),
    ],
)
def test_images_compatibility_library_wins_when_it_serves_the_driver(
    make_node: MakeNode, tmp_path: Path, image_version: str, notes: str, is_used: bool
) -> None:
    """A newer CUDA's own libcuda is loaded in place of the host's, and never an older one."""
    node = make_node("hook")
    bundle = _debian(tmp_path / "bundle")
    root = bundle / "rootfs"
    folder = root / "usr/local/cuda-13/compat"
    library(folder / f"libcuda.so.{image_version}", "libcuda.so.1", notes)
    (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{image_version}")
    (root / "usr/local/cuda").symlink_to("/usr/local/cuda-13")

    done = _run(bundle, node, "a", "/bin/cuda-probe")

    assert done.stdout.splitlines() == _probed(0b01, "/usr/local/cuda/compat" if is_used else _LIBRARY_FOLDER), (
        done.stderr
    )


def test_container_does_not_start_when_its_cache_cannot_be_extended(make_node: MakeNode, tmp_path: Path) -> None:
    """A cache of no known form is the container's error, with the next step, and not a program
    without CUDA.
    """
    node = make_node("hook")
    bundle = _debian(tmp_path / "bundle")
    (bundle / "rootfs/etc/ld.so.cache").write_bytes(b"of another time")

    done = _run(bundle, node, "a", "/bin/cuda-probe")

    assert done.returncode != 0
    assert "hardware.driver_files.loader" in done.stderr
    assert done.stdout == ""
