"""CDI files of others, one in each public generator's form: they are read as a container runtime
reads them, and the gateway lets a foreign plugin bring what they say.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.public_cdi_files import GENERATORS
from topobus.devicekit.containers.oci_host import read_cdi_files
from topobus.formats.containers.cdi import CdiDevice, CdiSpec, render
from topobus.formats.containers.oci import HostNode, as_on_host, device_paths, oci_spec, resolve_cdi
from topobus.formats.messages.messages import Prepared
from topobus.gateway.containers.rules.edit_limits import EditRights, refuse_forbidden, rights_of
from topobus.values.edits import ContainerEdits, DeviceNode, join_edits
from topobus.values.outcome import Refusal

_GOOD = "cdiVersion: 0.6.0\nkind: acme.example/w\ndevices:\n- name: a\n  containerEdits: {env: [A=b]}\n"


@pytest.mark.parametrize("generator", GENERATORS)
def test_file_of_a_public_generator_gives_its_device_to_a_plugin_of_others(tmp_path: Path, generator: str) -> None:
    """Nodes, mounts and hooks are all there.

    The gateway has nothing against them, and a claim's own CDI file can say them.
    """
    public = GENERATORS[generator]
    (tmp_path / public.name).write_text(public.text, encoding="utf-8")

    files, problems = read_cdi_files((tmp_path,))
    resolved = resolve_cdi([public.device], files)
    assert not isinstance(resolved, Refusal), (resolved.reasons, problems)
    edits = join_edits(as_on_host(part, public.nodes) for _, part in resolved)

    assert problems == ()
    assert isinstance(edits, ContainerEdits)
    assert {node.path for node in edits.device_nodes} == set(public.nodes)
    assert {set(node.permissions) >= {"r", "w"} for node in edits.device_nodes} == {True}
    assert (tuple(mount.host_path for mount in edits.mounts), len(edits.hooks)) == (public.mounts, public.hooks)
    assert (
        refuse_forbidden(
            "gpu-acme", Prepared(common=edits, edits={}), rights_of("gpu-acme", EditRights(), is_foreign=True)
        )
        is None
    )
    assert render(CdiSpec(vendor="topobus.dev", device_class="gpu", devices=(CdiDevice(name="a", edits=edits),)))


@pytest.mark.parametrize("generator", GENERATORS)
def test_file_of_a_public_generator_becomes_the_spec_of_a_container(tmp_path: Path, generator: str) -> None:
    """`topobus oci` gives each node its type and numbers: of the file where it has both, else of
    the host.

    Without permissions all access.
    """
    public = GENERATORS[generator]
    (tmp_path / public.name).write_text(public.text, encoding="utf-8")
    files, _ = read_cdi_files((tmp_path,))
    asked = {path: public.nodes[path] for path in device_paths((), [public.device], files)}

    merged = oci_spec({}, cdi_devices=[public.device], files=files, nodes=asked)

    assert not isinstance(merged, Refusal)
    assert merged.missing == ()
    devices = {
        device["path"]: (device["type"], device["major"], device["minor"]) for device in merged.spec["linux"]["devices"]
    }
    assert devices == {path: (node.kind, node.major, node.minor) for path, node in public.nodes.items()}
    rules = {rule["access"] for rule in merged.spec["linux"]["resources"]["devices"]}
    assert rules == ({"rw"} if generator == "amd-ctk" else {"rwm"})


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        pytest.param(
            "nvidia.yml",
            _GOOD,
            "nvidia.yml was not looked at: container runtimes read only files that end in .json or .yaml",
            id="yml",
        ),
        pytest.param("nvidia.yaml.bak", _GOOD, "nvidia.yaml.bak was not looked at", id="backup"),
        pytest.param("empty.yaml", "", "empty.yaml: it is empty", id="empty"),
        pytest.param(
            "broken.yaml", "cdiVersion: [\n", "broken.yaml, line 2: this is neither YAML nor JSON", id="broken"
        ),
        pytest.param(
            "broken.json", '{"cdiVersion": ', "broken.json, line 1: this is neither YAML nor JSON", id="broken-json"
        ),
        pytest.param("binary.yaml", "a\x00b", "binary.yaml: this is neither YAML nor JSON", id="binary"),
        pytest.param("list.yaml", "- a\n", "list.yaml: not a CDI file that we can read", id="list"),
        pytest.param(
            "no-edits.yaml",
            _GOOD.partition("  containerEdits")[0],
            "no-edits.yaml: device a has no edits",
            id="no-edits",
        ),
        pytest.param("deep.yaml", "[" * 4000, "deep.yaml: ", id="deep"),
        pytest.param(
            "bomb.yaml",
            "a: &a ["
            + ",".join("x" * 9)
            + "]\n"
            + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(8)),
            "bomb.yaml: it has more than 100000 values",
            id="bomb",
        ),
    ],
)
def test_read_cdi_files_names_a_file_that_it_does_not_read(tmp_path: Path, name: str, text: str, problem: str) -> None:
    """What a runtime would not look at, or not take, is one sentence with the file's name.

    Its neighbour is read.
    """
    (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "good.yaml").write_text(_GOOD, encoding="utf-8")

    files, problems = read_cdi_files((tmp_path,))

    assert [Path(file.path).name for file in files] == ["good.yaml"]
    assert [problem in message for message in problems] == [True], problems


def test_read_cdi_files_waits_for_no_fifo_and_looks_into_no_folder(tmp_path: Path) -> None:
    """A FIFO with a right ending is named; folders and hidden files are nobody's."""
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / ".hidden").write_text("", encoding="utf-8")

    files, problems = read_cdi_files((tmp_path,))

    assert (files, problems) == ((), (f"{tmp_path}/a.json cannot be read: it is a FIFO, wanted a regular file",))


