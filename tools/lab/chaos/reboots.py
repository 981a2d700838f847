"""A node that is rebooted again and again while pods of all interfaces have its devices.

A reboot ends every process of the node by SIGKILL, NATS and kubelet included, in the middle of an
admission. Of the disk stay NATS' store, the gateway's files and kubelet's checkpoint, the last as it
was some pods ago. CDI files, sockets and containers are gone, and the boot has another id. Some pods
are deleted while the node is off. Afterwards kubelet starts before the services or after them, and
admits every pod again. A pod that kubelet ends for good is made again under another name, as its
controller does.

Interfaces are prepared and not attached: that needs a kernel's own namespaces.
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
from functools import partial
from pathlib import Path

from lab.bench.service_process import ServiceProcess, node_settings
from lab.chaos.node import SERVICES
from lab.chaos.node_run import leaves
from lab.chaos.observer import Grant, NodeObserver
from lab.chaos.pod_lives import Door, Lives, Stuck, class_object
from topobus.bus.bus import Bus
from topobus.engine.alignment.planning.node_view import cpu_name
from topobus.formats.kubernetes.objects import object_parts
from topobus.formats.messages.catalogue import OBJECT, PLACE
from topobus.formats.messages.messages import ApiObject, PlaceRequest
from topobus.process.config import NatsSettings
from topobus.simulation.container_runtime import Refused, SimulatedRuntime
from topobus.simulation.kubelet.checkpoint import CHECKPOINT_FILE
from topobus.simulation.kubelet.simulator import (
    Admission,
    ClaimReference,
    Container,
    KubeletSimulator,
    KubeletTimings,
    Pod,
)
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.values.dra_names import DRIVER, group_of_class
from topobus.values.errors import PeerUnavailable
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Placement
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

__all__ = ["KINDS", "RebootOptions", "RebootResult", "run_reboots"]

NODE = "reboot-node"
_DEVICE_CLASSES = ("gpu", "nic", "fpga", "cpu")
_CPUS = CpuSet.of(range(224))
_PAUSE_S = 0.1
_ASK_S = 3.0
_RETRY_S = 1.0
_WELL_S = 120.0
"""A pod that neither runs nor has ended so long after a reboot is stuck, and so is a device that is
held by a pod that is gone."""
# What the services of a real node wait for in minutes. Only the length of a run depends on it.
_SETTINGS = {
    "TOPOBUS_GATEWAY__DEADLINES__KUBELET_GRACE_S": "4",
    "TOPOBUS_GATEWAY__DEADLINES__FORGOTTEN_S": "0.5",
    "TOPOBUS_GATEWAY__DEADLINES__RECONCILE_S": "0.5",
    "TOPOBUS_GATEWAY__CPUS__OWNED": "all",
}
# The boot's id is the kernel's own file, which no process can change.
_BOOTED = (
    "import runpy, sys; from pathlib import Path; from topobus.sysfs import boot; "
    "_, module, file = sys.argv; sys.argv[1:] = []; boot.read_boot_id = lambda _tree: Path(file).read_text(); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
_BY_KUBELET = ("no healthy devices present", "no longer healthy", "unregistered device", "Requested: ")
"""How kubelet itself ends a pod by a resource: before the device plugin has registered, and while too
few devices are free."""


@dataclass(frozen=True)
class Kind:
    """What pods of one kind ask for, and by which interface."""

    door: Door
    wants: tuple[tuple[str, int], ...]
    count: int

    @property
    def name(self) -> str:
        """Its interface and classes."""
        return f"{self.door}-{'-'.join(name for name, _ in self.wants)}"


KINDS = (
    Kind(Door.PLUGIN, (("gpu", 1),), 3),
    Kind(Door.PLUGIN, (("nic", 1),), 2),
    Kind(Door.PLUGIN, (("fpga", 1),), 1),
    Kind(Door.CLAIM, (("gpu", 1),), 2),
    Kind(Door.CLAIM, (("nic", 1),), 2),
    Kind(Door.CLAIM, (("gpu", 1), ("nic", 1)), 2),
    Kind(Door.CLAIM, (("cpu", 2),), 3),
    Kind(Door.CLAIM, (("gpu", 1), ("cpu", 2)), 1),
    Kind(Door.CLAIM, (("fpga", 1),), 1),
    Kind(Door.PLACE, (("nic", 1), ("cpu", 4)), 1),
    Kind(Door.PLACE, (("cpu", 4),), 2),
)
"""Twenty pods, which have all GPUs and FPGAs of the machine, and seven of eight interfaces."""


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
    checkpoint_age: int = 0
    """How many of the pods, in all, kubelet's checkpoint did not have any more or not yet."""
    slowest_s: float = 0.0
    """The longest time from the start of the processes until every pod runs and nothing is left."""
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Tenant:
    """One pod."""

    kind: Kind
    name: str
    claim: ApiObject | None = None
    pod: Pod | None = None
    grant: Grant | None = None
    devices: frozenset[str] = frozenset()

    @property
    def owner(self) -> Owner:
        kind = OwnerKind.CLAIM if self.kind.door is Door.CLAIM else OwnerKind.POD
        return Owner(kind=kind, name=self.name, uid=f"uid-{self.name}")

    @property
    def references(self) -> tuple[ClaimReference, ...]:
        if self.claim is None:
            return ()
        return (ClaimReference(name=self.name, uid=f"uid-{self.name}", drivers=(DRIVER,)),)


