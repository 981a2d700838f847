"""Types that threads read into for the first time, which ends a process in msgspec's own code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# What runs in threads of services. The command line reads everything in its one thread, settings
# are read before there is another, and a migration, a snapshot and a what-if are processes of their own.
_ROOMS = ("shared/topobus/bus", "shared/topobus/devicekit", "shared/topobus/formats", "shared/topobus/kubernetes")
_READERS = ("msgspec.json.decode", "msgspec.convert")
_SERVICES = ("controller/state", "fpga", "gateway", "gpu", "nic")

_RACE = """
import sys, threading, msgspec
from topobus.formats.first_read import ready
sys.setswitchinterval(1e-6)
kinds = []
for number in range(25):
    fields = [(f"f{field}", int | None, None) for field in range(12)]
    if kinds:
        fields += [("before", kinds[-1] | None, None), ("all", dict[str, tuple[kinds[-1], ...]], {})]
    kinds.append(msgspec.defstruct(f"S{number}", fields, kw_only=True))
begin = threading.Barrier(4)
def read(order):
    begin.wait()
    for kind in order:
        msgspec.json.decode(b'{"f0": 1, "before": {"f1": 2}}', type=ready(kind))
threads = [threading.Thread(target=read, args=(kinds[::step],)) for step in (1, -1, 1, -1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_read_types_for_the_first_time_without_harm() -> None:
    """Without `ready` about half of such processes end with SIGSEGV."""
    ended = [subprocess.run([sys.executable, "-c", _RACE], timeout=60, check=False).returncode for _ in range(3)]

    assert ended == [0, 0, 0]


def _unready(path: Path) -> list[int]:
    """List the lines in which msgspec reads into a type of its own that may be new to it, or has
    somebody else call the function that does.
    """
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in _READERS]
    called = {id(call.func) for call in calls}
    lines = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute) and id(node) not in called and ast.unparse(node) in _READERS
    ]
    for call in calls:
        wanted = [word.value for word in call.keywords if word.arg == "type"] or call.args[1:]
        if wanted and not ast.unparse(wanted[0]).startswith(("ready(", "dict[str, Any]")):
            lines.append(call.lineno)
    return lines


def test_what_may_run_in_a_thread_reads_into_types_that_are_ready() -> None:
    """Vendors' drivers run in threads, as do large messages and files of the gateway."""
    folders = [*_ROOMS, *(f"services/topobus/{service}" for service in _SERVICES)]
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    unready = {str(path.relative_to(ROOT)): lines for path in files if (lines := _unready(path))}

    assert unready == {}
