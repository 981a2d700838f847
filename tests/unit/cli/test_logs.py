"""`topobus logs`: several files as one log, and what it says where there are none."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.cli.contexts import Context, ContextFolder
from topobus.cli.help.command_data import read_commands
from topobus.cli.help.completing import complete
from topobus.cli.help.value_names import names_of
from topobus.cli.options import BusOptions
from topobus.local_system.log_files import LogFile, read_logs

_START = datetime(2026, 11, 28, 11, 37, tzinfo=UTC)


def _event(second: float, event: str, **facts: str) -> str:
    time = (_START + timedelta(seconds=second)).isoformat().replace("+00:00", "Z")
    return json.dumps({"ts": time, "level": "info", "event": event, **facts})


def _server_line(second: float, text: str) -> str:
    """As nats-server writes it: local time."""
    return f"[7] {(_START + timedelta(seconds=second)).astimezone():%Y/%m/%d %H:%M:%S.%f} [INF] {text}"


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A context of a `topobus up` that has ended, selected; gives the folder of its logs."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TOPOBUS_CONTEXT", raising=False)
    folder = tmp_path / "lab" / "logs"
    folder.mkdir(parents=True)
    contexts = ContextFolder()
    contexts.put(Context(name="lab", nats="nats://127.0.0.1:4230", state_dir=str(folder.parent)))
    contexts.put(Context(name="prod", nats="nats://prod:4222"))
    contexts.select("lab")
    (folder / "gpu.log").write_text(f"{_event(1, 'gpu.first')}\n{_event(4, 'gpu.second')}\nTraceback of gpu\n")
    (folder / "nats.log").write_text(f"{_server_line(0, 'starting')}\n{_server_line(5, 'ready')}\n")
    (folder / "topology.log").write_text(f"{_event(3, 'topology.first', level='warning')}\n")
    return folder


def test_logs_are_merged_by_time_when_several_programs_write(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Local times of nats-server and UTC of services are one order.

    A line without a time stays behind the one that it belongs to.
    """
    code = run(["logs"])

    lines = [" ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert lines == [
        "nats starting",
        "gpu gpu.first",
        "topology WARNING topology.first",
        "gpu gpu.second",
        "gpu Traceback of gpu",
        "nats ready",
    ]


def test_logs_are_json_as_they_were_written_when_a_program_reads_them(
    local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service's line is given unchanged; of what is no JSON the text is the event."""
    run(["logs", "gpu", "nats", "--tail", "3", "-o", "json"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == _event(4, "gpu.second")
    assert [json.loads(line)["event"] for line in lines[1:]] == ["Traceback of gpu", _server_line(5, "ready")]


def test_log_line_stays_one_line_when_it_is_long_or_has_control_signs(
    local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is folded, and what a caller wrote does not command the terminal."""
    (local / "gpu.log").write_text(f"{_event(1, 'gpu.long', a='x ' * 150, b=chr(27) + '[2J')}\n")

    run(["logs", "gpu"])

    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert "\x1b" not in out
    assert "b= [2J" in out


def test_logs_begin_where_since_says(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is older is left out."""
    now = datetime.now(UTC) - _START
    (local / "gpu.log").write_text(f"{_event(1, 'gpu.old')}\n{_event(now.total_seconds() - 60, 'gpu.new')}\n")

    run(["logs", "gpu", "--since", "10m", "-o", "json"])

    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["gpu.new"]


def test_log_file_goes_on_with_whole_lines_when_more_comes(local: Path) -> None:
    """Half a line waits for its end, nothing comes twice, and an emptied file begins anew."""
    path = local / "topology.log"
    file = LogFile(path)
    texts: list[list[str]] = []

    for text, mode in (
        (f"{_event(6, 'b')}\n{_event(7, 'c')[:9]}", "a"),
        (f"{_event(7, 'c')[9:]}\n", "a"),
        (f"{_event(8, 'd')}\n", "w"),
    ):
        with path.open(mode) as log:
            log.write(text)
        texts.append([json.loads(line.text)["event"] for line in read_logs([file])])

    assert texts == [["topology.first", "b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gup"], "known are gpu, nats, topology"),
        (["--context", "prod"], "kubectl logs"),
        (["--context", "nope"], "known are lab, prod"),
        (["--since", "yesterday"], "for example --since 10m"),
        (["--tail", "-1"], "wanted 0 or more"),
    ],
    ids=" ".join,
)
def test_logs_say_what_to_do_when_there_are_none(
    local: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """An unknown program or context, a system elsewhere and a wrong option name the next step."""
    code = run(["logs", *words])

    assert code != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_logs_are_completed_with_the_programs_that_have_one(local: Path) -> None:
    """The names come from the folder; nobody is asked."""
    completion = complete(["logs", "gpu", ""], read_commands())

    assert names_of(completion.names, BusOptions()) == ["gpu", "nats", "topology"]
