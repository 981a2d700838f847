"""What a claim's preparation reports when an earlier try has to be undone first."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from topobus.gateway.claims.checkpoint import ClaimEntry
from topobus.gateway.claims.claim_key import ClaimFailed, ClaimKey
from topobus.gateway.claims.claims import ClaimPreparer
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice, ClaimAllocation
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.metrics import ClaimMetrics
from topobus.values.names import ClaimUid

CLAIM = ClaimKey(namespace="default", name="c", uid=ClaimUid("u-c"))
GPU_0, GPU_1 = (AllocatedDevice(request="r", pool="n1", device=f"gpu-{number}") for number in (0, 1))


class Calls:
    """The steps and reports of a claim, in the order of their calls. A new try is refused."""

    def __init__(self, entry: ClaimEntry) -> None:
        self.made: list[str] = []
        self.found: ClaimEntry | None = entry

    def get(self, *_: object) -> ClaimEntry | None:
        """The checkpoint's entry."""
        return self.found

    def entries(self) -> Iterable[ClaimEntry]:
        """All of them."""
        return () if self.found is None else (self.found,)

    def is_ready(self, _: ClaimEntry) -> bool:
        """No entry is."""
        return False

    async def read(self, *_: object) -> ClaimAllocation:
        """The claim has one GPU."""
        return ClaimAllocation(devices=(GPU_0,))

    async def undo(self, *_: object) -> tuple[str, ...]:
        """It succeeds."""
        self.made.append("undo")
        self.found = None
        return ("gpu-0",)

    async def prepare(self, *_: object) -> ClaimEntry:
        """It fails."""
        self.made.append("prepare")
        raise ClaimFailed("no firmware")

    def unprepared(self, *_: object) -> None:
        """Note the report."""
        self.made.append("reported as unprepared")


@pytest.mark.parametrize(
    ("entry", "calls"),
    [
        ({"devices": (GPU_0,), "is_undoing": True}, ["undo", "reported as unprepared", "prepare"]),
        ({"devices": (GPU_1,)}, ["undo", "reported as unprepared", "prepare"]),
        ({"devices": (GPU_0,)}, ["prepare"]),
    ],
    ids=["partly undone", "allocated again", "begun with the same devices"],
)
async def test_earlier_try_is_reported_as_undone_before_a_new_one_begins(
    entry: dict[str, Any], calls: list[str]
) -> None:
    """The claim's status must not show devices as prepared that were given back, whatever becomes of
    the new try.
    """
    made: Any = Calls(
        ClaimEntry(namespace="default", name="c", uid=CLAIM.uid, device_class="gpu", attempt="a", **entry)
    )
    preparer = ClaimPreparer(
        cast(Any, SimpleNamespace(containers=None)),
        made,
        DeadlineSettings(),
        made,
        made,
        made,
        made,
        ClaimMetrics(CollectorRegistry()),
    )

    answer = await preparer.prepare("gpu", CLAIM)

    assert isinstance(answer, str)
    assert "no firmware" in answer
    assert made.made == calls
