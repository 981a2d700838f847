"""The project's written pages, and the tests that they name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

__all__ = ["PAGES", "ROOT", "files_of_tests"]

ROOT = Path(__file__).resolve().parents[2]
# What tools and set-up put beside the project's own files. Names that begin with a dot are left out
# as well.
_NOT_OURS = frozenset({"build", "dist", "run", "node_modules"})


def _pages(folder: Path) -> list[Path]:
    """Return the written pages below a folder. A tarball has no git to ask."""
    paths = [path for path in folder.iterdir() if path.suffix == ".md"]
    inner = [
        path
        for path in folder.iterdir()
        if path.is_dir() and path.name not in _NOT_OURS and not path.name.startswith(".")
    ]
    return sorted(paths + [page for path in inner for page in _pages(path)])


PAGES = _pages(ROOT)


@cache
def files_of_tests() -> dict[str, str]:
    """Give the text of the file of each test function, by the function's name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    return {name: text for text in texts for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE)}
