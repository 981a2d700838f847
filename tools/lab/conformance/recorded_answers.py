"""Compares recorded answers of Kubernetes' own code with ours: `python -m lab.conformance FILE...`.

The kind of a file is recognised by the beginning of its name (`topology-merge…`, `device-hints…`,
`cpu-static-policy…`, `memory-hints…`, `structured-allocation…`, `cel-selectors…`). A file is JSON
Lines, plain or gzip. A kind may have a first line that is no case (the device of `cel-selectors…`).
Each file gives a line with what passed, then the remarks of its kind and the first differing cases.
Exit status: 0 all passed, 1 something differs, 2 a file cannot be used.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lab.conformance.alignment_checks import check_cpus, check_device_hints, check_memory, check_merge
from lab.conformance.allocator_checks import CelSelectors, check_allocation

__all__ = ["Check", "HeadedCheck", "kinds", "main", "run_file"]

Check = Callable[[dict[str, Any]], tuple[Any, Any]]
"""Turns a case into (expected, got) in the shape of the file. Equal means passed."""


@runtime_checkable
class HeadedCheck(Protocol):
    """A check of files whose first line is no case."""

    def begin(self, header: dict[str, Any]) -> None:
        """Read the first line."""
        ...

    def __call__(self, case: dict[str, Any]) -> tuple[Any, Any]:
        """Turn a case into (expected, got)."""
        ...

    def remarks(self) -> list[str]:
        """Report what was compared besides, once all cases were checked."""
        ...


_SHOWN = 3
"""Differing cases printed for each file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the files named on the command line, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.conformance", description="Check recorded answers against ours."
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON Lines, plain or gzip; the name begins with the kind"
    )
    known_kinds = kinds()
    status = 0
    for file in parser.parse_args(argv).files:
        kind = next((key for key in sorted(known_kinds, key=len, reverse=True) if file.name.startswith(key)), None)
        if kind is None:
            print(
                f"{file.name}: unknown kind, wanted a name that begins with one of {', '.join(sorted(known_kinds))}",
                file=sys.stderr,
            )
            status = 2
            continue
        try:
            failed = _report(file, known_kinds[kind])
        except (OSError, EOFError, ValueError, KeyError, TypeError) as err:
            print(f"{file.name}: cannot be used: {type(err).__name__}: {err}", file=sys.stderr)
            status = 2
            continue
        status = max(status, 1 if failed else 0)
    return status


def kinds() -> dict[str, Check]:
    """All kinds, by the beginning of a file's name.

    A check with a first line is a new object each time, so that each run has its own.
    """
    return {
        "cel-selectors": CelSelectors(),
        "cpu-static-policy": check_cpus,
        "device-hints": check_device_hints,
        "memory-hints": check_memory,
        "structured-allocation": check_allocation,
        "topology-merge": check_merge,
    }


def run_file(file: Path, check: Check) -> Iterator[tuple[str, Any, Any]]:
    """Yield (case id, expected, got) for each case of a file.

    Errors: raises ValueError with the number of a line that is no case, or where a first line is
    required and missing.
    """
    wants_header = isinstance(check, HeadedCheck)
    with gzip.open(file, "rt", encoding="utf-8") if _is_gzip(file) else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                case = json.loads(line)
            except json.JSONDecodeError as err:
                raise ValueError(f"line {number} is not JSON: {err}") from err
            if wants_header and isinstance(check, HeadedCheck):
                if not isinstance(case, dict) or "expect" in case:
                    raise ValueError(f"line {number} is a case: wanted the line that all cases share first")
                check.begin(case)
                wants_header = False
                continue
            if not isinstance(case, dict) or "expect" not in case:
                raise ValueError(f"line {number} is not a case: wanted an object with `expect`")
            expected, got = check(case)
            yield str(case.get("id", number)), expected, got


def _is_gzip(file: Path) -> bool:
    with file.open("rb") as raw:
        return raw.read(2) == b"\x1f\x8b"


def _report(file: Path, check: Check) -> int:
    passed, differing = 0, []
    for case_id, expected, got in run_file(file, check):
        if expected == got:
            passed += 1
        else:
            differing.append((case_id, expected, got))
    print(f"{file.name}: {passed} passed, {len(differing)} failed")
    for remark in check.remarks() if isinstance(check, HeadedCheck) else ():
        print(f"  {remark}")
    for case_id, expected, got in differing[:_SHOWN]:
        print(f"  {case_id}\n    expected {json.dumps(expected)}\n    got      {json.dumps(got)}")
    return len(differing)
