"""The output of the demo: numbered steps with their times, results and checks.

A check that fails ends the demo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from topobus.cli.render.grids import marked_line
from topobus.cli.render.picture import recording_console
from topobus.values.errors import TopobusError

__all__ = ["ExpectationError", "Stage"]

# The pod that is placed and the one that is refused: the purpose of Topobus on one page.
_PICTURED_STEPS = (3, 4)


class ExpectationError(TopobusError):
    """Raised when a promise of the demo is broken."""


class Stage:
    """Prints the demo. `width` bounds all that it shows."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.picture = recording_console()
        """Records the steps that make a good picture."""
        self.started_at = time.monotonic()
        self.checks = 0
        self.steps: list[tuple[str, float]] = []
        self._is_pictured = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self.started_at

    @contextmanager
    def step(self, title: str, command: str = "") -> Iterator[None]:
        """Frame one step. `command` is the user's command for the same."""
        number = len(self.steps) + 1
        self._is_pictured = number in _PICTURED_STEPS
        started_at = time.monotonic()
        self._print()
        self._print(
            Rule(
                Text.assemble((f" {number} ", "reverse bold"), (f" {title} ", "bold")),
                align="left",
                style="faint",
                characters="─",
            )
        )
        if command:
            self._print(Text(f"  $ {command}", "name"))
        yield
        took_s = time.monotonic() - started_at
        self.steps.append((title, took_s))
        self._print(Text(f"  {took_s:.2f} s", "faint"))

    def _print(self, *parts: RenderableType) -> None:
        self.console.print(*parts)
        if self._is_pictured:
            self.picture.print(*parts)

    def show_text(self, text: str) -> None:
        """Show one line about what happens."""
        self._print(Padding(Text(text), (0, 0, 0, 2)))

    def show(self, part: RenderableType, *, indent: int = 0) -> None:
        """Show a table, panel or drawing."""
        self._print(Padding(part, (0, 0, 0, indent)) if indent else part)

    def expect(self, is_so: bool, what: str, evidence: object = "") -> None:
        """Check a promise and show it.

        Errors: raises ExpectationError, which ends the demo, when it is broken.
        """
        if not is_so:
            raise ExpectationError(
                f"the demo expected: {what}", next_step=f"found instead: {evidence}" if evidence != "" else ""
            )
        self.confirm(what)

    def confirm(self, what: str) -> None:
        """Show a promise that the demo has just waited for."""
        self.checks += 1
        self._print(marked_line(Text("✓", "ok"), Text(what)))
