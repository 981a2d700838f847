"""The files of a driver: all that NVIDIA's toolkit would list, from every kind of driver root, and
what is said when some are missing.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.driver_roots import FIRMWARE, LIBRARIES, VERSION, driver_root, library, listening_socket, require_compiler
from topobus.formats.messages.messages import Prepared
from topobus.gateway.containers.rules.edit_limits import NO_RIGHTS, EditRights, refuse_forbidden, rights_of
from topobus.gpu.driver_root.bring import DriverFileSource, file_edits
from topobus.gpu.driver_root.driver_files import DriverFiles, find_driver_files, find_sockets
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.edits import ContainerEdits, Mount
from topobus.values.outcome import Refusal

_DATA = Path(__file__).resolve().parents[2] / "data" / "driver_files"
_FOLDER = "usr/lib/x86_64-linux-gnu"
_SONAMES = {"libGLX_nvidia.so": "libGLX_nvidia.so.0"}


@pytest.fixture(scope="module")
def toolkits() -> dict[str, Any]:
    """What the toolkit lists."""
    return tomllib.loads((_DATA / "toolkit_list.toml").read_text())


def _find(host: Path, root: str = "") -> DriverFiles:
    driver_files = find_driver_files(DriverFilesSettings(host_root=str(host), root=root), VERSION)
    assert isinstance(driver_files, DriverFiles), driver_files
    return driver_files


@pytest.fixture
def whole(tmp_path: Path, toolkits: dict[str, Any]) -> Iterator[Path]:
    """A host with all that the toolkit's list names, and with files that
    are none of the driver's.
    """
    require_compiler()
    host = tmp_path / "host"
    for base in toolkits["versioned"]:
        soname = LIBRARIES.get(base.removesuffix(".so"), _SONAMES.get(base, f"{Path(base).name}.1"))
        library(host / _FOLDER / f"{base}.{VERSION}", soname)
    for name in (*toolkits["others"], *toolkits["foreign"]):
        library(host / _FOLDER / name)
    for path in (*toolkits["configuration"], *toolkits["xorg"][:2], *toolkits["storage"]):
        (host / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (host / path.lstrip("/")).write_text("configuration\n")
    (host / "usr/bin").mkdir(parents=True)
    for name in toolkits["programs"]:
        (host / "usr/bin" / name).write_text("#!/bin/sh\n")
    for name in toolkits["firmware"]:
        (host / "lib/firmware/nvidia" / VERSION).mkdir(parents=True, exist_ok=True)
        (host / "lib/firmware/nvidia" / VERSION / name).write_bytes(b"firmware")
    with ExitStack() as stack:
        for path in toolkits["sockets"]:
            stack.enter_context(listening_socket(host / path.lstrip("/")))
        yield host


def test_container_gets_all_that_the_toolkit_lists(whole: Path, toolkits: dict[str, Any]) -> None:
    """Compared by name: libraries, links, programs, firmware, sockets, configuration; and nothing
    that is none of the driver's.
    """
    files = _find(whole)

    edits = file_edits(files, sockets=find_sockets(str(whole), files.root), way="image", hook="", has_storage=True)

    inside = {mount.container_path for mount in edits.mounts}
    folder = "/usr/local/nvidia/lib64"
    wanted = {f"{folder}/{base}.{VERSION}" for base in toolkits["versioned"]}
    wanted |= {f"{folder}/{name}" for name in (*toolkits["others"], *toolkits["links"])}
    wanted |= {f"/usr/bin/{name}" for name in toolkits["programs"]}
    wanted |= {f"/lib/firmware/nvidia/{VERSION}/{name}" for name in toolkits["firmware"]}
    wanted |= {*toolkits["sockets"], *toolkits["configuration"], *toolkits["xorg"], *toolkits["storage"]}
    assert wanted - inside == set()
    assert {Path(mount.host_path).name for mount in edits.mounts} & set(toolkits["foreign"]) == set()
    assert len(inside) == len(edits.mounts)


def test_gateway_allows_all_of_it_without_a_setting(whole: Path) -> None:
    """What a usual host has passes the gateway's shipped rights; one file more does not."""
    files = _find(whole)
    edits = file_edits(
        files,
        sockets=find_sockets(str(whole), files.root),
        way="hook",
        hook="/usr/local/bin/topobus-gpu-hook",
        has_storage=True,
    )
    rights = rights_of("gpu", NO_RIGHTS, is_foreign=False)

    assert refuse_forbidden("gpu", Prepared(edits={}, common=edits), rights) is None
    variable = file_edits(files, way="variable", hook="")
    assert refuse_forbidden("gpu", Prepared(edits={}, common=variable), rights) is None
    for refused in (
        ContainerEdits(env={"LD_LIBRARY_PATH": "/tmp"}),
        ContainerEdits(mounts=(Mount(host_path="/etc/shadow", container_path="/a"),)),
        ContainerEdits(mounts=(Mount(host_path="/usr/lib", container_path="/a"),)),
        ContainerEdits(mounts=(Mount(host_path="/usr/lib/x.conf", container_path="/a"),)),
    ):
        assert refuse_forbidden("gpu", Prepared(edits={}, common=refused), rights) is not None, refused


