"""Pods of one node that hold devices for long: they come by kubelet's device plugins, by claims, by
`place` and by `topobus oci`, and outlive whatever befalls the node.

Their container is the runtime's, so their CPUs and interfaces are seen as well. The observer gets what
each has.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.service_process import node_settings
from lab.chaos.interfaces import Interfaces
from lab.chaos.observer import Grant, NodeObserver
from lab.chaos.oci_containers import OciContainers
from lab.chaos.pod_lives import CLASSES, Door, Lives, Stuck, claim_object, leaves
from topobus.bus.bus import Bus
from topobus.formats.messages.messages import ApiObject
from topobus.simulation.container_runtime import NotStarted, Refused, SimulatedRuntime
from topobus.simulation.kubelet.simulator import (
    Admission,
    ClaimReference,
    Container,
    KubeletSimulator,
    KubeletTimings,
    Pod,
)
from topobus.values.dra_names import DRIVER
from topobus.values.errors import PeerUnavailable
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.request import Owner, OwnerKind

__all__ = [
    "KINDS",
    "WELL_S",
    "Kind",
    "Tenant",
    "Tenants",
    "new_kubelet",
    "new_runtime",
    "tenant_settings",
    "violations_of",
]

_CPUS = CpuSet.of(range(224))
"""Those of the recorded machine."""
WELL_S = 120.0
"""A pod that neither runs nor has ended after so long is stuck, and so is a device that is held by a
pod that is gone."""
_PLUGIN_CLASSES = ("gpu", "nic", "fpga")
_PAUSE_S = 0.1
_RETRY_S = 1.0
_BY_KUBELET = ("no healthy devices present", "no longer healthy", "unregistered device", "Requested: ")
"""How kubelet itself ends a pod by a resource: before the device plugin has registered, and while too
few devices are free."""
_BY_US = (" holds ", "has not ended", "no service answers", "(see whether ")
"""How Allocate's refusals name the holder, or what must run."""


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
    Kind(Door.CLAIM, (("gpu", 1),), 1),
    Kind(Door.CLAIM, (("nic", 1),), 1),
    Kind(Door.OCI, (("gpu", 1),), 1),
    Kind(Door.OCI, (("nic", 1),), 1),
    Kind(Door.CLAIM, (("gpu", 1), ("nic", 1)), 2),
    Kind(Door.CLAIM, (("cpu", 2),), 3),
    Kind(Door.CLAIM, (("gpu", 1), ("cpu", 2)), 1),
    Kind(Door.CLAIM, (("fpga", 1),), 1),
    Kind(Door.PLACE, (("nic", 1), ("cpu", 4)), 1),
    Kind(Door.PLACE, (("cpu", 4),), 2),
)
"""Twenty pods, which have all GPUs and FPGAs of the machine, and seven of eight interfaces."""


@dataclass(eq=False)
class Tenant:
    """One pod."""

    kind: Kind
    name: str
    claim: ApiObject | None = None
    pod: Pod | None = None
    grant: Grant | None = None
    devices: frozenset[str] = frozenset()

    @property
    def is_kubelets(self) -> bool:
        """Whether kubelet runs it."""
        return self.kind.door in (Door.PLUGIN, Door.CLAIM)

    @property
    def has_claim(self) -> bool:
        """Whether a claim has its devices."""
        return self.kind.door in (Door.CLAIM, Door.OCI)

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The interfaces that are in its network namespace, where interfaces are moved."""
        names = self.devices if self.has_claim else ()
        return tuple(name.removeprefix("nic-") for name in names if name.startswith("nic-"))

    @property
    def owner(self) -> Owner:
        """The pod or claim that holds its devices, except those by kubelet's allocation."""
        kind = OwnerKind.CLAIM if self.has_claim else OwnerKind.POD
        return Owner(kind=kind, name=self.name, uid=f"uid-{self.name}")

    @property
    def references(self) -> tuple[ClaimReference, ...]:
        """Its claim, as kubelet names it."""
        if self.claim is None or not self.is_kubelets:
            return ()
        return (ClaimReference(name=self.name, uid=f"uid-{self.name}", drivers=(DRIVER,)),)


