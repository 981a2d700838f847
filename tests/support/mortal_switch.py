"""A process that may die before and after each of the kernel's writes of a function switch, beside
those of the journal (`topobus.testing.drivers.deaths`).
"""

from __future__ import annotations

from collections.abc import Callable

from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.passthrough.function_switch import FunctionSwitch

__all__ = ["mortal"]


def mortal(verb: Callable[[Journal], object]) -> Callable[[Journal], object]:
    """Let the process die also before and after the kernel's writes.

    It is a copy of this one, so nothing is patched here.
    """

    def run(journal: Journal) -> object:
        write, step = FunctionSwitch._write, journal._step  # type: ignore[attr-defined]

        def deadly(switch: FunctionSwitch, file: str, text: str) -> None:
            step()
            write(switch, file, text)
            step()

        FunctionSwitch._write = deadly  # type: ignore[method-assign]
        return verb(journal)

    return run
