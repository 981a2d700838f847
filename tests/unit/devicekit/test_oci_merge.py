"""From Allocate answers and CDI files to an OCI spec: order, winners,
and every disagreement told.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from topobus.devicekit.containers.oci_host import look_up, read_cdi_files
from topobus.formats.containers.cdi import CdiDevice, CdiSpec, render
from topobus.formats.containers.oci import CdiFile, HostNode, OciResult, PluginAnswer, device_paths, oci_spec
from topobus.values.edits import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from topobus.values.outcome import Refusal

BASE: dict[str, Any] = {
    "ociVersion": "1.0.2",
    "process": {"env": ["PATH=/bin", "A=pod"], "user": {"uid": 1000, "gid": 100}},
    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
    "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}},
}
NODES = {
    "/dev/x": HostNode(kind="c", major=195, minor=0, mode=0o660, gid=44),
    "/dev/y": HostNode(kind="b", major=8, minor=1),
}


def answer(resource: str, **edits: Any) -> PluginAnswer:
    """An Allocate answer."""
    return PluginAnswer(resource=resource, edits=ContainerEdits(**edits))


def file(
    name: str = "c", path: str = "/run/c.json", priority: int = 1, common: ContainerEdits | None = None, **edits: Any
) -> CdiFile:
    """A CDI file with one device."""
    device = CdiDevice(name=name, edits=ContainerEdits(**(edits or {"env": {"E": "1"}})))
    spec = CdiSpec(vendor="topobus.dev", device_class="gpu", devices=(device,), common=common or ContainerEdits())
    return CdiFile(path=path, spec=spec, priority=priority)


def merged(**parts: Any) -> OciResult:
    """Merge into the base; it must be possible."""
    outcome = oci_spec(BASE, nodes=NODES, **parts)
    assert isinstance(outcome, OciResult), outcome
    return outcome


def conflicts(oci_result: OciResult) -> list[str]:
    """Conflicts in words."""
    return [str(conflict) for conflict in oci_result.conflicts]


def test_spec_has_all_edits_when_nothing_disagrees() -> None:
    """Variables, mounts, nodes with the host's numbers, access rules behind the general denial,
    annotations.

    The base is left alone.
    """
    before = copy.deepcopy(BASE)
    gpu = answer(
        "topobus.dev/gpu",
        env={"GPUS": "0"},
        annotations={"a": "1"},
        device_nodes=(DeviceNode(path="/dev/g", host_path="/dev/x", permissions="rw"),),
        mounts=(
            Mount(host_path="/opt/lib", container_path="/usr/lib/gpu/inner"),
            Mount(host_path="/opt", container_path="/usr/lib"),
        ),
    )

    oci_result = merged(answers=[gpu])

    assert oci_result.spec["process"]["env"] == ["PATH=/bin", "A=pod", "GPUS=0"]
    assert oci_result.spec["annotations"] == {"a": "1"}
    assert oci_result.spec["linux"]["devices"] == [
        {"path": "/dev/g", "type": "c", "major": 195, "minor": 0, "fileMode": 0o660, "uid": 0, "gid": 44}
    ]
    assert oci_result.spec["linux"]["resources"]["devices"] == [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"},
    ]
    assert [mount["destination"] for mount in oci_result.spec["mounts"]] == ["/proc", "/usr/lib", "/usr/lib/gpu/inner"]
    assert (oci_result.conflicts, oci_result.missing, BASE) == ((), (), before)


def test_first_resource_wins_when_two_set_the_same() -> None:
    """As kubelet: the first answer keeps every key, and the pod's own variable wins over both.

    Equal values are no conflict.
    """
    node = DeviceNode(path="/dev/x")
    first = answer(
        "one",
        env={"V": "1", "A": "plugin", "S": "same"},
        mounts=(Mount(host_path="/a", container_path="/m"),),
        device_nodes=(node,),
    )
    second = answer(
        "two",
        env={"V": "2", "S": "same"},
        mounts=(Mount(host_path="/b", container_path="/m"),),
        device_nodes=(DeviceNode(path="/dev/x", host_path="/dev/y"),),
    )

    oci_result = merged(answers=[first, second])

    assert oci_result.spec["process"]["env"] == ["PATH=/bin", "A=pod", "V=1", "S=same"]
    assert oci_result.spec["mounts"][-1]["source"] == "/a"
    assert [device["type"] for device in oci_result.spec["linux"]["devices"]] == ["c"]
    assert [device["type"] for device in oci_result.spec["linux"]["resources"]["devices"][1:]] == ["c"]
    assert conflicts(oci_result) == [
        "variable A: the pod wins over one",
        "variable V: one wins over two",
        "mount /m: one wins over two",
        "device node /dev/x: one wins over two",
    ]


def test_cdi_wins_when_it_sets_what_was_set_before() -> None:
    """CDI edits come last; the file's common edits once and before the devices'.

    A node belongs to the container's user.
    """
    edits = {"env": {"A": "cdi"}, "device_nodes": (DeviceNode(path="/dev/x", permissions=""),)}
    common = ContainerEdits(env={"A": "common", "C": "1"})
    plugin = answer("one", device_nodes=(DeviceNode(path="/dev/x", host_path="/dev/y"),))

    oci_result = merged(answers=[plugin], cdi_devices=["topobus.dev/gpu=c"], files=[file(common=common, **edits)])

    assert oci_result.spec["process"]["env"] == ["PATH=/bin", "C=1", "A=cdi"]
    assert oci_result.spec["linux"]["devices"] == [
        {"path": "/dev/x", "type": "c", "major": 195, "minor": 0, "uid": 1000, "gid": 100}
    ]
    assert oci_result.spec["linux"]["resources"]["devices"][-1]["access"] == "rwm"
    assert conflicts(oci_result) == [
        "variable A: CDI file /run/c.json wins over the pod",
        "variable A: CDI device topobus.dev/gpu=c wins over CDI file /run/c.json",
        "device node /dev/x: CDI device topobus.dev/gpu=c wins over one",
    ]


def test_cdi_brings_hooks_groups_interfaces_and_nodes_that_the_host_has_not() -> None:
    """As containerd's CDI library edits the spec: hooks by their moment, a group once and never
    root's, numbers as they are given.
    """
    hook = Hook(name="createContainer", path="/usr/bin/h", args=("h", "x"), env=("A=1",), timeout_s=5)
    edits: dict[str, Any] = {
        "hooks": (hook, Hook(name="prestart", path="/p")),
        "additional_gids": (44, 0),
        "net_devices": (NetDevice(host_name="mlx5_0", name="net1"),),
        "intel_rdt": IntelRdt(clos_id="gpu", enable_monitoring=True),
        "device_nodes": (
            DeviceNode(path="/dev/cap", permissions="r", kind="c", major=238, minor=7, file_mode=0o444, uid=0, gid=5),
            DeviceNode(path="/dev/shown", host_path="/dev/x", permissions="none"),
        ),
        "mounts": (Mount(host_path="tmpfs", container_path="/scratch", options=("size=1m",), kind="tmpfs"),),
    }

    spec = merged(
        cdi_devices=["topobus.dev/gpu=c"], files=[file(common=ContainerEdits(additional_gids=(44,)), **edits)]
    ).spec

    assert spec["hooks"] == {
        "createContainer": [{"path": "/usr/bin/h", "args": ["h", "x"], "env": ["A=1"], "timeout": 5}],
        "prestart": [{"path": "/p"}],
    }
    assert spec["process"]["user"]["additionalGids"] == [44]
    assert spec["linux"]["netDevices"] == {"mlx5_0": {"name": "net1"}}
    assert spec["linux"]["intelRdt"] == {"closID": "gpu", "enableMonitoring": True}
    assert spec["linux"]["devices"] == [
        {"path": "/dev/cap", "type": "c", "major": 238, "minor": 7, "uid": 0, "gid": 5, "fileMode": 0o444},
        {"path": "/dev/shown", "type": "c", "major": 195, "minor": 0, "uid": 1000, "gid": 100},
    ]
    assert spec["linux"]["resources"]["devices"][1:] == [
        {"allow": True, "type": "c", "major": 238, "minor": 7, "access": "r"}
    ]
    assert {"destination": "/scratch", "source": "tmpfs", "type": "tmpfs", "options": ["size=1m"]} in spec["mounts"]


def test_claims_devices_come_before_those_of_plugins_when_both_name_some() -> None:
    """Kubelet's order; a name that comes twice is injected once."""
    files = [file("c", env={"E": "claim"}), file("p", "/run/p.json", env={"E": "plugin"})]
    plugin = PluginAnswer(resource="one", cdi_devices=("topobus.dev/gpu=p", "topobus.dev/gpu=c"))

    oci_result = merged(answers=[plugin], cdi_devices=["topobus.dev/gpu=c"], files=files)

    assert oci_result.spec["process"]["env"][-1] == "E=plugin"
    assert conflicts(oci_result) == ["variable E: CDI device topobus.dev/gpu=p wins over CDI device topobus.dev/gpu=c"]


