"""The `docker run` lines of a page: with which environment, volumes, network and user an image is
to be run.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SERVICES", "SERVICES_PAGE", "DocumentedRun", "documented_runs"]

_ROOT = Path(__file__).parents[2]
SERVICES_PAGE = _ROOT / "docs" / "how-to" / "deploy-one-service.md"
SERVICES = tuple(
    sorted(
        folder.name
        for folder in (_ROOT / "services" / "topobus").iterdir()
        if folder.name not in ("cli", "__pycache__")
    )
)
"""Every process with an image that serves."""


@dataclass(frozen=True)
class DocumentedRun:
    """One line."""

    environment: Mapping[str, str]
    volumes: tuple[tuple[str, str, str], ...]
    """Of the host, in the container, and `ro` or `rw`."""
    network: str
    user: str
    command: tuple[str, ...]


def documented_runs(page: Path) -> dict[str, DocumentedRun]:
    """Read a page's lines, by the image's name without its registry and tag.

    An option that is not known here is an error, so that none is left out unseen.
    """
    text = page.read_text(encoding="utf-8")
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--detach", action="store_true")
    for option in ("--name", "--network", "--env-file", "--user"):
        parser.add_argument(option, default="")
    for option in ("--env", "--volume", "--publish"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    runs = {}
    for line in re.findall(r"^\$ docker run (.*)$", text.replace("\\\n", " "), flags=re.MULTILINE):
        given = parser.parse_args(shlex.split(line))
        variables = [*(_shown_file(page, text, given.env_file) if given.env_file else ()), *given.env]
        runs[given.image.rpartition("/")[2].partition(":")[0]] = DocumentedRun(
            environment=dict(variable.split("=", 1) for variable in variables),
            volumes=tuple((*volume.split(":"), "rw")[:3] for volume in given.volume),
            network=given.network,
            user=given.user,
            command=tuple(given.command),
        )
    return runs


def _shown_file(page: Path, text: str, name: str) -> list[str]:
    """Give the lines of a file of variables whose content the page shows."""
    shown = re.search(rf"^\$ cat {re.escape(name)}\n((?:[A-Z_0-9]+=.*\n)+)", text, flags=re.MULTILINE)
    if shown is None:
        raise ValueError(f"{page} names {name} and does not show what is in it")
    return shown[1].splitlines()
