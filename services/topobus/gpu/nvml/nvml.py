"""Wraps NVML in one class: identity, memory, NVLink peers and health of NVIDIA GPUs, where the
vendor's library loads.

Only the `nvidia` plugin uses it. A query that the library refuses is left out and named in
`warnings`, and the plugin then uses sysfs alone.

A session is valid only for the driver that it was opened on. After the driver was reloaded or
replaced, every query fails, and a failed query is no sign of bad health. Such GPUs are Unknown with
the reason `unmonitored` and keep their last identity. The session is reopened after pauses that
grow, with the library loaded from the disk again.
Source: NVML API reference; nvidia-ml-py (module `pynvml`), whose functions raise `NVMLError`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from topobus.devicekit.counter_rises import CounterRises
from topobus.engine.health.health_machine import silence
from topobus.gpu.mig.nvml_mig import read_mig, read_profiles
from topobus.gpu.mig.values import MigGpu, MigProfile
from topobus.gpu.nvml.instance_readings import InstanceReadings
from topobus.gpu.nvml.nvml_facts import (
    NvmlUse,
    gpu_facts,
    gpu_readings,
    read_use,
    read_use_of_instance,
)
from topobus.gpu.nvml.nvml_library import NvmlUnavailable, open_library, reopen_library
from topobus.gpu.nvml.nvml_signs import (
    ecc_sign,
    fabric_sign,
    field_of,
    link_error_sign,
    memory_sign,
    nvml_sign,
    recovery_sign,
    retirement_sign,
    thermal_sign,
)
from topobus.gpu.nvml.nvml_xids import XidTable
from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue
from topobus.values.health import Observation
from topobus.values.pci import PciAddress
from topobus.values.readings import Reading

__all__ = ["Nvml", "NvmlGpu", "NvmlSilent", "load_nvml"]

_T = TypeVar("_T")
# What an event has for GI and CI when it is about no instance (NVML
# API reference, nvmlEventData_t).
_NO_INSTANCE = 0xFFFFFFFF

# A reason of silence in the health machine (devicekit.health): the last known health of the GPU
# stays.
_UNMONITORED = "unmonitored"
# Events read at one look, so that a storm of them cannot block it. The next look reads the rest.
_MAX_EVENTS = 64
# Looks between two attempts to reopen a session, doubled with each failure. A look comes every
# second (health.poll_s), and a driver's update takes minutes.
_FIRST_PAUSE_LOOKS = 1
_LONGEST_PAUSE_LOOKS = 60


class NvmlGpu(Struct, frozen=True, kw_only=True):
    """NVML's facts of one GPU, empty or 0 where it refuses a query."""

    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0
    minor: int | None = None
    links: Mapping[PciAddress, float] = {}
    """Peer GPU to NVLink bandwidth in Gbit/s one way, direct links; through switches every GPU on
    them is a peer."""
    switch_gbps: float = 0.0
    """Bandwidth into NVSwitches in Gbit/s one way; 0 without."""
    counts: Mapping[PciAddress, int] = {}
    """Peer GPU to how many of its direct links lead there."""
    switch_count: int = 0
    """How many links lead into NVSwitches."""
    facts: Mapping[str, AttributeValue] = {}
    """Attributes for those who select a GPU."""
    mig: MigGpu = MigGpu()
    """Its instances, when it is in MIG mode."""


class NvmlSilent(Exception):
    """Raised when NVML does not answer for a GPU, or refuses. The message has the reason."""

    def __init__(self, message: str, *, is_in_use: bool = False, has_no_room: bool = False) -> None:
        super().__init__(message)
        self.is_in_use = is_in_use
        """A program uses what was to be destroyed."""
        self.has_no_room = has_no_room
        """What was to be made does not fit; nothing was made."""


def load_nvml(tree: Tree) -> Nvml:
    """Load and start the library: from `hardware.library_path` when that is set, else from the
    system.

    Errors: raises NvmlUnavailable with the reason.
    """
    return Nvml(open_library(tree), reopen=partial(reopen_library, tree=tree))


