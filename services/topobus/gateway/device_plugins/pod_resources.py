"""kubelet's PodResources as values: which container has which of our devices, and what kubelet can
give.

kubelet is never asked for its list more often than its rate limit allows.
Source: kubelet 1.36 cm/cpumanager/policy_{none,static}.go, GetAllocatableCPUs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from msgspec import Struct

from topobus.gateway.containers.rules.exclusive import ExclusiveUse
from topobus.gateway.device_plugins.malformed_calls import readable
from topobus.gateway.device_plugins.pod_contents import PodContents
from topobus.gateway.device_plugins.sockets import dialling, identity
from topobus.gateway.reconcile.rules.pods import PodUse
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.values.dra_names import DRIVER, class_of_device, pool_of_class
from topobus.values.idset import CpuSet
from topobus.values.request import Owner

__all__ = ["Listing", "PodResourcesReader"]

_CALL_LIMIT_S = 5.0
# In seconds. A claim or a registration waits for what kubelet can give, which it answers from memory.
_ALLOCATABLE_S = 1.0
# In seconds. kubelet answers ten calls at once and then a hundred per second, for all its clients
# together. Ours stays far below.
_BETWEEN_S = 0.1

R = TypeVar("R")

_Identity = tuple[int, int, int]
"""Of a kubelet: its socket."""


class Listing(Struct, frozen=True, kw_only=True):
    """One answer of kubelet."""

    kubelet: _Identity
    """Identity of the kubelet that answered: its socket before the call."""
    in_use: dict[str, frozenset[str]]
    """Resource to the devices that pods have, ours by their names. Resources of other vendors
    are included."""
    uses: tuple[PodUse, ...]
    """Our devices by container."""
    exclusive: tuple[ExclusiveUse, ...] = ()
    """CPUs and memory that kubelet's own managers gave to containers."""
    pods: frozenset[tuple[str, str]] = frozenset()
    """Namespace and name of each pod, whatever it has."""


@dataclass(frozen=True)
class _Connection:
    """An open channel: it ends when this value does."""

    kubelet: _Identity
    channel: grpc.aio.Channel
    lister: rpc.PodResourcesListerStub


