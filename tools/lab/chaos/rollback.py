"""Two built releases take turns on one node under load, service by service, in both orders.

    python -m lab.chaos.rollback        or: make rollback

The earlier one is a commit of long ago, the later one HEAD. A third one is HEAD with a ledger that
the others cannot read: they must refuse it before they write. Each is a wheel in an environment of its
own, with the dependencies of this one. It needs the history of the repository.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from lab.bench.service_process import ServiceProcess, wait_ready
from lab.chaos.node import SERVICES
from lab.chaos.observer import NodeObserver
from lab.chaos.pod_lives import Stuck
from lab.chaos.tenants import Tenants, new_kubelet, new_runtime, tenant_settings, violations_of
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import LEDGER
from topobus.process.config import LogSettings, NatsSettings
from topobus.process.logging import setup_logging
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.values.request import Owner, OwnerKind

__all__ = ["main"]

NODE = "rollback-node"
_EARLIER = "a896eabc4dbbe0c8bfef526d345f9faa4f9500f9"
"""Before a Node's conditions and what storage knows of releases."""
_CENTRE_FIRST = ("controller", "topology", "gateway", "gpu", "nic", "fpga", "cpu", "discovery")
_NODE_FIRST = ("discovery", "cpu", "fpga", "nic", "gpu", "gateway", "topology", "controller")
_READY_S = 120.0
# A process that refuses its data ends with this status (EX_DATAERR).
_REFUSED = 65
_NEW_FORMAT = (
    ("shared/topobus/values/ledger.py", "format: Literal[1] = 1", "format: Literal[1, 2] = 1"),
    (
        "services/topobus/topology/ledger_store.py",
        "compare_and_set(LEDGER, ledger, revision",
        "compare_and_set(LEDGER, structs.replace(ledger, format=2), revision",
    ),
)
"""What a release changes that stores what the one before must not read: file, before, after."""
_print_line = partial(print, flush=True)


class DidNotRun(Exception):
    """Raised where this cannot be tested here."""


