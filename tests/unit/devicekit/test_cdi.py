"""Promises of CDI files: what a runtime would refuse is never written, and a file is whole or
absent.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from topobus.devicekit.containers.cdi_files import delete, find_files, write
from topobus.formats.containers.cdi import CdiDevice, CdiSpec, file_name, lowest_version, parse, problems, render
from topobus.values.edits import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from topobus.values.errors import ContractError

EDITS = ContainerEdits(env={"A": "1"})


def spec(
    *devices: CdiDevice,
    vendor: str = "topobus.dev",
    device_class: str = "gpu",
    common: ContainerEdits = ContainerEdits(),  # noqa: B008 - frozen
) -> CdiSpec:
    """A file with one good device unless given."""
    return CdiSpec(vendor=vendor, device_class=device_class, devices=devices or (device(),), common=common)


def device(name: str = "gpu-0", edits: ContainerEdits = EDITS) -> CdiDevice:
    """A device."""
    return CdiDevice(name=name, edits=edits)


def with_node(path: str = "/dev/x", host_path: str = "", permissions: str = "rw", **more: Any) -> ContainerEdits:
    """Edits with one device node."""
    return ContainerEdits(device_nodes=(DeviceNode(path=path, host_path=host_path, permissions=permissions, **more),))


def test_render_writes_edits_as_objects_when_spec_is_good() -> None:
    """Edits are objects at both levels, env is a list of pairs, a host path that says nothing new
    is left out.
    """
    common = ContainerEdits(env={"ALL": "a,b"})
    edits = ContainerEdits(
        env={"B": "2", "A": "1"},
        device_nodes=(DeviceNode(path="/dev/x", host_path="/dev/x", permissions="rwm"),),
        mounts=(Mount(host_path="/h", container_path="/c", options=("ro",)),),
    )

    written: dict[str, Any] = json.loads(render(spec(device(edits=edits), common=common)))

    assert written == {
        "cdiVersion": "0.3.0",
        "kind": "topobus.dev/gpu",
        "devices": [
            {
                "name": "gpu-0",
                "containerEdits": {
                    "env": ["A=1", "B=2"],
                    "deviceNodes": [{"path": "/dev/x", "permissions": "rwm"}],
                    "mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["ro"]}],
                },
            }
        ],
        "containerEdits": {"env": ["ALL=a,b"]},
    }


def test_render_writes_no_empty_edits_when_devices_have_nothing_in_common() -> None:
    """Nothing is not written down: neither at the file's level nor as empty lists."""
    written: dict[str, Any] = json.loads(render(spec()))

    assert written == {
        "cdiVersion": "0.3.0",
        "kind": "topobus.dev/gpu",
        "devices": [{"name": "gpu-0", "containerEdits": {"env": ["A=1"]}}],
    }


@pytest.mark.parametrize(
    ("edits", "part"),
    [
        pytest.param(with_node("dev/x"), "device gpu-0: 'dev/x' is no absolute path", id="node"),
        pytest.param(with_node("/dev/x", "dev/y"), "'dev/y' is no absolute path", id="host-node"),
        pytest.param(
            ContainerEdits(mounts=(Mount(host_path="/a", container_path="b"),)), "'b' is no absolute path", id="mount"
        ),
        pytest.param(ContainerEdits(env={"A": "x\x00y"}), "'A' has a zero byte", id="zero-byte"),
    ],
)
def test_render_refuses_what_no_container_would_start_with(edits: ContainerEdits, part: str) -> None:
    """A runtime reads such a file, and the pod hangs in its creation with a text of the kernel's:
    here the device and the value are named.
    """
    with pytest.raises(ContractError) as refused:
        render(spec(device(edits=edits)))

    assert part in refused.value.message


def test_parse_gives_back_the_spec_when_rendered() -> None:
    """What was written is read as it was, so a file can be proven on disk."""
    wanted = spec(device(edits=with_node(host_path="/dev/y")), common=EDITS)

    assert parse(render(wanted)) == wanted


@pytest.mark.parametrize(
    ("made", "version"),
    [
        pytest.param(spec(), "0.3.0", id="plain"),
        pytest.param(spec(device("0-gpu")), "0.5.0", id="digit-first-name"),
        pytest.param(spec(device(edits=with_node(host_path="/dev/y"))), "0.5.0", id="other-host-path"),
        pytest.param(spec(device(edits=with_node(host_path="/dev/x"))), "0.3.0", id="same-host-path"),
        pytest.param(spec(common=with_node(host_path="/dev/y")), "0.5.0", id="host-path-in-common-edits"),
        pytest.param(spec(device_class="gpu.shared"), "0.6.0", id="dot-in-class"),
    ],
)
def test_version_is_the_lowest_that_holds_when_rendered(made: CdiSpec, version: str) -> None:
    """An older runtime refuses a newer file, so no version is higher than its content needs."""
    assert lowest_version(made) == version
    assert json.loads(render(made))["cdiVersion"] == version


