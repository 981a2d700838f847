"""A kernel for recorded machines: it obeys what is written into files of a tree, as the real one
obeys writes to sysfs.

Flows in: files, each with what a write to it does; then the writes, by inotify, in the order in
which they are closed. Flows out: what the reactions do to the tree. A write returns before it is
obeyed, other than in sysfs, so whoever writes waits for the effect. Of two writes to a file that
can be read the first text is lost if the second comes before it is obeyed; a file that is
written alone (a pipe here) loses none, whoever writes. A file can refuse: then the write itself
fails, as a driver's does that says no.
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
# How often it is seen whether the thread still lives, for whoever waits for it.
_LOOK_S = 1.0


class KernelWrites:
    """The thread that obeys; between `with` and its end."""

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
        """Begin to obey."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, after everything that was written is obeyed.

        Errors: raises what a reaction raised.
        """
        os.close(self._woken)
        self._thread.join()
        for descriptor in (self._inotify, self._wake, *self._opened):
            os.close(descriptor)
        if self._error is not None and error is None:
            raise self._error

    def obey(self, file: str, react: Callable[[str], None], *, is_write_only: bool = False) -> None:
        """Have writes to a file below the root obeyed; `react` gets the text, in the kernel's
        thread.

        The file is made when it is not there.

        Shapes: is_write_only — nobody reads it; each line that is written counts, and lines
        of several writers do not mix.
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
        """Wait until everything that was written so far is obeyed.

        Errors: raises what a reaction raised.
        """
        is_obeyed = threading.Event()
        with self._lock:
            self._settling.append(is_obeyed)
        os.write(self._woken, b".")
        # The thread may have ended by an error, and then says nothing more.
        while not is_obeyed.wait(_LOOK_S) and self._thread.is_alive():
            continue
        if self._error is not None:
            raise self._error

    def refuse(self, file: str) -> None:
        """Let writes to a file fail from now on (EISDIR: no other error comes to root from a file
        without a kernel behind it).
        """
        path = self._path(file)
        path.unlink()
        path.mkdir()

    def accept(self, file: str) -> None:
        """Take writes to a file again after `refuse`."""
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
                # The files first: who writes `driver_override` and then
                # `bind` means it in this order.
                self._obey_events()
                self._obey_pipes()
                for is_obeyed in settling:
                    is_obeyed.set()
            self._obey_events()
            self._obey_pipes()
        except BaseException as err:  # noqa: BLE001 - boundary: a reaction of a test; whoever started the thread is told
            self._error = err

    def _wait(self) -> bool:
        """Wait until something is written, or somebody wants it done; False at the end."""
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
            # Who wrote `driver_override` before this line did so after the events
            # were read: they count before it.
            self._obey_events()
            for line in text.splitlines():
                self._reactions[path](line)

    def _make_pipe(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        with self._lock:
            # For writing, too: then it never ends, and no writer waits for a reader. One that it
            # replaces stays open, for the thread may wait for it.
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
