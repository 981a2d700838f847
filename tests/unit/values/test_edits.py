"""What a device adds to a container: which edits are some, which only a container runtime can do,
and CPUs that add up.
"""

from __future__ import annotations

import pytest

from topobus.values.edits import ContainerEdits, Cpuset, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from topobus.values.idset import CpuSet, NodeSet


def test_cpusets_add_up_when_a_container_has_two_devices() -> None:
    """CPUs and memory nodes of both."""
    first, second = Cpuset(cpus=CpuSet(1), mems=NodeSet(0)), Cpuset(cpus=CpuSet(5), mems=NodeSet(1))

    assert first | second == Cpuset(cpus=CpuSet(1, 5), mems=NodeSet(0, 1))


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(ContainerEdits(hooks=(Hook(name="prestart", path="/x"),)), id="hook"),
        pytest.param(ContainerEdits(additional_gids=(44,)), id="group"),
        pytest.param(ContainerEdits(net_devices=(NetDevice(host_name="a", name="b"),)), id="network device"),
        pytest.param(ContainerEdits(intel_rdt=IntelRdt(clos_id="a")), id="rdt"),
        pytest.param(ContainerEdits(device_nodes=(DeviceNode(path="/dev/a", kind="c", major=1),)), id="numbers"),
        pytest.param(ContainerEdits(device_nodes=(DeviceNode(path="/dev/a", gid=5),)), id="owner"),
        pytest.param(
            ContainerEdits(mounts=(Mount(host_path="tmpfs", container_path="/t", kind="tmpfs"),)), id="file system"
        ),
    ],
)
def test_edits_need_a_runtime_when_kubelet_has_no_words_for_them(edits: ContainerEdits) -> None:
    """They are edits for CDI, and a device plugin's answer cannot carry them."""
    assert (edits.is_empty, edits.needs_runtime) == (False, True)


def test_plain_edits_need_no_runtime() -> None:
    """Variables, nodes of the host and bind mounts go through both doors.

    A cpuset or an annotation alone is no CDI edit.
    """
    plain = ContainerEdits(
        env={"A": "1"}, device_nodes=(DeviceNode(path="/dev/a"),), mounts=(Mount(host_path="/a", container_path="/b"),)
    )

    assert (plain.is_empty, plain.needs_runtime) == (False, False)
    assert ContainerEdits(annotations={"a": "b"}, cpuset=Cpuset(cpus=CpuSet(1))).is_empty