def _driver_container(host: Path) -> None:
    """A driver container's root: a whole system, whose absolute links mean itself."""
    root = driver_root(host / "run/nvidia/driver")
    real = root / "opt/driver/libcudadebugger.so"
    real.parent.mkdir(parents=True)
    (root / _FOLDER / f"libcudadebugger.so.{VERSION}").rename(real)
    (root / _FOLDER / f"libcudadebugger.so.{VERSION}").symlink_to("/opt/driver/libcudadebugger.so")


def _plain_folder(host: Path, folder: str) -> None:
    driver_root(host / folder, folder="lib64", programs="bin")


def _nixos(host: Path) -> None:
    """NixOS: a folder of links into the store, by absolute paths of the host."""
    store = driver_root(host / "nix/store/abc-nvidia-x11", folder="lib", programs="bin")
    (host / "run/opengl-driver").mkdir(parents=True)
    (host / "run/opengl-driver/lib").symlink_to("/nix/store/abc-nvidia-x11/lib")
    (host / "run/opengl-driver/bin").symlink_to(f"/{store.relative_to(host)}/bin")


def _alternatives(host: Path) -> None:
    """Debian's own packages: libraries in a folder of the driver, a program behind two links."""
    driver_root(host, folder=f"{_FOLDER}/nvidia/current", programs="usr/lib/nvidia/current")
    (host / "usr/bin").mkdir()
    (host / "usr/bin/nvidia-smi").symlink_to("/etc/alternatives/nvidia--nvidia-smi")
    (host / "etc/alternatives").mkdir()
    (host / "etc/alternatives/nvidia--nvidia-smi").symlink_to("/usr/lib/nvidia/current/nvidia-smi")


def _usr_merged(host: Path) -> None:
    driver_root(host, folder="usr/lib64")
    (host / "lib64").symlink_to("usr/lib64")


@pytest.mark.parametrize(
    ("lay_out", "root"),
    [
        pytest.param(_driver_container, "/run/nvidia/driver", id="driver container"),
        pytest.param(
            lambda host: _plain_folder(host, "home/kubernetes/bin/nvidia"), "/home/kubernetes/bin/nvidia", id="GKE"
        ),
        pytest.param(lambda host: _plain_folder(host, "usr/local/nvidia"), "/usr/local/nvidia", id="plain folder"),
        pytest.param(_nixos, "/run/opengl-driver", id="NixOS"),
        pytest.param(_alternatives, "/", id="Debian's packages"),
        pytest.param(_usr_merged, "/", id="Red Hat, merged /usr"),
    ],
)
def test_driver_is_found_in_every_kind_of_root(tmp_path: Path, lay_out: Any, root: str) -> None:
    """Without a setting: each library of the loaded version with its names, by paths of the host
    that exist and lead through no link, and with the program; the gateway allows it.
    """
    require_compiler()
    host = tmp_path / "host"
    host.mkdir()
    lay_out(host)

    files = _find(host)

    assert files.root == root
    names = {name for library in files.libraries for name in library.names}
    assert {f"{base}.so.{VERSION}" for base in LIBRARIES} <= names
    assert {"libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"} <= names
    assert not {name for name in names if "570" in name or "libz" in name}
    paths = [*(library.host_path for library in files.libraries), *(file.host_path for file in files.files)]
    assert all(
        (host / path.lstrip("/")).is_file()
        and os.path.realpath(host / path.lstrip("/")) == str(host / path.lstrip("/"))
        for path in paths
    )
    assert "/usr/bin/nvidia-smi" in {file.container_path for file in files.files}
    own = EditRights(mounts=("/run/nvidia/driver/opt",)) if lay_out is _driver_container else NO_RIGHTS
    assert (
        refuse_forbidden(
            "gpu",
            Prepared(edits={}, common=file_edits(files, way="image", hook="")),
            rights_of("gpu", own, is_foreign=False),
        )
        is None
    )


def test_root_of_the_loaded_version_counts_when_another_one_comes_first(tmp_path: Path) -> None:
    """A driver container that is gone may have left another version's files."""
    require_compiler()
    host = tmp_path / "host"
    library(host / "run/nvidia/driver" / _FOLDER / "libcuda.so.570.86.10", "libcuda.so.1")
    driver_root(host)

    assert _find(host).root == "/"


