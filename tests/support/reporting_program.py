"""A program that reports what it was started with, or ends in the way that its first argument
names: for tests of how programs are started.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path


def report() -> None:
    """Print what the process has from its start, as JSON."""
    # Nothing is open while the folder is read but its own descriptor, the newest one.
    descriptors = sorted(int(path.name) for path in Path("/proc/self/fd").iterdir())[:-1]
    text = {
        "name": __name__,
        "arguments": sys.argv[1:],
        "file": Path(sys.argv[0]).name,
        "folder": str(Path.cwd()),
        "paths": sys.path[:2],
        "variable": os.environ.get("REPORTED", ""),
        "variables": sorted(os.environ),
        "told_command": _told("cmdline")[3:],
        "told_environment": _told("environ"),
        "parent": os.getppid(),
        "is_own_session": os.getsid(0) == os.getpid(),
        "descriptors": descriptors,
        "threads": threading.active_count(),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "sigpipe": signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN,
        "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
        "stdin": sys.stdin.read(),
        "has_gateway": "topobus.gateway.service" in sys.modules,
        "death_signal": _death_signal(),
        "random": random.random(),
    }
    sys.stdout.write(json.dumps(text))


def _told(name: str) -> list[str]:
    return (Path("/proc/self") / name).read_text().rstrip("\0").split("\0")


def _death_signal() -> int:
    # PR_GET_PDEATHSIG (linux/prctl.h).
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def main(arguments: list[str]) -> None:
    """Do what the first argument names."""
    match arguments[0]:
        case "report":
            report()
        case "exit":
            sys.exit(int(arguments[1]))
        case "message":
            sys.exit("a message")
        case "raise":
            raise ValueError("a defect")
        case "late":
            # What an interpreter does after the last line of a program: other threads
            # end, then the functions of atexit.
            atexit.register(sys.stdout.write, "at exit\n")
            threading.Thread(target=lambda: (time.sleep(0.05), sys.stdout.write("thread\n"))).start()
        case "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            sys.stdout.write("lost")
        case "wait":
            sys.stdout.write("waiting\n")
            sys.stdout.flush()
            signal.pause()
        case "unflushed":
            sys.stdout.write("waiting\n")
            signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
