"""Contexts: a user's systems by name, and which of them a command talks to."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from topobus.cli.application import run
from topobus.cli.contexts import Context, ContextFolder, ContextState, announced_context, name_of_folder, process_start
from topobus.cli.exits import UsageError
from topobus.cli.targets import choose_target
from topobus.values.errors import ConfigError, PeerUnavailable

_ADDED = Context(name="prod", nats="nats://10.1.2.3:4222", user="cli", password_file="/secrets/cli")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a configuration folder of its own."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}


@pytest.fixture
def folder(environ: dict[str, str]) -> ContextFolder:
    """The contexts of that environment."""
    return ContextFolder(environ)


def _up(state: Path, name: str = "lab", nats: str = "nats://127.0.0.1:4230") -> Context:
    state.mkdir(exist_ok=True)
    return Context(
        name=name, nats=nats, state_dir=str(state), user="cli", password_file=f"{state}/nats-users/cli/password"
    )


def test_files_are_the_users_alone_when_a_context_is_kept(folder: ContextFolder, tmp_path: Path) -> None:
    """The folder can be entered and the files read by the user only."""
    before = os.umask(0)
    try:
        folder.put(_ADDED)
        folder.select("prod")
    finally:
        os.umask(before)

    files = tmp_path / "config" / "topobus"
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (files / "contexts", files / "contexts" / "prod.json", files / "context")
    }
    assert modes == {"contexts": 0o700, "prod.json": 0o600, "context": 0o600}


def test_contexts_are_ignored_and_not_written_when_others_may_write_them(folder: ContextFolder, tmp_path: Path) -> None:
    """A context of somebody else could send this user's password anywhere."""
    folder.put(_ADDED)
    (tmp_path / "config" / "topobus" / "contexts").chmod(0o777)

    assert folder.all() == ()
    assert folder.get("prod") is None
    with pytest.raises(ConfigError, match="may be written by others"):
        folder.put(_ADDED)


def test_context_of_a_run_is_running_then_stopped_when_its_folder_is_kept(
    folder: ContextFolder, tmp_path: Path
) -> None:
    """Its name, port and folder stay; only the state changes."""
    with announced_context(folder, _up(tmp_path / "lab"), is_kept=True) as is_selected:
        running = folder.get("lab")
        assert is_selected
        assert running is not None
        assert running.state is ContextState.RUNNING

    stopped = folder.get("lab")
    assert stopped is not None
    assert (stopped.state, stopped.nats, folder.selected()) == (ContextState.STOPPED, "nats://127.0.0.1:4230", "lab")


def test_context_of_a_run_is_gone_with_its_selection_when_its_folder_was_fresh(
    folder: ContextFolder, tmp_path: Path
) -> None:
    """Nothing is left of a system that cannot be started again."""
    with announced_context(folder, _up(tmp_path / "lab"), is_kept=False):
        assert folder.selected() == "lab"

    assert (folder.all(), folder.selected()) == ((), "")


def test_context_is_stopped_when_its_process_died_and_the_number_is_anothers(
    folder: ContextFolder, tmp_path: Path
) -> None:
    """A kill -9 takes nothing back.

    The start of the process tells it from the next one with that number.
    """
    folder.put(msgspec.structs.replace(_up(tmp_path / "lab"), pid=os.getpid(), started="1"))

    context = folder.get("lab")

    assert context is not None
    assert context.state is ContextState.STOPPED


def test_context_is_stopped_when_its_process_was_of_another_boot(folder: ContextFolder, tmp_path: Path) -> None:
    """Ticks and process numbers begin anew with each boot."""
    ticks = process_start(os.getpid()).partition("@")[0]
    folder.put(msgspec.structs.replace(_up(tmp_path / "lab"), pid=os.getpid(), started=f"{ticks}@of another boot"))

    context = folder.get("lab")

    assert context is not None
    assert context.state is ContextState.STOPPED