async def run_reboots(options: RebootOptions, folder: Path) -> RebootResult:
    """Start a node with its pods, and reboot it."""
    result = RebootResult()
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
        settings = {
            **node_settings(NODE, folder, server.url),
            **_SETTINGS,
            "TOPOBUS_GATEWAY__RUNTIME__SOCKET": str(folder / "nri.sock"),
        }
        boot_file = folder / "boot_id"
        services = {
            name: ServiceProcess(
                name, settings, folder, program=("-c", _BOOTED, f"topobus.{name}.main", str(boot_file))
            )
            for name in SERVICES
        }
        for service in services.values():
            stack.push_async_callback(service.kill)
        run = _RebootRun(options, folder, server, outside, services, result)
        watching = asyncio.create_task(run.observer.run())
        try:
            await run.run()
        except* (Stuck, PeerUnavailable, TimeoutError) as group:
            result.violations += [str(err) for err in leaves(group)]
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await run.power_off()
        result.violations = [*run.observer.violations, *result.violations]
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
        result: RebootResult,
    ) -> None:
        self._options = options
        self._folder = folder
        self._server = server
        self._bus = bus
        self._services = services
        self._result = result
        self._chance = random.Random(f"{options.seed}/reboots")
        self._tenants: list[_Tenant] = []
        self._numbers: Counter[str] = Counter()
        self._on: AsyncExitStack | None = None
        self._unseen: set[str] = set()
        self.observer = NodeObserver(bus, NODE, folder / "cdi")
        self._kubelet, self._runtime = self._new_kubelet(), self._new_runtime()
        self._lives = Lives(bus, self._kubelet, self.observer, NODE)

    def _new_kubelet(self) -> KubeletSimulator:
        timings = KubeletTimings(pod_retry_s=0.5, reconcile_s=1.0, dra_s=20.0)
        return KubeletSimulator(self._folder / "k", numa_nodes=NodeSet(0, 1), timings=timings)

    def _new_runtime(self) -> SimulatedRuntime:
        root = self._folder / "machine"
        return SimulatedRuntime(
            self._folder / "nri.sock", _CPUS, cdi_dir=self._folder / "cdi", control_groups=root, cgroup_version=1
        )

    async def run(self) -> None:
        """Begin all pods, reboot, and check each time."""
        await self._power_on(is_kubelet_first=False)
        for name in _DEVICE_CLASSES:
            made = class_object(name)
            await self._lives.apply(made, f"uid-{made.metadata['name']}")
        self._tenants = [self._new_tenant(kind) for kind in KINDS for _ in range(kind.count)]
        await self._begin_all(self._tenants)
        await self._until_well("with all pods", time.monotonic())
        self._options.report(f"{len(self._tenants)} pods run")
        for number in range(1, self._options.reboots + 1):
            await self._reboot(number)
            self._result.reboots += 1
            if self.observer.violations:
                return

    async def _reboot(self, number: int) -> None:
        checkpoint = self._folder / "k/device-plugins" / CHECKPOINT_FILE
        older = checkpoint.read_bytes() if checkpoint.exists() else b""
        listed = {tenant.name for tenant in self._tenants}
        for leaving in self._chance.sample(self._tenants, 4):
            await self._end(leaving)
            await self._begin_all([self._replace(leaving)])
        # One is being admitted when the power goes.
        interrupted = self._chance.choice([tenant for tenant in self._tenants if tenant.kind.door is not Door.PLACE])
        await self._end(interrupted)
        comes = self._replace(interrupted)
        begins = asyncio.create_task(self._begin(comes))
        await asyncio.sleep(self._chance.random() * 0.3)
        begins.cancel()
        await asyncio.gather(begins, return_exceptions=True)
        await self.power_off()
        checkpoint.write_bytes(older) if older else checkpoint.unlink(missing_ok=True)
        self._result.checkpoint_age += len(listed ^ {tenant.name for tenant in self._tenants})
        gone = self._chance.sample([each for each in self._tenants if each.kind.door is not Door.PLACE], 2)
        is_kubelet_first = self._chance.random() < 0.5
        began = time.monotonic()
        await self._power_on(is_kubelet_first=is_kubelet_first)
        deletions = [asyncio.create_task(self._delete_while_off(tenant, tenant.name in listed)) for tenant in gone]
        self._result.deleted_while_off += len(gone)
        for tenant in gone:
            self._tenants.remove(tenant)
        ended = self._result.ended.total()
        before = list(self._tenants)
        self._unseen = {each.name for each in before if each.kind.door is not Door.PLACE}
        await self._begin_all(before)
        self._result.ran_again += sum(each in self._tenants for each in before)
        await asyncio.gather(*deletions)
        await self._begin_all([self._replace(tenant) for tenant in gone])
        await self._until_ready()
        await self._until_well(f"after reboot {number}", began)
        took_s = time.monotonic() - began
        self._result.slowest_s = max(self._result.slowest_s, took_s)
        self._options.report(
            f"reboot {number} of {self._options.reboots}, {'kubelet' if is_kubelet_first else 'services'} first: "
            f"{len(self._tenants)} pods after {took_s:.1f} s, {self._result.ended.total() - ended} were ended"
        )

    async def _power_on(self, *, is_kubelet_first: bool) -> None:
        (self._folder / "boot_id").write_text(str(uuid.UUID(int=self._chance.getrandbits(128))))
        (self._folder / "cdi").mkdir(exist_ok=True)
        if not self._server.is_running:
            await self._server.start()
        self._kubelet, self._runtime = self._new_kubelet(), self._new_runtime()
        self._on = AsyncExitStack()
        await self._on.enter_async_context(self._runtime.serving())
        if is_kubelet_first:
            await self._on.enter_async_context(self._kubelet)
        for name in self._chance.sample(SERVICES, len(SERVICES)):
            await self._services[name].start()
        if not is_kubelet_first:
            await self._until_ready()
            await self._on.enter_async_context(self._kubelet)
            await self._kubelet.wait_for_driver(DRIVER)
            for device_class in ("gpu", "nic", "fpga"):
                await self._kubelet.wait_for_event("ListAndWatch.send", subject=f"topobus.dev/{device_class}")

    async def power_off(self) -> None:
        """End everything at once, and keep what a disk keeps."""
        if self._on is None:
            return
        await asyncio.gather(*(service.kill() for service in self._services.values()), self._server.kill())
        stack, self._on = self._on, None
        await stack.aclose()
        await asyncio.to_thread(shutil.rmtree, self._folder / "cdi", ignore_errors=True)
        await asyncio.to_thread(shutil.rmtree, self._folder / "machine/sys/fs/cgroup", ignore_errors=True)
        for tenant in self._tenants:
            # No container runs. What a claim has, or a placed pod, stays its own.
            tenant.devices = frozenset()
            if tenant.kind.door is Door.PLUGIN and tenant.grant is not None:
                self.observer.give_back(tenant.grant)
                tenant.grant = None

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(_WELL_S):
                for service in self._services.values():
                    await service.until_ready()
                await self._runtime.synchronized.wait()
        except TimeoutError as err:
            said = [f"{name}: {await service.readiness()}" for name, service in self._services.items()]
            raise Stuck(f"not ready after {_WELL_S:g} s: {'; '.join(said)}") from err

    def _new_tenant(self, kind: Kind) -> _Tenant:
        self._numbers[kind.name] += 1
        return _Tenant(kind, f"{kind.name}-{self._numbers[kind.name]}")

    def _replace(self, tenant: _Tenant) -> _Tenant:
        """Put another pod of the same kind into the place of one that is gone."""
        self._tenants = [each for each in self._tenants if each is not tenant]
        made = self._new_tenant(tenant.kind)
        self._tenants.append(made)
        return made

    async def _begin_all(self, tenants: list[_Tenant]) -> None:
        try:
            async with asyncio.timeout(_WELL_S), asyncio.TaskGroup() as group:
                for tenant in tenants:
                    group.create_task(self._begin(tenant))
        except TimeoutError as err:
            stuck = [tenant.name for tenant in self._tenants if not tenant.devices]
            raise Stuck(f"{', '.join(stuck)}: neither run nor have ended after {_WELL_S:g} s") from err

    async def _begin(self, tenant: _Tenant) -> None:
        """Let a pod run: a new one, or one that ran before the boot. One that kubelet ends is made
        again.
        """
        while True:
            if tenant.kind.door is Door.PLACE:
                await self._place(tenant)
                return
            if tenant.kind.door is Door.CLAIM and tenant.claim is None:
                await self._claim(tenant)
            tenant.pod = Pod(
                name=tenant.name,
                uid=f"uid-{tenant.name}",
                containers=(Container(name="main", resources=_resources(tenant.kind)),),
                claims=tenant.references,
            )
            answer = await self._kubelet.admit(tenant.pod)
            self._note_seen(tenant)
            if isinstance(answer, Admission):
                if await self._start(tenant, answer):
                    return
            elif answer.is_final:
                self._note_end(tenant, answer.message)
                await self._end(tenant)
                tenant = self._replace(tenant)
            await asyncio.sleep(_RETRY_S)

    def _note_seen(self, tenant: _Tenant) -> None:
        """Let kubelet drop what its checkpoint gives to others when it has seen every pod."""
        self._unseen.discard(tenant.name)
        if not self._unseen:
            self._kubelet.sources_ready()

    async def _start(self, tenant: _Tenant, answer: Admission) -> bool:
        """Start the container as the runtime does. False: it was refused, and kubelet tries again."""
        (grant,) = answer.containers
        cdi = tuple(
            sorted(
                {
                    *grant.cdi_devices,
                    *(name for claim in answer.claims for each in claim.devices for name in each.cdi_devices),
                }
            )
        )
        env = tuple(f"{key}={value}" for key, value in grant.edits.env.items())
        try:
            await self._runtime.create("main", pod=tenant.name, cdi=cdi, env=env)
        except Refused:
            return False
        names = frozenset(name for ids in grant.devices.values() for name in ids)
        names |= frozenset(each.device for claim in answer.claims for each in claim.devices)
        await self._has(tenant, names)
        return True

    async def _has(self, tenant: _Tenant, names: frozenset[str]) -> None:
        """Note what a pod runs with. A claim and a placed pod keep what they had before the boot."""
        tenant.devices = names
        if tenant.grant is None:
            kind = OwnerKind.DEVICE_PLUGIN if tenant.kind.door is Door.PLUGIN else tenant.owner.kind
            tenant.grant = Grant(tenant.name, kind, tenant.owner.key, names)
            await self.observer.grant(tenant.grant)
        elif tenant.grant.devices != names:
            self._result.violations.append(
                f"{tenant.name} has {sorted(names)} after a boot, and had {sorted(tenant.grant.devices)}"
            )

    def _note_end(self, tenant: _Tenant, message: str) -> None:
        by_kubelet = next((text for text in _BY_KUBELET if text in message), "")
        self._result.ended[f"kubelet: {by_kubelet}" if by_kubelet else message] += 1
        if not by_kubelet and " holds " not in message:
            self._result.violations.append(f"{tenant.name} was ended without a holder's name: {message}")

    async def _claim(self, tenant: _Tenant) -> None:
        requests = [
            {
                "name": name,
                "exactly": {"deviceClassName": group_of_class(name), "allocationMode": "ExactCount", "count": count},
            }
            for name, count in tenant.kind.wants
        ]
        claim = ApiObject(
            api_version="resource.k8s.io/v1",
            kind="ResourceClaim",
            metadata={"name": tenant.name},
            spec={"devices": {"requests": requests}},
        )
        await self._lives.apply(claim, tenant.owner.uid)
        tenant.claim = claim
        while True:
            entry = await self._lives.until(
                f"{tenant.name}: read", lambda: self._bus.get(OBJECT, **object_parts(claim))
            )
            if entry is not None and entry.value.status.get("allocation"):
                return
            await asyncio.sleep(_PAUSE_S)

    async def _place(self, tenant: _Tenant) -> None:
        wants = dict(tenant.kind.wants)
        cpus = wants.pop("cpu", 0)
        container = ContainerRequest(
            name="main",
            cpus=cpus,
            devices=tuple(DeviceRequest(device_class=name, count=count) for name, count in wants.items()),
        )
        request = PlaceRequest(
            op_id=f"place-{tenant.name}", pod=PodRequest(owner=tenant.owner, containers=(container,))
        )
        while True:
            reply = await self._lives.until(
                f"{tenant.name}: place", partial(self._bus.ask, PLACE, request, timeout_s=_ASK_S, node=NODE)
            )
            if isinstance(reply.result, Placement):
                break
            request = PlaceRequest(op_id=f"place-{tenant.name}-{uuid.uuid4()}", pod=request.pod)
            await asyncio.sleep(_PAUSE_S)
        names = {name for each in reply.result.containers for held in each.devices.values() for name in held}
        await self._has(
            tenant, frozenset(names | {cpu_name(cpu) for each in reply.result.containers for cpu in each.cpus})
        )

    async def _end(self, tenant: _Tenant) -> None:
        """End a pod as its deletion does."""
        if tenant.grant is not None:
            self.observer.give_back(tenant.grant)
            tenant.grant = None
        tenant.devices = frozenset()
        for made in [
            made
            for made in self._runtime.containers.values()
            if made.message.pod_sandbox_id == f"sandbox-{tenant.name}"
        ]:
            await self._runtime.end(made)
        if tenant.pod is not None:
            while await self._kubelet.remove(tenant.pod):  # noqa: ASYNC110 - kubelet repeats it
                await asyncio.sleep(_PAUSE_S)
        if tenant.kind.door is Door.PLACE:
            await self._lives.release_place(tenant.owner, f"release-{tenant.name}")
        if tenant.claim is not None:
            await self._lives.delete(tenant.claim)

    async def _delete_while_off(self, tenant: _Tenant, is_in_checkpoint: bool) -> None:
        """Let a pod be gone when the node comes back. kubelet has its claim undone if its checkpoint
        has the claim.
        """
        if tenant.grant is not None:
            self.observer.give_back(tenant.grant)
        if is_in_checkpoint:
            kubelet, references = self._kubelet, tenant.references
            while await kubelet.unprepare_claims(references):  # noqa: ASYNC110 - kubelet repeats it
                await asyncio.sleep(_PAUSE_S)
        if tenant.claim is not None:
            await self._lives.delete(tenant.claim)

    async def _until_well(self, when: str, began: float) -> None:
        """Wait until the ledger and the files have exactly what pods have, and check the CPUs."""
        while problems := [*await self.observer.differences(), *self._cpu_problems()]:
            if self.observer.violations or self._result.violations:
                return
            if time.monotonic() - began > _WELL_S:
                raise Stuck(f"{when}: {'; '.join(problems)}")
            await asyncio.sleep(_PAUSE_S)

    def _cpu_problems(self) -> list[str]:
        """Compare the CPUs on which each container runs with those that claims have."""
        own = {
            tenant.name: frozenset(int(name.removeprefix("cpu-")) for name in tenant.devices if name.startswith("cpu-"))
            for tenant in self._tenants
            if tenant.kind.door is Door.CLAIM
        }
        taken = frozenset(cpu for cpus in own.values() for cpu in cpus)
        problems = []
        for made in self._runtime.containers.values():
            name = made.message.pod_sandbox_id.removeprefix("sandbox-")
            wanted = own.get(name) or (frozenset(_CPUS) - taken)
            if frozenset(made.cpus) != wanted and not (
                own.get(name) == frozenset() and not taken & frozenset(made.cpus)
            ):
                problems.append(f"the container of {name} runs on {made.cpus}")
        return problems


def _resources(kind: Kind) -> dict[str, int]:
    if kind.door is not Door.PLUGIN:
        return {}
    return {f"topobus.dev/{name}": count for name, count in kind.wants}
