"""What `--probe` answers, and what it does not import to do so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from topobus.process.config import HttpSettings
from topobus.process.http import Endpoint
from topobus.process.probe import ask_ready, read_endpoint
from topobus.process.readiness import Readiness
from topobus.simulation.nats_server import free_port

SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")
# What the interpreter has loaded before a script begins, and the few
# modules on the way to the answer.
_ALLOWED = frozenset(
    {"__future__", "_socket", "topobus", "topobus.process", "topobus.process.packages", "topobus.process.probe"}
    | {name for service in SERVICES for name in (f"topobus.{service}", f"topobus.{service}.main")}
)


def _run(service: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a service's main and write the modules that it loaded to standard error."""
    script = (
        "import sys; before = set(sys.modules)\n"
        f"sys.argv = ['topobus-{service}', *{arguments!r}]\n"
        f"from topobus.{service}.main import main\n"
        "try: main()\n"
        "finally: sys.stderr.write(' '.join(sorted(set(sys.modules) - before)))\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPOBUS_")}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env={**clean, **variables}, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("service", SERVICES)
def test_probe_answers_before_any_import_when_a_console_script_is_asked(service: str) -> None:
    """A health check pays for an interpreter and not for the service: nothing is loaded but the
    probe itself.
    """
    readiness = Readiness()
    readiness.set("bus", is_ready=True)
    settings = HttpSettings(port=free_port())
    with Endpoint(settings, readiness, CollectorRegistry()):
        done = _run(service, "--probe", TOPOBUS_ALL__HTTP__PORT=str(settings.port))

    assert (done.returncode, '"ready": true' in done.stdout) == (0, True)
    assert set(done.stderr.split()) <= _ALLOWED


def test_probe_names_the_mistake_when_its_settings_cannot_be_read() -> None:
    """A port that is no number is told as the service itself tells it: the key, the variable,
    status 78.
    """
    done = _run("topology", "--probe", TOPOBUS_ALL__HTTP__PORT="eighty")

    assert done.returncode == 78
    assert "TOPOBUS_ALL__HTTP__PORT" in done.stderr


def test_probe_says_what_is_missing_when_the_service_is_not_ready() -> None:
    """A probe gives the report of the parts.

    It works when the endpoint listens at all addresses.
    """
    readiness = Readiness()
    readiness.set("bus", is_ready=False, why="waiting for NATS")
    settings = HttpSettings(host="0.0.0.0", port=free_port())
    with Endpoint(settings, readiness, CollectorRegistry()):
        is_ready, report = ask_ready(settings.host, settings.port)

    assert not is_ready
    assert "waiting for NATS" in report


@pytest.mark.parametrize(("port", "words"), [(0, "http.port is 0"), (1, "no answer")])
def test_probe_says_why_when_there_is_no_endpoint(port: int, words: str) -> None:
    """Without an endpoint the probe fails with the reason."""
    is_ready, report = ask_ready("127.0.0.1", port)

    assert not is_ready
    assert words in report


@pytest.mark.parametrize(
    "answer", [b"", b"220 mail.example ESMTP\r\n", b"\x00" * 100], ids=["nothing", "another-protocol", "zeros"]
)
def test_probe_is_not_ready_when_something_else_listens_at_the_port(answer: bytes) -> None:
    """What is no HTTP answer is told as it is, and never taken for ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_once, args=(listener, answer))
        thread.start()
        is_ready, report = ask_ready("127.0.0.1", listener.getsockname()[1])
        thread.join()

    assert not is_ready
    assert "wanted an HTTP status line" in report


def _answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1024)
        connection.sendall(answer)


def test_endpoint_has_the_settings_defaults_when_nothing_is_set() -> None:
    """The probe's own defaults are those of the settings struct."""
    assert read_endpoint("gpu", ["--probe"], {}) == (HttpSettings().host, HttpSettings().port)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"TOPOBUS_ALL__HTTP__PORT": "1"}, ("127.0.0.1", 1)),
        ({"TOPOBUS_GPU__HTTP__PORT": "2", "TOPOBUS_ALL__HTTP__PORT": "1"}, ("127.0.0.1", 2)),
        ({"TOPOBUS_NIC__HTTP__PORT": "3"}, ("file.example", 9)),
        ({"TOPOBUS_ALL__HTTP__HOST": "::", "TOPOBUS_ALL__HTTP__STALLED_S": "4"}, ("::", 9)),
        ({"TOPOBUS_ALL__HTTP": '{"port": 1}'}, None),
        ({"TOPOBUS_ALL__HTTP__PROT": "1"}, None),
        ({"TOPOBUS_ALL__HTTP__PORT": "-1"}, None),
        ({"TOPOBUS_ALL__HTTP__PORT": "65536"}, None),
    ],
    ids=["all", "own-over-all", "another-service", "host", "whole-section", "unknown-key", "negative", "too-large"],
)
def test_endpoint_is_read_by_the_settings_rules(
    tmp_path: Path, variables: dict[str, str], wanted: tuple[str, int] | None
) -> None:
    """The file, then what speaks to all, then what speaks to this service.

    Whatever else there is goes to the full reader.
    """
    file = tmp_path / "gpu.toml"
    file.write_text('[http]\nhost = "file.example"\nport = 9\n[log]\nlevel = "info"\n', encoding="utf-8")
    if wanted is not None and wanted[1] != 9:
        file.write_text("", encoding="utf-8")

    assert read_endpoint("gpu", ["--probe", "--config", str(file)], variables) == wanted
    assert read_endpoint("gpu", [f"--config={file}", "--probe"], variables) == wanted


@pytest.mark.parametrize("text", [None, "http = 1", "[http]\nport = true", "[http]\nport = '1'", "[http", "\xff"])
def test_endpoint_is_left_to_the_full_reader_when_the_file_is_wrong(tmp_path: Path, text: str | None) -> None:
    """No file, no TOML, no table and no number: `process.config` names the mistake."""
    file = tmp_path / "gpu.toml"
    if text is not None:
        file.write_text(text, encoding="latin-1")

    assert read_endpoint("gpu", ["--probe", "--config", str(file)], {}) is None


@pytest.mark.parametrize(
    "arguments", [["--probe", "--check-config"], ["--probe", "--help"], ["--probe", "--config"], ["--probe", "-v"]]
)
def test_endpoint_is_left_to_the_full_reader_when_more_is_asked(arguments: list[str]) -> None:
    """Arguments beside the probe are read, and refused, by the parser of the service."""
    assert read_endpoint("gpu", arguments, {}) is None
