"""A node that is rebooted again and again while pods of all interfaces have its devices.

A reboot ends every process of the node by SIGKILL, NATS and kubelet included, in the middle of an
admission. Of the disk stay NATS' store, the gateway's files and kubelet's checkpoint, the last as it
was some pods ago. CDI files, sockets and containers are gone, and the boot has another id. Some pods
are deleted while the node is off. Afterwards kubelet starts before the services or after them, and
admits every pod again. A pod that kubelet ends for good is made again under another name, as its
controller does.

Interfaces are this kernel's, and move into pods, where this process may do that. Else they are a
recorded machine's, and are prepared and not attached.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.service_process import ServiceProcess, wait_ready
from lab.chaos.interfaces import Interfaces, why_no_interfaces
from lab.chaos.node import SERVICES
from lab.chaos.observer import NodeObserver
from lab.chaos.oci_containers import OciContainers
from lab.chaos.pod_lives import Door
from lab.chaos.tenants import WELL_S, Tenant, Tenants, new_kubelet, new_runtime, tenant_settings, violations_of
from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from topobus.simulation.kubelet.checkpoint import CHECKPOINT_FILE
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer

__all__ = ["RebootOptions", "RebootResult", "run_reboots"]

NODE = "reboot-node"
# The boot's id is the kernel's own file, which no process can change.
_BOOTED = (
    "import runpy, sys; from pathlib import Path; from topobus.sysfs import boot; "
    "_, module, file = sys.argv; sys.argv[1:] = []; boot.read_boot_id = lambda _tree: Path(file).read_text(); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RebootOptions:
    """The parameters of a run."""

    seed: int
    reboots: int
    nats_server: Path | None = None
    report: Callable[[str], None] = field(default=lambda _: None)


@dataclass
class RebootResult:
    """The result of a run."""

    reboots: int = 0
    ran_again: int = 0
    """Pods that ran before a reboot and run after it."""
    ended: Counter[str] = field(default_factory=Counter)
    """Pods that kubelet ended for good, by the reason."""
    deleted_while_off: int = 0
    attached: int = 0
    """How many interfaces were in a pod's namespace after each of the reboots, in all."""
    why_not_attached: str = ""
    """Why interfaces cannot be moved here."""
    checkpoint_age: int = 0
    """How many of the pods, in all, kubelet's checkpoint did not have any more or not yet."""
    slowest_s: float = 0.0
    """The longest time from the start of the processes until every pod runs and nothing is left."""
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


async def run_reboots(options: RebootOptions, folder: Path) -> RebootResult:
    """Start a node with its pods, and reboot it."""
    result = RebootResult(why_not_attached=await asyncio.to_thread(why_no_interfaces))
    interfaces = None if result.why_not_attached else Interfaces(folder / "run")
    began = time.monotonic()
    await asyncio.to_thread(build, "dgx", folder / "machine")
    async with AsyncExitStack() as stack:
        server = NatsServer(binary=options.nats_server, parent=folder)
        server.log = folder / "nats.log"
        await stack.enter_async_context(server)
        outside = await stack.enter_async_context(
            Bus.session(NatsSettings(url=server.url, provisioner="controller"), name="topobus-cli")
        )
        await outside.provision()
        settings = tenant_settings(NODE, folder, server.url)
        boot_file = folder / "boot_id"
        services = {
            name: ServiceProcess(
                name,
                {**settings, **(interfaces.settings if interfaces is not None and name == "nic" else {})},
                folder,
                program=("-c", _BOOTED, f"topobus.{name}.main", str(boot_file)),
            )
            for name in SERVICES
        }
        for service in services.values():
            stack.push_async_callback(service.kill)
        run = _RebootRun(options, folder, server, outside, services, interfaces, result)
        try:
            result.violations = await violations_of(run.tenants, run.run())
        finally:
            await run.power_off()
        if result.violations:
            # Beside the logs: what NATS has on its disk may be the reason.
            await asyncio.to_thread(shutil.copytree, server.store, folder / "store")
        result.ended = run.tenants.ended
    result.seconds = time.monotonic() - began
    return result


