"""Whom the gateway tells of containers that the kernel has on a claim's CPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from topobus.formats.containers.cdi import CdiDevice, CdiSpec
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_cdi import cdi_device_name
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.cpu_pinning import CpuPinning
from topobus.gateway.containers.cpuset_reports import CpusetReports
from topobus.gateway.containers.kernel_cpusets import KernelCpusets
from topobus.gateway.containers.rules.cpusets import CpuDifference
from topobus.gateway.containers.rules.exclusive import ExclusiveUse
from topobus.gateway.containers.values import CpusetUpdate, RunningContainer
from topobus.gateway.metrics import CpusetMetrics
from topobus.gateway.node_state import NodeState
from topobus.process.broadcast import Broadcast
from topobus.process.clock import SystemClock
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device, Inventory
from topobus.values.edits import ContainerEdits, Cpuset
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.names import ClaimUid
from topobus.values.sandbox import Sandbox

NAME = cdi_device_name(ClaimUid("u-c"), "cpu-0")
ENTRY = ClaimEntry(
    namespace="default",
    name="c",
    uid=ClaimUid("u-c"),
    device_class="cpu",
    attempt="a",
    devices=(AllocatedDevice(request="r", pool="n1", device="cpu-0"),),
    is_prepared=True,
    cdi=CdiSpec(
        vendor="topobus.dev",
        device_class="cpu",
        devices=(CdiDevice(name=NAME, edits=ContainerEdits(cpuset=Cpuset(cpus=CpuSet(0)))),),
    ),
)
INTRUDER = Sandbox(id="s-p", uid="u-p", namespace="default", name="p")
OWNER = Sandbox(id="s-x", uid="u-x", namespace="default", name="x")


class Runtime:
    """A runtime that does what it is told."""

    is_ready, why_not = True, ""

    def __init__(self, file: Path) -> None:
        self.file = file

    async def update(self, updates: Sequence[CpusetUpdate], within_s: float) -> tuple[str, ...]:
        """Write the container's cpuset."""
        for update in updates:
            self.file.write_text(f"{update.cpus}\n")
        return ()


class Reports:
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[CpuDifference] = asyncio.Queue()


async def no_cpus() -> CpuSet:
    """Say that kubelet's CPU manager gives none."""
    return CpuSet()


def state_of(*, cpus: int) -> SimpleNamespace:
    """What a gateway knows of a node with an empty ledger."""
    devices = tuple(Device(name=f"cpu-{cpu}", device_class="cpu", cpu=cpu) for cpu in range(cpus))
    inventory = Inventory(node="n1", device_class="cpu", generation=1, devices=devices)
    return SimpleNamespace(
        inventories=lambda: {"cpu": inventory}, ledger=None, changed=Broadcast(), ledger_changed=Broadcast()
    )


def pinning_of(root: Path, file: Path, reports: Reports, state: SimpleNamespace | None = None) -> CpuPinning:
    """A machine, by default of two CPUs, of which a prepared claim has the first."""
    state = state or state_of(cpus=2)
    kernel = KernelCpusets(Tree(HardwareSettings(root=str(root))))
    cpuset_reports = CpusetReports(reports.told.put_nowait, CpusetMetrics(CollectorRegistry()), lambda _: None)
    return CpuPinning(
        Runtime(file), None, cast(NodeState, state), lambda: [ENTRY], SystemClock(), no_cpus, kernel, cpuset_reports
    )


async def told_of(pinning: CpuPinning, reports: Reports, intruder: RunningContainer) -> CpuDifference:
    """Show the intruder and the claim's container, and wait for what is told."""
    owner = RunningContainer(id="x", sandbox_id="s-x", name="main", cpus=CpuSet(0), cdi_devices=(NAME,))
    running = asyncio.create_task(pinning.run())
    pinning.synchronize([INTRUDER, OWNER], [intruder, owner])
    async with asyncio.timeout(60):
        difference = await reports.told.get()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return difference


