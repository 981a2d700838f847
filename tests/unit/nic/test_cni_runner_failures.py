"""The runner with plugins that fail, hang, die, lie or are not there."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from support.cni_plugins import LIMIT_S, Bench, PluginFolder, chain_of, code_of, error, result, target
from topobus.nic.cni.process import Ended, OutputTooLarge, TimedOut, run_plugin
from topobus.nic.cni.rules.chain import Chain, parse_chain
from topobus.nic.cni.rules.messages import CniResult
from topobus.values.outcome import Refusal


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Nothing attached, no plugins."""
    return Bench(PluginFolder(tmp_path / "bin"), tmp_path / "records")


def test_add_undoes_the_whole_chain_when_one_plugin_fails(bench: Bench) -> None:
    """DEL from the last to the first, and the plugin's own words in the refusal."""
    bench.plugins.add("first")
    bench.plugins.add("second", ADD=error(7, "no such subnet", "10.9.0.0/24"))
    bench.plugins.add("third")

    outcome = bench.runner().add(chain_of("first", "second", "third"), target())

    assert isinstance(outcome, Refusal)
    assert outcome.reasons[0].code == "cni-plugin-failed"
    assert outcome.reasons[0].facts == {"plugin": "second", "command": "ADD", "error_code": 7}
    assert outcome.reasons[0].message.endswith("no such subnet (10.9.0.0/24)")
    assert bench.plugins.in_short == ["first ADD", "second ADD", "third DEL", "second DEL", "first DEL"]
    assert bench.record is None


def test_add_keeps_its_record_when_undoing_fails_as_well(bench: Bench) -> None:
    """Both reasons are told, and the next ADD runs the DEL that is owed first."""
    bench.plugins.add("only", ADD=error(100), DEL=error(101))
    outcome = bench.runner().add(chain_of("only"), target())
    record = bench.record
    bench.plugins.add("only")

    again = bench.runner().add(chain_of("only"), target())

    assert isinstance(outcome, Refusal)
    assert [reason.facts["command"] for reason in outcome.reasons] == ["ADD", "DEL"]
    assert record is not None
    assert record["is_attached"] is False
    assert isinstance(again, CniResult)
    assert bench.plugins.in_short == ["only ADD", "only DEL", "only DEL", "only ADD"]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("sleep 1000", "cni-plugin-timeout"),
        ("(sleep 1000 & sleep 1000)", "cni-plugin-timeout"),
        ("kill -SEGV $$", "cni-plugin-killed"),
        ("echo hello", "cni-plugin-nonsense"),
        (":", "cni-plugin-nonsense"),
        ("echo broken >&2; exit 3", "cni-plugin-nonsense"),
        ("yes", "cni-output-too-large"),
        (result(version="0.4.0"), "cni-version-answered"),
        (error(11, "later"), "cni-try-again"),
        (error(5), "cni-plugin-failed"),
    ],
    ids=["hangs", "children-hang", "signal", "words", "nothing", "exit-code", "endless", "version", "later", "error"],
)
def test_add_is_refused_by_name_when_a_plugin_misbehaves(bench: Bench, answer: str, code: str) -> None:
    """Each way to go wrong has a code, names plugin and command, and is followed by DEL."""
    bench.plugins.add("only", ADD=answer)
    limit_s = 1.0 if "sleep" in answer else LIMIT_S

    outcome = bench.runner(limit_s=limit_s).add(chain_of("only"), target())

    assert code_of(outcome) == code
    assert isinstance(outcome, Refusal)
    assert (outcome.reasons[0].facts["plugin"], outcome.reasons[0].facts["command"]) == ("only", "ADD")
    assert bench.plugins.in_short == ["only ADD", "only DEL"]


def test_add_runs_nothing_when_a_binary_is_absent(bench: Bench) -> None:
    """The binary is named, and where it was looked for; address plugins count."""
    bench.plugins.add("only")
    chain = parse_chain(
        {"cniVersion": "1.0.0", "name": "data", "plugins": [{"type": "only", "ipam": {"type": "dhcp"}}]},
        "data.conflist",
    )
    assert isinstance(chain, Chain)

    outcome = bench.runner().add(chain, target())

    assert isinstance(outcome, Refusal)
    assert outcome.reasons[0].code == "cni-plugin-missing"
    assert outcome.reasons[0].facts == {
        "where": "data.conflist",
        "plugin": "dhcp",
        "field": "plugins[0].ipam.type",
        "looked_in": ("/nowhere", str(bench.plugins.path)),
    }
    assert (bench.plugins.in_short, bench.record) == ([], None)


def test_add_runs_nothing_when_a_plugin_is_not_allowed(bench: Bench) -> None:
    """The allow-list counts whoever names the plugin, before it is looked for."""
    outcome = bench.runner(allowed=frozenset({"bridge"})).add(chain_of("bridge", "evil"), target())

    assert code_of(outcome) == "cni-plugin-forbidden"


def test_nothing_is_run_when_an_allowed_plugin_was_taken_off_the_list_since(bench: Bench) -> None:
    """The last check is at the program's start: a record made while the plugin was allowed runs it
    no more.
    """
    bench.plugins.add("only")
    bench.runner(allowed=frozenset({"only"})).add(chain_of("only"), target())

    outcome = bench.runner(allowed=frozenset()).delete("data", "c1", "net1")

    assert code_of(outcome) == "cni-plugin-forbidden"
    assert bench.plugins.in_short == ["only ADD"]


