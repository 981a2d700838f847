"""What a device adds to a container: which edits are some, which only a container runtime can do,
and CPUs that add up.
"""

from __future__ import annotations

import pytest

from topobus.values.edits import ContainerEdits, Cpuset, DeviceNode, Hook, IntelRdt, Mount, NetDevice, join_edits
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Refusal


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


@pytest.mark.parametrize(
    ("edits", "other", "what"),
    [
        pytest.param(ContainerEdits(env={"A": "1"}), ContainerEdits(env={"A": "2"}), "variable A", id="variable"),
        pytest.param(
            ContainerEdits(annotations={"a": "1"}),
            ContainerEdits(annotations={"a": "2"}),
            "annotation a",
            id="annotation",
        ),
        pytest.param(
            ContainerEdits(device_nodes=(DeviceNode(path="/dev/a"),)),
            ContainerEdits(device_nodes=(DeviceNode(path="/dev/a", host_path="/dev/b"),)),
            "device node /dev/a",
            id="device-node",
        ),
        pytest.param(
            ContainerEdits(mounts=(Mount(host_path="/a", container_path="/c"),)),
            ContainerEdits(mounts=(Mount(host_path="/b", container_path="/c"),)),
            "mount /c",
            id="mount",
        ),
        pytest.param(
            ContainerEdits(net_devices=(NetDevice(host_name="a", name="net1"),)),
            ContainerEdits(net_devices=(NetDevice(host_name="b", name="net1"),)),
            "network device net1",
            id="network device",
        ),
        pytest.param(
            ContainerEdits(intel_rdt=IntelRdt(clos_id="a")),
            ContainerEdits(intel_rdt=IntelRdt(clos_id="b")),
            "cache and memory bandwidth",
            id="rdt",
        ),
    ],
)
def test_join_refuses_and_names_the_place_when_two_devices_disagree(
    edits: ContainerEdits, other: ContainerEdits, what: str
) -> None:
    """Nothing is dropped in silence: a contradiction is a refusal that names what contradicts."""
    refused = join_edits([edits, other])

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "edits-conflict"
    assert what in refused.reasons[0].message


def test_join_keeps_each_hook_and_group_once_and_all_cpus() -> None:
    """A hook that two devices name alike is one program, run once; CPUs add up."""
    hook = Hook(name="createContainer", path="/usr/bin/nvidia-cdi-hook", args=("nvidia-cdi-hook", "update-ldcache"))
    first = ContainerEdits(hooks=(hook,), additional_gids=(44, 109), cpuset=Cpuset(cpus=CpuSet(1), mems=NodeSet(0)))
    second = ContainerEdits(hooks=(hook,), additional_gids=(44,), cpuset=Cpuset(cpus=CpuSet(9), mems=NodeSet(1)))

    assert join_edits([first, second]) == ContainerEdits(
        hooks=(hook,), additional_gids=(44, 109), cpuset=Cpuset(cpus=CpuSet(1, 9), mems=NodeSet(0, 1))
    )
