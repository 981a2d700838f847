"""What `topobus why` says of pods without a node, against kube-scheduler: the cause that it names is
the one for which kube-scheduler finds no node, and with each change that it names kube-scheduler
binds the pod.

A control plane without nodes is enough (TOPOBUS_CLUSTER_INSTALLATION=none, KUBECONFIG), since
nothing starts. One that has nodes is refused: classes by the vendors' names and slices without a
driver are made there.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.installation import setting
from support.why_clusters import CASES, KEPT_COUNTERS, Case, first_reasons
from support.why_plane import Refused, WhyPlane
from topobus.values.cluster_answers import Verdict

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        setting("INSTALLATION") != "none",
        reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `none`",
    ),
]

# What kube-scheduler 1.36 says of a pod, in its condition PodScheduled, for each reason that is named.
# A pod of a reason that is not here is not tried: it waits for a claim, is another scheduler's, or is
# on a node.
_SAID = {
    "anti-affinity-of-others": "existing pods anti-affinity rules",
    "gated": "Scheduling is blocked due to non-empty scheduling gates",
    "host-port-taken": "free ports for the requested pod ports",
    "no-room": "Insufficient |Too many pods",
    "node-affinity": "didn't match Pod's node affinity/selector",
    "node-selector-label": "didn't match Pod's node affinity/selector",
    "node-tainted": "had untolerated taint|were unschedulable",
    "pod-affinity": "didn't match pod affinity rules",
    "pod-anti-affinity": "didn't match pod anti-affinity rules",
    "selector-error": "CEL runtime error.* no such key",
    "too-few-devices": "cannot allocate all claims",
    "unknown-class": "device class .* does not exist",
    "volume-claim-missing": 'persistentvolumeclaim "data" not found',
    "volume-claim-unbound": "unbound immediate PersistentVolumeClaims",
    "volume-unavailable": "didn't find available persistent volumes to bind",
}
_STORED = [case for case in CASES if not case.is_refused and not case.is_passing]
_REFUSED = [case for case in CASES if case.is_refused]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane() -> AsyncIterator[WhyPlane]:
    """The control plane, with an empty namespace."""
    async with WhyPlane.open(os.environ["KUBECONFIG"]) as opened:
        yield opened


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in _STORED])
async def test_why_agrees_with_kube_scheduler(plane: WhyPlane, case: Case) -> None:
    """The pod waits for the cause that is named, and is bound once a change is made: each of them,
    on the same cluster made again. What is stored and means nothing there keeps no pod away.
    """
    if case.gate and not await plane.heeds(case.gate):
        async with plane.made(case):
            await plane.until_bound()
        return
    verdict = await _explained(plane, case, change=0)

    assert (verdict.code, case.reason in first_reasons(verdict)) == (case.code, True), verdict
    assert (case.change or None) in [change.code for change in verdict.changes] or not case.change, verdict
    for number in range(1, len(verdict.changes)):
        again = await _explained(plane, case, change=number)

        assert again.changes == verdict.changes


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in KEPT_COUNTERS])
async def test_why_names_counters_that_kube_scheduler_keeps(plane: WhyPlane, case: Case) -> None:
    """A pod whose devices are there waits, the fault is named, and a change helps; or kube-scheduler is a
    newer one, and binds it.
    """
    if not await plane.keeps_counters():
        async with plane.made(case):
            await plane.until_bound()
        return
    verdict = await _explained(plane, case, change=0)

    assert (verdict.code, case.reason in first_reasons(verdict)) == (case.code, True), verdict
    assert "counters-kept" in [reason.code for reason in verdict.remarks]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in _REFUSED])
async def test_api_server_refuses_what_no_cluster_can_have(plane: WhyPlane, case: Case) -> None:
    """What is refused when it is made needs no explanation later."""
    with pytest.raises(Refused, match=r"422|403"):
        async with plane.made(case):
            pass


async def _explained(plane: WhyPlane, case: Case, *, change: int) -> Verdict:
    """Make a cluster, explain its pod, and see that it is bound with the change of that number."""
    async with plane.made(case):
        if case.reason in _SAID:
            await plane.until_said(_SAID[case.reason])
        verdict = await plane.verdict()
        if change < len(verdict.changes):
            await plane.apply(verdict.changes[change])
            await plane.until_bound()
        return verdict