@pytest.mark.parametrize("mode", [0o757, 0o644], ids=["writable-by-all", "not-executable"])
def test_add_is_refused_when_the_binary_is_not_to_be_run(bench: Bench, mode: int) -> None:
    """A file that anybody could have changed is not run as root.

    One that is not executable is not there.
    """
    bench.plugins.add("only")
    (bench.plugins.path / "only").chmod(mode)

    outcome = bench.runner().add(chain_of("only"), target())

    assert code_of(outcome) == ("cni-plugin-unusable" if mode == 0o757 else "cni-plugin-missing")
    assert bench.plugins.in_short == []


def test_add_is_refused_when_the_binary_is_no_program(bench: Bench) -> None:
    """The kernel's own word (Exec format error) is told."""
    path = bench.plugins.path / "only"
    path.write_bytes(b"\x7fELF")
    path.chmod(0o755)

    outcome = bench.runner().add(chain_of("only"), target())

    assert code_of(outcome) == "cni-plugin-unusable"


@pytest.mark.parametrize(
    ("version", "code"),
    [
        (None, "cni-version-unsupported"),
        ("echo no; exit 0", "cni-plugin-nonsense"),
        ("kill -9 $$", "cni-plugin-killed"),
        ("sleep 1000", "cni-plugin-timeout"),
    ],
    ids=["older", "nonsense", "dies", "hangs"],
)
def test_chain_is_refused_when_its_plugin_does_not_speak_its_version(
    bench: Bench, version: str | None, code: str
) -> None:
    """Before anything is changed."""
    bench.plugins.add("only", versions=("0.3.1",), version=version)

    outcome = bench.runner(limit_s=1.0 if code == "cni-plugin-timeout" else LIMIT_S).add(chain_of("only"), target())

    assert code_of(outcome) == code
    assert (bench.plugins.in_short, bench.record) == ([], None)


def test_add_is_refused_when_the_sandbox_is_not_there(bench: Bench, tmp_path: Path) -> None:
    """A path that is no network namespace is refused before anything runs."""
    bench.plugins.add("only")
    (tmp_path / "file").touch()

    outcomes = [
        bench.runner().add(chain_of("only"), target(network_namespace=path))
        for path in ("", "/nowhere", str(tmp_path / "file"))
    ]

    assert [code_of(outcome) for outcome in outcomes] == ["cni-config-invalid"] * 3
    assert bench.plugins.in_short == []


@pytest.mark.parametrize("content", ["", "{", "{}", '{"format": "other/v1"}'])
def test_an_unreadable_record_is_refused_when_its_attachment_is_asked_for(bench: Bench, content: str) -> None:
    """Nothing is guessed; other attachments go on."""
    bench.plugins.add("only")
    runner = bench.runner()
    runner.add(chain_of("only"), target())
    next(bench.records.iterdir()).write_text(content)

    outcomes = [
        runner.add(chain_of("only"), target()),
        runner.delete("data", "c1", "net1"),
    ]

    assert [code_of(outcome) for outcome in outcomes] == ["cni-state-unreadable"] * 2
    assert isinstance(runner.add(chain_of("only"), target(container_id="c2")), CniResult)


def test_program_is_read_to_its_end_when_a_child_keeps_its_output_open(tmp_path: Path) -> None:
    """A daemon that a plugin leaves behind with the pipe open does not make the plugin hang."""
    script = tmp_path / "plugin"
    script.write_text("#!/bin/sh\nsleep 5 &\necho done\n")
    script.chmod(0o755)

    ended = run_plugin(str(script), {"PATH": "/usr/bin:/bin"}, b"x" * 500_000, 4.0)

    assert ended == Ended(code=0, output=b"done\n")


def test_program_group_is_dead_when_it_hangs(tmp_path: Path) -> None:
    """What it started dies with it."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    script = tmp_path / "plugin"
    # The child holds the pipe's other end for as long as it lives.
    script.write_text(f"#!/bin/sh\nsleep 1000 > {fifo} &\necho $! > {tmp_path}/child\nwait\n")
    script.chmod(0o755)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ended = run_plugin(str(script), {"PATH": "/usr/bin:/bin"}, b"", 1.0)

        # A killed process ends a little later than the kill; its end of the pipe is closed with it.
        end = select.poll()
        end.register(reader, select.POLLIN)
        events = end.poll(10_000)
    finally:
        os.close(reader)

    assert ended == TimedOut()
    assert (tmp_path / "child").read_text().strip().isdigit()
    assert [event & select.POLLHUP for _, event in events] == [select.POLLHUP]


def test_program_may_fill_its_error_output_when_it_answers(tmp_path: Path) -> None:
    """Much on standard error neither blocks it nor is kept; too much on standard output ends it."""
    script = tmp_path / "plugin"
    script.write_text("#!/bin/sh\nhead -c 3000000 /dev/zero | tr '\\0' e >&2\necho answer\n")
    script.chmod(0o755)
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec yes\n")
    endless.chmod(0o755)

    ended = run_plugin(str(script), {"PATH": "/usr/bin:/bin"}, b"", LIMIT_S)

    assert isinstance(ended, Ended)
    assert (ended.output, len(ended.said)) == (b"answer\n", 16 << 10)
    assert run_plugin(str(endless), {"PATH": "/usr/bin:/bin"}, b"", LIMIT_S) == OutputTooLarge()
