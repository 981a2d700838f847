"""Commands find the system of a `topobus up` by its context, with no variable and no option, and
say which one it was.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

_TOPOBUS = (sys.executable, "-m", "topobus.cli.main")
_LIMIT_S = 60.0
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user with a configuration folder of its own, and nothing said of any system."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TOPOBUS_") or name == "TOPOBUS_NATS_SERVER"
    }
    return {**own, "XDG_CONFIG_HOME": str(tmp_path / "config"), "TOPOBUS_CLI__CONNECT_TIMEOUT_S": "60"}


@pytest.fixture
def topobus(environment: dict[str, str]) -> Command:
    """One command of that user."""

    def run(*arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*_TOPOBUS, *arguments], env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        assert code in (None, done.returncode), f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def state(short_folder: Path) -> Path:
    """A state folder: sockets are in it."""
    return short_folder / "lab"


@contextmanager
def _up(environment: dict[str, str], *arguments: str) -> Iterator[dict[str, Any]]:
    """Run a system and give what it says when it is ready."""
    command = [*_TOPOBUS, "up", "--profile", "laptop", "--json", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        while (ready := json.loads(process.stdout.readline())).get("system") != "ready":
            pass
        yield ready
    finally:
        process.terminate()
        process.communicate(timeout=_LIMIT_S)


def test_commands_use_the_running_system_and_refuse_it_when_it_has_ended(
    environment: dict[str, str], topobus: Command, state: Path
) -> None:
    """Its context is selected while it runs.

    Then a command says that it is stopped, instead of asking whoever has the port now.
    The next run has the port again.
    """
    with _up(environment, "--dir", str(state), "--context", "bench") as ready:
        inventory = json.loads(topobus("inventory", "--json").stdout)
        versions = json.loads(topobus("version", "-o", "json").stdout)
        doctor = json.loads(topobus("--json", "doctor", code=None).stdout)["findings"][0]
        stored_nodes = topobus("get", "nodes").stderr
        unknown = topobus("machine", "--node", "nope", code=1).stderr
        nodes = topobus("__complete", "machine", "--node", "d").stdout
        running = json.loads(topobus("context", "ls", "--json").stdout)["contexts"]
    stopped = topobus("inventory", code=69).stderr
    with _up(environment, "--dir", str(state)) as again:
        pass

    text = f"NATS at {ready['nats']}, from context bench, the selected one"
    assert ready["context"] == "bench"
    assert {entry["node"] for entry in inventory["inventories"]} == {"demo-node"}
    assert (doctor["what"], doctor["found"]) == ("system", text)
    assert f"unknown node 'nope' ({text})" in unknown
    assert "`topobus inventory`" in stored_nodes
    assert nodes == "demo-node\n:4\n"
    assert [(context["name"], context["state"], context["is_selected"]) for context in running] == [
        ("bench", "running", True)
    ]
    assert f"`topobus up` of {state}, which is not running" in stopped
    assert (again["nats"], again["context"]) == (ready["nats"], "bench")
    services = {(service["node"], service["service"]): service["version"] for service in versions["services"]}
    on_node = ("cpu", "discovery", "fpga", "gateway", "gpu", "nic", "topology")
    assert services == {
        **{("demo-node", service): versions["client"] for service in on_node},
        ("", "controller"): versions["client"],
    }
    assert versions["nats_server"].count(".") == 2
    assert versions["system"] == text


def test_second_system_is_reached_by_its_name_when_the_first_still_runs(
    environment: dict[str, str], topobus: Command, state: Path
) -> None:
    """Two systems of one user have ports and names of their own.

    The first stays the selected one, and a fresh folder leaves no context behind.
    """
    with (
        _up(environment, "--dir", str(state), "--node", "first") as first,
        _up(environment, "--node", "second") as second,
    ):
        nodes = {
            name: {entry["node"] for entry in json.loads(topobus(*words, "inventory", "--json").stdout)["inventories"]}
            for name, words in (("selected", ()), ("named", ("--context", second["context"])))
        }
        asked = {
            words: topobus(*words)
            for words in (("inventory",), ("get", "pods"), ("decisions", "-o", "json"), ("machine",))
        }
        names = topobus("__complete", "machine", "--node", "")
    left = json.loads(topobus("context", "ls", "--json").stdout)["contexts"]

    assert first["nats"] != second["nats"]
    assert (first["context"], second["context"]) == ("lab", "local")
    assert nodes == {"selected": {"first"}, "named": {"second"}}
    system = f"NATS at {first['nats']}, from context lab, the selected one"
    assert {words: done.stderr.splitlines()[0] for words, done in asked.items()} == dict.fromkeys(asked, system)
    assert json.loads(asked["decisions", "-o", "json"].stdout) == {"decisions": []}
    assert names.stderr == ""
    assert [(context["name"], context["state"]) for context in left] == [("lab", "stopped")]


def test_up_names_the_command_for_its_logs_when_it_ends_and_its_folder_stays(
    environment: dict[str, str], topobus: Command, state: Path
) -> None:
    """The command works after the end, from what the folder keeps."""
    command = (*_TOPOBUS, "up", "--profile", "laptop", "--dir", str(state), "--context", "bench")
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Ctrl-C stops"):
                break
        process.send_signal(signal.SIGINT)
        ending, _ = process.communicate(timeout=_LIMIT_S)

    assert "what was logged: topobus logs --context bench" in ending
    assert "controller" in topobus("logs", "--context", "bench").stdout


def test_up_says_for_whom_it_waits_when_nobody_is_at_the_given_server(environment: dict[str, str], state: Path) -> None:
    """It goes on waiting, as its services do; the user sees for what."""
    command = [*_TOPOBUS, "up", "--profile", "laptop", "--dir", str(state), "--nats", "nats://127.0.0.1:1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
    finally:
        process.terminate()
        process.communicate(timeout=_LIMIT_S)

    assert said == "waiting for NATS at nats://127.0.0.1:1: connection refused\n"
