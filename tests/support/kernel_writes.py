"""A kernel for recorded machines: it reacts to writes to files of a tree, as the real one reacts to
writes to sysfs.

Each file has a reaction to its writes. Writes come by inotify, in the order in which they are
closed. A write returns before its reaction has run, other than in sysfs, so a writer waits for the
effect. Of two writes to a file that can be read, the first text is lost if the second comes before
the reaction. A write-only file (a pipe here) loses none, also with several writers. A file can
refuse: then the write itself fails, as with a driver that refuses.
Source: inotify(7); Documentation/filesystems/sysfs.rst for what a store does.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["KernelWrites"]

# linux/inotify.h: a file that was opened for writing is closed.
_IN_CLOSE_WRITE = 0x8
# struct inotify_event: watch, mask, cookie, length of the name that follows.
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16
# How often a waiter checks whether the thread still lives.
_LOOK_S = 1.0


class KernelWrites:
    """The thread that runs the reactions, within a `with` block."""

    def __init__(self, root: Path) -> None:
        """Take the root of a recorded machine."""
        self.root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)
        self._folders: dict[int, Path] = {}
        self._reactions: dict[Path, Callable[[str], None]] = {}
        self._pipes: dict[Path, int] = {}
        self._opened: list[int] = []
        self._settling: list[threading.Event] = []
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kernel", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, after the reactions to all writes have run.

        Errors: raises what a reaction raised.
        """
        os.close(self._woken)
        self._thread.join()
        for descriptor in (self._inotify, self._wake, *self._opened):
            os.close(descriptor)
        if self._error is not None and error is None:
            raise self._error

    def obey(self, file: str, react: Callable[[str], None], *, is_write_only: bool = False) -> None:
        """React to writes to a file below the root. `react` gets the text, in the kernel's thread.

        The file is made when it does not exist.

        Shapes: is_write_only — the file is never read; each written line counts, and lines of
        several writers do not mix.
        Errors: raises OSError when the folder cannot be watched.
        """
        path = self._path(file)
        if is_write_only:
            self._make_pipe(path)
            with self._lock:
                self._reactions[path] = react
            return
        path.touch()
        with self._lock:
            watch = self._libc.inotify_add_watch(self._inotify, os.fsencode(path.parent), _IN_CLOSE_WRITE)
            self._folders[self._checked(watch)] = path.parent
            self._reactions[path] = react

    def settle(self) -> None:
        """Wait until the reactions to all writes so far have run.

        Errors: raises what a reaction raised.
        """
        is_obeyed = threading.Event()
        with self._lock:
            self._settling.append(is_obeyed)
        os.write(self._woken, b".")
        # The thread may have ended by an error, and then sets nothing more.
        while not is_obeyed.wait(_LOOK_S) and self._thread.is_alive():
            continue
        if self._error is not None:
            raise self._error

    def refuse(self, file: str) -> None:
        """Make writes to a file fail from now on (EISDIR: root gets no other error from a file
        without a kernel behind it).
        """
        path = self._path(file)
        path.unlink()
        path.mkdir()

    def accept(self, file: str) -> None:
        """Accept writes to a file again after `refuse`."""
        path = self._path(file)
        path.rmdir()
        if path in self._pipes:
            self._make_pipe(path)
        else:
            path.touch()

    def _path(self, file: str) -> Path:
        # The name itself is no link to follow: it may be one that refuses.
        path = self.root / file
        return path.parent.resolve() / path.name

    def _run(self) -> None:
        try:
            while self._wait():
                with self._lock:
                    settling, self._settling = self._settling, []
                # The files first: a writer of `driver_override` and then `bind` means them in this
                # order.
                self._obey_events()
                self._obey_pipes()
                for is_obeyed in settling:
                    is_obeyed.set()
            self._obey_events()
            self._obey_pipes()
        except BaseException as err:  # noqa: BLE001 - boundary: a reaction of a test; the error is raised where the thread was started
            self._error = err

    def _wait(self) -> bool:
        """Wait until something is written, or a caller waits for the reactions. False at
        the end.
        """
        with self._lock:
            pipes = list(self._pipes.values())
        ready, _, _ = select.select([self._inotify, self._wake, *pipes], [], [])
        return self._wake not in ready or os.read(self._wake, _READ_BYTES) != b""

    def _obey_pipes(self) -> None:
        with self._lock:
            pipes = dict(self._pipes)
        for path, pipe in pipes.items():
            try:
                text = os.read(pipe, _READ_BYTES).decode()
            except BlockingIOError:
                continue
            # A write of `driver_override` that came after the events were read and before this line
            # counts first.
            self._obey_events()
            for line in text.splitlines():
                self._reactions[path](line)

    def _make_pipe(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        with self._lock:
            # Open for writing as well, so that it never ends, and no writer waits for a reader. A
            # pipe that it replaces stays open, because the thread may wait for it.
            self._pipes[path] = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._opened.append(self._pipes[path])
        os.write(self._woken, b".")

    def _obey_events(self) -> None:
        while True:
            try:
                events = os.read(self._inotify, _READ_BYTES)
            except BlockingIOError:
                return
            while events:
                watch, _, _, length = _EVENT.unpack_from(events)
                name = os.fsdecode(events[_EVENT.size : _EVENT.size + length].rstrip(b"\0"))
                events = events[_EVENT.size + length :]
                self._obey(watch, name)

    def _obey(self, watch: int, name: str) -> None:
        with self._lock:
            folder = self._folders.get(watch)
            path = folder / name if folder is not None else None
            react = self._reactions.get(path) if path is not None else None
        if path is None or react is None or path.is_dir():
            return
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        react(text)

    def _checked(self, answer: int) -> int:
        if answer < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return answer
