"""The port of `topobus up`'s NATS server: the same again, and never one that another run has."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from topobus.local_system import nats_port
from topobus.local_system.nats_port import reserved_port
from topobus.simulation.nats_server import free_port

_HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Three ports in place of the fixed ones, which any program of this machine may have, and a
    folder of locks of our own.
    """
    chosen = (free_port(), free_port(), free_port())
    monkeypatch.setattr(nats_port, "PORTS", chosen)
    monkeypatch.setattr(nats_port, "_PARENT", tmp_path)
    return chosen


def _state(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return folder


def test_ports_begin_with_that_of_nats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands without any setting find the first system of a machine."""
    monkeypatch.undo()

    assert (nats_port.PORTS[0], len(set(nats_port.PORTS))) == (4222, 21)


def test_runs_get_ports_of_their_own_when_they_start_at_the_same_time(tmp_path: Path, ports: tuple[int, ...]) -> None:
    """Nobody listens at the first one's port yet when the second chooses."""
    with reserved_port(_state(tmp_path, "a"), _HERE) as first, reserved_port(_state(tmp_path, "b"), _HERE) as second:
        assert (first, second) == ports[:2]


def test_run_takes_the_next_port_when_a_program_listens_at_the_first(tmp_path: Path, ports: tuple[int, ...]) -> None:
    """In the order of the list, so that the next run finds the same."""
    with socket.socket() as stranger:
        stranger.bind((_HERE, ports[0]))
        stranger.listen()
        with reserved_port(_state(tmp_path, "a"), _HERE) as port:
            assert port == ports[1]


def test_folder_has_its_port_again_when_the_first_of_the_list_is_free_by_then(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    """What somebody exported for this system stays right."""
    with reserved_port(_state(tmp_path, "a"), _HERE), reserved_port(_state(tmp_path, "b"), _HERE):
        pass

    with reserved_port(_state(tmp_path, "b"), _HERE) as port:
        assert port == ports[1]


def test_run_gets_any_port_when_all_of_the_list_are_taken(tmp_path: Path, ports: tuple[int, ...]) -> None:
    """The list is a convenience, no limit."""
    holders = [reserved_port(_state(tmp_path, str(number)), _HERE) for number in range(len(ports))]
    for holder in holders:
        holder.__enter__()
    try:
        with reserved_port(_state(tmp_path, "last"), _HERE) as port:
            assert port not in ports
    finally:
        for holder in holders:
            holder.__exit__(None, None, None)


@pytest.mark.parametrize("content", ["", "x", "99999999", "0", "80"])
def test_run_ignores_what_is_no_port_in_the_folder(tmp_path: Path, ports: tuple[int, ...], content: str) -> None:
    """A spoilt file costs the memory, not the start."""
    state = _state(tmp_path, "a")
    (state / "nats-port").write_text(content)

    with reserved_port(state, _HERE) as port:
        assert port == ports[0]
