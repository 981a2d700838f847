"""What a release has beside its wheel, and `topobus verify`, which checks it offline."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from releasing.licences import main as check_licences
from releasing.release_files import release_files
from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.cli.rules.release_check import SIGNATURE, SUMS, check_release, commit_of

ROOT = Path(__file__).resolve().parents[3]
WHEEL = "topobus-1.2.0-py3-none-any.whl"
BILL = "topobus-1.2.0.cdx.json"
PROVENANCE = "topobus-1.2.0.provenance.json"
COMMIT = "c0ffee" * 6 + "c0ff"
PRESENT = {WHEEL: b"a wheel", "topobus-1.2.0-licences.txt": b"h2 4.1 MIT\n"}
LOCKS = {
    "requirements/all.txt": b"h2==4.1 \\\n    --hash=sha256:00\nPyYAML==6.0\npywin32==3 ; sys_platform == 'win32'\n",
    "requirements/gpu.txt": b"h2==4.1 \\\n    --hash=sha256:00\n",
}
needs_ssh_keygen = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None,
    reason="NOT TESTED: no ssh-keygen is on the PATH (apt-get install openssh-client)",
)


def environment() -> dict[str, Any]:
    """What cyclonedx-py writes of an environment; the tools that are in it as well, such as pip."""
    components: list[dict[str, Any]] = [
        {"bom-ref": f"{name}=={version}", "name": name, "version": version, "licenses": [{"license": {"id": "MIT"}}]}
        for name, version in (("h2", "4.1"), ("PyYAML", "6.0"), ("pip", "26"))
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "components": components,
        "dependencies": [{"ref": "root-component", "dependsOn": ["h2==4.1", "PyYAML==6.0", "pip==26"]}],
        "metadata": {"component": {"bom-ref": "root-component", "name": "topobus", "version": "1.2.0"}},
    }


def made() -> dict[str, bytes]:
    """Every file of a release, its signature left out."""
    return {**PRESENT, **release_files(PRESENT, environment(), LOCKS, COMMIT)}


def summed(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same with sums that fit again, as whoever holds the key could sign them."""
    names = sorted(files.keys() - {SUMS})
    return {**files, SUMS: "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in names).encode()}


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> dict[str, bytes]:
    """A release whose document of this name says something else, in sums that fit."""
    files = made()
    document = json.loads(files[name])
    change(document)
    return summed({**files, name: json.dumps(document).encode()})


def test_release_files_are_equal_when_they_are_made_twice() -> None:
    """Equal inputs give equal bytes, whatever order the tool lists packages in."""
    backwards = {**environment(), "components": environment()["components"][::-1]}

    assert release_files(PRESENT, backwards, dict(reversed(LOCKS.items())), COMMIT) == release_files(
        PRESENT, environment(), LOCKS, COMMIT
    )


def test_release_files_describe_the_wheel_and_each_image() -> None:
    """Each SBOM has what its lock has, and nothing else of the environment; provenance names the commit."""
    files = made()
    image = json.loads(files["topobus-1.2.0-image-gpu.cdx.json"])

    assert check_release(files) == ()
    assert [each["name"] for each in json.loads(files[BILL])["components"]] == ["PyYAML", "h2"]
    assert [each["name"] for each in image["components"]] == ["h2", "topobus"]
    assert image["metadata"]["component"]["name"] == "topobus/gpu"
    assert commit_of(files) == COMMIT


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        pytest.param({**made(), WHEEL: b"another"}, ("other-sum", WHEEL), id="a changed wheel"),
        pytest.param(
            {name: content for name, content in made().items() if name != BILL}, ("other-sum", BILL), id="a file less"
        ),
        pytest.param(made() | {"topobus-9.whl": b""}, ("other-sum", "topobus-9.whl"), id="a file more"),
        pytest.param(made() | {SUMS: b"0  ../x\n"}, ("unreadable", f"{SUMS}, line 1"), id="sums that name no file"),
        pytest.param(
            summed({name: content for name, content in made().items() if name != BILL}),
            ("absent-file", SUMS),
            id="no SBOM of the wheel",
        ),
        pytest.param(summed(made() | {WHEEL: b"another"}), ("other-wheel", BILL), id="another wheel, with its sum"),
        pytest.param(summed(made() | {BILL: b"{}"}), ("unreadable", BILL), id="an SBOM of nothing"),
        pytest.param(
            changed(BILL, lambda bill: bill["components"].pop()), ("other-version", BILL), id="a package less"
        ),
        pytest.param(
            changed(BILL, lambda bill: bill["components"][0].update(version="5")),
            ("other-version", BILL),
            id="a version",
        ),
        pytest.param(
            changed(BILL, lambda bill: bill["components"].append({"name": "x", "version": "1"})),
            ("other-version", BILL),
            id="a package more",
        ),
        pytest.param(
            changed(PROVENANCE, lambda statement: statement["subject"].pop()),
            ("other-provenance", PROVENANCE),
            id="provenance of fewer files",
        ),
        pytest.param(summed(made() | {PROVENANCE: b"[]"}), ("unreadable", PROVENANCE), id="no provenance"),
    ],
)
def test_check_release_names_the_file_when_something_does_not_fit(
    files: dict[str, bytes], fault: tuple[str, str]
) -> None:
    """Each fault has a code and the file, and no fault is passed over for another one's sake."""
    assert fault in [(each.code, each.where) for each in check_release(files)]