class _RebootRun:
    """One run."""

    def __init__(
        self,
        options: RebootOptions,
        folder: Path,
        server: NatsServer,
        bus: Bus,
        services: dict[str, ServiceProcess],
        interfaces: Interfaces | None,
        result: RebootResult,
    ) -> None:
        self._options = options
        self._folder = folder
        self._server = server
        self._bus = bus
        self._services = services
        self._interfaces = interfaces
        self._result = result
        self._chance = random.Random(f"{options.seed}/reboots")
        self._on: AsyncExitStack | None = None
        self.observer = NodeObserver(bus, NODE, folder / "cdi")
        self._oci = OciContainers(server.url, folder / "cdi", interfaces)
        self.tenants = Tenants(
            bus, NODE, self.observer, new_kubelet(folder), new_runtime(folder), interfaces, self._oci
        )

    async def run(self) -> None:
        """Begin all pods, reboot, and check each time."""
        await self._power_on(is_kubelet_first=False)
        await self.tenants.begin_first()
        self._options.report(f"{len(self.tenants.all)} pods run")
        for number in range(1, self._options.reboots + 1):
            await self._reboot(number)
            self._result.reboots += 1
            if self.observer.violations or self.tenants.violations:
                return

    async def _reboot(self, number: int) -> None:
        checkpoint = self._folder / "k/device-plugins" / CHECKPOINT_FILE
        older = checkpoint.read_bytes() if checkpoint.exists() else b""
        listed = {tenant.name for tenant in self.tenants.all}
        for leaving in self._chance.sample(self.tenants.all, 4):
            await self.tenants.end(leaving)
            await self.tenants.begin_all([self.tenants.replace(leaving)])
        # One is being admitted when the power goes.
        interrupted = self._chance.choice([tenant for tenant in self.tenants.all if tenant.kind.door is not Door.PLACE])
        await self.tenants.end(interrupted)
        comes = self.tenants.replace(interrupted)
        begins = asyncio.create_task(self.tenants.begin(comes))
        await asyncio.sleep(self._chance.random() * 0.3)
        begins.cancel()
        await asyncio.gather(begins, return_exceptions=True)
        await self.power_off()
        checkpoint.write_bytes(older) if older else checkpoint.unlink(missing_ok=True)
        self._result.checkpoint_age += len(listed ^ {tenant.name for tenant in self.tenants.all})
        gone = self._chance.sample([each for each in self.tenants.all if each.kind.door is not Door.PLACE], 2)
        is_kubelet_first = self._chance.random() < 0.5
        began = time.monotonic()
        await self._power_on(is_kubelet_first=is_kubelet_first)
        deletions = [asyncio.create_task(self._delete_while_off(tenant, tenant.name in listed)) for tenant in gone]
        self._result.deleted_while_off += len(gone)
        for tenant in gone:
            self.tenants.all.remove(tenant)
        ended = self.tenants.ended.total()
        before = list(self.tenants.all)
        self.tenants.unseen = {each.name for each in before if each.is_kubelets}
        await self.tenants.begin_all(before)
        self._result.ran_again += sum(each in self.tenants.all for each in before)
        await asyncio.gather(*deletions)
        await self.tenants.begin_all([self.tenants.replace(tenant) for tenant in gone])
        await self._until_ready()
        await self.tenants.until_well(f"after reboot {number}", began)
        self._result.attached += len(self.tenants.attached()) if self._interfaces is not None else 0
        took_s = time.monotonic() - began
        self._result.slowest_s = max(self._result.slowest_s, took_s)
        self._options.report(
            f"reboot {number} of {self._options.reboots}, {'kubelet' if is_kubelet_first else 'services'} first: "
            f"{len(self.tenants.all)} pods after {took_s:.1f} s, {self.tenants.ended.total() - ended} were ended"
        )

    async def _power_on(self, *, is_kubelet_first: bool) -> None:
        (self._folder / "boot_id").write_text(str(uuid.UUID(int=self._chance.getrandbits(128))))
        (self._folder / "cdi").mkdir(exist_ok=True)
        if self._interfaces is not None:
            await self._interfaces.power_on()
        if not self._server.is_running:
            await self._server.start()
        self.tenants.kubelet, self.tenants.runtime = new_kubelet(self._folder), new_runtime(self._folder)
        self._on = AsyncExitStack()
        await self._on.enter_async_context(self.tenants.runtime.serving())
        if is_kubelet_first:
            await self._on.enter_async_context(self.tenants.kubelet)
        for name in self._chance.sample(SERVICES, len(SERVICES)):
            await self._services[name].start()
        if not is_kubelet_first:
            await self._until_ready()
            await self._on.enter_async_context(self.tenants.kubelet)
            await self.tenants.wait_registered()

    async def power_off(self) -> None:
        """End everything at once, and keep what a disk keeps."""
        if self._on is None:
            return
        await asyncio.gather(*(service.kill() for service in self._services.values()), self._server.kill())
        stack, self._on = self._on, None
        await stack.aclose()
        self._oci.power_off()
        if self._interfaces is not None:
            await self._interfaces.power_off()
        await asyncio.to_thread(shutil.rmtree, self._folder / "cdi", ignore_errors=True)
        await asyncio.to_thread(shutil.rmtree, self._folder / "machine/sys/fs/cgroup", ignore_errors=True)
        for tenant in self.tenants.all:
            # No container runs. What a claim has, or a placed pod, stays its own.
            tenant.devices = frozenset()
            if tenant.kind.door is Door.PLUGIN and tenant.grant is not None:
                self.observer.give_back(tenant.grant)
                tenant.grant = None

    async def _until_ready(self) -> None:
        await wait_ready(self._services.values(), limit_s=WELL_S)
        async with asyncio.timeout(WELL_S):
            await self.tenants.runtime.synchronized.wait()

    async def _delete_while_off(self, tenant: Tenant, is_in_checkpoint: bool) -> None:
        """Let a pod be gone when the node comes back. kubelet has its claim undone if its checkpoint
        has the claim.
        """
        if tenant.grant is not None:
            self.observer.give_back(tenant.grant)
        if is_in_checkpoint:
            kubelet, references = self.tenants.kubelet, tenant.references
            while await kubelet.unprepare_claims(references):  # noqa: ASYNC110 - kubelet repeats it
                await asyncio.sleep(_PAUSE_S)
        if tenant.claim is not None:
            await self.tenants.lives.delete(tenant.claim)
