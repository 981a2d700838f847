"""Measures the controller in a cluster: `python -m lab.bench cluster [--nodes N] [--claims N]
[--kill] [--json]`.

Real processes: nats-server, the controller with the cluster as its home, the API server simulator,
and one process that plays all nodes (`cluster_fill`). Pods behind the gate are created with a claim
each, as fast as the API server accepts them. A fill ends when the last gate is open and all pods
are bound. All processes share the machine, so the rate is a property of all of them. The processor
time per claim of each process is the number to compare. The floor is measured in the same run.
`--kill` runs two replicas, of which one is killed when half of the gates are open. In the end every
claim has its devices and no device has two, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec import Struct, structs

from lab.bench.figures import machine_facts, percentile
from lab.bench.process_use import Counts
from lab.bench.service_process import wait_ready
from lab.cluster_fill.fill_rig import CONTROLLER, FillRig, fill_rig
from lab.cluster_fill.gated_pods import NAMESPACE, Crowd
from lab.cluster_fill.patch_floor import patch_statuses
from lab.fleet.fill_outcome import faults_of, left_at_nodes
from lab.leaves.node_content import record_content
from topobus.formats.messages import catalogue
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.testing.apiserver import Object
from topobus.testing.apiserver.request_counts import RequestKind
from topobus.values.errors import PeerUnavailable

__all__ = ["ClusterFigures", "ProcessFigures", "draw", "main", "measure_fill", "verbs_of"]

_PARALLEL = 16
"""Requests under way at the same time: as `cluster.parallel_pods`."""
_READY_LIMIT_S = 300.0
_FLOOR_PATCHES = 2000
_PAGE = 500


class ProcessFigures(Struct, frozen=True, kw_only=True):
    """What one process used."""

    name: str
    until_ready_s: float
    """Processor time until the first controller was ready."""
    ms_a_claim: float
    """Processor time of the fill, divided by the claims."""
    resident_mib: float
    """At the end."""


class ClusterFigures(Struct, frozen=True, kw_only=True):
    """The results of a fill."""

    nodes: int
    claims: int
    replicas: int
    ready_s: float
    """From the start of the first controller until it was ready."""
    fill_s: float
    """From the first claim made until the last gate was open."""
    claims_a_second: float
    wait_median_s: float
    """From a pod's creation until its gate was open."""
    wait_p99_s: float
    floor_patches_a_second: float
    pause_after_kill_s: float | None
    """From the death of a replica until the next gate was open. None: no replica died."""
    processes: list[ProcessFigures]
    requests_until_ready: dict[str, int]
    """Of the controllers, by verb and resource. Watches count when they are opened."""
    requests_of_fill: dict[str, int]
    conflicts: int
    """Writes of the controllers that lost against another writer."""
    left_at_nodes: int
    """Devices that a node holds for a claim that was allocated elsewhere, because the node answered
    too late. Its gateway would release them."""
    faults: list[str]
    """What is wrong in the end. Empty when nothing is."""


