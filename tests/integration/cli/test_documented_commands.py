"""The commands that pages for operators show are run, those that need no system, in the order of
the page; and the tutorial, on a system of the test's own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.leaf_pair import version_of
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.cli.application import run

REPOSITORY = Path(__file__).parents[3]
HOW_TO = REPOSITORY / "docs" / "how-to"
_BLOCK = re.compile(r"^ *```console\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# What a page does with files alone; everything else asks a server, a container engine or a cluster.
_FILES_ALONE = (
    *(
        f"topobus keys {word} /"
        for word in (
            "make",
            "rotate",
            "forget",
            "certify",
            "show",
            "operator make",
            "operator rotate",
            "operator revoke",
        )
    ),
    "topobus profile list",
    "topobus profile build",
    "topobus profile remove",
    "topobus profile restore",
    "topobus profile offline",
    "topobus profile online",
    "topobus machine --root",
    "topobus topo --root",
    "topobus topo --machine",
    "topobus simulate --machine",
    "topobus migrate",
    "topobus context add",
    "topobus context use prod",
    "topobus context ls",
    "topobus version --client",
    "topobus completion",
    "topobus help",
    "python -m topobus.testing.kubelet replay",
    "cp deploy/",
    "echo 'include",
    "echo 'tls",
    "grep -v '^mappings' deploy/",
    "nats-server -t",
    "install -d",
    "for class in gpu nic fpga cpu; do (umask",
)
# Where a block's further commands are run.
_MOVE = re.compile(r"cd (\S+) && ")
# Makes device nodes.
_AS_ROOT = re.compile(r"--device-nodes")
# A file that the reader is to write, by the name in its first line.
_FILE = re.compile(r"^```toml\n# (\S+\.toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Folders of the reader's machine that commands write to.
_FOLDERS = re.compile(r"(?<![\w.])/(?:etc/topobus|tmp)\b")
# It tells a server that runs; what it does beside that is run.
_TELL_SERVER = re.compile(r" && nats-server --signal reload$")
# Blocks of these pages are for one machine each; on others the whole page is for one.
_MACHINES_APART = ("choose-a-nats-shape.md",)


def machines(page: str) -> list[list[str]]:
    """List the commands of a page that need nothing but files, by the machine that they are for.

    What others need is made first.
    """
    blocks = []
    for block in _BLOCK.findall((HOW_TO / page).read_text(encoding="utf-8")):
        lines = [line.strip().removeprefix("$ ") for line in block.splitlines() if line.strip().startswith("$ ")]
        moves = [f"cd {place[1]}" for line in lines if (place := _MOVE.match(line)) is not None]
        commands = [
            _TELL_SERVER.sub("", line) for line in lines if line.startswith(_FILES_ALONE) and not _AS_ROOT.search(line)
        ]
        blocks.append([*moves, *commands, *(["cd ."] if moves else [])] if commands else [])
    if page not in _MACHINES_APART:
        blocks = [[command for block in blocks for command in block]]
    return [
        sorted(block, key=lambda command: " make " not in command and " --name " not in command)
        for block in blocks
        if block
    ]


def test_pages_show_no_code_that_is_not_a_command() -> None:
    """A snippet of Python on a command line has no test and no help: what a page needs is an option
    of a command.
    """
    shown = [
        page.name
        for page in sorted((REPOSITORY / "docs").rglob("*.md"))
        if "adr" not in page.parts and "python -c" in page.read_text()
    ]

    assert shown == []


@pytest.mark.integration
@pytest.mark.parametrize("page", sorted(path.name for path in HOW_TO.glob("*.md") if machines(path.name)))
def test_commands_of_a_page_work_when_they_are_run_as_it_shows_them(
    page: str, tmp_path: Path, nats_binary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, below a folder of the test's own, each ends well."""
    failed = []
    for number, commands in enumerate(machines(page)):
        home = tmp_path / str(number)
        (home / "etc" / "topobus").mkdir(parents=True)
        (home / "bin").mkdir()
        (home / "bin" / "nats-server").symlink_to(nats_binary)
        (home / "tmp").mkdir()
        for folder in ("deploy", "examples", "tests"):
            (home / folder).symlink_to(REPOSITORY / folder)
        for name, content in _FILE.findall((HOW_TO / page).read_text(encoding="utf-8")):
            (home / name).write_text(content, encoding="utf-8")
        monkeypatch.chdir(home)
        environment = {**os.environ, "PATH": f"{home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for command in commands:
            there = _FOLDERS.sub(rf"{home}\g<0>", command)
            if version_of(nats_binary) < (2, 10):
                # As the page's table says: by the server's version.
                there = there.replace("nats-server-2.10.conf", "nats-server.conf")
            if there.startswith("cd "):
                monkeypatch.chdir(home / there.removeprefix("cd "))
                continue
            if there.startswith("topobus ") and ">" not in there:
                # In this process: twenty starts of an interpreter say nothing more.
                words = shlex.split(there, comments=True)[1:]
                status, said = run(words), "".join(capsys.readouterr())
            else:
                done = subprocess.run(
                    ["bash", "-c", there], cwd=home, env=environment, capture_output=True, text=True, check=False
                )
                status, said = done.returncode, done.stdout + done.stderr
            if status:
                failed.append(f"{command}\n  {said}")

    assert failed == []


_TUTORIAL = REPOSITORY / "docs" / "tutorial" / "first-steps.md"
_STATE = "/tmp/topobus-tutorial"
# What the page shows of a command, in its order: the next one waits for
# nothing but the end of the last.
_SHOWN = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
# Where each run has other words: times, ids, ages; and how wide a table is.
_OTHERS = (
    (r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME"),
    (r"\bd-[0-9a-f]{20}\b", "DECISION"),
    (r"\b\d+s\b", "AGE"),
    (r"[─\s]+", " "),
    (r"[╭╮╰╯│]", ""),
)


def _plain(text: str) -> str:
    for pattern, word in _OTHERS:
        text = re.sub(pattern, word, text)
    return text.strip()


def _read_until(text: str, program: subprocess.Popen[str] | None) -> None:
    """Wait for a line of what another terminal shows."""
    assert program is not None
    assert program.stdout is not None
    assert any(text in line for line in iter(program.stdout.readline, "")), f"it ended without: {text}"


# Some thirty commands one after the other, and the 30 seconds in which a GPU that came back is not
# given out: a minute and a half on two busy cores.
@pytest.mark.timeout(300)
@pytest.mark.integration
def test_tutorial_shows_what_its_commands_print_when_they_are_run_in_its_order(
    tmp_path: Path, short_folder: Path, nats_binary: Path
) -> None:
    """On a fresh system, from the first look to the last pod: each command ends as the page says,
    and each line that the page shows whole is printed.
    """
    # What is shown was printed at the width of drawings, whatever the
    # terminal of whoever runs the test.
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith("TOPOBUS_") and name != "COLUMNS"
    }
    environment |= {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
        "TOPOBUS_NATS_SERVER": str(nats_binary),
    }

    def run_there(command: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "topobus.cli.main", *shlex.split(command.replace(_STATE, str(short_folder)))[1:]]
        done = subprocess.run(
            words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=90
        )
        return done.returncode, done.stdout + done.stderr

    up = subprocess.Popen(
        [sys.executable, "-m", "topobus.cli.main", "up", "--dir", str(short_folder)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    wrong = []
    watching: subprocess.Popen[str] | None = None
    try:
        assert up.stdout is not None
        assert any("all ready" in line for line in iter(up.stdout.readline, ""))
        shown = [
            (command, lines)
            for block in _BLOCK.findall(_TUTORIAL.read_text(encoding="utf-8"))
            for command, lines in _SHOWN.findall(block)
        ]
        ids = ""
        for command, lines in shown:
            if command.startswith("topobus health watch"):
                words_of_watch = [sys.executable, "-m", "topobus.cli.main", *shlex.split(command)[1:]]
                watching = subprocess.Popen(
                    words_of_watch, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
                )
                _read_until("(present state)", watching)
            if not command.startswith("topobus ") or command.startswith(
                ("topobus up", "topobus --version", "topobus health watch")
            ):
                continue
            if "placed on" in lines and "sequencer" in command:
                # "It is refused again if the GPU has not been back for 30 seconds": the watcher of
                # the third terminal says when it has.
                _read_until("recovering -> healthy", watching)
            words = command.replace("d-51e9c9e7756afd750d3e", ids)
            status, said = run_there(words)
            if command.startswith("topobus profile remove"):
                # The page says so before it goes on: a GPU that is back before
                # anybody looked was never away.
                _read_until("-> unhealthy", watching)
            ids = ids or next(iter(re.findall(r"explain (d-[0-9a-f]{20})", said)), "")
            wanted = 1 if "sequencer" in command and "refused" in lines else 0
            printed = _plain(said)
            # Shortened lines, and those of a table whose columns fit, are another matter.
            missing = [line for line in lines.splitlines() if "…" not in line and _plain(line) not in printed]
            if status != wanted or missing:
                wrong.append((command, status, missing))
    finally:
        if watching is not None:
            watching.terminate()
            watching.communicate()
        up.terminate()
        up.wait(timeout=60)

    assert wrong == []


def test_file_of_named_nodes_gives_each_node_users_of_its_own(tmp_path: Path) -> None:
    """The way to part nodes that distrust each other at a central server: each has its own users,
    and the server's file narrows them.
    """
    names = {user.name for account in accounts(Shape.CENTRAL, nodes=["n1", "n2"]) for user in account.users}
    file = tmp_path / "users.conf"

    status = run(["keys", "make", str(tmp_path / "users"), "--server-file", str(file), "--node", "n1", "--node", "n2"])

    assert status == 0
    assert {"gpu-n1", "gpu-n2", "discovery-n1", "controller"} <= names
    assert {path.name for path in (tmp_path / "users").iterdir()} == names
    assert '"$KV.topobus_inventories_gpu.n1.gpu"' in file.read_text()