@pytest.mark.parametrize(
    ("made", "part"),
    [
        pytest.param(CdiSpec(vendor="v", device_class="c", devices=()), "no devices", id="no-devices"),
        pytest.param(spec(device(edits=ContainerEdits())), "no edits", id="empty-edits"),
        pytest.param(
            spec(device(edits=ContainerEdits(annotations={"a": "b"}))), "no edits", id="annotations-are-no-edits"
        ),
        pytest.param(spec(device(), device()), "twice", id="duplicate-name"),
        pytest.param(spec(device("mig/1")), "mig/1", id="slash-in-name"),
        pytest.param(spec(device("gpu-")), "gpu-", id="name-ends-with-dash"),
        pytest.param(spec(vendor="1vendor"), "1vendor", id="vendor-begins-with-digit"),
        pytest.param(spec(device_class="c" * 64), "63", id="class-too-long"),
        pytest.param(spec(device(edits=ContainerEdits(env={"": "x"}))), "needs a name", id="env-without-key"),
        pytest.param(spec(device(edits=ContainerEdits(env={"A=B": "x"}))), "needs a name", id="env-key-with-equals"),
        pytest.param(spec(device(edits=with_node(permissions="rx"))), "'rx'", id="unknown-permission"),
        pytest.param(spec(device(edits=with_node(path=""))), "without a path", id="node-without-path"),
        pytest.param(
            spec(common=ContainerEdits(mounts=(Mount(host_path="", container_path="/c"),))),
            "both paths",
            id="mount-without-source",
        ),
    ],
)
def test_render_refuses_and_says_why_when_a_runtime_would(made: CdiSpec, part: str) -> None:
    """Every rule of the reference library stops the file before it is written, with a sentence."""
    assert any(part in problem for problem in problems(made))
    with pytest.raises(ContractError, match="CDI file of"):
        render(made)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        pytest.param(b"{", "not a CDI file", id="broken-json"),
        pytest.param(b'{"cdiVersion":"new","kind":"a/b","devices":[]}', "'new', wanted three numbers", id="no-version"),
        pytest.param(
            b'{"cdiVersion":"0.6.0","kind":"a/b","devices":[{"name":"d","containerEdits":{"additionalGids":[44]}}]}',
            "0.7.0",
            id="groups-too-early",
        ),
        pytest.param(
            b'{"cdiVersion":"1.1.0","kind":"a/b","devices":[{"name":"d","containerEdits":{"hooks":[{"hookName":"later","path":"/x"}]}}]}',
            "'later' is none of",
            id="unknown-hook",
        ),
        pytest.param(
            b'{"cdiVersion":"0.3.0","kind":"a/b","devices":[{"name":"d","containerEdits":[]}]}',
            "array",
            id="edits-as-array",
        ),
        pytest.param(
            b'{"cdiVersion":"0.3.0","kind":"a/b","devices":[{"name":"0","containerEdits":{"env":["A=1"]}}]}',
            "0.5.0",
            id="version-too-low",
        ),
    ],
)
def test_parse_refuses_as_a_runtime_when_the_file_is_wrong(data: bytes, part: str) -> None:
    """A file that runtimes refuse is refused here, with the place."""
    with pytest.raises(ContractError, match="here") as refused:
        parse(data, where="here")

    assert part in refused.value.message


# As NVIDIA's container toolkit makes them, shortened: hooks, groups, a variable,
# and a field of a version to come.
OF_OTHERS = b"""{
 "cdiVersion": "1.2.0", "kind": "nvidia.com/gpu", "annotations": {"made-by": "nvidia-ctk"}, "newField": [1],
 "devices": [{"name": "0", "annotations": {"a": "b"}, "containerEdits": {
   "deviceNodes": [{"path": "/dev/nvidia0", "major": 195, "fileMode": 438, "permissions": "rw", "gid": 44, "type": "c"}, {"path": "/dev/fb0", "permissions": "none"}],
   "additionalGids": [44]}}],
 "containerEdits": {
   "env": ["NVIDIA_VISIBLE_DEVICES=void"],
   "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache"], "env": ["DEBUG=false"], "timeout": 5}],
   "netDevices": [{"hostInterfaceName": "mlx5_0", "name": "net1"}],
   "intelRdt": {"closID": "gpu", "schemata": ["L3:0=f"]},
   "mounts": [{"hostPath": "tmpfs", "containerPath": "/scratch", "options": ["size=1m"], "type": "tmpfs"}]}}"""  # noqa: E501