class PodResourcesReader:
    """Reads kubelet's list.

    One call serves all callers who asked before it began, and none who asks later.
    """

    def __init__(
        self,
        socket: Path,
        node: str,
        resources: Mapping[str, str],
        name_of: Callable[[str, str], str] = lambda _resource, device_id: device_id,
    ) -> None:
        """`resources` maps to classes, `name_of` returns a device by resource and kubelet's id."""
        self.parts_of: Callable[[str, str, str], tuple[str, ...]] = lambda _namespace, _claim, device: (device,)
        """The devices that a device of a claim (namespace, name) stands for. Set by `PodLook`."""
        self.socket = socket
        self._node = node
        self._resources = resources
        self._name_of = name_of
        self._lock = asyncio.Lock()
        self._begun = 0
        """How many calls have begun."""
        self._seen: tuple[int, Listing | str] = (0, "")
        """The last call to end, and its result."""
        self._rests_until = 0.0
        self._contents = PodContents()
        self._connection: _Connection | None = None
        self._cpus: tuple[_Identity, CpuSet] | None = None
        """The CPUs of a kubelet's CPU manager, which do not change while that kubelet runs."""
        self._allocating = 0
        """How many of kubelet's running calls allocate devices."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def unlisted(self) -> Iterator[None]:
        """Delay lists while kubelet allocates. A list that frees a pod's devices would make kubelet
        forget those that it is allocating (see `DevicePlugin`).
        """
        self._allocating += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._allocating -= 1
            if not self._allocating:
                self._is_idle.set()
                # Wait until kubelet has stored the answer.
                self._rests_until = max(self._rests_until, asyncio.get_running_loop().time() + _BETWEEN_S)

    async def users(self, resource: str, pods: Sequence[Owner | None]) -> dict[str, frozenset[str]]:
        """Read from kubelet which devices of a resource these pods have.

        With an owner without a pod's name (None) among them, all pods are listed. Empty when
        kubelet does not answer.

        Shapes: result — by `namespace/name`.
        """
        if not pods:
            return {}
        if None in pods:
            listing = await self._list_pods()
            uses = listing.uses if isinstance(listing, Listing) else ()
        else:
            of_pods = [await self._uses_of(pod) for pod in pods if pod is not None]
            uses = tuple(itertools.chain.from_iterable(of_pods))
        held: dict[str, frozenset[str]] = {}
        for use in uses:
            if use.resource == resource:
                name = f"{use.namespace}/{use.pod}"
                held[name] = held.get(name, frozenset()) | {*use.devices}
        return held

    async def _uses_of(self, pod: Owner) -> tuple[PodUse, ...]:
        """Read one pod.

        Empty when kubelet has none of that name, or its Get is off (before 1.34).
        """
        request = pb.GetPodResourcesRequest(pod_name=pod.name, pod_namespace=pod.namespace)
        # kubelet answers UNKNOWN for a pod that it does not have, and where Get is disabled.
        seen = await self._call(
            lambda lister: lister.Get(request, timeout=_CALL_LIMIT_S), usual=grpc.StatusCode.UNKNOWN
        )
        if isinstance(seen, str):
            return ()
        kubelet, answer = seen
        return self._to_listing(
            kubelet, pb.ListPodResourcesResponse(pod_resources=[answer.pod_resources]), PodContents()
        ).uses

    async def cpus(self) -> CpuSet:
        """Return the CPUs that kubelet's own CPU manager may give to containers: with the static
        policy all but the reserved ones, else none.

        Empty when kubelet does not answer: what it has already given is known from other sources.
        The next call asks it again.
        """
        if self._cpus is None or self._cpus[0] != identity(self.socket):
            seen = await self._allocatable()
            if isinstance(seen, str):
                return CpuSet()
            kubelet, answer = seen
            cpus = CpuSet.of(cpu for cpu in answer.cpu_ids if 0 <= cpu <= CpuSet.MAX_ID)
            self._cpus = kubelet, cpus
            get_logger().info("kubelet-cpus.read", cpus=str(cpus), policy="static" if cpus else "none")
        return self._cpus[1]

    async def allocatable(self, resource: str) -> int:
        """Count the devices of a resource that kubelet can allocate. 0 when it does not answer."""
        seen = await self._allocatable()
        entries = seen[1].devices if not isinstance(seen, str) else ()
        return len({device for entry in entries if entry.resource_name == resource for device in entry.device_ids})

    async def _allocatable(self) -> tuple[_Identity, pb.AllocatableResourcesResponse] | str:
        request = pb.AllocatableResourcesRequest()
        return await self._call(lambda lister: lister.GetAllocatableResources(request, timeout=_ALLOCATABLE_S))

    async def read(self) -> Listing | str:
        """Read the list. A text is the reason why kubelet does not give it.

        The answer is no older than the call, which may wait a tenth of a second for its turn.
        """
        before = self._begun
        async with self._lock:
            if self._seen[0] > before:
                # The previous holder of the lock began to read after this call had asked.
                return self._seen[1]
            loop = asyncio.get_running_loop()
            # When calls come without a break, the list is read in spite of them.
            await is_set_within(self._is_idle, asyncio.timeout(_CALL_LIMIT_S))
            await asyncio.sleep(max(0.0, self._rests_until - loop.time()))
            self._rests_until = loop.time() + _BETWEEN_S
            self._begun += 1
            self._seen = (self._begun, await self._list_pods())
            return self._seen[1]

    async def _list_pods(self) -> Listing | str:
        seen = await self._call(lambda lister: lister.List(pb.ListPodResourcesRequest(), timeout=_CALL_LIMIT_S))
        return seen if isinstance(seen, str) else self._to_listing(*seen, self._contents)

    async def _call(
        self,
        call: Callable[[rpc.PodResourcesListerStub], Awaitable[R]],
        *,
        usual: grpc.StatusCode | None = None,
    ) -> tuple[_Identity, R] | str:
        """Call kubelet, and say which one answered. A text is the reason why none does.

        Shapes: usual — the code of an answer that is no failure of kubelet.
        """
        kubelet = identity(self.socket)
        if kubelet is None:
            return f"there is no kubelet at {self.socket}"
        try:
            return kubelet, readable(await call(self._connect(kubelet).lister))
        except grpc.aio.AioRpcError as err:
            if err.code() is not usual:
                self._connection = None
                get_logger().warning("pod-resources.failed", code=err.code().name, error=err.details())
            return f"kubelet's PodResources failed: {err.code().name}: {err.details()}"

    def _connect(self, kubelet: _Identity) -> _Connection:
        """Give the connection to this kubelet. It is kept, because to make one costs more than a call.

        After a failed call it is made again. The former one is not closed here, which would cancel
        another call on it: it closes with the last call that holds it.
        """
        if self._connection is None or self._connection.kubelet != kubelet:
            channel = dialling(self.socket, checks_answers=False)
            self._connection = _Connection(kubelet, channel, rpc.PodResourcesListerStub(channel))
        return self._connection

    def _to_listing(self, kubelet: _Identity, answer: pb.ListPodResourcesResponse, contents: PodContents) -> Listing:
        in_use: dict[str, set[str]] = {}
        devices: dict[tuple[str, ...], set[str]] = {}
        exclusive: list[ExclusiveUse] = []
        pods: set[tuple[str, str]] = set()
        for pod, content in contents.read(answer):
            where = (pod.namespace, pod.name)
            pods.add(where)
            exclusive += content.exclusive
            for container, resource, ids in content.devices:
                names = {self._name_of(resource, device_id) for device_id in ids}
                in_use.setdefault(resource, set()).update(names)
                device_class = self._resources.get(resource)
                if device_class is not None:
                    devices.setdefault((*where, container, resource, "", "", device_class), set()).update(names)
            for container, claim_namespace, claim, pool, device_class, device in content.claimed:
                if pool != pool_of_class(self._node, device_class):
                    continue
                for name in self.parts_of(claim_namespace, claim, device):
                    key = (*where, container, "", claim_namespace, claim, class_of_device(DRIVER, name) or device_class)
                    devices.setdefault(key, set()).add(name)
        return Listing(
            kubelet=kubelet,
            in_use={resource: frozenset(ids) for resource, ids in in_use.items()},
            uses=tuple(
                PodUse(
                    namespace=key[0],
                    pod=key[1],
                    container=key[2],
                    resource=key[3],
                    claim_namespace=key[4],
                    claim=key[5],
                    device_class=key[6],
                    devices=tuple(sorted(held)),
                )
                for key, held in sorted(devices.items())
            ),
            exclusive=tuple(exclusive),
            pods=frozenset(pods),
        )
