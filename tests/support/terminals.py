"""A terminal for programs under test: a pseudo terminal of a given size, and what a person would
see on it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["TerminalSession", "screen_text"]

_SEQUENCE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")
_LIMIT_S = 60.0


def screen_text(written: str, columns: int) -> list[str]:
    """Give the lines that a terminal shows after all that was written.

    Understands cursor positions, clearing and colours, and nothing else. Without
    wrapping the cursor stays on the last column, so what is written or cleared
    there takes the place of what was.
    """
    rows: dict[int, list[str]] = {}
    row = column = place = 0
    while place < len(written):
        sequence = _SEQUENCE.match(written, place)
        if sequence is not None:
            place = sequence.end()
            match sequence[3]:
                case "H":
                    row, column = (int(number) - 1 for number in (sequence[2] or "1;1").split(";"))
                case "J":
                    rows.clear()
                case "K":
                    rows[row] = rows.get(row, [])[:column]
                case _:
                    pass
            continue
        line = rows.setdefault(row, [])
        line.extend(" " * (column + 1 - len(line)))
        line[column] = written[place]
        column = min(column + 1, columns - 1)
        place += 1
    return ["".join(rows.get(number, [])).rstrip() for number in range(max(rows, default=-1) + 1)]


class TerminalSession:
    """A program on a pseudo terminal."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, columns: int, lines: int) -> None:
        self._master, self._slave = os.openpty()
        self.resize(columns, lines)
        self.modes_before = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        self.written = ""

    def resize(self, columns: int, lines: int) -> None:
        """Change the size, as a terminal does whose window is pulled."""
        self.columns = columns
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if hasattr(self, "process"):
            # The terminal controls no process, so the kernel signals none.
            self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._master, keys)

    def hang_up(self) -> None:
        """Close the terminal under the program, as its window or tmux does."""
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDWR)

    def modes(self) -> list[Any]:
        """Give the terminal's modes now."""
        return termios.tcgetattr(self._slave)

    async def until(self, is_shown: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the screen shows it; gives the screen."""
        async with asyncio.timeout(_LIMIT_S):
            while not is_shown(screen := screen_text(self.written, self.columns)):
                await self._read()
        return screen

    async def until_written(self, text: str) -> None:
        """Wait until the program has written it."""
        async with asyncio.timeout(_LIMIT_S):
            while text not in self.written:
                await self._read()

    async def end(self) -> int:
        """Wait for the program's end and read the rest."""
        code = await asyncio.to_thread(self.process.wait, _LIMIT_S)
        os.set_blocking(self._master, False)
        while True:
            try:
                self.written += os.read(self._master, 65536).decode(errors="replace")
            except BlockingIOError:
                return code

    def close(self) -> None:
        """End what runs still."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=_LIMIT_S)
        os.close(self._master)
        os.close(self._slave)

    async def _read(self) -> None:
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._master, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._master)
        # A sign of several bytes may come in pieces; they are put together by the next read.
        self._bytes = getattr(self, "_bytes", b"") + os.read(self._master, 65536)
        self.written = self._bytes.decode(errors="ignore")
