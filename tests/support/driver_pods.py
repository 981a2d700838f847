"""The gpu service's pod of an overlay, on a host that is a folder: what its mounts show of the
host, its own settings, and what the gateway's settings allow.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from support.kustomize import Manifest, container_of, environment_of, pod_of
from topobus.gateway.config import GatewaySettings
from topobus.gateway.containers.rules.edit_limits import EditRights, rights_of
from topobus.gpu.config import GpuSettings
from topobus.process.config import load_settings
from topobus.sysfs.tree import HardwareSettings

__all__ = ["DriverPod", "start_pod"]


class DriverPod(Struct, frozen=True, kw_only=True):
    """What the two services would have."""

    hardware: HardwareSettings
    """The gpu service's settings, with the pod's root before each path; NVML is left out."""
    rights: EditRights


def start_pod(manifests: list[Manifest], host: Path, root: Path) -> DriverPod:
    """Show below `root` what the container `gpu` sees of the host, as kubelet does: a folder of
    type Directory must be there, one of DirectoryOrCreate is made.
    """
    pod = pod_of(manifests, "DaemonSet", "topobus-gpu")
    container = container_of(pod, "gpu")
    volumes = {volume["name"]: volume["hostPath"] for volume in pod["volumes"] if "hostPath" in volume}
    for mount in container["volumeMounts"]:
        if mount["name"] in volumes:
            volume = volumes[mount["name"]]
            source = host / volume["path"].lstrip("/")
            if volume["type"] == "DirectoryOrCreate":
                source.mkdir(parents=True, exist_ok=True)
            assert source.is_dir(), f"kubelet would not start the pod: the host has no {volume['path']}"
            # A copy and no link: what lies outside of the mounted folders must be out of sight.
            target = root / mount["mountPath"].lstrip("/")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, symlinks=True, copy_function=_copy)
    hardware = load_settings(GpuSettings, "gpu", file=None, environ=environment_of(manifests, container)).hardware
    files = msgspec.structs.replace(hardware.driver_files, host_root=f"{root}{hardware.driver_files.host_root}")
    gateway = container_of(pod_of(manifests, "DaemonSet", "topobus-gateway"), "gateway")
    settings = load_settings(GatewaySettings, "gateway", file=None, environ=environment_of(manifests, gateway))
    return DriverPod(
        hardware=msgspec.structs.replace(hardware, root=f"{root}{hardware.root}", library_path="", driver_files=files),
        rights=rights_of("gpu", settings.edits.get("gpu", EditRights()), is_foreign=False),
    )


def _copy(source: str, target: str) -> None:
    status = Path(source).stat()
    if stat.S_ISCHR(status.st_mode):
        os.mknod(target, status.st_mode, status.st_rdev)
    else:
        shutil.copy(source, target)