def main(argv: Sequence[str]) -> int:
    """Measure and print.

    Returns the exit status: 1 when a claim has no devices or a device has two claims.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench cluster", description="Measure the controller in a cluster."
    )
    parser.add_argument("--nodes", type=int, default=1000, metavar="N", help="nodes of eight GPUs (1000)")
    parser.add_argument(
        "--claims", type=int, default=5000, metavar="N", help="claims for one GPU, each of a gated pod (5000)"
    )
    parser.add_argument(
        "--machine", default="dgx", metavar="NAME", help="the recorded machine that all nodes are (dgx)"
    )
    parser.add_argument(
        "--kill", action="store_true", help="two replicas; one is killed when half of the gates are open"
    )
    parser.add_argument("--limit", type=float, default=1200.0, metavar="S", help="give up after so many seconds (1200)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    arguments = parser.parse_args(argv)
    facts = machine_facts()
    try:
        figures = asyncio.run(_measure_within(arguments))
    except TimeoutError:
        sys.stderr.write(
            f"bench cluster: not done in {arguments.limit:g} s; fewer nodes and claims (--nodes, --claims) "
            "take less time\n"
        )
        return 1
    if arguments.json:
        document = {"group": "cluster", "machine": facts, **structs.asdict(figures)}
        print(json.dumps({**document, "processes": [structs.asdict(use) for use in figures.processes]}, indent=2))
    else:
        print(" ".join(f"{key}={value}" for key, value in facts.items()))
        print(draw(figures))
    return 1 if figures.faults else 0


def verbs_of(requests: Mapping[RequestKind, int], before: Mapping[RequestKind, int] | None = None) -> dict[str, int]:
    """Add up the controllers' requests by verb and resource, without those in `before`.

    >>> kinds = [RequestKind(user="controller", verb="list", resource="pods", code=code) for code in (200, 410)]
    >>> verbs_of({kinds[0]: 3, kinds[1]: 1}, {kinds[0]: 2})
    {'list pods': 2}
    """
    sums: dict[str, int] = {}
    for kind, count in requests.items():
        if kind.user == CONTROLLER and count != (before or {}).get(kind, 0):
            name = f"{kind.verb} {kind.resource}"
            sums[name] = sums.get(name, 0) + count - (before or {}).get(kind, 0)
    return {name: count for name, count in sorted(sums.items()) if count}


def draw(figures: ClusterFigures) -> str:
    """Write the figures as lines of text."""
    writes = sum(
        count
        for name, count in figures.requests_of_fill.items()
        if name.split()[0] in ("patch", "create", "update", "delete")
    )
    lines = [
        f"{figures.claims} claims on {figures.nodes} nodes, {figures.replicas} controller(s)",
        f"ready after                {figures.ready_s:9.1f} s",
        f"filled in                  {figures.fill_s:9.1f} s   {figures.claims_a_second:.0f} claims a second",
        f"a pod waited               {figures.wait_median_s:9.2f} s   in the median, {figures.wait_p99_s:.2f} "
        "s in the 99th percentile",
        f"floor, bare status patches {figures.floor_patches_a_second:9.0f} a second",
        f"writes of a claim          {writes / figures.claims:9.2f}     lost to another writer: {figures.conflicts}",
    ]
    if figures.left_at_nodes:
        lines.append(
            f"left at nodes              {figures.left_at_nodes:9d}     devices of late answers, which gateways release"
        )
    if figures.pause_after_kill_s is not None:
        lines.append(f"after the kill             {figures.pause_after_kill_s:9.2f} s   until the next gate was open")
    lines.append(f"{'process':<16}{'until ready, s':>16}{'ms a claim':>12}{'resident MiB':>14}")
    lines += [
        f"{use.name:<16}{use.until_ready_s:16.1f}{use.ms_a_claim:12.2f}{use.resident_mib:14.1f}"
        for use in figures.processes
    ]
    for title, requests in (("until ready", figures.requests_until_ready), ("in the fill", figures.requests_of_fill)):
        lines.append(f"requests {title}: {', '.join(f'{name} {count}' for name, count in requests.items()) or 'none'}")
    lines += [f"WRONG: {fault}" for fault in figures.faults] or [
        "every claim has its devices, and no device has two claims"
    ]
    return "\n".join(lines)


async def _measure_within(arguments: argparse.Namespace) -> ClusterFigures:
    async with asyncio.timeout(arguments.limit):
        _say(f"reading the recorded machine {arguments.machine}")
        content = await record_content(arguments.machine)
        _say(f"bringing up {arguments.nodes} nodes")
        async with fill_rig(content, arguments.nodes) as rig:
            return await measure_fill(rig, arguments.nodes, arguments.claims, kills=arguments.kill)


async def measure_fill(rig: FillRig, nodes: int, claims: int, *, kills: bool) -> ClusterFigures:
    """Fill the nodes of a rig with claims. With `kills`, by two replicas, of which one is killed
    half way.
    """
    patches = min(claims, _FLOOR_PATCHES)
    _say(f"the floor: {patches} bare patches")
    floor_s = await patch_statuses(rig.client, patches, _PARALLEL)
    _say("starting the controller")
    at_first, began_s = rig.counts(), time.monotonic()
    for _ in range(2 if kills else 1):
        await rig.start_replica()
    await wait_ready(rig.replicas, limit_s=_READY_LIMIT_S)
    ready_s, at_ready, asked_ready = time.monotonic() - began_s, rig.counts(), await rig.requests()
    crowd = Crowd(rig.client, parallel=_PARALLEL)
    pause_s: float | None = None
    async with crowd.followed(), asyncio.TaskGroup() as group:
        progress = group.create_task(_tell_progress(crowd, claims))
        creating = group.create_task(crowd.create(0, claims))
        if kills:
            await crowd.until_open(claims // 2)
            killed_s = time.monotonic()
            await rig.replicas[0].kill()
            _say("killed a replica")
            await crowd.until_open(len(crowd.waited_s) + 1)
            pause_s = crowd.last_open_s - killed_s
        await creating
        await crowd.until_open(claims)
        await crowd.until_bound(claims)
        progress.cancel()
    at_end, asked_end = rig.counts(), await rig.requests()
    _say("checking every claim and every ledger")
    ledgers = [entry.value for entry in await rig.bus.list(catalogue.LEDGER)]
    stored = [claim async for claim in _claims(rig.client)]
    faults = faults_of(stored, ledgers)
    fill_s, waits = crowd.last_open_s - crowd.began_s, list(crowd.waited_s.values())
    return ClusterFigures(
        nodes=nodes,
        claims=claims,
        replicas=len(rig.replicas),
        ready_s=round(ready_s, 2),
        fill_s=round(fill_s, 2),
        claims_a_second=round(claims / fill_s, 1),
        wait_median_s=round(percentile(waits, 0.5), 3),
        wait_p99_s=round(percentile(waits, 0.99), 3),
        floor_patches_a_second=round(patches / floor_s, 1),
        pause_after_kill_s=round(pause_s, 3) if pause_s is not None else None,
        processes=_processes(at_first, at_ready, at_end, claims),
        requests_until_ready=verbs_of(asked_ready),
        requests_of_fill=verbs_of(asked_end, asked_ready),
        conflicts=sum(count for kind, count in asked_end.items() if kind.user == CONTROLLER and kind.code == 409),
        left_at_nodes=len(left_at_nodes(stored, ledgers)),
        faults=faults,
    )


def _processes(
    at_first: Mapping[str, Counts], at_ready: Mapping[str, Counts], at_end: Mapping[str, Counts], claims: int
) -> list[ProcessFigures]:
    """Compare counts. A replica that was killed has none at the end."""
    return [
        ProcessFigures(
            name=name,
            until_ready_s=round(
                at_ready[name].processor_s - (at_first[name].processor_s if name in at_first else 0.0), 2
            ),
            ms_a_claim=round((end.processor_s - at_ready[name].processor_s) * 1000 / claims, 3),
            resident_mib=round(end.resident_mib, 1),
        )
        for name, end in at_end.items()
    ]


async def _claims(client: KubernetesClient) -> AsyncIterator[Object]:
    """List the claims of the fill, page by page."""
    params = {"limit": str(_PAGE)}
    while True:
        answer = await client.ask(
            "GET", object_path("resource.k8s.io/v1", "resourceclaims", namespace=NAMESPACE), params=params
        )
        if isinstance(answer, Rejected):
            raise PeerUnavailable(f"the claims cannot be listed: {answer.code} {answer.message}")
        for claim in answer["items"]:
            yield claim
        more = answer["metadata"].get("continue")
        if not more:
            return
        params = {**params, "continue": str(more)}


async def _tell_progress(crowd: Crowd, claims: int) -> None:
    """Print the progress every few seconds."""
    while True:
        await asyncio.sleep(5.0)
        _say(f"{len(crowd.waited_s)} of {claims} gates open, {crowd.bound} pods bound")


def _say(text: str) -> None:
    sys.stderr.write(f"bench cluster: {text}\n")
    sys.stderr.flush()
