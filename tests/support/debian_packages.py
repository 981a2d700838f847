"""Debian's packages whose programs tests run: fetched once, and unpacked aside below .cache."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

__all__ = ["UNPACKED", "fetch_packages"]

_ROOT = Path(__file__).resolve().parents[2]
UNPACKED = _ROOT / ".cache" / "debian"
"""Where they are: a folder each, and what tests make of them."""
_FETCH_S = 300.0


def fetch_packages(*packages: str) -> list[Path] | str:
    """Give the folder of each package of the machine's own release. A text is the reason why they
    cannot be had here.
    """
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with (UNPACKED / ".lock").open("w") as lock:
        # The files of tests run side by side, and one fetch is enough.
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetch = [str(_ROOT / "tools" / "fetch-debian-package"), ",".join(packages), "own", str(UNPACKED)]
        try:
            done = subprocess.run(fetch, capture_output=True, text=True, timeout=_FETCH_S, check=False)
        except subprocess.TimeoutExpired:
            return f"{', '.join(packages)} took longer than {_FETCH_S:g} s to fetch"
    return list(map(Path, done.stdout.split())) if done.returncode == 0 else done.stderr.strip()[-300:]