def test_check_release_refuses_a_wheel_when_the_sums_do_not_name_it() -> None:
    """A wheel that lies in the folder of another release is not verified by that one's signature."""
    assert [fault.code for fault in check_release(made(), "topobus-1.1.0-py3-none-any.whl")] == ["other-wheel"]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder with a signed release, and beside it the key."""
    folder = tmp_path / "release"
    folder.mkdir()
    for name, content in made().items():
        (folder / name).write_bytes(content)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a b", "-f", tmp_path / "key"], check=True)
    sign = ["ssh-keygen", "-q", "-Y", "sign", "-f", tmp_path / "key", "-n", "file", folder / SUMS]
    subprocess.run(sign, check=True, capture_output=True)
    return folder


def verify(release: Path, key: str = "key.pub") -> int:
    """Run the command, with a key that lies beside the folder."""
    folder = release if release.is_dir() else release.parent
    return run(["verify", str(release), "--key", str(folder.parent / key)])


@needs_ssh_keygen
def test_verify_says_who_signed_and_from_which_commit_when_all_fits(
    release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other downloads beside it, and keys that did not sign, change nothing."""
    (release / "notes.txt").write_text("")
    (release.parent / "keys").write_text("# of 2026\n" + (release.parent / "key.pub").read_text())

    assert verify(release, "keys") == ExitCode.OK
    text = " ".join(capsys.readouterr().out.split())
    assert "signed by SHA256:" in text
    assert COMMIT in text


@needs_ssh_keygen
def test_verify_refuses_when_the_sums_were_changed_after_they_were_signed(
    release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums that fit say nothing unless their signature fits."""
    for name, content in summed({**made(), WHEEL: b"another"}).items():
        (release / name).write_bytes(content)

    assert verify(release) == ExitCode.NO
    assert "bad-signature: SHA256SUMS.sig: got" in capsys.readouterr().out


@needs_ssh_keygen
def test_verify_refuses_when_another_key_signed(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The key that came with the release proves nothing: the user gives it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", release.parent / "other"], check=True)

    assert verify(release, "other.pub") == ExitCode.NO
    assert "bad-signature" in capsys.readouterr().out


@needs_ssh_keygen
def test_verify_refuses_when_there_is_no_signature(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A release is never taken for one because a file is absent."""
    (release / SIGNATURE).unlink()

    assert verify(release / WHEEL) == ExitCode.NO
    assert "no-signature" in capsys.readouterr().out


@needs_ssh_keygen
def test_verify_ends_as_other_commands_when_its_input_cannot_be_used(
    release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A private key is data that cannot be used; a folder without sums and an absent key are no input."""
    assert verify(release, "key") == ExitCode.DATA
    assert verify(release, "absent") == ExitCode.NO_INPUT
    (release / SUMS).unlink()
    assert verify(release) == ExitCode.NO_INPUT
    assert capsys.readouterr().err.count("next: ") == 3


def test_verify_names_what_it_was_given_when_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt folder is not taken for a wheel beside the sums of the current one."""
    assert run(["verify", str(tmp_path / "relase"), "--key", "key.pub"]) == ExitCode.NO_INPUT
    assert capsys.readouterr().err.startswith("error: there is no ")


def test_licences_refuse_what_is_unknown_not_allowed_or_not_as_locked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each package of the lock that this system has must be there in its version, with a licence of the list."""
    bill = environment()
    bill["components"][0]["licenses"] = [{"expression": "MIT AND GPL-3.0-only"}]
    bill["components"][1]["version"] = "7"
    (tmp_path / "bill").write_text(json.dumps(bill))
    (tmp_path / "lock").write_bytes(LOCKS["requirements/all.txt"])

    assert check_licences(str(tmp_path / "bill"), str(tmp_path / "lock")) == 1
    printed = capsys.readouterr()
    assert printed.out == "h2 4.1 MIT AND GPL-3.0-only\npyyaml 6.0 unknown\n"
    assert "h2 4.1: got MIT AND GPL-3.0-only, of version 4.1, wanted one of Apache-2.0" in printed.err
    assert "pyyaml 6.0: got no identifier, of version 7" in printed.err
