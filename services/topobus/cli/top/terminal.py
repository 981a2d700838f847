"""Uses a terminal as a full screen, and restores it in every way that the program may end.

It restores the terminal after the end, an exception, a signal, and while the program is stopped by
Ctrl-Z.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import termios
import tty
from collections.abc import Callable, Iterator
from typing import TextIO

from topobus.cli.top.keys import Key, Press, read_presses

__all__ = ["FullScreen", "full_screen"]

# Alternate screen, hidden cursor, no wrapping at the edge, and the opposite of all of it (xterm's
# control sequences, DEC private modes 1049, 25 and 7).
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
# A terminal sends a sequence in one piece, so an escape sign after which nothing
# comes for so long is the key Esc.
_ESCAPE_S = 0.1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class FullScreen:
    """A terminal in full-screen mode. When the terminal is gone, `on_end` is called, as for a
    signal.
    """

    def __init__(self, keys_fd: int, out: TextIO, on_end: Callable[[], object]) -> None:
        self._keys_fd = keys_fd
        self._out = out
        self._on_end = on_end
        self._before = termios.tcgetattr(keys_fd)
        self._rest = b""

    def enter(self) -> None:
        """Enter full-screen mode: each key is read at once and not shown. Keys for signals keep
        their effect.
        """
        tty.setcbreak(self._keys_fd, termios.TCSANOW)
        self.write(_ENTER)

    def leave(self) -> None:
        """Restore the terminal. Errors are ignored, for it may be gone."""
        with contextlib.suppress(ValueError):
            self._is_written(_LEAVE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._keys_fd, termios.TCSANOW, self._before)

    def write(self, text: str) -> None:
        """Write at once."""
        if not self._is_written(text):
            self._on_end()

    def _is_written(self, text: str) -> bool:
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            # Otherwise the interpreter would write the rest again at its end, and report an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
            return False
        return True

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            size = os.get_terminal_size(self._out.fileno())
        except OSError:
            self._on_end()
            return 80, 24
        # A pseudo terminal whose size was never set reports none.
        return size.columns or 80, size.lines or 24

    @property
    def is_in_sequence(self) -> bool:
        """Say whether the bytes read last may be the beginning of a key."""
        return bool(self._rest)

    def presses(self) -> list[Press]:
        """Read the presses. A terminal that is gone gives the key END."""
        try:
            data = os.read(self._keys_fd, 1024)
        except OSError:
            data = b""
        if not data:
            return [Press(Key.END)]
        presses, self._rest = read_presses(self._rest + data)
        return presses

    def rest(self) -> list[Press]:
        """Parse the bytes read last as complete: nothing more has come."""
        presses, self._rest = read_presses(self._rest, is_all=True)
        return presses


@contextlib.contextmanager
def full_screen(
    keys_fd: int,
    out: TextIO,
    *,
    on_presses: Callable[[list[Press]], None],
    on_change: Callable[[], None],
    on_end: Callable[[], object],
) -> Iterator[FullScreen]:
    """Use the terminal for a block. The running event loop calls back for keys, a new size, and a
    signal that ends the program.
    """
    loop = asyncio.get_running_loop()
    screen = FullScreen(keys_fd, out, on_end)

    def stop() -> None:
        # The shell gets its terminal while we are stopped, and full-screen mode returns when we
        # continue.
        screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.enter()
        on_change()

    waiting: list[asyncio.TimerHandle] = []

    def read() -> None:
        while waiting:
            waiting.pop().cancel()
        on_presses(screen.presses())
        if screen.is_in_sequence:
            waiting.append(loop.call_later(_ESCAPE_S, lambda: on_presses(screen.rest())))

    handlers = {**dict.fromkeys(_ENDING, on_end), signal.SIGWINCH: on_change, signal.SIGTSTP: stop}
    try:
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        screen.enter()
        loop.add_reader(keys_fd, read)
        yield screen
    finally:
        loop.remove_reader(keys_fd)
        for handle in waiting:
            handle.cancel()
        screen.leave()
        for number in handlers:
            loop.remove_signal_handler(number)
