"""The context of a `topobus up`: one for each state folder, under the
name that it was given last.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import cast

import pytest

from topobus.cli.announcements import Announcement
from topobus.cli.contexts import Context, ContextFolder
from topobus.cli.exits import UsageError
from topobus.local_system.supervision import Supervisor
from topobus.local_system.system import Layout, System

_LIMIT_S = 60.0


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder that stays."""
    folder = tmp_path / "lab"
    folder.mkdir()
    return folder


def _system(state: Path) -> System:
    return System(
        layout=Layout(state=state),
        node="n1",
        nats_url="nats://127.0.0.1:4230",
        supervisor=cast("Supervisor", None),
        has_users=True,
    )


def _run(state: Path, wanted: str | None) -> str:
    remarks: list[str] = []
    with Announcement(wanted=wanted, state=state, is_kept=True).made(_system(state), remarks.append) as use:
        assert remarks == []
        return use.name


def test_folder_keeps_its_name_and_takes_another_when_it_is_given_one(state: Path) -> None:
    """The folder's own name first, then the one of --context for good: never two contexts for one
    system.
    """
    names = [_run(state, None), _run(state, "bench"), _run(state, None)]

    assert names == ["lab", "bench", "bench"]
    assert [context.name for context in ContextFolder().all()] == ["bench"]
    assert ContextFolder().selected() == "bench"


def test_context_holds_what_commands_need_and_no_password(state: Path) -> None:
    """The URL, the user and the path of its password file."""
    _run(state, None)

    context = ContextFolder().get("lab")
    assert context is not None
    assert (context.nats, context.user, context.password_file) == (
        "nats://127.0.0.1:4230",
        "cli",
        f"{state}/nats-users/cli/password",
    )


def test_name_of_another_system_is_refused_before_anything_starts(state: Path) -> None:
    """Somebody has given it to a system that runs elsewhere."""
    ContextFolder().put(Context(name="prod", nats="nats://10.0.0.1:4222"))

    with pytest.raises(UsageError, match="--context prod: another system has this name"):
        Announcement(wanted="prod", state=state, is_kept=True)


def test_systems_have_names_of_their_own_when_they_start_at_the_same_moment(tmp_path: Path) -> None:
    """Each of eight finds its own context, and one is selected."""
    at_once, all_named = Barrier(8), Barrier(8)

    def run(number: int) -> tuple[str, bool]:
        at_once.wait(_LIMIT_S)
        with Announcement(wanted=None, state=tmp_path / str(number), is_kept=False).made(
            _system(tmp_path / str(number)), lambda _: None
        ) as use:
            all_named.wait(_LIMIT_S)
            return use.name, use.is_selected

    with ThreadPoolExecutor(8) as threads:
        uses = list(threads.map(run, range(8)))

    assert sorted(name for name, _ in uses) == sorted(["local", *(f"local-{number}" for number in range(2, 9))])
    assert sum(is_selected for _, is_selected in uses) == 1
    assert ContextFolder().all() == ()


def test_system_runs_without_a_context_when_none_can_be_written(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder should be costs a remark, and one on how commands log in."""
    (tmp_path / "config").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    remarks: list[str] = []

    with Announcement(wanted=None, state=state, is_kept=True).made(_system(state), remarks.append) as use:
        assert (use.name, use.is_selected) == ("", False)

    assert [remark.partition(":")[0] for remark in remarks] == [
        "this system gets no context",
        "commands find no login by themselves",
    ]
    assert f"TOPOBUS_CLI__NATS__PASSWORD_FILE={_system(state).password_file('cli')}" in remarks[-1]