@pytest.mark.parametrize(
    ("url", "is_found"),
    [
        ("nats://127.0.0.1:4222", True),
        ("127.0.0.1:4222", True),
        ("nats://localhost", True),
        ("nats://[::1]:4222", True),
        ("tls://10.0.0.1:4222", True),
        ("tls://gpu1.example.org:4222", True),
        ("tls://[fd00::1]:4222", True),
        ("nats://127.0.0.1:4223", False),
        ("nats://me:secret@127.0.0.1:4222", False),
        ("tls://10.0.0.2:4222", False),
        ("nats://127.0.0.1:4222,nats://127.0.0.1:4223", False),
        ("nats://127.0.0.1:port", False),
    ],
)
def test_run_is_found_by_its_server_while_it_runs_and_no_other_server_is(
    folder: ContextFolder, tmp_path: Path, url: str, is_found: bool
) -> None:
    """By the port and each name of its certificate. No password goes where it does not belong, and
    a user in the URL stays who it is.
    """
    hosts = ("10.0.0.1", "gpu1.example.org", "fd00::1")
    context = msgspec.structs.replace(_up(tmp_path / "lab", nats="nats://127.0.0.1:4222"), hosts=hosts)
    folder.put(msgspec.structs.replace(_ADDED, nats=url))
    with announced_context(folder, context, is_kept=True):
        assert folder.running_at(url) == (folder.get("lab") if is_found else None)

    assert folder.running_at(url) is None


def test_run_of_another_network_is_not_found_by_its_port(folder: ContextFolder, tmp_path: Path) -> None:
    """In a container that shares the home folder, another server has that port."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can make a network namespace")
    context = _up(tmp_path / "lab")
    with announced_context(folder, context, is_kept=True):
        script = f"from topobus.cli.contexts import ContextFolder; print(ContextFolder().running_at({context.nats!r}))"
        done = subprocess.run(
            ["unshare", "-n", sys.executable, "-c", script],
            env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")},
            capture_output=True,
            text=True,
            check=True,
        )

        assert folder.running_at(context.nats) is not None
    assert done.stdout == "None\n"


def test_second_run_leaves_the_selection_when_the_first_still_runs(folder: ContextFolder, tmp_path: Path) -> None:
    """Commands that are typed for one system do not go to another that
    somebody starts beside it.
    """
    with announced_context(folder, _up(tmp_path / "a", "a"), is_kept=True):
        with announced_context(folder, _up(tmp_path / "b", "b"), is_kept=True) as is_selected:
            assert not is_selected
            assert folder.selected() == "a"

        assert folder.selected() == "a"


def test_run_takes_the_selection_when_the_selected_one_has_ended(folder: ContextFolder, tmp_path: Path) -> None:
    """A selection of what runs no more is nobody's wish."""
    with announced_context(folder, _up(tmp_path / "a", "a"), is_kept=True):
        pass
    with announced_context(folder, _up(tmp_path / "b", "b"), is_kept=True) as is_selected:
        assert is_selected
        assert folder.selected() == "b"


def test_end_of_a_run_leaves_a_context_that_somebody_else_wrote_meanwhile(
    folder: ContextFolder, tmp_path: Path
) -> None:
    """It takes back what is its own, and no more."""
    with announced_context(folder, _up(tmp_path / "a", "a"), is_kept=False):
        folder.put(msgspec.structs.replace(_ADDED, name="a"))

    assert folder.get("a") == msgspec.structs.replace(_ADDED, name="a")


def test_free_name_has_a_number_when_another_system_has_the_name(folder: ContextFolder, tmp_path: Path) -> None:
    """An added one and one of another folder keep their names.

    A stopped one whose folder is gone gives it back, and a folder has its own again.
    """
    folder.put(_ADDED)
    folder.put(_up(tmp_path / "lab"))
    folder.put(Context(name="gone", nats="nats://127.0.0.1:4231", state_dir=str(tmp_path / "removed")))

    names = {
        "prod": folder.free_name("prod", str(tmp_path / "new")),
        "lab of another folder": folder.free_name("lab", str(tmp_path / "new")),
        "lab of its folder": folder.free_name("lab", str(tmp_path / "lab")),
        "gone": folder.free_name("gone", str(tmp_path / "new")),
    }

    assert names == {"prod": "prod-2", "lab of another folder": "lab-2", "lab of its folder": "lab", "gone": "gone"}


@pytest.mark.parametrize(
    ("state", "is_kept", "name"),
    [
        ("my lab", True, "my-lab"),
        ("..", True, "local"),
        (".hidden", True, "hidden"),
        ("ä", True, "local"),
        ("topobus-x1y2", False, "local"),
    ],
)
def test_name_of_folder_is_a_file_name_whatever_the_folder_is_called(state: str, is_kept: bool, name: str) -> None:
    """Letters, digits, '-', '_' and '.', and no dot first."""
    assert name_of_folder(Path("/home/me") / state, is_kept=is_kept) == name


