"""Exclusive CPUs on a real node under load and kills: what the kernel says of every container's CPUs is compared, many times a second, with what running claims have for themselves.

As `test_hands`: TOPOBUS_CLUSTER_INSTALLATION=hands, TOPOBUS_CLUSTER_NRI. TOPOBUS_CLUSTER_STRESS_PODS says how many pods at least come and go, TOPOBUS_CLUSTER_STRESS_CLAIMS how many of them with an
exclusive CPU, TOPOBUS_CLUSTER_STRESS_KILLS how often the gateway is killed; TOPOBUS_CLUSTER_HANDS_SEED says when, and what else.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lightkube.core.exceptions import ApiError
from lightkube.resources.core_v1 import Pod
from lightkube.resources.resource_v1 import ResourceClaim

from e2e.cluster.hands import IMAGE, Hands, hands_of_cluster
from support.installation import setting
from support.real_hands import HandsInstallation, installed_hands, veth_bench
from topobus.domain.idset import CpuSet

_LIMIT_S = 300.0
_ENDED = ("Succeeded", "Failed")
_INTERFACES = 3
# What may be at a time: one claim, for a node of two CPUs has one to give and one for all others.
_WORKERS = {"claim": 1, "resource": 2, "plain": 4}
_SECONDS = {"claim": (1, 4), "resource": (1, 2, 4), "plain": (1, 2, 4, 8)}
# The gateway looks each three seconds and believes a difference after half a second; a start of the gateway looks at once.
_OUTSIDE_LOOK_S = 5.0
_LOOK_S = 0.02

pytestmark = pytest.mark.skipif(
    setting("INSTALLATION") != "hands",
    reason="NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION is not `hands`",
)


@pytest.fixture(scope="module")
def topobus() -> Iterator[HandsInstallation]:
    """Topobus on this node: CPUs by claim, interfaces by the device plugin."""
    settings = {
        "TOPOBUS_NIC__INTERFACES__OFFER": json.dumps([{"name": "tbh[0-9]*"}]),
        "TOPOBUS_GATEWAY__EXPOSURE": json.dumps({"cpu": "dra", "nic": "device-plugin"}),
    }
    with veth_bench(_INTERFACES), installed_hands(settings) as installation:
        yield installation


@pytest_asyncio.fixture
async def hands(topobus: HandsInstallation) -> AsyncIterator[Hands]:
    """Classes and pods of this test."""
    topobus.check()
    async with hands_of_cluster() as made:
        yield made


class _Overlap:
    """CPUs that a running claim has for itself, and another container has, too."""

    def __init__(self, since_s: float, text: str) -> None:
        self.since_s, self.until_s, self.text, self.looks = since_s, since_s, text, 0

    @property
    def lasted_s(self) -> float:
        return self.until_s - self.since_s


class _KernelLook(threading.Thread):
    """Looks at the control groups of all containers again and again; a thread, so that nothing else delays it much."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.looks = 0
        self.containers: set[Path] = set()
        self.claims: set[Path] = set()
        self.overlaps: list[_Overlap] = []
        self.two_devices: set[str] = set()
        self._open: dict[tuple[Path, Path], _Overlap] = {}
        self._kinds: dict[Path, tuple[str, str]] = {}
        self._is_over = threading.Event()

    def finish(self) -> None:
        self._is_over.set()
        self.join()
        self.overlaps += self._open.values()

    def run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        self.looks += 1
        now_s = time.time()
        cpus = {group: own for group in _control_groups() if self._kind(group)[0] and (own := _cpus_of_group(group)) is not None}
        self.containers |= cpus.keys()
        claims = {group for group in cpus if self._kind(group)[0] == "claim"}
        self.claims |= claims
        devices = Counter(device for group in cpus if (device := self._kind(group)[1]))
        self.two_devices |= {device for device, count in devices.items() if count > 1}
        seen = {(claim, other) for claim in claims for other in cpus if other != claim and not cpus[claim].isdisjoint(cpus[other])}
        for pair in seen:
            claim, other = pair
            overlap = self._open.setdefault(
                pair,
                _Overlap(now_s, f"{other.name[:12]} ({self._kind(other)[0]}) on {cpus[other]}, claim on {cpus[claim]}"),
            )
            overlap.until_s = now_s
            overlap.looks += 1
        for pair in self._open.keys() - seen:
            self.overlaps.append(self._open.pop(pair))

    def _kind(self, group: Path) -> tuple[str, str]:
        """Kind of our container and its device; empty for a pause process, for others' and for one that has not begun."""
        if group not in self._kinds:
            with suppress(OSError, LookupError, ValueError):
                pid = (group / "cgroup.procs").read_text().split()[0]
                variables = dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)
                if "STRESS_KIND" in variables:
                    self._kinds[group] = (variables["STRESS_KIND"], variables.get("TOPOBUS_NIC_DEVICES", ""))
        return self._kinds.get(group, ("", ""))