async def test_pod_and_claim_and_its_pod_are_named_when_a_container_runs_on_the_claims_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the runtime shows is its own notes: the kernel has the container on the claim's CPU, and
    all whom that concerns are told when it was put right.
    """
    monkeypatch.setattr("topobus.gateway.containers.cpu_pinning._SECOND_LOOK_S", 0.0)
    file = tmp_path / "sys/fs/cgroup/kubepods.slice/kubepods-podp.slice/cri-containerd-p.scope/cpuset.cpus"
    file.parent.mkdir(parents=True)
    file.write_text("0-1\n")
    reports = Reports()
    intruder = RunningContainer(
        id="p", sandbox_id="s-p", name="main", cpus=CpuSet(1), control_group="kubepods-podp.slice:cri-containerd:p"
    )

    difference = await told_of(pinning_of(tmp_path, file, reports), reports, intruder)

    assert (difference.sandbox, difference.sandboxes, [claim.uid for claim in difference.claims]) == (
        INTRUDER,
        (OWNER,),
        ["u-c"],
    )
    assert (difference.has, difference.wanted, difference.shared, difference.error) == (
        CpuSet(0, 1),
        CpuSet(1),
        CpuSet(0),
        "",
    )
    assert file.read_text() == "1\n"


async def test_same_are_named_when_a_container_was_started_while_the_gateway_was_away(tmp_path: Path) -> None:
    """Such a container has all CPUs until the gateway is back: that the claim's was shared is no
    secret.
    """
    reports = Reports()
    intruder = RunningContainer(id="p", sandbox_id="s-p", name="main")

    difference = await told_of(pinning_of(tmp_path, tmp_path / "cpus", reports), reports, intruder)

    assert (difference.sandbox, difference.sandboxes, difference.shared, difference.error) == (
        INTRUDER,
        (OWNER,),
        CpuSet(0),
        "",
    )
    assert (tmp_path / "cpus").read_text() == "1\n"


def ledger_of(*uses: ExclusiveUse) -> Ledger:
    """A ledger with what kubelet's CPU manager gave."""
    allocations = (Allocation(owner=use.owner, holdings=(Holding(cpus=use.cpus),)) for use in uses)
    return Ledger(node="n1", allocations={allocation.owner.key: allocation for allocation in allocations})


def test_container_that_kubelet_pinned_while_no_gateway_was_there_has_its_cpus_when_the_ledger_knows(
    tmp_path: Path,
) -> None:
    """The ledger hears of what kubelet gave after the runtime has shown the container: then it has
    these CPUs again, alone.
    """
    state = state_of(cpus=4)
    pinning = pinning_of(tmp_path, tmp_path / "cpus", Reports(), state)
    pinned = RunningContainer(id="pinned", sandbox_id="s-p", name="main", cpus=CpuSet(3))
    other = RunningContainer(id="other", sandbox_id="s-x", name="main", cpus=CpuSet(0, 1, 2))
    pinning.synchronize([INTRUDER, OWNER], [pinned, other])

    state.ledger = ledger_of(ExclusiveUse(namespace="default", pod="p", container="main", cpus=CpuSet(3)))
    # What the first look at them made of both.
    changed = [structs.replace(container, cpus=CpuSet(1, 2, 3)) for container in (pinned, other)]
    updates = pinning.synchronize([INTRUDER, OWNER], changed)

    assert {update.container_id: update.cpus for update in updates} == {"pinned": CpuSet(3), "other": CpuSet(1, 2)}


def test_container_of_the_pool_stays_in_it_when_kubelet_gives_its_former_cpus_to_others(tmp_path: Path) -> None:
    """The pool was CPUs 1 and 2 when the gateway came. Both are exclusive to other pods by now, so
    the container has the rest, although these CPUs are kubelet's.
    """
    state = state_of(cpus=4)
    pinning = pinning_of(tmp_path, tmp_path / "cpus", Reports(), state)
    pooled = RunningContainer(id="pooled", sandbox_id="s-p", name="main", cpus=CpuSet(1, 2))
    pinning.synchronize([INTRUDER], [pooled])

    state.ledger = ledger_of(
        *(ExclusiveUse(namespace="default", pod=f"e-{cpu}", container="main", cpus=CpuSet(cpu)) for cpu in (1, 2))
    )
    updates = pinning.synchronize([INTRUDER], [pooled])

    assert {update.container_id: update.cpus for update in updates} == {"pooled": CpuSet(3)}