def test_target_is_the_first_of_option_environment_file_and_selection_when_several_are_given(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """--nats, --context, TOPOBUS_CLI__NATS__URL, TOPOBUS_ALL__NATS__URL, --config, TOPOBUS_CONTEXT,
    the selected context, the default: each wins when those before it are absent.
    """
    folder = ContextFolder(environ)
    for name in ("flagged", "named", "selected"):
        folder.put(Context(name=name, nats=f"nats://{name}.example:1"))
    folder.select("selected")
    config = tmp_path / "topobus.toml"
    config.write_text('[nats]\nurl = "nats://file.example:1"\n')
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    variables = {
        "TOPOBUS_CLI__NATS__URL": "nats://own.example:1",
        "TOPOBUS_ALL__NATS__URL": "nats://all.example:1",
        "TOPOBUS_CONTEXT": "named",
    }
    given = {**environ, **variables}

    def url(nats: str | None, context: str | None, file: Path | None) -> str:
        return choose_target(nats=nats, context=context, config=file, environ=given).url

    chosen = [url("nats://option.example:1", None, config), url(None, "flagged", config), url(None, None, config)]
    del given["TOPOBUS_CLI__NATS__URL"]
    chosen.append(url(None, None, config))
    del given["TOPOBUS_ALL__NATS__URL"]
    chosen += [url(None, None, config), url(None, None, empty)]
    del given["TOPOBUS_CONTEXT"]
    chosen.append(url(None, None, empty))
    folder.select("")
    chosen.append(url(None, None, None))

    hosts = ["option", "flagged", "own", "all", "file", "named", "selected"]
    assert chosen == [*(f"nats://{host}.example:1" for host in hosts), "nats://127.0.0.1:4222"]


def test_target_has_the_login_of_the_context_unless_the_settings_name_one(environ: dict[str, str]) -> None:
    """A user that the environment names comes with its own password and
    never with the context's.
    """
    ContextFolder(environ).put(_ADDED)

    nats = choose_target(nats=None, context="prod", config=None, environ=environ).settings.nats
    other = choose_target(
        nats=None, context="prod", config=None, environ={**environ, "TOPOBUS_CLI__NATS__USER": "me"}
    ).settings.nats

    assert (nats.user, nats.password_file) == ("cli", "/secrets/cli")
    assert (other.url, other.user, other.password_file) == ("nats://10.1.2.3:4222", "me", "")


def test_target_says_which_context_it_is_and_why(environ: dict[str, str]) -> None:
    """The text that errors show has the name, the address and where the choice comes from."""
    folder = ContextFolder(environ)
    folder.put(_ADDED)
    folder.select("prod")

    assert choose_target(nats=None, context=None, config=None, environ=environ).text == (
        "NATS at nats://10.1.2.3:4222, from context prod, the selected one"
    )


def test_target_refuses_a_stopped_context(environ: dict[str, str], tmp_path: Path) -> None:
    """Its port may be another system's by now."""
    ContextFolder(environ).put(_up(tmp_path / "lab"))

    with pytest.raises(PeerUnavailable, match=r"context lab .* is not running"):
        choose_target(nats=None, context="lab", config=None, environ=environ)


@pytest.mark.parametrize(
    ("nats", "context", "said"),
    [
        ("nats://a:1", "prod", "exclude each other"),
        (None, "nope", "there is no context 'nope'"),
        ("foo", None, "no URL"),
        ("http://a:1", None, "--nats"),
    ],
    ids=["both", "unknown", "word", "scheme"],
)
def test_target_is_a_usage_error_when_nothing_is_named(
    environ: dict[str, str], nats: str | None, context: str | None, said: str
) -> None:
    """Each is told before anything is tried."""
    with pytest.raises(UsageError, match=said):
        choose_target(nats=nats, context=context, config=None, environ=environ)


@pytest.mark.parametrize(
    "nats", ["10.0.0.1", "localhost", "nats.example.org", "[::1]:4222", "host:4222", "a:1,b:2", "tls://foo"]
)
def test_target_takes_what_is_plainly_an_address(environ: dict[str, str], nats: str) -> None:
    """A scheme, a port, a dot or localhost will do."""
    assert choose_target(nats=nats, context=None, config=None, environ=environ).source == "--nats"


def test_command_ends_at_once_when_nobody_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused connection is an answer: nothing is waited for.

    The limit is a day, so a wait would hang this test.
    """
    monkeypatch.setenv("TOPOBUS_CLI__CONNECT_TIMEOUT_S", "86400")
    with socket.socket() as held:
        # Bound and not listening: connections are refused, and nobody else takes the port.
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        code = run(["inventory", "--nats", f"nats://127.0.0.1:{port}"])

    assert code == 69
    assert (
        f"no NATS server listens at nats://127.0.0.1:{port} (from --nats): connection refused"
        in capsys.readouterr().err
    )


def test_context_commands_add_list_select_show_and_forget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first that is added is selected; what is shown are files and never a password."""
    password = tmp_path / "password"
    password.write_text("s3cret")
    assert (
        run(
            ["context", "add", "a", "--nats", "nats://10.0.0.1:4222", "--user", "cli", "--password-file", str(password)]
        )
        == 0
    )
    assert run(["context", "add", "b", "--nats", "nats://10.0.0.2:4222"]) == 0
    capsys.readouterr()

    assert run(["context", "ls"]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()] == [
        ["name", "state", "nats", "node"],
        ["*", "a", "added", "nats://10.0.0.1:4222"],
        ["b", "added", "nats://10.0.0.2:4222", "-"],
    ]

    codes = [run(["context", "use", "b"]), run(["context", "ls", "--json"])]
    listed = msgspec.json.decode(capsys.readouterr().out.partition("\n{")[2].join(("{", "")))["contexts"]
    codes += [run(["context", "show", "a"]), run(["context", "rm", "a", "b"]), run(["context", "show", "a"])]
    shown = capsys.readouterr()

    assert codes == [0, 0, 0, 0, 1]
    assert [(context["name"], context["is_selected"]) for context in listed] == [("a", False), ("b", True)]
    assert str(password) in shown.out
    assert "s3cret" not in shown.out
    assert "there is no context 'a'" in shown.err


def test_context_says_that_nats_is_down_when_its_up_still_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`topobus up` may live while its server does not; what runs elsewhere is not asked."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        nats = f"nats://127.0.0.1:{held.getsockname()[1]}"
        with announced_context(ContextFolder(), msgspec.structs.replace(_up(tmp_path), nats=nats), is_kept=False):
            assert run(["context", "ls"]) == 0
            down = capsys.readouterr().out
            held.listen()
            assert run(["context", "ls"]) == 0
            up = capsys.readouterr().out
            assert run(["context", "ls", "--json"]) == 0
            listed = msgspec.json.decode(capsys.readouterr().out)["contexts"]

    assert "running, no NATS" in down
    assert "running" in up
    assert "no NATS" not in up
    assert [context["is_nats_listening"] for context in listed] == [True]


def test_error_names_the_system_once_when_a_note_has_named_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that writes says first where it goes."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        system = f"nats://127.0.0.1:{held.getsockname()[1]}"
        assert run(["release", "pod", "a", "--nats", system]) == 69

    said = capsys.readouterr().err
    assert said.count(system) == 1
    assert "no NATS server listens there: connection refused" in said


def test_compose_page_reaches_compose_when_a_stopped_system_is_selected(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes from the tutorial has its context selected: what the page shows is typed as it
    stands.
    """
    page = (Path(__file__).parents[3] / "docs/how-to/run-in-compose.md").read_text(encoding="utf-8")
    commands = [
        line.removeprefix("$ topobus ").split() for line in page.splitlines() if line.startswith("$ topobus context ")
    ]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    folder = ContextFolder(environ)
    folder.put(_up(tmp_path / "tutorial"))
    folder.select("tutorial")
    *before, forgetting = commands

    assert [run(words) for words in before] == [0, 0]
    target = choose_target(nats=None, context=None, config=None, environ=environ)
    assert (target.url, target.settings.nats.user, target.context) == ("nats://127.0.0.1:4222", "cli", "compose")
    assert run(forgetting) == 0
    assert folder.get("compose") is None
