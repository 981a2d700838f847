"""The kubelet simulator does again what a real kubelet 1.36.2 did, and a recording that says
anything else is noticed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topobus.testing.kubelet import KubeletTimings
from topobus.testing.kubelet.recorder import RecordingPlugin, device
from topobus.testing.kubelet.replay import replay
from topobus.testing.kubelet.transcript import read_transcript

pytestmark = pytest.mark.integration

TRANSCRIPT = Path(__file__).resolve().parents[2] / "data" / "kubelet" / "kubelet-1.36-transcript.jsonl"
LINES = TRANSCRIPT.read_text(encoding="utf-8").splitlines()
# The recording's refused registrations take 10 s each; that the simulator's default is that
# is tested beside the transcript.
SHORT = KubeletTimings(dial_s=2.0)
# Too short for a loaded machine, which then finds one difference more.
SHORTEST = KubeletTimings(dial_s=0.3)


async def test_simulator_does_what_kubelet_did_when_the_recording_is_done_again(short_folder: Path) -> None:
    """All 52 lines of both sessions come again: the same calls in the same order with the same
    contents and deadlines.
    """
    assert await replay(read_transcript("\n".join(LINES)), short_folder, timings=SHORT) == []


def _changed(line: dict[str, Any]) -> dict[str, Any]:
    """The same line with another content, whatever it is."""
    if line["event"] == "ListAndWatch.send":
        return {**line, "deadline_s": 1.0}
    if line.get("deadline_s"):
        return {**line, "deadline_s": line["deadline_s"] + 5}
    return {**line, "details": "otherwise"} if "details" in line else {**line, "event": f"{line['event']}.otherwise"}


def _without(lines: list[str], index: int) -> list[str]:
    return [*lines[:index], *lines[index + 1 :]]


def _swapped(lines: list[str], index: int) -> list[str]:
    return [*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]]


def _rewritten(lines: list[str], index: int) -> list[str]:
    return [*lines[:index], json.dumps(_changed(json.loads(lines[index]))), *lines[index + 1 :]]


@pytest.mark.parametrize(
    ("index", "change"),
    [
        pytest.param(0, _rewritten, id="options-deadline"),
        pytest.param(4, _rewritten, id="refusal-words"),
        pytest.param(8, _rewritten, id="get-info-deadline"),
        pytest.param(9, _without, id="status-missing"),
        pytest.param(13, _swapped, id="allocate-and-prepare-swapped"),
        pytest.param(14, _rewritten, id="prepare-deadline"),
        pytest.param(13, _without, id="allocate-missing"),
        pytest.param(23, _without, id="stream-end-missing"),
        pytest.param(29, _rewritten, id="dial-words"),
        pytest.param(41, _without, id="owed-unprepare-missing"),
    ],
)
async def test_difference_is_told_when_a_line_is_another(
    short_folder: Path, index: int, change: Callable[[list[str], int], list[str]]
) -> None:
    """A recording with one line changed, gone or out of its place fails, and the difference names
    the session.
    """
    differences = await replay(
        read_transcript("\n".join(change(LINES, index))), short_folder, timings=SHORTEST, patience_s=0.7
    )

    assert differences
    assert differences[0].startswith("session ")


async def test_command_fails_when_a_line_is_another(tmp_path: Path) -> None:
    """`python -m topobus.testing.kubelet replay FILE`: 0 and one line for the recording itself, 1
    and the difference for a changed one.
    """
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(_rewritten(LINES, 14)), encoding="utf-8")
    answers = []
    for path in (TRANSCRIPT, changed):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "topobus.testing.kubelet", "replay", str(path), "--dial-s", "2"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, complaint = await asyncio.wait_for(process.communicate(), 60)
        answers.append((process.returncode, json.loads(output)["is_same"], complaint.decode()))

    assert [answer[:2] for answer in answers] == [(0, True), (1, False)]
    assert '"deadline_s": 50.0' in answers[1][2]


async def test_program_serves_a_plugin_of_another_process_when_told_by_words(short_folder: Path) -> None:
    """`serve`: the plugin registers on its sockets, words admit a pod and restart kubelet, every
    call is a JSON line, and a wrong word is an error that helps.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "topobus.testing.kubelet", "serve", "--root", str(short_folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def printed(key: str, value: str) -> dict[str, Any]:
        while True:
            line: dict[str, Any] = json.loads(await process.stdout.readline())  # type: ignore[union-attr]
            if line.get(key) == value:
                return line

    async with asyncio.timeout(30):
        await printed("serving", str(short_folder))
        async with RecordingPlugin(
            short_folder / "device-plugins", "rec.example.com/x", [device("dev-0", 0)]
        ) as plugin:
            await plugin.register()
            await printed("event", "ListAndWatch.send")
            process.stdin.write(b"admit p rec.example.com/x=1\nadmit q nonsense\nrestart\n")
            admitted = await printed("admitted", "p")
            await printed("event", "ListAndWatch.closed")
        process.stdin.write(b"quit\n")
        _, complaint = await process.communicate()

    assert admitted["containers"][0]["devices"] == {"rec.example.com/x": ["dev-0"]}
    assert "wanted RESOURCE=COUNT or claim=NAME:UID:DRIVER" in complaint.decode()
    assert process.returncode == 0