def test_libraries_of_another_machine_are_left_out(tmp_path: Path) -> None:
    """A 32-bit library of the same name in a folder that comes later is none of this driver's."""
    require_compiler()
    host = tmp_path / "host"
    driver_root(host)
    file = host / "usr/lib" / f"libnvidia-tls.so.{VERSION}"
    data = bytearray((host / _FOLDER / f"libcuda.so.{VERSION}").read_bytes())
    data[18] = 183
    file.write_bytes(data)

    assert file.name not in {name for library in _find(host).libraries for name in library.names}


def test_missing_library_is_named_with_where_and_what_to_do(tmp_path: Path) -> None:
    """What, where, got, wanted, next step."""
    require_compiler()
    host = tmp_path / "host"
    driver_root(host)
    (host / _FOLDER / f"libnvidia-ml.so.{VERSION}").unlink()

    refusal = find_driver_files(DriverFilesSettings(host_root=str(host)), VERSION)

    assert isinstance(refusal, Refusal)
    (reason,) = refusal.reasons
    assert reason.code == "driver-files-incomplete"
    assert reason.facts["wanted"] == (f"libnvidia-ml.so.{VERSION}",)
    assert all(
        word in reason.message
        for word in ("at /", f"libnvidia-ml.so.{VERSION}", "install all of the driver's packages")
    )


def test_other_version_is_named_when_the_module_is_of_another(tmp_path: Path) -> None:
    """After an upgrade without a reboot the sentence names both versions, and the reboot."""
    require_compiler()
    host = tmp_path / "host"
    driver_root(host)

    refusal = find_driver_files(DriverFilesSettings(host_root=str(host)), "590.44.01")

    assert isinstance(refusal, Refusal)
    assert all(word in refusal.reasons[0].message for word in (VERSION, "590.44.01", "reboot"))


def test_absence_is_told_with_the_places_when_there_is_no_driver(tmp_path: Path) -> None:
    """A host without any driver's files: where it was looked for."""
    refusal = find_driver_files(DriverFilesSettings(host_root=str(tmp_path)), VERSION)

    assert isinstance(refusal, Refusal)
    assert "/run/nvidia/driver" in refusal.reasons[0].message
    assert "hardware.driver_files.root" in refusal.reasons[0].message


def test_links_in_a_circle_lead_nowhere(tmp_path: Path) -> None:
    """A broken root costs its own library, and no hang."""
    require_compiler()
    host = tmp_path / "host"
    driver_root(host)
    (host / "usr/bin/nvidia-smi").unlink()
    (host / "usr/bin/nvidia-smi").symlink_to("nvidia-smi")
    shutil.rmtree(host / "lib/firmware/nvidia" / VERSION)
    (host / "lib/firmware/nvidia" / VERSION).symlink_to(VERSION)

    inside = {file.container_path for file in _find(host).files}

    assert "/usr/bin/nvidia-debugdump" in inside
    assert not {path for path in inside if path.endswith(("nvidia-smi", *FIRMWARE))}


def test_files_are_found_again_when_a_package_was_installed(tmp_path: Path) -> None:
    """What was found is kept until a folder of any root changes: the host's own, too."""
    require_compiler()
    host = tmp_path / "host"
    driver_root(host)
    source = DriverFileSource()
    tree = Tree(
        HardwareSettings(
            root=str(tmp_path / "tree"), driver_files=DriverFilesSettings(host_root=str(host), bring="always")
        )
    )

    before = source.find(tree, VERSION)
    (host / _FOLDER / f"libnvidia-ml.so.{VERSION}").unlink()
    without = source.find(tree, VERSION)
    driver_root(host / "run/nvidia/driver")
    in_container = source.find(tree, VERSION)

    assert isinstance(before, DriverFiles)
    assert isinstance(without, Refusal)
    assert isinstance(in_container, DriverFiles)
    assert (before.root, in_container.root) == ("/", "/run/nvidia/driver")


@pytest.mark.parametrize(
    ("is_recorded", "settings", "is_found"),
    [
        pytest.param(False, {}, True, id="in a container that has the host's folders"),
        pytest.param(False, {"bring": "never"}, False, id="left to NVIDIA's runtime"),
        pytest.param(True, {}, False, id="of a recorded machine"),
        pytest.param(True, {"root": "/"}, True, id="of a recorded machine whose driver is named"),
    ],
)
def test_files_are_ours_to_bring_when_the_host_is_seen(
    tmp_path: Path, is_recorded: bool, settings: dict[str, Any], is_found: bool
) -> None:
    """Without a setting they are looked for on a real machine alone: a recorded one must not be
    mixed with this machine's files.
    """
    require_compiler()
    host = tmp_path / "host"
    driver_root(host)
    where = {"root": str(tmp_path / "recorded")} if is_recorded else {}
    tree = Tree(HardwareSettings(**where, driver_files=DriverFilesSettings(host_root=str(host), **settings)))

    assert isinstance(DriverFileSource().find(tree, VERSION), DriverFiles) is is_found
