"""CDI files in the forms that public generators write, each with the names that a device plugin
gives, and the device nodes of the host that they name.

The forms are facts about the generators (which fields they write, in which file format), repeated
here with few devices: nvidia-ctk 1.17 (NVIDIA/nvidia-container-toolkit, pkg/nvcdi), amd-ctk
(ROCm/container-toolkit, internal/cdi), Intel's GPU plugin (intel-device-plugins-for-kubernetes,
cmd/gpu_plugin/cdi.md), and VFIO groups as NVIDIA's sandbox device plugin has them.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.formats.containers.oci import HostNode

__all__ = ["GENERATORS", "PublicFile"]


class PublicFile(Struct, frozen=True, kw_only=True):
    """One generator's file."""

    name: str
    text: str
    device: str
    """What a plugin names."""
    nodes: dict[str, HostNode]
    """The device nodes that the device brings, as the host has them."""
    mounts: tuple[str, ...] = ()
    hooks: int = 0


def _nvidia(minor: int) -> HostNode:
    return HostNode(kind="c", major=195, minor=minor, mode=0o666)


_HOOKS = """\
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, create-symlinks, --link, "libcuda.so.1::/usr/lib/x86_64-linux-gnu/libcuda.so"]
    env: [NVIDIA_CTK_DEBUG=false]
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, update-ldcache, --folder, /usr/lib/x86_64-linux-gnu]
    env: [NVIDIA_CTK_DEBUG=false]
"""

_BARE_METAL = f"""\
---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidia-uvm
  - path: /dev/nvidiactl
  env:
  - NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/x86_64-linux-gnu
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
{_HOOKS}\
  mounts:
  - containerPath: /usr/bin/nvidia-smi
    hostPath: /usr/bin/nvidia-smi
    options: [ro, nosuid, nodev, rbind, rprivate]
  - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
    hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
    options: [ro, nosuid, nodev, rbind, rprivate]
  - containerPath: /lib/firmware/nvidia/580.95.05/gsp_ga10x.bin
    hostPath: /lib/firmware/nvidia/580.95.05/gsp_ga10x.bin
    options: [ro, nosuid, nodev, rbind, rprivate]
  - containerPath: /run/nvidia-persistenced/socket
    hostPath: /run/nvidia-persistenced/socket
    options: [ro, nosuid, nodev, rbind, rprivate, noexec]
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/dri/card1
    - path: /dev/dri/renderD128
    hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, create-symlinks, --link, "../card1::/dev/dri/by-path/pci-0000:3b:00.0-card"]
      env: [NVIDIA_CTK_DEBUG=false]
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: GPU-5d2c7c9b-0000-4000-8000-000000000000
kind: nvidia.com/gpu
"""

_MIG = """\
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
    major: 195
    minor: 255
devices:
- name: 0
  containerEdits: {deviceNodes: [{path: /dev/nvidia0, major: 195}]}
- name: "0:1"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      major: 195
    - path: /dev/nvidia-caps/nvidia-cap12
      major: 237
      minor: 12
      fileMode: 292
    - path: /dev/nvidia-caps/nvidia-cap13
      fileMode: 0444
"""

_WSL = """\
---
cdiVersion: 0.3.0
containerEdits:
  hooks:
  - args: [nvidia-ctk, hook, create-symlinks, --link, "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_0/nvidia-smi::/usr/bin/nvidia-smi"]
    hookName: createContainer
    path: /usr/bin/nvidia-ctk
  mounts:
  - containerPath: /usr/lib/wsl/lib/libdxcore.so
    hostPath: /usr/lib/wsl/lib/libdxcore.so
    options: [ro, nosuid, nodev, bind]
  - containerPath: /usr/lib/wsl/drivers/nv_dispi.inf_amd64_0/nvidia-smi
    hostPath: /usr/lib/wsl/drivers/nv_dispi.inf_amd64_0/nvidia-smi
    options: [ro, nosuid, nodev, bind]
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/dxg
  name: all
kind: nvidia.com/gpu
"""  # noqa: E501

_MANAGEMENT = f"""\
---
cdiVersion: 0.5.0
kind: management.nvidia.com/gpu
containerEdits:
  hooks:
{_HOOKS}\
  mounts: null
devices:
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/nvidia1
    - path: /dev/nvidiactl
    - path: /dev/nvidia-caps/nvidia-cap1
"""

_AMD = (
    '{"cdiVersion":"0.6.0","kind":"amd.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":['
    '{"path":"/dev/dri/renderD128","type":"c","major":226,"minor":128,"fileMode":432,"permissions":"rw","uid":0,"gid":993},'
    '{"path":"/dev/kfd","type":"c","major":235,"fileMode":432,"permissions":"rw","uid":0,"gid":993}]}}],"containerEdits":{}}\n'
)