def _control_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    here = root / "cpuset" if (root / "cpuset").is_dir() else root
    # A walk leaves out a folder that goes meanwhile, which a glob does not.
    folders = [Path(folder) for each in here.glob("kubepods*") for folder, _, _ in os.walk(each)]
    return [folder for folder in folders if "pod" in folder.parent.name]


def _cpus_of_group(group: Path) -> CpuSet | None:
    """Read what the kernel lets a control group have; None: it is gone, or has nobody in it."""
    try:
        if not (group / "cgroup.procs").read_text().strip():
            return None
        effective = group / "cpuset.cpus.effective"
        return CpuSet.parse((effective if effective.exists() else group / "cpuset.cpus").read_text().strip())
    except OSError:
        return None


class _Load:
    """Pods that come and go."""

    def __init__(self, hands: Hands, chance: random.Random) -> None:
        self._hands = hands
        self._chance = chance
        self.done: Counter[str] = Counter()
        self.longest_s = 0.0
        self.claims_s: list[float] = []
        self.failed: list[str] = []
        self.turned_away: list[str] = []
        self._phases: dict[str, str] = {}

    async def follow(self) -> None:
        """Keep the pods' phases, for ever."""
        while True:
            pods = [pod.to_dict() async for pod in self._hands.client.list(Pod, namespace="default", labels={"stress": self._hands.run})]
            self._phases = {pod["metadata"]["name"]: pod.get("status", {}).get("phase", "") for pod in pods}
            await asyncio.sleep(0.2)

    async def come_and_go(self, kind: str, worker: int, goes_on: Callable[[], bool]) -> None:
        number = 0
        while goes_on():
            number += 1
            name = f"{self._hands.run}-{kind}{worker}-{number}"
            begun_s = time.monotonic()
            await self._make(name, kind)
            try:
                async with asyncio.timeout(_LIMIT_S):
                    while self._phases.get(name) not in _ENDED:  # noqa: ASYNC110 - a list tells it, no event
                        await asyncio.sleep(0.1)
            except TimeoutError:
                pass
            phase = self._phases.get(name)
            if phase != "Succeeded":
                status = (await self._hands.client.get(Pod, name, namespace="default")).to_dict().get("status", {})
                # kubelet gives up a pod whose device plugin cannot allocate now: topology was away for too long.
                is_turned_away = status.get("reason") == "UnexpectedAdmissionError" and kind == "resource"
                (self.turned_away if is_turned_away else self.failed).append(
                    f"{name} is {phase}: {status.get('reason')} {status.get('message')}"
                )
            await self._remove(Pod, name)
            if kind == "claim":
                await self._remove(ResourceClaim, name)
                self.claims_s.append(time.monotonic() - begun_s)
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            if phase == "Succeeded":
                self.done[kind] += 1

    async def _make(self, name: str, kind: str) -> None:
        container: dict[str, Any] = {
            "name": "main",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["sleep", str(self._chance.choice(_SECONDS[kind]))],
            "env": [{"name": "STRESS_KIND", "value": kind}],
        }
        spec: dict[str, Any] = {
            "containers": [container],
            # A container that is held back while the gateway is away fails at its start, and is tried again.
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
        }
        if kind == "claim":
            request = {"name": "cpu", "exactly": {"deviceClassName": f"{self._hands.run}-cpu", "allocationMode": "ExactCount", "count": 1}}
            claim = {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": {"requests": [request]}}}
            await self._create(ResourceClaim, claim)
            spec["resourceClaims"] = [{"name": "cpu", "resourceClaimName": name}]
            container["resources"] = {"claims": [{"name": "cpu"}]}
        if kind == "resource":
            container["resources"] = {"limits": {"topobus.dev/nic": "1"}}
        metadata = {
            "name": name,
            "namespace": "default",
            "labels": {"stress": self._hands.run},
        }
        await self._create(Pod, {"metadata": metadata, "spec": spec})

    async def _create(self, kind: Any, value: dict[str, Any]) -> None:
        await self._hands.client.create(kind.from_dict(value))

    async def _remove(self, kind: Any, name: str) -> None:
        try:
            await self._hands.client.delete(kind, name, namespace="default")
        except ApiError as err:
            if err.status.code != 404:
                raise


async def test_no_exclusive_cpu_is_shared_when_pods_come_and_go_while_services_are_killed(hands: Hands, topobus: HandsInstallation) -> None:
    """While the gateway is there no other container has a running claim's CPU, as the kernel says; one that started while it was away loses it at the outside look."""
    pods, claims, kills = (int(setting(f"STRESS_{name}", least)) for name, least in (("PODS", "40"), ("CLAIMS", "8"), ("KILLS", "4")))
    seed = int(setting("HANDS_SEED", "0")) or secrets.randbelow(2**31)
    print(f"stress: {pods} pods, TOPOBUS_CLUSTER_HANDS_SEED={seed}")  # noqa: T201 - to repeat it
    chance = random.Random(seed)
    killed: list[str] = []
    gateway_killed_s: list[float] = []
    load = _Load(hands, chance)

    def goes_on() -> bool:
        return load.done.total() < pods or load.done["claim"] < claims or killed.count("gateway") < kills

    async def break_things() -> None:
        while goes_on():
            await asyncio.sleep(chance.uniform(4.0, 12.0))
            name = chance.choice(("gateway", "gateway", "topology", "cpu"))
            if name == "gateway":
                gateway_killed_s.append(time.time())
            await asyncio.to_thread(topobus.kill, name)
            killed.append(name)
            await asyncio.sleep(chance.choice((0.0, 0.5, 2.0)))
            topobus.start(name)
            # Else a slow machine would have no gateway for most of the time.
            await topobus.until_ready()

    look = _KernelLook()
    look.start()
    begun_s = time.time()
    following = asyncio.create_task(load.follow())
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(break_things())
            for kind, workers in _WORKERS.items():
                for worker in range(workers):
                    group.create_task(load.come_and_go(kind, worker, goes_on))
    finally:
        following.cancel()
        await asyncio.to_thread(look.finish)
    await topobus.until_ready()
    away = _away(topobus, gateway_killed_s)
    said = [
        f"at {overlap.since_s - begun_s:.1f} s for {overlap.lasted_s:.2f} s{'' if not _is_within(overlap, away) else ', gateway away'}: {overlap.text}"
        for overlap in look.overlaps
    ]
    print(  # noqa: T201 - the figures
        f"stress: {dict(load.done)} pods in {time.time() - begun_s:.0f} s, kills {dict(Counter(killed))}, gateway away at most "
        f"{max((until_s - since_s for since_s, until_s in away), default=0):.1f} s; longest pod {load.longest_s:.0f} s, claims "
        f"{sorted(round(claim_s) for claim_s in load.claims_s)} s; {look.looks} looks at {len(look.containers)} containers, {len(look.claims)} of claims; {len(load.turned_away)} "
        f"pods turned away by kubelet; overlaps: {said}"
    )

    assert load.failed == []
    assert not look.two_devices
    assert len(look.claims) >= claims
    assert [overlap.text for overlap in look.overlaps if overlap.looks > 1 and not _is_within(overlap, away)] == []
    assert [overlap.text for overlap in look.overlaps if overlap.until_s > _back_s(overlap, away) + _OUTSIDE_LOOK_S] == []


def _away(topobus: HandsInstallation, killed_s: list[float]) -> list[tuple[float, float]]:
    """When the runtime had no gateway: from each kill until the runtime has shown the next one what there is."""
    lines = [json.loads(line) for line in (topobus.folder / "gateway.log").read_text().splitlines() if '"nri.synchronized"' in line]
    back_s = [datetime.fromisoformat(line["ts"]).timestamp() for line in lines]
    return [(since_s, min((until_s for until_s in back_s if until_s > since_s), default=time.time())) for since_s in killed_s]


def _back_s(overlap: _Overlap, away: list[tuple[float, float]]) -> float:
    """When a gateway was there that could put it right."""
    return max(
        (until_s for since_s, until_s in away if since_s <= overlap.since_s <= until_s),
        default=overlap.since_s,
    )


def _is_within(overlap: _Overlap, away: list[tuple[float, float]]) -> bool:
    return any(since_s <= overlap.since_s <= until_s for since_s, until_s in away)
