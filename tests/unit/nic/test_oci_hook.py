"""The program that a container runtime runs as a hook: what it is given wrongly is refused by name,
before anything is changed.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from topobus.nic import oci_hook


@pytest.mark.parametrize(
    ("state", "parameters", "why"),
    [
        pytest.param('{"id":"a/b"}', "[]", "state on standard input: id is 'a/b'", id="an id that would be a path"),
        pytest.param('{"id":"a","pid":-1}', "[]", "pid is -1", id="no process"),
        pytest.param('{"pid":1', "[]", "state on standard input", id="a state that is cut off"),
        pytest.param('{"id":"a","pid":1}', "[", "--parameters: no JSON", id="parameters that are no JSON"),
        pytest.param('{"id":"a","pid":1}', "7", "--parameters: wanted an object", id="parameters that are a number"),
        pytest.param('{"id":"a"}', "[]", "pid is missing", id="a container that has no process"),
        pytest.param(
            '{"id":"a","pid":1}',
            '{"apiVersion":"nic.topobus.dev/v1","kind":"Interface","interface":{"mtu":1}}',
            "interface.mtu",
            id="an MTU too small",
        ),
    ],
)
def test_container_is_not_made_when_the_hook_is_given_something_wrong(
    state: str, parameters: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime sees status 1, and an operator the sentence.

    No record and no namespace is left.
    """
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(state.encode())))

    with pytest.raises(SystemExit) as ended:
        oci_hook.main(["attach", "--interface", "eth1", "--parameters", parameters, "--state-dir", str(tmp_path)])

    assert str(ended.value.code).startswith("topobus-nic-hook: ")
    assert why in str(ended.value.code)
    assert list(tmp_path.iterdir()) == []