@pytest.mark.parametrize(
    ("files", "codes"),
    [
        pytest.param([], ["cdi-unresolved"], id="none"),
        pytest.param([file("other")], ["cdi-unresolved"], id="another-device"),
        pytest.param([file(), file(path="/run/d.json")], ["cdi-ambiguous"], id="twice-in-one-folder"),
        pytest.param([file(priority=0), file(path="/run/d.json")], [], id="the-later-folder-hides"),
    ],
)
def test_names_are_refused_when_a_runtime_would_refuse_them(files: list[CdiFile], codes: list[str]) -> None:
    """Undefined, or defined twice at one priority: the container would not start."""
    outcome = oci_spec(BASE, nodes={}, cdi_devices=["topobus.dev/gpu=c"], files=files)

    assert [reason.code for reason in outcome.reasons] == codes if isinstance(outcome, Refusal) else codes == []


def test_missing_nodes_are_told_when_the_host_has_them_not() -> None:
    """A runtime would fail.

    Here all is shown, and what is missing is named and has no numbers,
    and no access is granted to it.
    """
    oci_result = merged(answers=[answer("one", device_nodes=(DeviceNode(path="/dev/none"), DeviceNode(path="/dev/x")))])

    assert oci_result.missing == ("/dev/none",)
    assert oci_result.spec["linux"]["devices"][0] == {"path": "/dev/none"}
    assert [device["path"] for device in oci_result.spec["linux"]["devices"]] == ["/dev/none", "/dev/x"]
    assert len([rule for rule in oci_result.spec["linux"]["resources"]["devices"] if rule["allow"]]) == 1


