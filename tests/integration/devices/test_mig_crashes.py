"""A gpu service killed (SIGKILL) at every single step of making and destroying MIG instances: the
next start leaves no orphan, and nobody else's instance is touched.

The steps are counted while the verb runs (see `support.mig_deaths`), so a step that is
added later is covered by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from support.fake_nvml import needs_gcc

pytestmark = [pytest.mark.integration, needs_gcc]

LIMIT_S = 60.0
_TESTS = Path(__file__).resolve().parent.parent.parent


@pytest.mark.law
@pytest.mark.parametrize(
    ("scenario", "least"),
    [("prepare,again", 30), ("prepare,given-up", 30), ("unprepare,given-up", 16), ("mend,given-up", 8)],
)
async def test_no_instance_is_orphaned_when_the_service_is_killed_at_any_step(
    tmp_path: Path, scenario: str, least: int
) -> None:
    """After a death at any step each instance is a claim's or somebody else's.

    Asked again the claim has its two, given up none is left; the neighbour keeps its own.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.mig_deaths", str(tmp_path), scenario,
        env={**os.environ, "PYTHONPATH": str(_TESTS)}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert process.returncode == 0, errors.decode()
    report = json.loads(out.splitlines()[-1])
    assert report["wrong"] == {}
    assert report["steps"] >= least, report["where"]
