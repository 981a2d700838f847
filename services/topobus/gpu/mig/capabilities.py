"""Finds the device nodes by which a container may use one MIG instance: the capabilities of its GPU
instance and its compute instance.

A container with these two nodes and the GPU's can use that instance alone: CUDA finds the others
but may not open them.
Source: MIG User Guide, "Device Nodes and Capabilities":
/proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<id>/access with `DeviceFileMinor: 12`, and
/proc/driver/nvidia-caps/mig-minors with `gpu0/gi1/ci0/access 13`.
"""

from __future__ import annotations

from topobus.sysfs.tree import Tree
from topobus.values.outcome import Refusal, refuse

__all__ = ["capability_nodes"]

_ACCESS = "proc/driver/nvidia/capabilities"
_MINORS = "proc/driver/nvidia-caps/mig-minors"
_MINOR_KEY = "DeviceFileMinor"


def capability_nodes(tree: Tree, minor: str, gi: int, ci: int) -> tuple[str, ...] | Refusal:
    """Name the nodes of a GPU's instance, relative to dev, that of the GPU instance first.

    Shapes: minor — the GPU's number in /dev/nvidia<minor>, by which the module's files are named.
    Errors: returns Refusal code mig-capability-missing with what the host lacks; raises
    HardwareError when a file exists and cannot be read.
    """
    nodes: list[str] = []
    # The list is long (each instance that could ever exist), and needed only where the first file
    # is missing.
    listed: dict[str, str] | None = None
    for path, short in (
        (f"gpu{minor}/mig/gi{gi}", f"gpu{minor}/gi{gi}"),
        (f"gpu{minor}/mig/gi{gi}/ci{ci}", f"gpu{minor}/gi{gi}/ci{ci}"),
    ):
        number = _minor_of(tree.read(f"{_ACCESS}/{path}/access") or "")
        if not number:
            listed = _read_list(tree) if listed is None else listed
            number = listed.get(f"{short}/access", "")
        if not number:
            text = (
                f"the kernel module names no capability for {short}: neither /{_ACCESS}/{path}/access nor "
                f"/{_MINORS} has its number"
            )
            return _refuse(text, short)
        nodes.append(f"nvidia-caps/nvidia-cap{number}")
    missing = [node for node in nodes if tree.is_live and not tree.exists(f"dev/{node}")]
    if missing:
        text = (
            f"the host has no {', '.join(f'/dev/{node}' for node in missing)}: nvidia-modprobe makes it "
            "(nvidia-modprobe -f <access file>)"
        )
        return _refuse(text, ",".join(missing))
    return tuple(nodes)


def _minor_of(text: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == _MINOR_KEY and value.strip().isdecimal():
            return value.strip()
    return ""


def _read_list(tree: Tree) -> dict[str, str]:
    words = (line.split() for line in (tree.read(_MINORS) or "").splitlines())
    return {pair[0]: pair[1] for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def _refuse(message: str, what: str) -> Refusal:
    return refuse("mig-capability-missing", message, capability=what)
