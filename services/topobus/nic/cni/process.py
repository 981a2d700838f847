"""Runs one CNI plugin with limits on input, output and time, and kills the plugin with all that it
started when it exceeds one.

It does not interpret the answer. It blocks, for worker threads.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping

from msgspec import Struct

__all__ = ["OUTPUT_LIMIT_BYTES", "Ended", "OutputTooLarge", "TimedOut", "run_plugin"]

OUTPUT_LIMIT_BYTES = 1 << 20
"""Bytes that a plugin may write: real results have a few kilobytes."""
# Bytes of a plugin's standard error that are kept for the message. The rest is read and dropped, so
# that the plugin does not block.
_ERROR_BYTES = 16 << 10
_CHUNK_BYTES = 64 << 10


class Ended(Struct, frozen=True, kw_only=True):
    """A plugin that ended by itself. A negative code is the signal that killed it."""

    code: int
    output: bytes
    said: str = ""
    """The beginning of its standard error."""

    @property
    def signal_name(self) -> str:
        """The signal that ended it, or "" when none did."""
        if self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


class TimedOut(Struct, frozen=True, kw_only=True):
    """A plugin that did not end in time. It and its process group are dead."""


class OutputTooLarge(Struct, frozen=True, kw_only=True):
    """A plugin that wrote too much. It and its process group are dead."""


def run_plugin(
    binary: str, variables: Mapping[str, str], content: bytes, limit_s: float
) -> Ended | TimedOut | OutputTooLarge:
    """Run a binary to its end.

    Errors: raises OSError when it cannot be started (missing, not executable, no memory).
    """
    # A session of its own is a process group of its own: iptables and address plugins that the
    # plugin starts die with it.
    process = subprocess.Popen(
        [binary],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(variables),
        cwd="/",
        start_new_session=True,
        bufsize=0,
    )
    try:
        ended = _communicate(process, content, time.monotonic() + limit_s)
    finally:
        # A plugin is also killed when an error here ended the wait for it.
        if process.returncode is None and process.poll() is None:
            _kill_group(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
    return ended


def _communicate(process: subprocess.Popen[bytes], content: bytes, give_up: float) -> Ended | TimedOut | OutputTooLarge:
    """Write the input and read both outputs until the process ends.

    A child of it that keeps the pipes open does not delay the return.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, said = bytearray(), bytearray()
    left = memoryview(content)
    end_of_process = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(end_of_process, selectors.EVENT_READ)
            for stream in (process.stdout, process.stderr):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            has_ended = False
            while not has_ended:
                remaining_s = give_up - time.monotonic()
                if remaining_s <= 0:
                    _kill_group(process)
                    return TimedOut()
                ready = {key.fileobj for key, _ in selector.select(remaining_s)}
                # What the process wrote before its end is in the pipes by now, so they are read
                # after its end was seen.
                has_ended = end_of_process in ready
                if process.stdin in ready:
                    left = _write(process, left)
                    if not left:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                for stream, kept in ((process.stdout, output), (process.stderr, said)):
                    if (
                        (stream in ready or has_ended)
                        and stream in selector.get_map()
                        and not _read(stream.fileno(), kept, has_ended)
                    ):
                        selector.unregister(stream)
                if len(output) > OUTPUT_LIMIT_BYTES:
                    _kill_group(process)
                    return OutputTooLarge()
                del said[_ERROR_BYTES:]
    finally:
        os.close(end_of_process)
    return Ended(code=process.wait(), output=bytes(output), said=said.decode("utf-8", "replace").strip())


def _write(process: subprocess.Popen[bytes], left: memoryview) -> memoryview:
    """Write what the pipe takes. Nothing is left when the plugin has closed its input."""
    assert process.stdin is not None
    try:
        return left[os.write(process.stdin.fileno(), left[:_CHUNK_BYTES]) :] if left else left
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[len(left) :]


def _read(descriptor: int, kept: bytearray, is_last: bool) -> bool:
    """Read what is there, and after the process's end all of it. False at the end of the stream."""
    while True:
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        kept += chunk
        if not chunk:
            return False
        if not is_last or len(kept) > OUTPUT_LIMIT_BYTES:
            return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a plugin and its process group, and collect its exit code, so that no zombie stays."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
