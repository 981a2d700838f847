"""Files that users name: whatever they are, one line that says what is wrong, and never a wait or a
memory without end.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.cli.exits import ExitCode, InputError
from topobus.cli.objects.input_files import read_bytes
from topobus.cli.simulation.node import open_machine
from topobus.values.errors import ContractError

COMMANDS = (
    ("apply", "-f"),
    ("delete", "-f"),
    ("place",),
    ("allocate", "--dry-run", "-f"),
    ("simulate", "--machine", "dgx", "--pods"),
    ("explain", "--file"),
    ("migrate",),
)


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """Paths that are no files."""
    os.mkfifo(tmp_path / "fifo")
    return {"a FIFO": tmp_path / "fifo", "a device file": Path("/dev/zero"), "a folder": tmp_path}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        pytest.param(words, kind, id=f"{words[0]}-{kind}")
        for words in COMMANDS
        for kind in ("a FIFO", "a device file", "a folder")
        # These take folders of manifests.
        if kind != "a folder" or words[0] not in ("simulate", "apply", "delete", "allocate", "place")
    ],
)
def test_command_refuses_what_is_no_file(
    command: tuple[str, ...], kind: str, odd: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that never ends, a FIFO that nobody writes and a folder are named as what they are,
    before any server is asked.
    """
    code = run([*command, str(odd[kind])])

    said = " ".join(capsys.readouterr().err.split())
    assert code == ExitCode.NO_INPUT
    assert f"it is {kind}, wanted a file" in said
    assert "next:" in said


def test_manifest_is_refused_when_it_is_larger_than_a_manifest_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The size is looked at while reading."""
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)

    assert run(["place", str(path)]) == ExitCode.DATA
    assert "it has more than 1048576 bytes" in " ".join(capsys.readouterr().err.split())


def test_read_bytes_takes_what_the_shell_hands_over() -> None:
    """A pipe of `<(…)` is read to its end; one without end is refused after the limit."""
    command = "import sys; from pathlib import Path; from topobus.cli.objects.input_files import read_bytes\n"
    command += "print(len(read_bytes(Path(sys.argv[1]), limit_bytes=10, next_step='')))"
    done = [
        subprocess.run(
            ["bash", "-c", f'"$0" -c "$1" <({source})', sys.executable, command],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        for source in ("printf 12345", "yes")
    ]

    assert done[0].stdout.strip() == "5"
    assert "more than 10 bytes" in done[1].stderr


def test_manifest_with_a_nul_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A character that YAML cannot hold is a user's error with file and line, no defect."""
    path = tmp_path / "nul.yaml"
    path.write_bytes(b"apiVersion: v1\nkind: Pod\nmetadata: {name: a\0b}\n")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"apiVersion: v1\nkind: \xe9\n")

    codes = [run(["place", str(path)]), run(["place", str(latin)])]

    said = " ".join(capsys.readouterr().err.split())
    assert codes == [ExitCode.DATA, ExitCode.DATA]
    assert "nul.yaml, line 3: the character U+0000 is not allowed in YAML or JSON" in said
    assert "latin.yaml, line 2: this is not text" in said


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_archive_is_refused_when_it_holds_more_than_files(kind: bytes, tmp_path: Path) -> None:
    """An archive of a machine has files, folders and links; nothing else is made on this disk."""
    path = tmp_path / "machine.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("sys/odd")
        member.type = kind
        archive.addfile(member)

    with pytest.raises(InputError, match="sys/odd is no file, folder or link"), open_machine(str(path)):
        pass


def test_archive_is_refused_when_it_unpacks_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros that pack to nothing are not unpacked: the size that the archive tells counts before
    the bytes are written.
    """
    monkeypatch.setattr("topobus.cli.simulation.node._ARCHIVE_BYTES", 1 << 20)
    path = tmp_path / "bomb.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for number in range(3):
            member = tarfile.TarInfo(f"sys/zeros-{number}")
            member.size = 1 << 19
            archive.addfile(member, io.BytesIO(bytes(member.size)))

    with pytest.raises(InputError, match="unpacks to more than 1 MiB"), open_machine(str(path)):
        pass


def test_archive_is_refused_when_it_is_cut_off(tmp_path: Path) -> None:
    """A download that ended early is a file that cannot be unpacked, no defect."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        member = tarfile.TarInfo("sys/file")
        member.size = 1 << 16
        archive.addfile(member, io.BytesIO(os.urandom(member.size)))
    path = tmp_path / "cut.tar.gz"
    path.write_bytes(whole.getvalue()[: 1 << 15])

    with pytest.raises(InputError, match="cannot be unpacked"), open_machine(str(path)):
        pass


def test_read_bytes_reads_exactly_as_much_as_it_may(tmp_path: Path) -> None:
    """The limit itself is allowed, one byte more is not."""
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")

    assert read_bytes(path, limit_bytes=10, next_step="") == b"0123456789"
    with pytest.raises(ContractError, match="more than 9 bytes"):
        read_bytes(path, limit_bytes=9, next_step="")