def test_cpus_are_set_when_the_container_has_exclusive_ones() -> None:
    """As the CPU manager writes them."""
    assert merged(cpus="0-3", memory_nodes="0").spec["linux"]["resources"]["cpu"] == {"cpus": "0-3", "mems": "0"}


def test_host_facts_are_read_when_nodes_and_files_are_there(tmp_path: Path) -> None:
    """Numbers of device nodes, and CDI files in order of priority.

    What is broken is told and left out.
    """
    low, high = tmp_path / "etc", tmp_path / "run"
    for folder in (low, high):
        folder.mkdir()
        (folder / "a.json").write_bytes(render(file().spec))
    (high / "broken.json").write_text("{}")

    files, problems = read_cdi_files([low, high, tmp_path / "absent"])
    host_nodes = look_up([os.devnull, str(low), str(tmp_path / "none")])

    assert [(Path(cdi_file.path).parent.name, cdi_file.priority) for cdi_file in files] == [("etc", 0), ("run", 1)]
    assert [str(high / "broken.json") in problem for problem in problems] == [True]
    assert host_nodes.keys() == {os.devnull}
    assert (host_nodes[os.devnull].kind, host_nodes[os.devnull].major, host_nodes[os.devnull].minor) == ("c", 1, 3)


def test_device_paths_name_only_what_is_injected() -> None:
    """Host paths of plugins' nodes and of the CDI devices that are named, not of all that a folder
    defines.
    """
    files = [
        file("c", device_nodes=(DeviceNode(path="/dev/a", host_path="/dev/host-a"),)),
        file("d", device_nodes=(DeviceNode(path="/dev/b"),)),
    ]

    found_device_paths = device_paths(
        [answer("one", device_nodes=(DeviceNode(path="/dev/x"),))], ["topobus.dev/gpu=c"], files
    )

    assert found_device_paths == ("/dev/host-a", "/dev/x")