class Tenants:
    """The pods, and the kubelet and the runtime that run them now."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        observer: NodeObserver,
        kubelet: KubeletSimulator,
        runtime: SimulatedRuntime,
        interfaces: Interfaces | None = None,
        oci: OciContainers | None = None,
    ) -> None:
        """`bus` passes every fault by. Without `oci` kubelet runs its pods."""
        self.observer = observer
        self._interfaces, self._oci = interfaces, oci
        self.kubelet, self.runtime = kubelet, runtime
        self.lives = Lives(bus, kubelet, observer, node)
        self.all: list[Tenant] = []
        self.unseen: set[str] = set()
        """Names of pods that a kubelet which was started has not seen yet."""
        self.ended: Counter[str] = Counter()
        """Pods that kubelet ended for good, by the reason."""
        self.violations: list[str] = []
        self._numbers: Counter[str] = Counter()

    async def begin_first(self) -> None:
        """Make the device classes, and begin all pods."""
        for made in CLASSES:
            await self.lives.apply(made, f"uid-{made.metadata['name']}")
        kinds = [
            replace(kind, door=Door.CLAIM) if self._oci is None and kind.door is Door.OCI else kind for kind in KINDS
        ]
        self.all = [self.new(kind) for kind in kinds for _ in range(kind.count)]
        await self.begin_all(list(self.all))
        await self.until_well("with all pods", time.monotonic())

    async def wait_registered(self) -> None:
        """Wait until kubelet has the driver and the lists of all plugins."""
        await self.kubelet.wait_for_driver(DRIVER)
        for device_class in _PLUGIN_CLASSES:
            await self.kubelet.wait_for_event("ListAndWatch.send", subject=f"topobus.dev/{device_class}")

    def new(self, kind: Kind) -> Tenant:
        """Make a pod that has not begun yet."""
        self._numbers[kind.name] += 1
        return Tenant(kind, f"{kind.name}-{self._numbers[kind.name]}")

    def replace(self, tenant: Tenant) -> Tenant:
        """Put another pod of the same kind into the place of one that is gone."""
        self.all = [each for each in self.all if each is not tenant]
        made = self.new(tenant.kind)
        self.all.append(made)
        return made

    async def begin_all(self, tenants: list[Tenant]) -> None:
        """Let pods run.

        Errors: raises Stuck when one neither runs nor has ended in time.
        """
        try:
            async with asyncio.timeout(WELL_S), asyncio.TaskGroup() as group:
                for tenant in tenants:
                    group.create_task(self.begin(tenant))
        except TimeoutError as err:
            stuck = [tenant.name for tenant in self.all if not tenant.devices]
            raise Stuck(f"{', '.join(stuck)}: neither run nor have ended after {WELL_S:g} s") from err

    async def begin(self, tenant: Tenant) -> None:
        """Let a pod run: a new one, or one that ran before the boot. One that kubelet ends is made
        again.
        """
        while True:
            if tenant.kind.door is Door.PLACE:
                await self._place(tenant)
                return
            if tenant.has_claim and tenant.claim is None:
                await self._claim(tenant)
            if tenant.kind.door is Door.OCI:
                if await self._start_oci(tenant):
                    return
                await asyncio.sleep(_RETRY_S)
                continue
            tenant.pod = Pod(
                name=tenant.name,
                uid=f"uid-{tenant.name}",
                containers=(Container(name="main", resources=_resources(tenant.kind)),),
                claims=tenant.references,
            )
            answer = await self.kubelet.admit(tenant.pod)
            self._note_seen(tenant)
            if isinstance(answer, Admission):
                if await self._start(tenant, answer):
                    return
            elif answer.is_final:
                self._note_end(tenant, answer.message)
                await self.end(tenant)
                tenant = self.replace(tenant)
            await asyncio.sleep(_RETRY_S)

    def _note_seen(self, tenant: Tenant) -> None:
        """Let kubelet drop what its checkpoint gives to others when it has seen every pod."""
        self.unseen.discard(tenant.name)
        if not self.unseen:
            self.kubelet.sources_ready()

    async def _start(self, tenant: Tenant, answer: Admission) -> bool:
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
        await self._begin_sandbox(tenant)
        try:
            await self.runtime.create("main", pod=tenant.name, cdi=cdi, env=env)
        except (Refused, NotStarted):
            # kubelet removes what could not be started.
            await self._end_containers(tenant)
            return False
        names = frozenset(name for ids in grant.devices.values() for name in ids)
        names |= frozenset(each.device for claim in answer.claims for each in claim.devices)
        await self._has(tenant, names)
        return True

    async def _start_oci(self, tenant: Tenant) -> bool:
        assert self._oci is not None
        try:
            names = await self._oci.begin(tenant.name)
        except OSError:
            # A device service is not there yet, or does not have its devices yet.
            return False
        await self._has(tenant, names)
        return True

    async def _begin_sandbox(self, tenant: Tenant) -> None:
        if self._sandboxes_of(tenant):
            return
        namespace = ""
        if self._interfaces is not None:
            namespace = f"/proc/{await self._interfaces.begin_pod(tenant.name)}/ns/net"
        await self.runtime.run_pod(tenant.name, network_namespace=namespace)

    def _sandboxes_of(self, tenant: Tenant) -> list[str]:
        return [key for key, sandbox in self.runtime.sandboxes.items() if sandbox.name == tenant.name]

    async def _end_containers(self, tenant: Tenant) -> None:
        sandboxes = self._sandboxes_of(tenant)
        for made in list(self.runtime.containers.values()):
            if made.message.pod_sandbox_id in sandboxes:
                await self.runtime.end(made)

    async def _end_sandbox(self, tenant: Tenant) -> None:
        await self._end_containers(tenant)
        for key in self._sandboxes_of(tenant):
            await self.runtime.stop_pod(self.runtime.sandboxes[key])
            await self.runtime.remove_pod(self.runtime.sandboxes[key])
        if self._interfaces is not None:
            await self._interfaces.end_pod(tenant.name)

    async def _has(self, tenant: Tenant, names: frozenset[str]) -> None:
        """Note what a pod runs with. A claim and a placed pod keep what they had before the boot."""
        tenant.devices = names
        if tenant.grant is None:
            kind = OwnerKind.DEVICE_PLUGIN if tenant.kind.door is Door.PLUGIN else tenant.owner.kind
            grant = Grant(tenant.name, kind, tenant.owner.key, names, tenant.is_kubelets)
            # kubelet gives from its checkpoint without asking. When the services were not there for
            # longer than `kubelet_grace_s`, the ledger has it again two comparisons later.
            while not await self.observer.is_held(grant):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(_PAUSE_S)
            tenant.grant = grant
            await self.observer.grant(grant)
        elif tenant.grant.devices != names:
            self.violations.append(
                f"{tenant.name} has {sorted(names)} after a boot, and had {sorted(tenant.grant.devices)}"
            )

    def _note_end(self, tenant: Tenant, message: str) -> None:
        by_kubelet = next((text for text in _BY_KUBELET if text in message), "")
        self.ended[f"kubelet: {by_kubelet}" if by_kubelet else message] += 1
        if not by_kubelet and not any(text in message for text in _BY_US):
            self.violations.append(f"{tenant.name} was ended without a reason to act on: {message}")

    async def _claim(self, tenant: Tenant) -> None:
        claim = claim_object(tenant.name, tenant.kind.wants)
        await self.lives.apply(claim, tenant.owner.uid)
        tenant.claim = claim
        while not await self.lives.allocated(claim):
            pass

    async def _place(self, tenant: Tenant) -> None:
        if tenant.grant is not None:
            # Nothing of it runs here, and what it has stays its own.
            tenant.devices = tenant.grant.devices
            return
        devices = dict(tenant.kind.wants)
        cpus = devices.pop("cpu", 0)
        op_id = f"place-{tenant.name}"
        while not (names := await self.lives.place(tenant.owner, op_id, devices.items(), cpus)):
            op_id = f"place-{tenant.name}-{uuid.uuid4()}"
            await asyncio.sleep(_PAUSE_S)
        await self._has(tenant, names)

    async def end(self, tenant: Tenant) -> None:
        """End a pod as its deletion does."""
        if tenant.grant is not None:
            self.observer.give_back(tenant.grant)
            tenant.grant = None
        tenant.devices = frozenset()
        await self._end_sandbox(tenant)
        if tenant.kind.door is Door.OCI and self._oci is not None:
            await self._oci.end(tenant.name)
        if tenant.pod is not None:
            while await self.kubelet.remove(tenant.pod):  # noqa: ASYNC110 - kubelet repeats it
                await asyncio.sleep(_PAUSE_S)
        if tenant.kind.door is Door.PLACE:
            await self.lives.release_place(tenant.owner, f"release-{tenant.name}")
        if tenant.claim is not None:
            await self.lives.delete(tenant.claim)

    async def until_well(self, when: str, began: float) -> None:
        """Wait until the ledger and the files have exactly what pods have, each container its CPUs, and
        each pod its interfaces.
        """
        while problems := [
            *await self.observer.differences(),
            *self._cpu_problems(),
            *(await self._interfaces.differences(self.attached()) if self._interfaces is not None else ()),
        ]:
            if self.observer.violations or self.violations:
                return
            if time.monotonic() - began > WELL_S:
                raise Stuck(f"{when}: {'; '.join(problems)}")
            await asyncio.sleep(_PAUSE_S)

    def attached(self) -> dict[str, str]:
        """Map the interfaces that must be in pods to these."""
        return {interface: tenant.name for tenant in self.all for interface in tenant.interfaces}

    def _cpu_problems(self) -> list[str]:
        """Compare the CPUs on which each container runs with those that claims have."""
        own = {
            tenant.name: frozenset(int(name.removeprefix("cpu-")) for name in tenant.devices if name.startswith("cpu-"))
            for tenant in self.all
            if tenant.kind.door is Door.CLAIM
        }
        taken = frozenset(cpu for cpus in own.values() for cpu in cpus)
        problems = []
        for made in self.runtime.containers.values():
            name = self.runtime.sandboxes[made.message.pod_sandbox_id].name
            wanted = own.get(name) or (frozenset(_CPUS) - taken)
            if frozenset(made.cpus) != wanted and not (
                own.get(name) == frozenset() and not taken & frozenset(made.cpus)
            ):
                problems.append(f"the container of {name} runs on {made.cpus}")
        return problems


def tenant_settings(node: str, folder: Path, url: str) -> dict[str, str]:
    """Give the settings of the services of a node with such pods.

    What the services of a real node wait for in minutes is short: only the length of a run depends on it.
    """
    return {
        **node_settings(node, folder, url),
        "TOPOBUS_GATEWAY__DEADLINES__KUBELET_GRACE_S": "4",
        "TOPOBUS_GATEWAY__DEADLINES__FORGOTTEN_S": "0.5",
        "TOPOBUS_GATEWAY__DEADLINES__RECONCILE_S": "0.5",
        "TOPOBUS_GATEWAY__CPUS__OWNED": "all",
        "TOPOBUS_GATEWAY__RUNTIME__SOCKET": str(folder / "nri.sock"),
    }


def new_kubelet(folder: Path) -> KubeletSimulator:
    """Make a kubelet of that node, with the checkpoint of the one before."""
    timings = KubeletTimings(pod_retry_s=0.5, reconcile_s=1.0, dra_s=20.0)
    return KubeletSimulator(folder / "k", numa_nodes=NodeSet(0, 1), timings=timings)


def new_runtime(folder: Path) -> SimulatedRuntime:
    """Make a runtime of that node, without containers."""
    return SimulatedRuntime(folder / "nri.sock", _CPUS, cdi_dir=folder / "cdi", control_groups=folder / "machine")


async def violations_of(tenants: Tenants, run: Coroutine[Any, Any, None]) -> list[str]:
    """Run something under the observer's eyes, and return what was violated."""
    problems: list[str] = []
    try:
        async with tenants.observer.observing():
            await run
    except* (Stuck, PeerUnavailable, TimeoutError) as group:
        problems = [str(err) for err in leaves(group)]
    return [*tenants.observer.violations, *tenants.violations, *problems]


def _resources(kind: Kind) -> dict[str, int]:
    if kind.door is not Door.PLUGIN:
        return {}
    return {f"topobus.dev/{name}": count for name, count in kind.wants}
