"""Devices and pods of kubelet's device plugin interface, as its tests make and admit them."""

from __future__ import annotations

from pathlib import Path

from support.gateway_rig import Rig
from support.node_plane import device
from topobus.testing.kubelet import Admission, Container, Pod, Rejection

GPU = "topobus.dev/gpu"
NIC = "topobus.dev/nic"
GPUS = (device("gpu-0", 0), device("gpu-1", 1), device("gpu-2"))


def pod(uid: str = "p-1", **resources: int) -> Pod:
    """A pod with one container; `gpu=2` asks two GPUs."""
    return Pod(
        name=f"pod-{uid}",
        uid=uid,
        containers=(Container(name="main", resources={f"topobus.dev/{k}": n for k, n in resources.items()}),),
    )


async def admitted(rig: Rig, wanted: Pod) -> Admission:
    """Admit a pod that must be admitted."""
    answer = await rig.kubelet.admit(wanted)
    assert isinstance(answer, Admission), answer
    return answer


async def rejected(rig: Rig, wanted: Pod) -> Rejection:
    """Admit a pod that must be rejected."""
    answer = await rig.kubelet.admit(wanted)
    assert isinstance(answer, Rejection), answer
    return answer


def own_sockets(rig: Rig) -> list[Path]:
    """Our sockets in kubelet's folder."""
    return sorted(rig.kubelet.device_plugin_dir.glob("topobus-*.sock"))
