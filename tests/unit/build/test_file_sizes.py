"""Sizes of files: one concept a file, and one with more than 400 lines has a second concept that can be found in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_MOST_LINES = 400
# Programs without a suffix as well, and no generated code.
_FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("services", "shared", "tests", "tools", "examples", "proto")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
    and (path.suffix == ".py" or (not path.suffix and path.parts[-2] in ("tools", "proto")))
    and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)


def _lines(file: str) -> int:
    return len((ROOT / file).read_text(encoding="utf-8").splitlines())


def test_file_has_at_most_400_lines_when_it_is_written_by_hand() -> None:
    """A reader holds one concept at a time; who needs more lines looks for the second concept, and does not cut at a number."""
    large = {file: lines for file in _FILES if (lines := _lines(file)) > _MOST_LINES}

    assert large == {}


def test_files_to_be_measured_are_the_hand_written_ones_when_they_are_listed() -> None:
    """The check sees services, shared rooms, tests and programs without a suffix, and no generated code."""
    wanted = {
        "services/topobus/gateway/service.py",
        "shared/topobus/domain/ledger.py",
        "tests/unit/build/test_file_sizes.py",
        "tools/lock",
        "proto/regenerate",
    }

    assert wanted <= set(_FILES)
    assert [file for file in _FILES if file.endswith("_pb2.py")] == []
