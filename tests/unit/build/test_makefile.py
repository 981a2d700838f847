"""What the Makefile gives the programs that it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(shutil.which("make") is None, reason="NOT TESTED: no make here")
def test_make_lets_tests_keep_compiled_modules_when_the_environment_forbids_them() -> None:
    """Processes that tests start read compiled modules, in a container that sets
    PYTHONDONTWRITEBYTECODE, too.
    """
    rule = "shown: ; @echo [$${PYTHONDONTWRITEBYTECODE-unset}]"

    done = subprocess.run(
        ["make", "--no-print-directory", "--eval", rule, "shown"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.stdout.strip() == "[unset]", done.stderr
