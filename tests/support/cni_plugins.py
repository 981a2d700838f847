"""Small CNI plugins as real programs, for tests of the runner: each writes down how it was called
and answers what the test wants.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from topobus.nic.cni.records import AttachmentRecords
from topobus.nic.cni.rules.chain import Chain, parse_chain
from topobus.nic.cni.rules.messages import Target
from topobus.nic.cni.runner import CniRunner, RunnerSettings
from topobus.values.outcome import Refusal

__all__ = [
    "LIMIT_S",
    "Bench",
    "Call",
    "PluginFolder",
    "chain_of",
    "code_of",
    "error",
    "own_namespace",
    "result",
    "target",
]

VERSIONS = ("0.3.1", "0.4.0", "1.0.0")
_SCRIPT = """#!/bin/sh
if [ "$CNI_COMMAND" = VERSION ]; then
  cat >/dev/null
  {version}
fi
here="{folder}"
number=$(ls "$here/calls" | wc -l)
call="$here/calls/$(printf %04d "$number")-{name}"
mkdir "$call"
cat > "$call/input"
env > "$call/env"
case "$CNI_COMMAND" in
{cases}
esac
"""


# Real time: so long may a test's plugin take that is to end by itself.
# One that hangs gets a small one.
LIMIT_S = 30.0


@dataclasses.dataclass
class Bench:
    """A folder of plugins and a runner on it."""

    plugins: PluginFolder
    records: Path

    def runner(self, *, limit_s: float = LIMIT_S, allowed: frozenset[str] | None = None) -> CniRunner:
        """A runner as after a start: it knows only what is on disk."""
        settings = RunnerSettings(bin_dirs=("/nowhere", str(self.plugins.path)), allowed=allowed, limit_s=limit_s)
        return CniRunner(settings, AttachmentRecords(self.records))

    @property
    def record(self) -> dict[str, Any] | None:
        """The only record on disk."""
        files = list(self.records.glob("*")) if self.records.exists() else []
        assert len(files) <= 1
        return json.loads(files[0].read_text()) if files else None


class Call:
    """One call of a plugin, as it saw it."""

    def __init__(self, folder: Path) -> None:
        self.plugin = folder.name.partition("-")[2]
        lines = (folder / "env").read_text().splitlines()
        self.env = dict(line.split("=", 1) for line in lines if "=" in line)
        self.command = self.env["CNI_COMMAND"]
        self.input: dict[str, Any] = json.loads((folder / "input").read_text())

    def __repr__(self) -> str:
        return f"{self.plugin} {self.command}"


class PluginFolder:
    """A folder of plugins."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        (folder / "calls").mkdir(parents=True)

    def add(
        self, name: str, *, versions: tuple[str, ...] = VERSIONS, version: str | None = None, **answers: str
    ) -> None:
        """Write a plugin. Shapes: answers — what the shell does by command (`ADD`, `DEL`, …).

        By default ADD gives an empty result and the others nothing.
        """
        said = (
            version or f"echo '{json.dumps({'cniVersion': versions[-1], 'supportedVersions': list(versions)})}'; exit 0"
        )
        answers = {"ADD": result(), **answers}
        cases = "\n".join(f"{command}) {script} ;;" for command, script in answers.items())
        path = self.path / name
        path.write_text(_SCRIPT.format(version=said, folder=self.path, name=name, cases=cases))
        path.chmod(0o755)

    @property
    def calls(self) -> list[Call]:
        """Every call but VERSION, in order."""
        return [Call(folder) for folder in sorted((self.path / "calls").iterdir())]

    @property
    def in_short(self) -> list[str]:
        """The calls in short, such as `bridge ADD`."""
        return [repr(call) for call in self.calls]


def result(document: dict[str, Any] | None = None, version: str = "1.0.0") -> str:
    """The shell that answers a result."""
    return f"echo '{json.dumps({'cniVersion': version, **(document or {})})}'"


def error(code: int, message: str = "no", details: str = "") -> str:
    """The shell that answers an error object."""
    return f"echo '{json.dumps({'cniVersion': '1.0.0', 'code': code, 'msg': message, 'details': details})}'; exit 1"


def own_namespace() -> str:
    """A network namespace that is there: the test's own. No plugin of these tests touches it."""
    return f"/proc/{os.getpid()}/ns/net"


def chain_of(*types: str, version: str = "1.0.0", **keys: Any) -> Chain:
    """A chain of plugins without configuration."""
    chain = parse_chain(
        {"cniVersion": version, "name": "data", "plugins": [{"type": kind} for kind in types], **keys}, "data.conflist"
    )
    assert isinstance(chain, Chain)
    return chain


def target(**changes: Any) -> Target:
    """An attachment in the test's own namespace."""
    return Target(**{"container_id": "c1", "interface": "net1", "network_namespace": own_namespace(), **changes})


def code_of(outcome: object) -> str:
    """The first code of a refusal."""
    assert isinstance(outcome, Refusal), outcome
    return outcome.reasons[0].code