class Nvml:
    """A started library. `module` has pynvml's functions.

    Tests give their own module, and a `reopen`, which returns the module of a new session or raises
    NvmlUnavailable.
    """

    def __init__(self, module: Any, *, reopen: Callable[[Any], Any]) -> None:
        self._nvml = module
        self._reopen = reopen
        self._xids = XidTable()
        self._handles: dict[PciAddress, Any] = {}
        self._described: dict[PciAddress, NvmlGpu] = {}
        """The last answer about each GPU that is on the bus: its identity when the session goes
        stale."""
        self._lost: set[PciAddress] = set()
        self._events: Any = None
        self._watched: set[PciAddress] = set()
        self._counters = CounterRises()
        self._instances = InstanceReadings()
        self._most_links: dict[PciAddress, int] = {}
        self._is_stale = False
        # A GPU is cleaned in its own thread, and reopening a session unloads the library under any
        # thread that uses it.
        self._turn = threading.RLock()
        self._away: frozenset[PciAddress] = frozenset()
        self._pause_looks = _FIRST_PAUSE_LOOKS
        self._looks_to_wait = 0
        self._profiles: dict[PciAddress, tuple[MigProfile, ...]] = {}
        """The sizes of MIG instances that a GPU offers. They take dozens of calls to read and never
        change."""
        self.instance_faults: dict[PciAddress, list[tuple[int, Observation]]] = {}
        """What the last `observe` heard of single MIG instances, by the GPU instance's id."""
        self.warnings: list[str] = []
        """What the library refused since the last `describe`."""

    def describe(self, addresses: Sequence[PciAddress]) -> dict[PciAddress, NvmlGpu]:
        """Ask for identity, memory and links of these GPUs.

        A GPU that NVML has never known is left out. A GPU that it does not answer for now keeps its
        last description.
        """
        with self._turn:
            return self._describe(addresses)

    def observe(self, addresses: Sequence[PciAddress]) -> dict[PciAddress, list[Observation]]:
        """Observe the health of these GPUs."""
        with self._turn:
            return self._observe(addresses)

    def give_away(self, address: PciAddress, *, is_away: bool) -> None:
        """Stop using a GPU, or use it again.

        What is open on it is closed with the session, and a new session begins.
        """
        with self._turn:
            self._away = self._away | {address} if is_away else self._away - {address}
            self._is_stale, self._looks_to_wait = True, 0
            self._renew()

    def use(self, address: PciAddress, uuid: str = "") -> NvmlUse | str:
        """Ask which processes use a GPU, or the MIG instance of it with a UUID, and how much of its
        memory.

        Errors: raises nothing; returns the reason as text when NVML does not answer.
        """
        try:
            return self.with_gpu(
                address,
                lambda library, handle: read_use_of_instance(library, uuid) if uuid else read_use(library, handle),
            )
        except NvmlSilent as err:
            return str(err)

    def readings(self, address: PciAddress, uuid: str = "") -> list[Reading]:
        """Read what people graph of a GPU, or of the MIG instance of it with a UUID.

        Empty while NVML does not answer.
        """
        quiet = self._quiet
        with self._turn:
            handle = self._handles.get(address)
            if handle is None or self._is_stale:
                return []
            if not uuid:
                return gpu_readings(self._nvml, handle, quiet)
            return self._instances.read(self._nvml, handle, address, uuid, quiet)

    def mig(self, address: PciAddress) -> MigGpu:
        """Ask a GPU for its MIG instances as they are now.

        Errors: raises NvmlSilent when NVML does not answer.
        """
        return self.with_gpu(address, lambda _, handle: self._mig(address, handle))

    def with_gpu(self, address: PciAddress, act: Callable[[Any, Any], _T]) -> _T:
        """Call `act` with the module and a GPU's handle, while no other thread uses the session.

        Errors: raises NvmlSilent, also for an NVMLError of `act`.
        """
        with self._turn:
            handle, trouble = self._sign_of_life(address)
            if handle is None:
                raise NvmlSilent(trouble.message if trouble is not None else f"NVML does not know {address}")
            try:
                return act(self._nvml, handle)
            except self._nvml.NVMLError as err:
                in_use, no_room = self._nvml.NVML_ERROR_IN_USE, self._nvml.NVML_ERROR_INSUFFICIENT_RESOURCES
                text = f"NVML refuses for {address}: {err}"
                raise NvmlSilent(text, is_in_use=err.value == in_use, has_no_room=err.value == no_room) from err

    def _describe(self, addresses: Sequence[PciAddress]) -> dict[PciAddress, NvmlGpu]:
        self.warnings = []
        described: dict[PciAddress, NvmlGpu] = {}
        for address in addresses:
            handle, trouble = self._sign_of_life(address)
            if handle is None:
                if trouble is not None:
                    self._warn(f"NVML: {address}: {trouble.message}")
                if address in self._described:
                    described[address] = self._described[address]
                continue
            memory = self._try(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            minor = self._try(self._nvml.nvmlDeviceGetMinorNumber, handle)
            links, counts, switch_gbps, switch_count = self._links(handle, address)
            facts = gpu_facts(self._nvml, handle, self._quiet)
            described[address] = NvmlGpu(
                uuid=str(self._try(self._nvml.nvmlDeviceGetUUID, handle) or ""),
                name=str(self._try(self._nvml.nvmlDeviceGetName, handle) or ""),
                memory_bytes=0 if memory is None else int(memory.total),
                minor=None if minor is None else int(minor),
                links=links,
                switch_gbps=switch_gbps,
                counts=counts,
                switch_count=switch_count,
                facts=facts,
                mig=self._try_mig(address, handle) if facts.get("migEnabled") else MigGpu(),
            )
            self._watch(address, handle)
        self._described = described
        self._lost &= set(addresses)
        return described

    def _try_mig(self, address: PciAddress, handle: Any) -> MigGpu:
        try:
            return self._mig(address, handle)
        except self._nvml.NVMLError as err:
            return MigGpu(fault=f"NVML does not report its instances: {err}")

    def _mig(self, address: PciAddress, handle: Any) -> MigGpu:
        if not self._nvml.nvmlDeviceGetMigMode(handle)[0]:
            return MigGpu()
        if not self._profiles.get(address):
            self._profiles[address] = read_profiles(self._nvml, handle)
        return read_mig(self._nvml, handle, self._profiles[address])

    def _observe(self, addresses: Sequence[PciAddress]) -> dict[PciAddress, list[Observation]]:
        if self._is_stale:
            self._renew()
        seen: dict[PciAddress, list[Observation]] = {address: [] for address in addresses}
        self.instance_faults = {}
        for address, gi, observation in self._xid_events():
            if gi is None:
                seen.setdefault(address, []).append(observation)
            else:
                self.instance_faults.setdefault(address, []).append((gi, observation))
        asked = unmonitored = 0
        for address in addresses:
            handle, trouble = self._sign_of_life(address)
            if handle is not None:
                seen[address] += self._signs(address, handle)
            elif trouble is not None:
                seen[address].append(trouble)
            asked += handle is not None or trouble is not None
            unmonitored += trouble is not None and trouble.reason == _UNMONITORED
        if asked and unmonitored == asked:
            # One GPU that fails alone may be ill. When none answers, the session is no longer
            # valid.
            self._is_stale = True
        elif not self._is_stale:
            self._pause_looks = _FIRST_PAUSE_LOOKS
        return seen

    def _renew(self) -> None:
        """Reopen the session when its pause is over."""
        if self._looks_to_wait > 0:
            self._looks_to_wait -= 1
            return
        self._looks_to_wait = self._pause_looks
        self._pause_looks = min(2 * self._pause_looks, _LONGEST_PAUSE_LOOKS)
        try:
            self._nvml = self._reopen(self._nvml)
        except NvmlUnavailable as err:
            self._warn(f"{err}; GPUs are not monitored")
            return
        self._is_stale = False
        self._handles.clear()
        # Its samples are gone with the library that made them.
        self._instances = InstanceReadings()
        self._profiles.clear()
        self._watched.clear()
        self._events = None
        for address in self._described:
            handle, _ = self._sign_of_life(address)
            if handle is not None:
                self._watch(address, handle)

    def _sign_of_life(self, address: PciAddress) -> tuple[Any | None, Observation | None]:
        """Check that a GPU answers: its handle when it does, else its fault.

        Neither for a GPU that NVML has never known. The PCI address may come from the library's
        memory, so the memory in use is asked for as well, which comes from the driver.
        """
        nvml = self._nvml
        if address in self._away:
            return None, None
        try:
            if address not in self._handles:
                self._handles[address] = nvml.nvmlDeviceGetHandleByPciBusId(str(address))
            handle = self._handles[address]
            for question in (nvml.nvmlDeviceGetPciInfo, nvml.nvmlDeviceGetMemoryInfo):
                try:
                    question(handle)
                except nvml.NVMLError as err:
                    if err.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
                        raise
        except nvml.NVMLError as err:
            self._handles.pop(address, None)
            self._watched.discard(address)
            is_unknown = (
                err.value == nvml.NVML_ERROR_NOT_FOUND and address not in self._described and address not in self._lost
            )
            if is_unknown:
                self._warn(f"NVML: {err}")
                return None, None
            return None, self._trouble(address, err)
        self._lost.discard(address)
        return handle, None

    def _trouble(self, address: PciAddress, err: Any) -> Observation:
        nvml = self._nvml
        if err.value == nvml.NVML_ERROR_GPU_IS_LOST or (
            address in self._lost and err.value == nvml.NVML_ERROR_NOT_FOUND
        ):
            # A lost GPU is not found by later queries, which is still the same fault.
            self._lost.add(address)
            return nvml_sign("gpu-lost", str(err))
        if err.value == nvml.NVML_ERROR_RESET_REQUIRED:
            return nvml_sign("recovery-advised", str(err))
        return silence(_UNMONITORED, f"NVML does not answer for the GPU: {err}")

    def _signs(self, address: PciAddress, handle: Any) -> list[Observation]:
        """Read the health of a GPU that answers."""
        library, ask = self._nvml, self._quiet
        checks = (
            recovery_sign(library, handle, ask),
            memory_sign(library, handle, ask),
            thermal_sign(library, handle, ask),
            ecc_sign(library, handle, ask, self._counters, str(address)),
            retirement_sign(library, handle, ask),
            *self._nvlink(address, handle),
            fabric_sign(library, handle, ask),
        )
        return [observation for observation in checks if observation is not None]

    def _nvlink(self, address: PciAddress, handle: Any) -> list[Observation | None]:
        links = self._active_links(handle)
        active = len(links)
        most = self._most_links[address] = max(active, self._most_links.get(address, 0))
        errors = link_error_sign(self._nvml, handle, self._quiet, self._counters, str(address), links)
        if active == most:
            return [errors]
        text = f"{active} NVLinks are up, {most} were before"
        down = nvml_sign("nvlink-down", text, str(active))
        return [down, errors]

    def _xid_events(self) -> list[tuple[PciAddress, int | None, Observation]]:
        """Read the events that have come: the GPU, the GPU instance where the fault concerns that
        one alone, and the observation.
        """
        seen: list[tuple[PciAddress, int | None, Observation]] = []
        for _ in range(_MAX_EVENTS if self._events is not None else 0):
            # 0 ms: read only what has come already. A timeout is the ordinary answer.
            event = self._quiet(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                break
            address = self._pci(self._nvml.nvmlDeviceGetPciInfo, event.device)
            xid = int(event.eventData)
            observation = self._xids.observation(xid)
            is_whole = event.gpuInstanceId == _NO_INSTANCE or self._xids.is_of_whole_gpu(xid)
            if address is not None and observation is not None:
                seen.append((address, None if is_whole else int(event.gpuInstanceId), observation))
        return seen

    def _links(
        self, handle: Any, address: PciAddress
    ) -> tuple[dict[PciAddress, float], dict[PciAddress, int], float, int]:
        """Return bandwidth and number of the links to each direct peer, and of those into
        switches.
        """
        links: dict[PciAddress, float] = {}
        counts: dict[PciAddress, int] = {}
        switch_gbps, switch_count = 0.0, 0
        active = self._active_links(handle)
        if not active:
            return links, counts, switch_gbps, switch_count
        # Megabytes per second and link (NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON).
        speed_mbytes = field_of(self._nvml, handle, self._nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, self._quiet)
        link_gbps = (speed_mbytes or 0) * 8 / 1000
        for link in active:
            kind = self._quiet(self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            if kind == self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                switch_gbps += link_gbps
                switch_count += 1
                continue
            peer = self._pci(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            if peer is not None and peer != address:
                links[peer] = links.get(peer, 0.0) + link_gbps
                counts[peer] = counts.get(peer, 0) + 1
        return links, counts, switch_gbps, switch_count

    def _active_links(self, handle: Any) -> list[int]:
        links = range(self._nvml.NVML_NVLINK_MAX_LINKS)
        return [link for link in links if self._quiet(self._nvml.nvmlDeviceGetNvLinkState, handle, link)]

    def _watch(self, address: PciAddress, handle: Any) -> None:
        if address in self._watched:
            return
        if self._events is None:
            self._events = self._try(self._nvml.nvmlEventSetCreate)
        if self._events is None:
            return
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)
        except self._nvml.NVMLError as err:
            self._warn(f"{address}: Xid errors cannot be watched: {err}")
        # Asked only once, even when refused: a GPU that cannot be watched now will not be watchable
        # later.
        self._watched.add(address)

    def _pci(self, ask: Callable[..., Any], *arguments: Any) -> PciAddress | None:
        """Ask for a PCI address, or return None when NVML refuses or the address cannot be read."""
        info = self._quiet(ask, *arguments)
        if info is None:
            return None
        text = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
        try:
            return PciAddress.parse(text)
        except ValueError:
            return None

    def _try(self, ask: Callable[..., Any], *arguments: Any) -> Any | None:
        """Call a query that every GPU should answer. A refusal becomes a warning."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as err:
            self._warn(f"NVML: {err}")
            return None

    def _quiet(self, ask: Callable[..., Any], *arguments: Any) -> Any | None:
        """Call a query that many GPUs and drivers do not support. A refusal is ordinary."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
