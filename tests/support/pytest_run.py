"""Runs pytest as a program of ours, `python -m support.pytest_run`, which `support.forked_starts`
starts as a copy.
"""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    # A copy has modules of pytest's plugins already: their own assertions are not explained.
    sys.exit(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *sys.argv[1:]]))