_INTEL = """\
---
cdiVersion: 0.5.0
kind: intel.com/gpu
devices:
    - name: gpu0
      containerEdits:
        deviceNodes:
            - path: /dev/dri/card0
              hostPath: /dev/dri/card0
              type: c
            - path: /dev/dri/renderD128
              hostPath: /dev/dri/renderD128
              type: c
"""

_VFIO = """\
---
cdiVersion: 0.5.0
kind: nvidia.com/pgpu
containerEdits: {}
devices:
- name: "12"
  containerEdits: {deviceNodes: [{path: /dev/vfio/vfio}, {path: /dev/vfio/12}]}
- name: vfio0
  containerEdits: {deviceNodes: [{path: /dev/iommu}, {path: /dev/vfio/devices/vfio0}]}
"""

_CARD = HostNode(kind="c", major=226, minor=1, mode=0o660, gid=44)
_RENDER = HostNode(kind="c", major=226, minor=128, mode=0o660, gid=993)
_CAP = HostNode(kind="c", major=237, minor=12, mode=0o444)

GENERATORS = {
    "nvidia-ctk, bare metal": PublicFile(
        name="nvidia.yaml",
        text=_BARE_METAL,
        device="nvidia.com/gpu=0",
        nodes={
            "/dev/nvidia-uvm": HostNode(kind="c", major=510, mode=0o666),
            "/dev/nvidiactl": _nvidia(255),
            "/dev/nvidia0": _nvidia(0),
            "/dev/dri/card1": _CARD,
            "/dev/dri/renderD128": _RENDER,
        },
        mounts=(
            "/usr/bin/nvidia-smi",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05",
            "/lib/firmware/nvidia/580.95.05/gsp_ga10x.bin",
            "/run/nvidia-persistenced/socket",
        ),
        hooks=3,
    ),
    "nvidia-ctk, MIG": PublicFile(
        name="nvidia.yaml",
        text=_MIG,
        device="nvidia.com/gpu=0:1",
        nodes={
            "/dev/nvidiactl": _nvidia(255),
            "/dev/nvidia0": _nvidia(0),
            "/dev/nvidia-caps/nvidia-cap12": _CAP,
            "/dev/nvidia-caps/nvidia-cap13": _CAP,
        },
    ),
    "nvidia-ctk, a number for a name": PublicFile(
        name="nvidia.yaml",
        text=_MIG,
        device="nvidia.com/gpu=0",
        nodes={"/dev/nvidiactl": _nvidia(255), "/dev/nvidia0": _nvidia(0)},
    ),
    "nvidia-ctk, WSL": PublicFile(
        name="nvidia.yaml",
        text=_WSL,
        device="nvidia.com/gpu=all",
        nodes={"/dev/dxg": HostNode(kind="c", major=10, minor=125)},
        mounts=("/usr/lib/wsl/lib/libdxcore.so", "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_0/nvidia-smi"),
        hooks=1,
    ),
    "nvidia-ctk, management": PublicFile(
        name="management.nvidia.com-gpu.yaml",
        text=_MANAGEMENT,
        device="management.nvidia.com/gpu=all",
        nodes={
            "/dev/nvidia0": _nvidia(0),
            "/dev/nvidia1": _nvidia(1),
            "/dev/nvidiactl": _nvidia(255),
            "/dev/nvidia-caps/nvidia-cap1": _CAP,
        },
        hooks=2,
    ),
    "amd-ctk": PublicFile(
        name="amd.json",
        text=_AMD,
        device="amd.com/gpu=0",
        nodes={"/dev/dri/renderD128": _RENDER, "/dev/kfd": HostNode(kind="c", major=235, mode=0o660, gid=993)},
    ),
    "Intel": PublicFile(
        name="intel.com-gpu.yaml",
        text=_INTEL,
        device="intel.com/gpu=gpu0",
        nodes={"/dev/dri/card0": _CARD, "/dev/dri/renderD128": _RENDER},
    ),
    "VFIO group": PublicFile(
        name="pgpu.yaml",
        text=_VFIO,
        device="nvidia.com/pgpu=12",
        nodes={
            "/dev/vfio/vfio": HostNode(kind="c", major=10, minor=196),
            "/dev/vfio/12": HostNode(kind="c", major=511, minor=0),
        },
    ),
    "VFIO by iommufd": PublicFile(
        name="pgpu.yaml",
        text=_VFIO,
        device="nvidia.com/pgpu=vfio0",
        nodes={
            "/dev/iommu": HostNode(kind="c", major=10, minor=124),
            "/dev/vfio/devices/vfio0": HostNode(kind="c", major=512, minor=0),
        },
    ),
}
