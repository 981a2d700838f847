"""A recorded conversation between kubelet and plugins: its lines, the actions that caused them, and
the differences of two recordings.

Pure. Lines are JSON, as in `tests/data/kubelet/kubelet-1.36-transcript.jsonl`: `session`, `t`,
`event`, and the fields of that event. A comparison ignores what depends on the clock or the run
(`t`, `took`), and the order of calls that kubelet makes at the same time.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

__all__ = ["Action", "Line", "Session", "Step", "differences", "read_transcript"]

Line = dict[str, Any]

# kubelet answers Register and opens the stream at the same time, and closes both streams at the
# same time: sessions of one recording differ in it.
_AT_ONCE = (
    frozenset({"Register.ok", "ListAndWatch.open", "ListAndWatch.send"}),
    frozenset({"ListAndWatch.closed", "NodeWatchResources.closed"}),
)
_BY_CHANCE = ("session", "t", "took")
_SETS = ("available_deviceIDs", "must_include_deviceIDs", "devices_ids")


class Action(StrEnum):
    """An action on kubelet, on its pods or by the plugin.

    Everything else in a transcript is kubelet's own doing.
    """

    REGISTER = "register"
    """The plugin registers: `request` when it does so wrongly."""
    START_DRIVER = "start-driver"
    CREATE_PODS = "create-pods"
    """A pod with `count` devices, and one with `claims`."""
    RESTART_CONTAINER = "restart-container"
    SHOW = "show"
    """The plugin sends the list `devices`."""
    STOP_KUBELET = "stop-kubelet"
    START_KUBELET = "start-kubelet"
    DELETE_PODS = "delete-pods"
    STOP_PLUGIN = "stop-plugin"


class Step(Struct, frozen=True, kw_only=True):
    """One action, before the line of this index."""

    before: int
    action: Action
    request: dict[str, str] = {}
    count: int = 0
    claims: tuple[dict[str, str], ...] = ()
    devices: tuple[Line, ...] = ()


class Session(Struct, frozen=True, kw_only=True):
    """One run of the plugin."""

    name: str
    lines: tuple[Line, ...]
    steps: tuple[Step, ...]
    resource: str
    socket: str
    devices: tuple[Line, ...]
    """The plugin's first list."""
    owes: bool = False
    """Pods of the session before were deleted while no plugin was there."""


def read_transcript(text: str) -> tuple[Session, ...]:
    """Read a transcript and derive the actions in it.

    Errors: raises ValueError with the line's number for a line that is no JSON object with
    `session` and `event`, or a session from which no action can be derived.
    """
    by_session: dict[str, list[Line]] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
            by_session.setdefault(line["session"], []).append(line)
            str(line["event"])
        except (ValueError, KeyError, TypeError) as err:
            raise ValueError(f"transcript line {number}: wanted a JSON object with session and event: {err}") from err
    if not by_session:
        raise ValueError("the transcript has no lines")
    return tuple(_session(name, lines) for name, lines in by_session.items())


def differences(wanted: Sequence[Line], got: Sequence[Line]) -> list[str]:
    """List how two recordings of one session differ, as a unified diff.

    Empty when they are the same.

    >>> differences([{"event": "GetInfo", "t": 1.0}], [{"event": "GetInfo", "t": 2.0}])
    []
    """
    recorded, repeated = ([_text(line) for line in _normalised(lines)] for lines in (wanted, got))
    return list(difflib.unified_diff(recorded, repeated, fromfile="transcript", tofile="simulator", lineterm="", n=1))


def _normalised(lines: Iterable[Line]) -> Iterator[Line]:
    run: list[Line] = []
    kind: frozenset[str] = frozenset()
    for line in lines:
        plain = _plain({key: value for key, value in line.items() if key not in _BY_CHANCE})
        if line["event"] not in kind:
            yield from sorted(run, key=_text)
            run, kind = [], next((events for events in _AT_ONCE if line["event"] in events), frozenset())
        run.append(plain)
    yield from sorted(run, key=_text)


def _text(line: Line) -> str:
    return json.dumps(line, sort_keys=True)


def _plain(value: Any, key: str = "") -> Any:
    """Sets in any order are the same: Go's maps have none."""
    if isinstance(value, dict):
        return {name: _plain(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        inner = [_plain(item) for item in value]
        return sorted(inner) if key in _SETS else inner
    return value


def _session(name: str, lines: list[Line]) -> Session:
    lists = [line["msg"]["devices"] for line in lines if line["event"] == "ListAndWatch.send"]
    refused = [line["req"] for line in lines if line["event"] == "Register.refused"]
    # A registration with a wrong version carries the plugin's own name and socket.
    own = next((registration for registration in refused if registration.get("version") != "v1beta1"), None)
    if not lists or own is None:
        raise ValueError(
            f"transcript session {name}: it needs a ListAndWatch.send and a registration with a wrong "
            "version, which names the plugin"
        )
    steps, owes = _steps(lines)
    return Session(
        name=name,
        lines=tuple(lines),
        steps=tuple(steps),
        resource=own["resource_name"],
        socket=own["endpoint"],
        devices=tuple(lists[0]),
        owes=owes,
    )


def _steps(lines: list[Line]) -> tuple[list[Step], bool]:
    steps: list[Step] = []
    owes = is_deleted = is_stopped = has_driver = False
    sent = started = 0
    for index, line in enumerate(lines):
        match line["event"], line.get("what"):
            case "GetDevicePluginOptions" | "Register.error", _:
                steps.append(Step(before=index, action=Action.REGISTER))
            case "Register.refused", _:
                steps.append(Step(before=index, action=Action.REGISTER, request=line["req"]))
            case "GetInfo", _ if not has_driver:
                has_driver = True
                steps.append(Step(before=index, action=Action.START_DRIVER))
            case "ListAndWatch.send", _:
                sent += 1
                if sent > 1:
                    steps.append(Step(before=index, action=Action.SHOW, devices=tuple(line["msg"]["devices"])))
            case "GetPreferredAllocation", _:
                started = 0
                later = [each_line for each_line in lines[index:] if each_line["event"] == "NodePrepareResources"]
                claims = tuple(later[0]["req"]["claims"]) if later else ()
                count = line["req"]["container_requests"][0]["allocation_size"]
                steps.append(Step(before=index, action=Action.CREATE_PODS, count=count, claims=claims))
            case "PreStartContainer", _:
                started += 1
                if started > 1:
                    steps.append(Step(before=index, action=Action.RESTART_CONTAINER))
            case "marker", "kubelet stop":
                is_stopped = True
                steps.append(Step(before=index + 1, action=Action.STOP_KUBELET))
            case "marker", "kubelet start":
                steps.append(Step(before=index + 1, action=Action.START_KUBELET))
            case "NodeUnprepareResources", _ if not is_deleted:
                owes = True
            case "marker", "pods deleted":
                is_deleted = True
                steps.append(Step(before=index + 1, action=Action.DELETE_PODS))
            case "ListAndWatch.closed", _ if not is_stopped:
                steps.append(Step(before=index, action=Action.STOP_PLUGIN))
    return steps, owes
