"""The how-to page on CUDA shows settings, a configuration and a patch of
manifests that are right.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from support.kustomize import built, environment_of, pod_of
from topobus.gateway.config import GatewaySettings
from topobus.gateway.config import check as check_gateway
from topobus.gpu.config import GpuSettings
from topobus.gpu.driver_root.access import Access, read_access
from topobus.gpu.driver_root.bring import CACHED_FOLDER, IMAGES_FOLDER
from topobus.gpu.driver_root.driver_files import SEARCHED_ROOTS
from topobus.process.config import load_settings
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.values.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/cuda-without-a-toolkit.md").read_text(encoding="utf-8")


def _yaml() -> list[Any]:
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def test_page_shows_a_configuration_that_is_right() -> None:
    """What a claim asks for is read as the page says."""
    parameters = _yaml()[0]["config"][0]["opaque"]["parameters"]

    assert read_access([[parameters]]) == Access(gpu_direct_storage=True, gdr_copy=True, imex_channels=(0,))


def test_page_shows_settings_that_are_right() -> None:
    """Each variable in its table is one that the service takes, and changes something.

    So does the gateway's.
    """
    pairs = re.findall(r"`(TOPOBUS_GPU__[A-Z_]+)=([^`]+)`", PAGE)
    environ = {"TOPOBUS_GPU__NODE": "n", "TOPOBUS_GATEWAY__NODE": "n"}
    refused: list[str] = []
    for name, value in pairs:
        try:
            settings = load_settings(GpuSettings, "gpu", file=None, environ={**environ, name: value})
        except ConfigError as err:
            refused.append(str(err))
        else:
            refused += [name] if settings.hardware.driver_files == DriverFilesSettings() else []
    (edits,) = re.findall(r"`TOPOBUS_GATEWAY__EDITS='([^`]+)'`", PAGE)
    gateway = load_settings(GatewaySettings, "gateway", file=None, environ={**environ, "TOPOBUS_GATEWAY__EDITS": edits})
    check_gateway(gateway)

    assert len(pairs) == 5
    assert refused == []
    assert gateway.edits["gpu"].mounts == ("/opt/driver",)


def test_page_s_patch_meets_the_gpu_service_s_container() -> None:
    """The number in the patch is the place of container `gpu` in the overlay, and its folder is
    below what HOST_ROOT names there.
    """
    volume, mount = _yaml()[1]
    manifests = built("kubernetes-gpu")
    pod = pod_of(manifests, "DaemonSet", "topobus-gpu")

    index = int(re.findall(r"/containers/(\d+)/", mount["path"])[0])

    assert pod["containers"][index]["name"] == "gpu"
    host_root = environment_of(manifests, pod["containers"][index])["TOPOBUS_GPU__HARDWARE__DRIVER_FILES__HOST_ROOT"]
    assert mount["value"]["mountPath"] == f"{host_root}{volume['value']['hostPath']['path']}"
    assert volume["value"]["name"] not in {it["name"] for it in pod["volumes"]}


def test_page_names_the_folders_that_the_service_uses() -> None:
    """Roots that are searched, in their order, and the folders of libraries in containers."""
    rows = re.findall(r"^\| `(/[^`]*)` \|", PAGE, re.MULTILINE)

    assert tuple(rows[: len(SEARCHED_ROOTS)]) == SEARCHED_ROOTS
    assert CACHED_FOLDER in PAGE
    assert IMAGES_FOLDER in PAGE
