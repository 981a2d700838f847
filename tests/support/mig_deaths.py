"""Lives of a gpu service that makes MIG instances, each killed (SIGKILL) at the n-th step of a
verb, and what the next life finds.

    python -m support.mig_deaths FOLDER SCENARIO

A step is whatever a death could fall between: each file of the journal that is made, renamed or
synced (seen by an audit hook, so a new one counts by itself), and each call that changes an
instance, before it and after it. Every life is a fork of this process, which loads no library
itself. The last line is a report as JSON: how many steps the verb has, where a life was killed, and
what was wrong afterwards. The GPU has an instance of somebody else's and one of a neighbour claim's
all the time.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from support.fake_mig import H100_80
from support.laws import steps
from support.mig_life import OTHER, MigLife
from support.mig_node import MigNode, mig_node
from topobus.formats.messages.codec import decode, encode
from topobus.values.device import Device
from topobus.values.outcome import Refusal

MOST_STEPS = 150
_WANTED = ("2g-20gb-2", "1g-10gb-4")
_NEIGHBOURS, _FOREIGN = "1g-10gb-5", ("1g.10gb", 6)
_CHANGES = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
)
_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


class _Death:
    """Ends this process at the chosen step."""

    def __init__(self, journal: Path, deadly: int | str, log: int) -> None:
        self._journal, self._deadly, self._log, self._count = str(journal), deadly, log, 0

    def arm(self) -> None:
        """Count from here on."""
        for name in _CHANGES:
            setattr(pynvml, name, self._counted(name, getattr(pynvml, name)))
        sys.addaudithook(self._look)

    def step(self, name: str) -> None:
        """Die here when it is time."""
        self._count += 1
        if self._deadly in (self._count, name):
            os.write(self._log, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.step(f"before {name}")
            result = real(*arguments)
            self.step(f"after {name}")
            return result

        return call

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS and str(arguments[0]).startswith(self._journal):
            self.step(f"{event} {Path(str(arguments[0])).name}")


def _in_a_life(act: Callable[[int], None]) -> tuple[int, str]:
    """Run something in a fork: how it ended, and what it wrote."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            act(writing)
        except BaseException as err:  # noqa: BLE001 - a fork must not continue as its parent
            os.write(writing, f"raised {err!r}".encode()[:4000])
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitpid(child, 0)[1], said


class _Scenario:
    """One verb, killed at each of its steps."""

    def __init__(self, node: MigNode, journal: Path) -> None:
        self.node, self.journal = node, journal
        self.neighbours: Device
        self.devices: list[Device]
        self.state = b""
        self.files: dict[str, bytes] = {}

    def life(self) -> MigLife:
        return MigLife(self.node, self.journal)

    def set_up(self, *, is_prepared: bool) -> None:
        """Make what there is before a verb begins, and keep it for `begin`."""

        def act(log: int) -> None:
            self.node.make(*_FOREIGN)
            life = self.life()
            devices = life.discover()
            neighbours, *wanted = (devices[f"{life.parent}-mig-{name}"] for name in (_NEIGHBOURS, *_WANTED))
            _must(life.prepare(neighbours, owner=OTHER))
            if is_prepared:
                _must(life.prepare(*wanted))
            os.write(log, b"\n".join(map(encode, (neighbours, *wanted))))

        ended = _in_a_life(act)
        _check_ended(ended)
        self.neighbours, *self.devices = (decode(line.encode(), Device) for line in ended[1].splitlines())
        self.state = (self.node.library.folder / "mig-state").read_bytes()
        self.files = {file.name: file.read_bytes() for file in self.journal.iterdir()}

    def begin(self) -> None:
        """Bring everything to the beginning."""
        (self.node.library.folder / "mig-state").write_bytes(self.state)
        for file in self.journal.iterdir():
            file.unlink()
        for name, text in self.files.items():
            (self.journal / name).write_bytes(text)

    def kill(self, verb: str, step: int | str) -> str | None:
        """Have a life die at a step, by its number or the first of a name.

        The name of the step, or None when the verb had none such.
        """

        def act(log: int) -> None:
            life = self.life()
            devices = self.devices
            death = _Death(self.journal, step, log)
            death.arm()
            if verb == "prepare":
                _must(life.prepare(*devices))
            elif verb == "mend":
                life.mend()
            else:
                life.unprepare(*devices)

        status, said = _in_a_life(act)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return said
        _check_ended((status, said))
        return None

    def after(self, *, is_asked_again: bool) -> str:
        """Start again, as the service does, and return what is wrong then, or ""."""

        def act(log: int) -> None:
            life = self.life()
            neighbours, devices = self.neighbours, self.devices
            life.mend()
            wrong = [f"orphan: {left}" for left in _orphans(life)]
            if is_asked_again:
                _must(life.prepare(*devices))
                wrong += [] if len(life.instances()) == 4 else ["asked again: not two instances"]
            life.unprepare(*devices)
            wrong += [f"left: {sorted(_places(life))}"] if _places(life) != {("1g-10gb", 5), ("1g-10gb", 6)} else []
            wrong += [
                f"in the journal: {name}"
                for name in life.journal.entries
                if life.journal.steps_of(name) and not name.endswith(_NEIGHBOURS)
            ]
            _must(life.prepare(neighbours, owner=OTHER))
            wrong += ["the neighbour got another instance"] if len(life.instances()) != 2 else []
            os.write(log, "; ".join(wrong).encode())

        ended = _in_a_life(act)
        _check_ended(ended)
        return ended[1]


def _places(life: MigLife) -> set[tuple[str, int | None]]:
    names = {profile: name.replace(".", "-") for (name, _), (profile, _) in H100_80.placements().items()}
    return {(names[instance.profile or 0], instance.start) for instance in life.instances()}


def _orphans(life: MigLife) -> list[str]:
    """Name the instances that are neither somebody else's nor in the journal as whole."""
    whole = {
        name
        for name, entry in life.journal.entries.items()
        if entry.owners and not entry.half_done and life.journal.steps_of(name)
    }
    return [
        f"{profile} at {start}"
        for profile, start in sorted(_places(life), key=str)
        if (profile, start) != ("1g-10gb", 6) and f"{life.parent}-mig-{profile}-{start}" not in whole
    ]


def _must(answer: object) -> None:
    if isinstance(answer, Refusal):
        raise TypeError(str(answer))


def _check_ended(ended: tuple[int, str]) -> None:
    status, said = ended
    if status != 0:
        raise RuntimeError(f"a life ended with {status}: {said}")


def _run(scenario: _Scenario, name: str) -> dict[str, Any]:
    verb, _, again = name.partition(",")
    where: list[str] = []
    wrong: dict[str, str] = {}
    scenario.set_up(is_prepared=verb == "unprepare")
    gc.freeze()
    for step in steps(MOST_STEPS):
        scenario.begin()
        if verb == "mend":
            # A GPU instance is there, and its compute instance is not.
            scenario.kill("prepare", "before nvmlGpuInstanceCreateComputeInstance")
        at = scenario.kill(verb, step)
        if at is None:
            break
        where.append(at)
        said = scenario.after(is_asked_again=again == "again")
        if said:
            wrong[f"{step} {at}"] = said
    return {"steps": step - 1, "where": where, "wrong": wrong}


def main(arguments: list[str]) -> None:
    """Kill and report."""
    folder, name = arguments
    with mig_node(Path(folder)) as node:
        report = _run(_Scenario(node, Path(folder) / "journal"), name)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
