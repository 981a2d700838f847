"""The generated kubelet code: equal to its protos, loadable all at once, and numbered as kubelet
numbers it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

ROOT = Path(__file__).resolve().parents[2]
APIS = {
    "deviceplugin.v1beta1": "v1beta1",
    "dra.v1": "k8s.io.kubelet.pkg.apis.dra.v1",
    "pluginregistration.v1": "pluginregistration",
    "podresources.v1": "v1",
    "drahealth.v1": "v1",
}


def _regenerate(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if sys.version_info >= (3, 13) and not any(shutil.which(f"python3.{minor}") for minor in (11, 12)):
        pytest.skip("NOT TESTED: the generator has wheels for Python 3.11 and 3.12, and none is on PATH")
    return subprocess.run(
        [sys.executable, str(root / "proto" / "regenerate"), *options], capture_output=True, text=True, check=False
    )


def test_kubeletpb_equals_its_protos_when_generated_again() -> None:
    """The checked-in code is byte for byte what the protos give."""
    done = _regenerate(ROOT, "--check")

    assert (done.returncode, done.stderr) == (0, "")


def test_regenerate_check_fails_with_a_diff_when_code_was_edited(tmp_path: Path) -> None:
    """An edited file is found, named and shown, and nothing is repaired
    behind the author's back.
    """
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "proto.txt", tmp_path / "requirements")
    shutil.copytree(ROOT / "shared" / "topobus" / "kubeletpb", tmp_path / "shared" / "topobus" / "kubeletpb")
    edited = tmp_path / "shared" / "topobus" / "kubeletpb" / "dra" / "v1" / "api_pb2.pyi"
    edited.write_text(edited.read_text() + "EDITED = 1\n")

    done = _regenerate(tmp_path, "--check")

    assert done.returncode == 1
    assert "-EDITED = 1" in done.stderr
    assert "dra/v1/api_pb2.pyi" in done.stderr
    assert edited.read_text().endswith("EDITED = 1\n")


@pytest.mark.parametrize(
    ("edited", "suffix", "code"),
    [
        ("", "", 0),
        ("proto/topobus/kubeletpb/dra/v1/api.proto", "// edited", 1),
        ("shared/topobus/kubeletpb/dra/v1/api_pb2.pyi", "EDITED = 1", 1),
        ("shared/topobus/kubeletpb/added.py", "ADDED = 1", 1),
    ],
    ids=["nothing-edited", "proto-edited", "code-edited", "code-added"],
)
def test_regenerate_check_finds_an_edit_when_no_generator_can_be_had(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    edited: str,
    suffix: str,
    code: int,
) -> None:
    """A machine with another Python alone checks as well: what differs from the last generation is
    named, and "not generated again" is said.
    """
    for folder in ("proto", "requirements", "shared/topobus/kubeletpb", "shared/topobus/runtimepb"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    if edited:
        with (tmp_path / edited).open("a", encoding="utf-8") as file:
            file.write(suffix + "\n")
    loader = SourceFileLoader("regenerate", str(tmp_path / "proto" / "regenerate"))
    program = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location("regenerate", loader.path, loader=loader) or pytest.fail("no spec")
    )
    loader.exec_module(program)
    monkeypatch.setattr(program, "find_python", lambda: None)
    monkeypatch.setattr(sys, "argv", ["regenerate", "--check"])

    status = program.main()

    output = capsys.readouterr()
    assert status == code
    assert edited in output.err
    assert ("not generated again" in output.out) == (code == 0)


@pytest.mark.parametrize("suffix", ["api_pb2", "api_pb2_grpc"])
def test_kubeletpb_loads_all_apis_when_one_process_needs_them(suffix: str) -> None:
    """No two of kubelet's APIs collide in the descriptor pool, though upstream calls each file
    api.proto and two packages v1.
    """
    loaded = {name: importlib.import_module(f"topobus.kubeletpb.{name}.{suffix}") for name in APIS}

    assert len(loaded) == 5
    if suffix == "api_pb2":
        assert {name: _descriptor(name).package for name in APIS} == APIS


@pytest.mark.parametrize(
    ("api", "message", "fields"),
    [
        ("deviceplugin.v1beta1", "RegisterRequest", {"version": 1, "endpoint": 2, "resource_name": 3, "options": 4}),
        ("deviceplugin.v1beta1", "Device", {"ID": 1, "health": 2, "topology": 3}),
        (
            "deviceplugin.v1beta1",
            "ContainerAllocateResponse",
            {"envs": 1, "mounts": 2, "devices": 3, "annotations": 4, "cdi_devices": 5},
        ),
        (
            "deviceplugin.v1beta1",
            "ContainerPreferredAllocationRequest",
            {"available_deviceIDs": 1, "must_include_deviceIDs": 2, "allocation_size": 3},
        ),
        (
            "deviceplugin.v1beta1",
            "DevicePluginOptions",
            {"pre_start_required": 1, "get_preferred_allocation_available": 2},
        ),
        ("dra.v1", "Claim", {"namespace": 1, "uid": 2, "name": 3}),
        (
            "dra.v1",
            "Device",
            {"request_names": 1, "pool_name": 2, "device_name": 3, "cdi_device_ids": 4, "share_id": 5},
        ),
        ("dra.v1", "NodePrepareResourceResponse", {"devices": 1, "error": 2}),
        ("pluginregistration.v1", "PluginInfo", {"type": 1, "name": 2, "endpoint": 3, "supported_versions": 4}),
        ("podresources.v1", "DynamicResource", {"claim_name": 2, "claim_namespace": 3, "claim_resources": 4}),
        (
            "drahealth.v1",
            "DeviceHealth",
            {"device": 1, "health": 2, "last_updated_time": 3, "health_check_timeout_seconds": 4, "message": 5},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_message_keeps_kubelets_field_numbers_when_encoded(api: str, message: str, fields: dict[str, int]) -> None:
    """A field's number is what crosses the wire: it never moves."""
    field_descriptors = _descriptor(api).message_types_by_name[message].fields

    assert {field_descriptor.name: field_descriptor.number for field_descriptor in field_descriptors} == fields


def test_project_requires_the_runtimes_that_made_the_code_when_installed() -> None:
    """Generated code runs with no older grpcio and protobuf than made it, so the project's lower
    bounds are what made it.
    """
    code = (ROOT / "shared" / "topobus" / "kubeletpb" / "dra" / "v1" / "api_pb2.py").read_text()
    protobuf = re.search(r"Protobuf Python Version: ([\d.]+)", code)
    grpcio = re.search(r"^grpcio-tools==([\d.]+)", (ROOT / "requirements" / "proto.txt").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert grpcio is not None
    assert protobuf is not None
    assert {f"grpcio>={grpcio[1]}", f"protobuf>={protobuf[1]}"} <= set(extras["gateway"])


@pytest.mark.parametrize("api", sorted(APIS))
def test_kubeletpb_asks_for_no_newer_runtime_when_loaded(api: str) -> None:
    """A generator that writes a check of versions would raise the lower bounds for everybody who
    installs the gateway beside other packages.
    """
    folder = ROOT / "shared" / "topobus" / "kubeletpb" / Path(*api.split("."))

    assert "ValidateProtobufRuntimeVersion" not in (folder / "api_pb2.py").read_text()
    assert "GRPC_GENERATED_VERSION" not in (folder / "api_pb2_grpc.py").read_text()


def _descriptor(api: str) -> FileDescriptor:
    descriptor = importlib.import_module(f"topobus.kubeletpb.{api}.api_pb2").DESCRIPTOR
    assert isinstance(descriptor, FileDescriptor)
    return descriptor