def test_read_cdi_files_reads_yaml_in_a_json_file_and_text_that_looks_like_something_else(tmp_path: Path) -> None:
    """Runtimes read both endings as YAML.

    Names that are numbers, words for true or times are text.
    """
    text = "cdiVersion: 0.6.0\nkind: acme.example/w\ndevices:\n" + "".join(
        f"- name: {name}\n  containerEdits: {{env: [A=b], deviceNodes: null}}\n"
        for name in ("7", "true", "2026-01-02", "a")
    )
    (tmp_path / "a.json").write_text(text, encoding="utf-8")

    files, problems = read_cdi_files((tmp_path,))

    assert problems == ()
    assert [device.name for device in files[0].spec.devices] == ["7", "true", "2026-01-02", "a"]


@pytest.mark.parametrize(
    ("node", "kept"),
    [
        pytest.param(
            DeviceNode(path="/dev/a", permissions=""), DeviceNode(path="/dev/a", permissions="rwm"), id="path-alone"
        ),
        pytest.param(
            DeviceNode(path="/dev/a", kind="u", major=1, minor=3, permissions="r"),
            DeviceNode(path="/dev/a", permissions="r"),
            id="hosts-numbers",
        ),
        pytest.param(
            DeviceNode(path="/dev/x", host_path="/dev/a", file_mode=0o600, permissions=""),
            DeviceNode(path="/dev/x", host_path="/dev/a", file_mode=0o600, permissions="rwm"),
            id="mode-of-its-own",
        ),
        pytest.param(
            DeviceNode(path="/dev/a", kind="c", major=8, minor=0, permissions=""),
            DeviceNode(path="/dev/a", kind="c", major=8, minor=0, permissions="rwm"),
            id="numbers-of-another",
        ),
        pytest.param(
            DeviceNode(path="/dev/a", kind="b", permissions=""),
            DeviceNode(path="/dev/a", kind="b", permissions="rwm"),
            id="another-type",
        ),
        pytest.param(
            DeviceNode(path="/dev/none", kind="c", major=1, minor=3, permissions=""),
            DeviceNode(path="/dev/none", kind="c", major=1, minor=3, permissions="rwm"),
            id="not-on-the-host",
        ),
    ],
)
def test_as_on_host_leaves_out_what_the_hosts_node_has_anyway(node: DeviceNode, kept: DeviceNode) -> None:
    """Numbers that are not those of the host's node stay, and are judged: they would be another
    device under a known name.
    """
    host = {"/dev/a": HostNode(kind="c", major=1, minor=3, mode=0o666)}

    settled = as_on_host(ContainerEdits(device_nodes=(node,)), host)

    assert settled.device_nodes == (kept,)
