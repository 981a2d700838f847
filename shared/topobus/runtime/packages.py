"""The packages of a service that is not installed: one line and a next step, in place of a traceback.

All console scripts come with every installation, for they are entry points of one wheel; what each needs comes with its extra.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needing_extra"]

# sysexits.h EX_CONFIG, as for a setting that cannot be used.
_EXIT_CONFIG = 78


@contextmanager
def needing_extra(service: str) -> Iterator[None]:
    """Import a service's modules inside; ends the process with what to install when a package of others is absent."""
    try:
        yield
    except ModuleNotFoundError as err:
        name = (err.name or "").partition(".")[0]
        if name == "topobus":
            raise
        sys.stderr.write(f"error: topobus-{service} needs {name}, which is not installed\n  next: pip install 'topobus[{service}]'\n")
        sys.exit(_EXIT_CONFIG)
