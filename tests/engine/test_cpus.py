"""CPUs of a claim on a real containerd 2 and real CPUs: nobody else runs on them from kubelet's
answer on, and everybody does again afterwards.

The services run on this very machine's tree; kubelet alone is the simulator. The same
promises, and the rare roads, are held by
`tests/integration/gateway/attachments/test_gateway_cpus.py` on a simulated runtime.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from engine.containerd import Containerd
from support.running import NODE, Service, all_services, gateway_settings, service, until_all_ready
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference, KubeletSimulator
from topobus.values.dra_names import DRIVER, pool_of_class
from topobus.values.idset import CpuSet, NodeSet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ONLINE = CpuSet.of(os.sched_getaffinity(0))
OWN = max(ONLINE)
REST = str(ONLINE - CpuSet(OWN))
# Enough for a slowest that means something, few enough for a busy machine.
_ROUNDS = 30
CLAIM = ClaimReference(name="one-cpu", uid="5a0e7c8e-6f8e-4c63-9a2a-0d7d1a4a7f10", drivers=(DRIVER,))


@dataclass
class Running:
    """What runs beside containerd."""

    services: dict[str, Service]
    kubelet: KubeletSimulator
    another_gateway: Callable[[], AbstractAsyncContextManager[Service]]


@pytest_asyncio.fixture
async def running(folder: Path, containerd: Containerd) -> AsyncIterator[Running]:
    """The services on this machine, a claim that was given its last CPU, and a kubelet."""
    result = {"request": "cpu", "driver": DRIVER, "pool": pool_of_class(NODE, "cpu"), "device": f"cpu-{OWN}"}
    claim = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": CLAIM.name, "namespace": "default", "uid": CLAIM.uid},
        status={"allocation": {"devices": {"results": [result]}}},
    )
    settings = {
        **gateway_settings(folder),
        "TOPOBUS_ALL__HARDWARE__ROOT": "/",
        "TOPOBUS_GATEWAY__CPUS__OWNED": "all",
        "TOPOBUS_GATEWAY__RUNTIME__SOCKET": str(folder / "c" / "nri.sock"),
    }
    order = ("discovery", "cpu", "topology", "gateway")
    async with NatsServer() as server, all_services(server.url, folder, order=order, settings=settings) as services:
        await until_all_ready(services)
        await services["gateway"].logged("nri.synchronized")
        async with Bus.session(NatsSettings(url=server.url), name="topobus-cli") as bus:
            await bus.put(OBJECT, claim, kind="resourceclaim", namespace="default", name=CLAIM.name)
            async with KubeletSimulator(folder / "k", numa_nodes=NodeSet(0)) as kubelet:
                await kubelet.wait_for_driver(DRIVER)
                yield Running(services, kubelet, lambda: service("gateway", server.url, settings))


async def test_cpu_is_a_claims_own_on_a_real_containerd_until_it_is_unprepared(
    running: Running, containerd: Containerd
) -> None:
    """A container that runs loses the CPU before kubelet has its answer, the claim's has it alone,
    and all have it back without a container being made.
    """
    services, kubelet = running.services, running.kubelet
    with containerd.started() as neighbour:
        before = neighbour.cpus()
        (prepared,) = await kubelet.prepare_claims([CLAIM])
        at_the_answer = neighbour.cpus()
        names = sorted({name for device in prepared.devices for name in device.cdi_devices})
        ended = await asyncio.to_thread(containerd.run, "grep Cpus_allowed_list /proc/self/status", cdi_devices=names)
        with containerd.started() as late:
            pool = late.cpus()
            await kubelet.unprepare_claims([CLAIM])
            grown = await services["gateway"].logged(
                "cpusets.updated", where=lambda line: line["shared"] == str(ONLINE)
            )
            afterwards = (neighbour.cpus(), late.cpus())

    assert (prepared.error, before, at_the_answer) == ("", str(ONLINE), REST)
    assert (ended.code, ended.lines) == (0, [f"Cpus_allowed_list:\t{OWN}"])
    assert (pool, grown["containers"], afterwards) == (REST, 2, (str(ONLINE), str(ONLINE)))


async def test_pool_is_back_after_each_of_many_claims_on_a_real_containerd(
    running: Running, containerd: Containerd
) -> None:
    """However often a CPU is taken and given back, both containers have both CPUs afterwards.

    How long that took is printed.
    """
    pid = running.services["gateway"].process.pid
    waits_ms: list[float] = []
    whole_ms: list[float] = []
    with containerd.started() as first, containerd.started() as second:
        groups = (first.cpuset_file(), second.cpuset_file())
        began_s = _processor_s(pid)
        for _ in range(_ROUNDS):
            (prepared,) = await running.kubelet.prepare_claims([CLAIM])
            taken = {group.read_text(encoding="ascii").strip() for group in groups}
            assert (prepared.error, taken) == ("", {REST})
            asked = time.monotonic()
            errors = await running.kubelet.unprepare_claims([CLAIM])
            answered = time.monotonic()
            await asyncio.to_thread(_wait_for, groups, str(ONLINE))
            assert errors == {}
            waits_ms.append((time.monotonic() - answered) * 1000)
            whole_ms.append((time.monotonic() - asked) * 1000)
        spent_ms = (_processor_s(pid) - began_s) * 1000 / _ROUNDS
    figures = (
        f"after unprepare's answer {_figures(waits_ms)}, after its call {_figures(whole_ms)}; gateway's processor "
        f"time {spent_ms:.1f} ms a claim"
    )
    sys.stdout.write(f"\nboth CPUs back: {figures}\n")


def _figures(times_ms: list[float]) -> str:
    return f"median {sorted(times_ms)[_ROUNDS // 2]:.1f} ms, slowest {max(times_ms):.1f} ms of {_ROUNDS}"


def _wait_for(groups: tuple[Path, ...], cpus: str) -> None:
    """Read until all say so; the test's own time limit ends it."""
    while any(group.read_text(encoding="ascii").strip() != cpus for group in groups):
        pass


def _processor_s(pid: int) -> float:
    """Read the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_container_starts_only_past_the_gateway_on_a_real_containerd(
    running: Running, containerd: Containerd
) -> None:
    """With the gateway a container of the claim has nothing of the guard.

    Without, its start fails with an error that names the gateway; when it is back, it starts.
    """
    (prepared,) = await running.kubelet.prepare_claims([CLAIM])
    names = sorted({name for device in prepared.devices for name in device.cdi_devices})
    look = "grep Cpus_allowed_list /proc/self/status; grep -c topobus /proc/self/mounts; ls /run/topobus 2>&1"
    let_pass = await asyncio.to_thread(containerd.run, look, cdi_devices=names)
    await running.services["gateway"].stop()
    with pytest.raises(grpc.RpcError) as held_back:
        await asyncio.to_thread(containerd.run, look, cdi_devices=names)
    unclaimed = await asyncio.to_thread(containerd.run, "true")
    async with running.another_gateway() as gateway:
        await gateway.logged("nri.synchronized")
        again = await asyncio.to_thread(containerd.run, look, cdi_devices=names)

    assert "topobus-gateway-has-not-seen-this-container" in str(held_back.value)
    assert "no such file or directory" in str(held_back.value)
    assert unclaimed.code == 0
    assert let_pass.lines == again.lines
    assert let_pass.lines[:2] == [f"Cpus_allowed_list:\t{OWN}", "0"]
    assert "No such file or directory" in let_pass.lines[2]