def test_parse_keeps_all_that_cdi_knows_when_a_file_of_others_says_more() -> None:
    """Hooks, groups, network devices, cache and nodes with numbers of their own come along.

    What nobody knows is left aside.
    """
    spec = parse(OF_OTHERS)

    assert spec.devices[0].edits == ContainerEdits(
        device_nodes=(
            DeviceNode(path="/dev/nvidia0", permissions="rw", kind="c", major=195, file_mode=0o666, gid=44),
            DeviceNode(path="/dev/fb0", permissions="none"),
        ),
        additional_gids=(44,),
    )
    assert spec.common == ContainerEdits(
        env={"NVIDIA_VISIBLE_DEVICES": "void"},
        hooks=(
            Hook(
                name="createContainer",
                path="/usr/bin/nvidia-cdi-hook",
                args=("nvidia-cdi-hook", "update-ldcache"),
                env=("DEBUG=false",),
                timeout_s=5,
            ),
        ),
        net_devices=(NetDevice(host_name="mlx5_0", name="net1"),),
        intel_rdt=IntelRdt(clos_id="gpu", schemata=("L3:0=f",)),
        mounts=(Mount(host_path="tmpfs", container_path="/scratch", options=("size=1m",), kind="tmpfs"),),
    )


def test_render_gives_back_what_was_parsed_in_the_lowest_version() -> None:
    """Nothing of CDI 1.1 is lost on the way through our values."""
    spec = parse(OF_OTHERS)
    rendered = render(spec)

    assert parse(rendered) == spec
    assert json.loads(rendered)["cdiVersion"] == "1.1.0"


@pytest.mark.parametrize(
    ("edits", "version"),
    [
        pytest.param(ContainerEdits(hooks=(Hook(name="prestart", path="/x"),)), "0.3.0", id="hooks"),
        pytest.param(with_node(kind="c", major=1, minor=3, file_mode=0o600, uid=1, gid=1), "0.3.0", id="numbers"),
        pytest.param(
            ContainerEdits(mounts=(Mount(host_path="/t", container_path="/t", kind="tmpfs"),)), "0.4.0", id="mount type"
        ),
        pytest.param(ContainerEdits(additional_gids=(1,)), "0.7.0", id="groups"),
        pytest.param(ContainerEdits(intel_rdt=IntelRdt(clos_id="a")), "0.7.0", id="rdt"),
        pytest.param(ContainerEdits(intel_rdt=IntelRdt(enable_monitoring=True)), "1.1.0", id="rdt monitoring"),
        pytest.param(ContainerEdits(net_devices=(NetDevice(host_name="a", name="b"),)), "1.1.0", id="network device"),
    ],
)
def test_lowest_version_is_the_one_in_which_an_edit_came(edits: ContainerEdits, version: str) -> None:
    """Runtimes refuse files of versions that they do not know, so no file asks for more than it
    needs.
    """
    assert lowest_version(spec(device(edits=edits))) == version
    assert not edits.is_empty


def test_write_replaces_the_file_whole_when_it_exists(tmp_path: Path) -> None:
    """A new content comes by rename, readable by all, and no temporary file stays."""
    name = file_name("topobus.dev", "gpu", "u-1")
    write(tmp_path / "cdi", name, b"old")

    path = write(tmp_path / "cdi", name, b"new")

    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [other_path.name for other_path in path.parent.iterdir()] == ["topobus.dev-gpu_u-1.json"]


def test_delete_is_no_error_when_the_file_is_gone(tmp_path: Path) -> None:
    """Deleting twice is deleting once."""
    write(tmp_path, "a.json", b"{}")

    assert [delete(tmp_path, "a.json"), delete(tmp_path, "a.json")] == [True, False]


def test_find_files_tells_only_our_claims_when_others_share_the_folder(tmp_path: Path) -> None:
    """Files of other vendors and without an id are left alone.

    What a crash left half written is removed.
    """
    for name in (
        "topobus.dev-gpu_u-1.json",
        "topobus.dev-gpu.json",
        "topobus.dev-nic_u-2.json",
        "nvidia.com-gpu_u-3.json",
    ):
        write(tmp_path, name, b"{}")
    (tmp_path / ".topobus.dev-gpu_u-9.json.abc.tmp").write_bytes(b"half")

    files = find_files(tmp_path, "topobus.dev")

    assert files == ("topobus.dev-gpu_u-1.json", "topobus.dev-nic_u-2.json")
    assert not (tmp_path / ".topobus.dev-gpu_u-9.json.abc.tmp").exists()
    assert find_files(tmp_path / "absent", "topobus.dev") == ()
