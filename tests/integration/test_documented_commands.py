"""The commands that pages for operators show are run: those that need no system that is there, in the order of the page, below a folder of the test's own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.leaf_pair import version_of
from topobus.cli.application import run
from topobus.contracts.nats_accounts import Shape, accounts

REPOSITORY = Path(__file__).parents[2]
HOW_TO = REPOSITORY / "docs" / "how-to"
_BLOCK = re.compile(r"^ *```console\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# What a page does with files alone; everything else asks a server, a container engine or a cluster.
_FILES_ALONE = (
    *(
        f"topobus keys {word} /"
        for word in ("make", "rotate", "forget", "certify", "show", "operator make", "operator rotate", "operator revoke")
    ),
    "cp deploy/",
    "echo 'include",
    "echo 'tls",
    "grep -v '^mappings' deploy/",
    "nats-server -t",
    "install -d",
    "for class in gpu nic fpga cpu; do (umask",
)
# It tells a server that runs; what it does beside that is run.
_TELL_SERVER = re.compile(r" && nats-server --signal reload$")
# Blocks of these pages are for one machine each; on others the whole page is for one.
_MACHINES_APART = ("choose-a-nats-shape.md",)


def machines(page: str) -> list[list[str]]:
    """List the commands of a page that need nothing but files, by the machine that they are for; what others need is made first."""
    blocks = [
        [
            _TELL_SERVER.sub("", line.strip().removeprefix("$ "))
            for line in block.splitlines()
            if line.strip().removeprefix("$ ").startswith(_FILES_ALONE)
        ]
        for block in _BLOCK.findall((HOW_TO / page).read_text(encoding="utf-8"))
    ]
    if page not in _MACHINES_APART:
        blocks = [[command for block in blocks for command in block]]
    return [sorted(block, key=lambda command: " make " not in command and " --name " not in command) for block in blocks if block]


def test_pages_show_no_code_that_is_not_a_command() -> None:
    """A snippet of Python on a command line has no test and no help: what a page needs is an option of a command."""
    shown = [
        page.name for page in sorted((REPOSITORY / "docs").rglob("*.md")) if "adr" not in page.parts and "python -c" in page.read_text()
    ]

    assert shown == []


@pytest.mark.integration
@pytest.mark.parametrize("page", sorted(path.name for path in HOW_TO.glob("*.md") if machines(path.name)))
def test_commands_of_a_page_work_when_they_are_run_as_it_shows_them(
    page: str, tmp_path: Path, nats_binary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, below a folder of the test's own, each ends well."""
    failed = []
    for number, commands in enumerate(machines(page)):
        home = tmp_path / str(number)
        (home / "etc" / "topobus").mkdir(parents=True)
        (home / "bin").mkdir()
        (home / "bin" / "nats-server").symlink_to(nats_binary)
        (home / "deploy").symlink_to(REPOSITORY / "deploy")
        environment = {**os.environ, "PATH": f"{home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for command in commands:
            there = command.replace("/etc/topobus", f"{home}/etc/topobus")
            if version_of(nats_binary) < (2, 10):
                # As the page's table says: by the server's version.
                there = there.replace("nats-server-2.10.conf", "nats-server.conf")
            if there.startswith("topobus "):
                # In this process: twenty starts of an interpreter say nothing more.
                words = shlex.split(there, comments=True)[1:]
                status, said = run(words), "".join(capsys.readouterr())
            else:
                done = subprocess.run(["bash", "-c", there], cwd=home, env=environment, capture_output=True, text=True, check=False)
                status, said = done.returncode, done.stdout + done.stderr
            if status:
                failed.append(f"{command}\n  {said}")

    assert failed == []


def test_file_of_named_nodes_gives_each_node_users_of_its_own(tmp_path: Path) -> None:
    """The way to part nodes that distrust each other at a central server: each has its own users, and the server's file narrows them."""
    names = {user.name for account in accounts(Shape.CENTRAL, nodes=["n1", "n2"]) for user in account.users}
    file = tmp_path / "users.conf"

    status = run(["keys", "make", str(tmp_path / "users"), "--server-file", str(file), "--node", "n1", "--node", "n2"])

    assert status == 0
    assert {"gpu-n1", "gpu-n2", "discovery-n1", "controller"} <= names
    assert {path.name for path in (tmp_path / "users").iterdir()} == names
    assert '"$KV.topobus_inventories_gpu.n1.gpu"' in file.read_text()
