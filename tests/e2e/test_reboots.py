"""A node with twenty pods is rebooted, with an older checkpoint of kubelet, in the middle of an admission
(`make chaos CHAOS="--reboots 50"` is the long form).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.chaos.reboots import RebootOptions, run_reboots
from support.laws import share

pytestmark = [pytest.mark.integration, pytest.mark.law]

REBOOTS = len(share(range(3)))
TENANTS_THAT_STAY = 18 * REBOOTS
# Three claims that kubelet prepares, and one of `topobus oci`.
ATTACHED = 4


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, for sockets: `tmp_path` would be too long."""
    made = Path(tempfile.mkdtemp(prefix="tbr"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.timeout(300)
async def test_every_pod_runs_alone_with_its_devices_when_the_node_is_rebooted(folder: Path) -> None:
    """Pods of all interfaces run again or end with the holder's name, none shares a device, claims keep
    theirs, and nothing stays held by a pod that is gone. Where this process may move interfaces, each is
    in its pod again.
    """
    result = await run_reboots(RebootOptions(seed=3, reboots=REBOOTS), folder)

    assert result.violations == []
    assert result.reboots == REBOOTS
    assert result.attached == (0 if result.why_not_attached else ATTACHED * REBOOTS)
    assert result.deleted_while_off == 2 * REBOOTS
    # Those that kubelet ended were made again under other names.
    assert result.ran_again + result.ended.total() >= TENANTS_THAT_STAY
