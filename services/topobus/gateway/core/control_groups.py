"""Names a container's control group in the kernel's tree, from the path that the container runtime tells.

Flows in: `cgroups_path` of the OCI specification in either of its two forms. Flows out: a folder below the hierarchy's root. Source: runc, libcontainer/cgroups/systemd (ExpandSlice,
getUnitName).
"""

from __future__ import annotations

__all__ = ["control_group_folder"]


def control_group_folder(path: str) -> str:
    """Say in which folder a control group is; empty when the path says none.

    >>> control_group_folder("/kubepods/besteffort/pod1/c0ffee")
    'kubepods/besteffort/pod1/c0ffee'
    >>> control_group_folder("kubepods-besteffort-pod1.slice:cri-containerd:c0ffee")
    'kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-containerd-c0ffee.scope'
    """
    if path.count(":") != 2:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        return "" if ".." in parts else "/".join(parts)
    unit, prefix, name = path.split(":")
    scope = name if name.endswith(".slice") else f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    steps = (unit or "system.slice").removesuffix(".slice").split("-")
    slices = ["-".join(steps[:length]) + ".slice" for length in range(1, len(steps) + 1)]
    return "/".join([*slices, scope]) if all(steps) and "/" not in path else ""
