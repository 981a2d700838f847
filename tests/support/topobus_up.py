"""`topobus up` on the recorded dgx as a process, and commands against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LIMIT_S", "TOPOBUS", "UpSystem", "topobus_up"]

LIMIT_S = 60.0
TOPOBUS = (sys.executable, "-m", "topobus.cli.main")


@dataclass(kw_only=True)
class UpSystem:
    """A `topobus up` that is ready."""

    process: subprocess.Popen[str]
    state: Path
    columns: str = ""
    """How wide the terminal of its commands is: wide enough that no table breaks a word."""
    nats_url: str = ""
    contexts: str = field(default_factory=lambda: os.environ["XDG_CONFIG_HOME"])
    """Where its context is, by which commands find its login."""
    pids: dict[str, int] = field(default_factory=dict)

    def next_line(self) -> dict[str, Any]:
        """Wait for the next status line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "topobus up ended"
        event: dict[str, Any] = json.loads(line)
        if event.get("pid"):
            self.pids[event["service"]] = event["pid"]
        return event

    @property
    def environment(self) -> dict[str, str]:
        """The caller's environment, pointed at this system."""
        own = {"XDG_CONFIG_HOME": self.contexts, "TOPOBUS_ALL__NATS__URL": self.nats_url}
        return {**os.environ, **own, **({"COLUMNS": self.columns} if self.columns else {})}

    def run(self, *arguments: object, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run one command against the system and check its exit code."""
        done = subprocess.run(
            [*TOPOBUS, *map(str, arguments)],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *arguments: object, code: int = 0, stdin: str = "") -> Any:
        """Run one command with --json and read its answer."""
        return json.loads(self.run(*arguments, "--json", code=code, stdin=stdin).stdout)


@contextmanager
def topobus_up(state: Path, *, columns: str = "", settings: Mapping[str, str] | None = None) -> Iterator[UpSystem]:
    """Run the system until the block ends, with its files in a folder.

    Not below pytest's folders: unix socket paths are short.
    """
    process = subprocess.Popen(
        [*TOPOBUS, "up", "--dir", str(state), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(settings or {})},
    )
    running = UpSystem(process=process, state=state, columns=columns)
    try:
        while (line := running.next_line()).get("system") != "ready":
            pass
        running.nats_url = line["nats"]
        yield running
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)
