"""Where a container's control group is, from what the runtime tells of it."""

from __future__ import annotations

import pytest

from topobus.gateway.containers.kernel_cpusets import control_group_folder


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/kubepods/besteffort/pod1/c0", "kubepods/besteffort/pod1/c0"),
        ("kubepods-pod1.slice:cri-containerd:c0", "kubepods.slice/kubepods-pod1.slice/cri-containerd-c0.scope"),
        (":crio:c0", "system.slice/crio-c0.scope"),
        ("kubepods.slice::c0", "kubepods.slice/c0.scope"),
        ("kubepods.slice:crio:inner.slice", "kubepods.slice/inner.slice"),
        ("", ""),
        ("/kubepods/../../etc", ""),
        ("kubepods.slice:crio:../../c0", ""),
        ("a--b.slice:crio:c0", ""),
    ],
)
def test_control_group_is_where_the_runtime_makes_it(path: str, folder: str) -> None:
    """Both forms lead into the tree, slices one in the other as systemd nests them.

    What leads out of it, or is none, leads nowhere.
    """
    assert control_group_folder(path) == folder