def main() -> int:
    """Run, and return 0 when nothing was violated."""
    setup_logging(LogSettings(level="error"))
    # Short: a unix socket's path ends at 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tbv"))
    try:
        violations = asyncio.run(_run(folder))
    except DidNotRun as err:
        _print_line(f"rollback: DID NOT RUN: {err}")
        return 69
    for violation in violations:
        _print_line(f"VIOLATION: {violation}")
    if violations:
        _print_line(f"the logs are in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


async def _run(folder: Path) -> list[str]:
    began = time.monotonic()
    earlier = await asyncio.to_thread(_release, folder / "n", _EARLIER, "0.1.0")
    later = await asyncio.to_thread(_release, folder / "n1", "HEAD", "0.2.0")
    newest = await asyncio.to_thread(_release, folder / "n2", "HEAD", "0.3.0", _NEW_FORMAT)
    _print_line(f"three releases after {time.monotonic() - began:.0f} s")
    await asyncio.to_thread(build, "dgx", folder / "machine")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(NatsServer(parent=folder))
        settings = tenant_settings(NODE, folder, server.url)
        services = {name: ServiceProcess(name, settings, folder) for name in SERVICES}
        bus = await stack.enter_async_context(
            Bus.session(NatsSettings(url=server.url, provisioner="controller"), name="topobus-cli")
        )
        kubelet = await stack.enter_async_context(new_kubelet(folder))
        runtime = await stack.enter_async_context(new_runtime(folder).serving())
        for service in services.values():
            stack.push_async_callback(service.kill)
            service.python = earlier
            await service.start()
        observer = NodeObserver(bus, NODE, folder / "cdi")
        run = _Rollback(bus, services, Tenants(bus, NODE, observer, kubelet, runtime))
        violations = await violations_of(run.tenants, run.run(earlier, later, newest))
        _print_line(
            f"{run.replaced} processes replaced under {run.ends} ends of pods in {time.monotonic() - began:.0f} s; "
            f"pods ended: {dict(run.tenants.ended) or 'none'}"
        )
        return violations


class _Rollback:
    """One run."""

    def __init__(self, bus: Bus, services: dict[str, ServiceProcess], tenants: Tenants) -> None:
        self._bus = bus
        self._services = services
        self.tenants = tenants
        self.replaced = self.ends = 0
        self._chance = random.Random("rollback")

    async def run(self, earlier: str, later: str, newest: str) -> None:
        """Go up and back in both orders, then meet a ledger that cannot be read."""
        await wait_ready(self._services.values(), limit_s=_READY_S)
        await self.tenants.runtime.synchronized.wait()
        await self.tenants.wait_registered()
        await self.tenants.begin_first()
        for order in (_CENTRE_FIRST, _NODE_FIRST):
            for name, python in (("up", later), ("back", earlier)):
                await self._replace_all(order, python)
                _print_line(f"{name}, {order[0]} first: {len(self.tenants.all)} pods are well")
        await self._replace_all(_CENTRE_FIRST, later)
        await self._meet_newer(later, newest)

    async def _replace_all(self, order: tuple[str, ...], python: str) -> None:
        """Replace service after service while pods come and go, then look at everything."""
        goes_on = asyncio.Event()
        goes_on.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._come_and_go(goes_on))
            try:
                for name in order:
                    service = self._services[name]
                    await service.stop()
                    service.python = python
                    await service.start()
                    await wait_ready([service], limit_s=_READY_S)
                    self.replaced += 1
                    await asyncio.sleep(0.5)
            finally:
                goes_on.clear()
        await self.tenants.until_well("with one release", time.monotonic())

    async def _come_and_go(self, goes_on: asyncio.Event) -> None:
        while goes_on.is_set():
            leaving = self._chance.choice(self.tenants.all)
            await self.tenants.end(leaving)
            await self.tenants.begin_all([self.tenants.replace(leaving)])
            self.ends += 1

    async def _meet_newer(self, later: str, newest: str) -> None:
        """Let topology of a newer release write the ledger: the one before refuses it, names the
        release and writes nothing, and the newer one continues.
        """
        topology = self._services["topology"]
        await topology.stop()
        topology.python = newest
        await topology.start()
        await wait_ready([topology], limit_s=_READY_S)
        # The release of an owner that holds nothing: our own reader refuses what is written from here on.
        await self.tenants.lives.release_place(Owner(kind=OwnerKind.POD, name="none", uid="none"), "none")
        await topology.stop()
        before = await self._bus.fingerprint(LEDGER, node=NODE)
        topology.python = later
        await topology.start()
        async with asyncio.timeout(_READY_S):
            while topology.status is None:  # noqa: ASYNC110 - a process's end
                await asyncio.sleep(0.1)
        said = topology.read_log()
        if topology.status != _REFUSED or "release 0.3.0 wrote it" not in said:
            raise Stuck(f"topology met a ledger of a newer release and ended with {topology.status}: {said}")
        if await self._bus.fingerprint(LEDGER, node=NODE) != before:
            raise Stuck("topology wrote over a ledger of a newer release")
        topology.python = newest
        await topology.start()
        await wait_ready([topology], limit_s=_READY_S)
        _print_line("a ledger of a newer release was refused, and was as before")


def _release(folder: Path, commit: str, version: str, changes: tuple[tuple[str, str, str], ...] = ()) -> str:
    """Build a commit as a release, and return its interpreter.

    Errors: raises DidNotRun where the commit is not there.
    """
    source = folder / "source"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        raise DidNotRun(f"git has no commit {commit}: get the whole history (git fetch --unshallow)")
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    project = source / "pyproject.toml"
    project.write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', project.read_text(), count=1))
    for name, before, after in changes:
        text = (source / name).read_text()
        if before not in text:
            raise DidNotRun(f"{name} does not have {before!r} any more: write here how its format is raised")
        (source / name).write_text(text.replace(before, after))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *wheel], check=True)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    (made,) = folder.glob("*.whl")
    install = ["install", "--no-deps", "--no-index", "--target", str(packages), str(made)]
    subprocess.run([*pip, *install], check=True)
    # Our own modules are not in that folder: a path file has them there, and those of another folder
    # are not read.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return str(folder / "env/bin/python")


if __name__ == "__main__":
    raise SystemExit(main())
