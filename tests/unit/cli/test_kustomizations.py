"""Kustomizations are built by the user's own program, and what it says is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.claim_manifests import claim
from topobus.cli.application import run
from topobus.cli.exits import InputError, UsageError
from topobus.cli.objects.kustomize import built_kustomization
from topobus.cli.objects.sources import read_sources
from topobus.formats.kubernetes.objects import name_of
from topobus.values.errors import ContractError


@pytest.fixture
def kustomization(tmp_path: Path) -> Path:
    """A folder whose kustomization puts one claim into a namespace and under another name."""
    folder = tmp_path / "kustomization"
    folder.mkdir()
    (folder / "claim.yaml").write_text(claim("fast", 1))
    (folder / "kustomization.yaml").write_text("resources: [claim.yaml]\nnamespace: research\nnamePrefix: test-\n")
    return folder


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_program(path: Path, script: str) -> None:
    """Write a program."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.skipif(
    shutil.which("kustomize") is None and shutil.which("kubectl") is None,
    reason="neither kustomize nor kubectl is on the PATH",
)
def test_kustomization_is_built_when_a_program_is_there(kustomization: Path) -> None:
    """Namespace and name are those that the kustomization gives."""
    objects = read_sources("apply", (), kustomization, print, is_recursive=False)

    assert [name_of(api_object) for api_object in objects] == ["ResourceClaim research/test-fast"]


@pytest.mark.parametrize(
    ("names", "said"), [(("kustomize", "kubectl"), "kustomize build"), (("kubectl",), "kubectl kustomize")]
)
def test_kustomize_goes_before_kubectl_when_both_are_there(
    programs: Path, kustomization: Path, names: tuple[str, ...], said: str
) -> None:
    """Each is called with its own word and the folder."""
    for name in names:
        write_program(programs / name, f'echo "{name} $*"')

    assert built_kustomization(kustomization) == f"{said} {kustomization}\n"


def test_kustomization_is_refused_when_no_program_can_build_it(
    programs: Path, kustomization: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says exactly what to install, and how to do without."""
    assert run(["apply", "-k", str(kustomization)]) == 66

    error = capsys.readouterr().err
    assert "neither kustomize nor kubectl is on the PATH" in error
    assert "https://kubernetes.io/docs/tasks/tools" in error
    assert "topobus apply -f -" in error


def test_programs_own_words_are_told_when_it_fails(programs: Path, kustomization: Path) -> None:
    """The last lines of what it says, with the command that shows them again."""
    write_program(programs / "kubectl", "echo first >&2; echo 'claim.yaml: no such file' >&2; exit 1")

    with pytest.raises(InputError, match=r"kubectl kustomize .*: first; claim\.yaml: no such file"):
        built_kustomization(kustomization)


def test_program_that_cannot_run_is_named(programs: Path, kustomization: Path) -> None:
    """An interpreter that is missing is no traceback."""
    (programs / "kubectl").write_text("#!/nowhere/interpreter\n")
    (programs / "kubectl").chmod(0o755)

    with pytest.raises(InputError, match=r"cannot run .*kubectl"):
        built_kustomization(kustomization)


def test_kustomization_is_refused_when_it_builds_too_much(programs: Path, kustomization: Path) -> None:
    """No more is taken than a manifest may have."""
    write_program(programs / "kubectl", "/usr/bin/head -c 1048577 /dev/zero")

    with pytest.raises(ContractError, match="more than 1048576 bytes"):
        built_kustomization(kustomization)


def test_folder_without_a_kustomization_is_refused(tmp_path: Path) -> None:
    """A folder of plain manifests says which option is meant for it."""
    with pytest.raises(InputError, match="has no kustomization") as caught:
        built_kustomization(tmp_path)

    assert "-f FOLDER" in caught.value.next_step


@pytest.mark.parametrize(("files", "is_recursive"), [((Path("a.yaml"),), False), ((), True)])
def test_kustomization_stands_alone(kustomization: Path, files: tuple[Path, ...], is_recursive: bool) -> None:
    """As in kubectl, -k goes with neither -f nor -R."""
    with pytest.raises(UsageError, match="-k takes no other files"):
        read_sources("apply", files, kustomization, print, is_recursive=is_recursive)


@pytest.mark.parametrize(
    ("command", "said"),
    [("apply", "wanted what to apply"), ("diff", "wanted what to compare"), ("delete", "wanted what to delete")],
)
def test_commands_say_what_they_want_when_nothing_is_named(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A usage error, before any server is asked."""
    assert run([command]) == 2

    assert said in capsys.readouterr().err
