"""Help of `topobus`: complete, with examples that work, and printed without importing what the
commands need.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest
from cyclopts import CycloptsError

from topobus.cli.application import application, run
from topobus.cli.command_words import with_options_behind
from topobus.cli.help.command_data import as_lines, read_commands
from topobus.cli.help.examples import EXAMPLES
from topobus.cli.help.overview import COMMANDS
from topobus.cli.help.quick import help_of
from topobus.cli.help.specification import specify_all

_DATA = read_commands()
_RUNNABLE = sorted(words for words, command in _DATA.items() if command["is_command"])
_LIGHT = """
import json, sys
from topobus.cli.main import main
heavy = {}
for words in json.loads(sys.stdin.read()):
    sys.argv = ["topobus", *words]
    try:
        main()
    except SystemExit:
        pass
    names = ("nats", "prometheus_client", "structlog", "cyclopts", "rich", "msgspec", "topobus.bus.bus", "topobus.formats")
    loaded = [name for name in names if name in sys.modules]
    if loaded:
        heavy[" ".join(words)] = loaded
        break
sys.stderr.write(json.dumps(heavy))
"""  # noqa: E501


def _text(value: object) -> str:
    """Name a case by its words."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def test_help_data_is_what_the_commands_say_now() -> None:
    """Help is printed from a file that tools/render-docs writes; it is not older than the code."""
    assert as_lines(specify_all(application())).splitlines() == [
        json.dumps(_DATA[words], ensure_ascii=False) for words in sorted(_DATA)
    ]


def test_help_imports_neither_bus_nor_parser_when_it_is_printed() -> None:
    """Each command's --help, --version and the overview: no NATS, no metrics, no log, no parser, no
    terminal library in the process.
    """
    lines = [
        [],
        ["--version"],
        ["--help"],
        ["help", "keys", "make"],
        ["keys"],
        *([*words.split(), "--help"] for words in _DATA),
    ]

    done = subprocess.run(
        [sys.executable, "-c", _LIGHT], input=json.dumps(lines), capture_output=True, text=True, timeout=60, check=True
    )

    assert json.loads(done.stderr) == {}
    assert done.stdout.count("Usage:") == len(lines) - 1


@pytest.mark.parametrize(
    "words",
    [["context", "ls"], ["keys", "show", "/nonexistent", "cli"], ["migrate", "/nonexistent"], ["completion", "bash"]],
    ids=_text,
)
def test_command_that_asks_nobody_imports_no_client(words: list[str]) -> None:
    """NATS' client, metrics and logs come with the connection, not with
    the options that name it.
    """
    script = (
        "import sys\nfrom topobus.cli.application import run\nrun(sys.argv[1:])\nsys.stderr.write(repr([name for "
        "name in ('nats', 'structlog', 'prometheus_client') if name in sys.modules]))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stderr.splitlines()[-1] == "[]"


def test_every_command_stands_in_one_group_of_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is listed twice, and what is listed exists."""
    listed = [name for commands in COMMANDS.values() for name in commands]

    code = run([])

    text = capsys.readouterr().out
    assert code == 0
    assert sorted(listed) == sorted(words for words in _DATA if words and " " not in words)
    assert re.findall(r"^(\w[\w ]+):$", text, re.MULTILINE)[1:-1] == list(COMMANDS)
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in listed)


@pytest.mark.parametrize("words", _RUNNABLE)
def test_every_command_has_examples_that_parse(words: str) -> None:
    """Each example is a line of this command that the program takes."""
    lines = [line for _, line in EXAMPLES.get(words, ())]
    refused = {}
    for line in lines:
        call = re.search(r"topobus [^>)]*", line)
        assert call is not None, line
        arguments = shlex.split(call[0])[1:]
        if " ".join(arguments[: len(words.split())]) != words:
            refused[line] = "is a line of another command"
        try:
            application().parse_args(with_options_behind(arguments), exit_on_error=False, print_error=False)
        except CycloptsError as err:
            refused[line] = str(err)

    assert lines, f"write an example into topobus/cli/help/examples.py: {words}"
    assert refused == {}


def test_examples_are_of_commands_that_exist() -> None:
    """A command that is gone takes its examples along."""
    assert set(EXAMPLES) <= set(_RUNNABLE)


@pytest.mark.parametrize("words", sorted(_DATA))
def test_help_of_a_command_says_all_and_nothing_of_the_parser(words: str) -> None:
    """How to call it, each option, the examples; no `[default: False]`, no `--empty-x`.

    Nothing but examples is wider than 80 columns.
    """
    text = help_of(_DATA[words], _DATA)

    assert f"topobus {words}".rstrip() in text
    assert all(name in text for option in _DATA[words]["options"] for name in option["names"])
    assert all(line in text for _, line in EXAMPLES.get(words, ()))
    assert "[default" not in text
    assert "--empty-" not in text
    assert [line for line in text.partition("\nExamples:")[0].splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "Try it:"),
        (["-h"], "Try it:"),
        (["help"], "Try it:"),
        (["place", "--help"], "topobus place [POD.YAML…]"),
        (["place", "pod.yaml", "--help"], "topobus place [POD.YAML…]"),
        (["--nats", "nats://a:1", "place", "--help"], "topobus place [POD.YAML…]"),
        (["help", "keys", "secrets", "make"], "topobus keys secrets make NAMESPACE"),
        (["keys", "secrets"], "topobus keys secrets COMMAND"),
        (["release"], "topobus release COMMAND"),
        (["health", "--help"], "topobus health COMMAND"),
    ],
    ids=_text,
)
def test_help_is_of_the_command_that_is_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever --help stands; a group without a command has its own."""
    code = run(arguments)

    assert code == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["keys", "mak"], "mak"),
        (["help", "plac"], "did you mean place?"),
        (["plac", "--help"], "plac"),
        (["apply", "--empty-file"], "--empty-file"),
    ],
    ids=_text,
)
def test_word_that_is_no_command_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help of something else would hide the mistake."""
    code = run(arguments)

    assert code == 2
    assert said in capsys.readouterr().err


def test_words_behind_two_dashes_ask_for_no_help(capsys: pytest.CaptureFixture[str]) -> None:
    """After -- everything is an argument."""
    assert run(["describe", "--", "--help"]) == 2
    assert "Usage:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "ordered"),
    [
        (["--nats", "nats://a:1", "inventory", "gpu"], ["inventory", "gpu", "--nats", "nats://a:1"]),
        (["--context=lab", "--json", "get", "claims"], ["get", "claims", "--context=lab", "--json"]),
        (["--config", "a.toml", "release", "--", "pod"], ["release", "--config", "a.toml", "--", "pod"]),
        (["inventory", "--nats", "nats://a:1"], ["inventory", "--nats", "nats://a:1"]),
        (["--nats"], ["--nats"]),
        (["--version"], ["--version"]),
    ],
    ids=_text,
)
def test_options_before_the_command_are_read_as_if_they_stood_behind(arguments: list[str], ordered: list[str]) -> None:
    """As with kubectl and nats: what every command takes may come first."""
    assert with_options_behind(arguments) == ordered
