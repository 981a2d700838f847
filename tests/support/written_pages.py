"""The project's written pages."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PAGES", "ROOT"]

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
