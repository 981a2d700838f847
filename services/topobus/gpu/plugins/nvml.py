"""NVML behind one small class: identity, memory, NVLink peers and health of NVIDIA GPUs, where the vendor's library loads.

Only the `nvidia` plugin uses it. Whatever the library refuses is left out and said in `warnings`; the plugin then goes on with sysfs.

A session is good only for the driver that it was opened on. When the driver is reloaded or replaced, every question fails from then on, and a failed
question is no health: such GPUs are Unknown with the reason `unmonitored`, keep the identity that was told last, and the session is opened anew, the
library loaded from the disk again, with pauses that grow.
Source: NVML API reference; nvidia-ml-py (module `pynvml`), whose functions raise `NVMLError`.
"""

from __future__ import annotations

import _ctypes
import ctypes
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module, reload, resources
from pathlib import Path
from typing import Any

from msgspec import Struct

from topobus.devicekit.health import silence
from topobus.domain.device import AttributeValue
from topobus.domain.health import Dimension, HealthState, Observation, RecoveryAction
from topobus.domain.pci import PciAddress
from topobus.gpu.plugins.nvml_facts import gpu_facts
from topobus.sysfs.tree import Tree

__all__ = ["Nvml", "NvmlGpu", "NvmlUnavailable", "XidTable", "load_nvml"]

_LIBRARY = "libnvidia-ml.so.1"
# A silence of the health machine (devicekit.health): what was known of the GPU stands.
_UNMONITORED = "unmonitored"
# Events read at one look: a storm must not hold the look for ever; the rest comes with the next.
_MAX_EVENTS = 64
# Looks between two attempts to open a session anew, doubled with each failure: a look comes every second (health.poll_s), and a driver's update takes
# minutes.
_FIRST_PAUSE_LOOKS = 1
_LONGEST_PAUSE_LOOKS = 60
_ACTIONS = {
    1: RecoveryAction.RESET_DEVICE,
    2: RecoveryAction.REBOOT_NODE,
    3: RecoveryAction.WAIT,
    4: RecoveryAction.RESET_DEVICE,
    5: RecoveryAction.WAIT,
    6: RecoveryAction.RESET_DEVICE,
    7: RecoveryAction.REBOOT_NODE,
}


class NvmlUnavailable(Exception):
    """Raised when the library cannot be used at all; the message says why."""


class NvmlGpu(Struct, frozen=True, kw_only=True):
    """What NVML tells of one GPU; empty or 0 where it refuses."""

    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0
    minor: int | None = None
    links: Mapping[PciAddress, float] = {}
    """Peer GPU to NVLink bandwidth in Gbit/s one way, direct links; through switches every GPU on them is a peer."""
    switch_gbps: float = 0.0
    """Bandwidth into NVSwitches in Gbit/s one way; 0 without."""
    facts: Mapping[str, AttributeValue] = {}
    """Attributes for those who select a GPU."""


class XidTable:
    """Which Xid errors matter, as data."""

    def __init__(self) -> None:
        text = resources.files("topobus.gpu.plugins").joinpath("nvidia_xids.toml").read_text(encoding="utf-8")
        rows = tomllib.loads(text)
        self._ignored = frozenset(rows["ignored"])
        self._degraded = frozenset(rows["degraded"])
        self._reset = frozenset(rows["reset"])
        self._reboot = frozenset(rows["reboot"])

    def observation(self, xid: int) -> Observation | None:
        """Turn an Xid into an observation; None for those that say nothing of the GPU: an application's fault, or news.

        One that needs a reset or a reboot is sticky: nothing tells later that it happened.
        """
        if xid in self._ignored:
            return None
        action = RecoveryAction.RESET_DEVICE if xid in self._reset else RecoveryAction.WAIT
        if xid in self._reboot:
            action = RecoveryAction.REBOOT_NODE
        return Observation(
            dimension=Dimension.COMPUTE,
            state=HealthState.DEGRADED if xid in self._degraded else HealthState.UNHEALTHY,
            reason="xid",
            message=f"the driver reported Xid {xid}",
            evidence={"xid": str(xid)},
            action=action,
            is_sticky=action is not RecoveryAction.WAIT,
        )


def load_nvml(tree: Tree) -> Nvml:
    """Load and start the library: from `hardware.library_path` when given, else from the system.

    Errors: raises NvmlUnavailable with the reason.
    """
    try:
        # Untyped on purpose: the package brings no types, and it is looked for only when NVML may be asked.
        module: Any = import_module("pynvml")
    except ImportError as err:
        raise NvmlUnavailable("the Python package nvidia-ml-py is not installed: pip install 'topobus[gpu]'") from err
    _open(module, tree)
    return Nvml(module, reopen=partial(_reopen, tree=tree))


def _open(module: Any, tree: Tree) -> None:
    folder = tree.settings.library_path
    try:
        if folder:
            # pynvml looks its library up by name only; a library that it already holds is used as it is.
            module.nvmlLib = ctypes.CDLL(str(Path(folder) / _LIBRARY))
        module.nvmlInit()
    except (OSError, module.NVMLError) as err:
        raise NvmlUnavailable(f"{_LIBRARY} cannot be used: {err}") from err


def _reopen(module: Any, *, tree: Tree) -> Any:
    """Close a session and open another with the library as it lies on the disk now.

    The loader gives the same library again as long as somebody holds it, so it is closed first; pynvml keeps it, and pointers into it, in globals, which
    a reload of the module makes anew.
    Errors: raises NvmlUnavailable.
    """
    try:
        module.nvmlShutdown()
    except module.NVMLError:
        # A session that is void cannot be closed.
        pass
    library = module.nvmlLib
    module = reload(module)
    if library is not None:
        _ctypes.dlclose(library._handle)
    _open(module, tree)
    return module


class Nvml:
    """A started library. `module` has pynvml's functions; tests give their own, and `reopen`, which gives the module of a new session or raises NvmlUnavailable."""

    def __init__(self, module: Any, xids: XidTable | None = None, *, reopen: Callable[[Any], Any]) -> None:
        self._nvml = module
        self._reopen = reopen
        self._xids = xids or XidTable()
        self._handles: dict[PciAddress, Any] = {}
        self._described: dict[PciAddress, NvmlGpu] = {}
        """What was told last of each GPU, while it is on the bus: its identity when the session goes stale."""
        self._lost: set[PciAddress] = set()
        self._events: Any = None
        self._watched: set[PciAddress] = set()
        self._most_links: dict[PciAddress, int] = {}
        self._is_stale = False
        self._pause_looks = _FIRST_PAUSE_LOOKS
        self._looks_to_wait = 0
        self.warnings: list[str] = []
        """What the library refused since the last `describe`."""

    def describe(self, addresses: Sequence[PciAddress]) -> dict[PciAddress, NvmlGpu]:
        """Ask for identity, memory and links of these GPUs; one that NVML has never known is left out, one that it does not tell of now is as it was told last."""
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
            links, switch_gbps = self._links(handle, address)
            described[address] = NvmlGpu(
                uuid=str(self._try(self._nvml.nvmlDeviceGetUUID, handle) or ""),
                name=str(self._try(self._nvml.nvmlDeviceGetName, handle) or ""),
                memory_bytes=0 if memory is None else int(memory.total),
                minor=None if minor is None else int(minor),
                links=links,
                switch_gbps=switch_gbps,
                facts=gpu_facts(self._nvml, handle, self._quiet),
            )
            self._watch(address, handle)
        self._described = described
        self._lost &= set(addresses)
        return described

    def observe(self, addresses: Sequence[PciAddress]) -> dict[PciAddress, list[Observation]]:
        """Look at the health of these GPUs."""
        if self._is_stale:
            self._renew()
        seen: dict[PciAddress, list[Observation]] = {address: [] for address in addresses}
        for address, observation in self._xid_events():
            seen.setdefault(address, []).append(observation)
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
            # One GPU that fails alone may be ill; when none answers, it is the session.
            self._is_stale = True
        elif not self._is_stale:
            self._pause_looks = _FIRST_PAUSE_LOOKS
        return seen

    def _renew(self) -> None:
        """Open the session anew when its turn has come."""
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
        self._watched.clear()
        self._events = None
        for address in self._described:
            handle, _ = self._sign_of_life(address)
            if handle is not None:
                self._watch(address, handle)

    def _sign_of_life(self, address: PciAddress) -> tuple[Any | None, Observation | None]:
        """Ask a GPU for a sign of life: its handle when it gives one, else what is wrong; neither for one that NVML has never known.

        The PCI address may come from the library's memory; how much memory is in use comes from the driver.
        """
        nvml = self._nvml
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
            is_unknown = err.value == nvml.NVML_ERROR_NOT_FOUND and address not in self._described and address not in self._lost
            if is_unknown:
                self._warn(f"NVML: {err}")
                return None, None
            return None, self._trouble(address, err)
        self._lost.discard(address)
        return handle, None

    def _trouble(self, address: PciAddress, err: Any) -> Observation:
        nvml = self._nvml
        if err.value == nvml.NVML_ERROR_GPU_IS_LOST or (address in self._lost and err.value == nvml.NVML_ERROR_NOT_FOUND):
            # A lost GPU is not found later: still the same fault.
            self._lost.add(address)
            return _observation(Dimension.PRESENCE, HealthState.UNHEALTHY, "gpu-lost", str(err), RecoveryAction.REBOOT_NODE)
        if err.value == nvml.NVML_ERROR_RESET_REQUIRED:
            return _observation(Dimension.DRIVER, HealthState.UNHEALTHY, "recovery-advised", str(err), RecoveryAction.RESET_DEVICE)
        return silence(_UNMONITORED, f"NVML does not answer for the GPU: {err}")

    def _signs(self, address: PciAddress, handle: Any) -> list[Observation]:
        """Look at what a GPU that answers tells of its health."""
        checks = (self._recovery(handle), self._memory(handle), self._thermal(handle), self._nvlink(address, handle))
        return [observation for observation in checks if observation is not None]

    def _recovery(self, handle: Any) -> Observation | None:
        advice = self._field(handle, self._nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        if not advice:
            return None
        text = f"the driver advises recovery action {advice}"
        action = _ACTIONS.get(advice, RecoveryAction.RESET_DEVICE)
        return _observation(Dimension.DRIVER, HealthState.UNHEALTHY, "recovery-advised", text, action, value=str(advice))

    def _memory(self, handle: Any) -> Observation | None:
        rows = self._quiet(self._nvml.nvmlDeviceGetRemappedRows, handle)
        if rows is None:
            return None
        _, uncorrected, is_pending, has_failed = rows
        if has_failed:
            text = "the GPU has no spare memory row left to remap to"
            return _observation(
                Dimension.MEMORY,
                HealthState.UNHEALTHY,
                "row-remap-failed",
                text,
                RecoveryAction.REPLACE,
                value=str(uncorrected),
                is_sticky=True,
            )
        if is_pending:
            text = "a memory row waits for a reset to be remapped"
            return _observation(
                Dimension.MEMORY, HealthState.DEGRADED, "row-remap-pending", text, RecoveryAction.RESET_DEVICE, value=str(uncorrected)
            )
        return None

    def _thermal(self, handle: Any) -> Observation | None:
        reasons = self._quiet(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None or not reasons & self._nvml.nvmlClocksEventReasonHwThermalSlowdown:
            return None
        text = "clocks are lowered because the GPU is too hot"
        return _observation(Dimension.THERMAL, HealthState.DEGRADED, "thermal-slowdown", text, RecoveryAction.WAIT, value=hex(reasons))

    def _nvlink(self, address: PciAddress, handle: Any) -> Observation | None:
        active = len(self._active_links(handle))
        most = self._most_links[address] = max(active, self._most_links.get(address, 0))
        if active == most:
            return None
        text = f"{active} NVLinks are up, {most} were before"
        return _observation(Dimension.LINK, HealthState.DEGRADED, "nvlink-down", text, RecoveryAction.RESET_DEVICE, value=str(active))

    def _xid_events(self) -> list[tuple[PciAddress, Observation]]:
        seen: list[tuple[PciAddress, Observation]] = []
        for _ in range(_MAX_EVENTS if self._events is not None else 0):
            # 0 ms: only what has come already; a timeout is the ordinary answer.
            event = self._quiet(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                break
            address = self._pci(self._nvml.nvmlDeviceGetPciInfo, event.device)
            observation = self._xids.observation(int(event.eventData))
            if address is not None and observation is not None:
                seen.append((address, observation))
        return seen

    def _links(self, handle: Any, address: PciAddress) -> tuple[dict[PciAddress, float], float]:
        links: dict[PciAddress, float] = {}
        switch_gbps = 0.0
        active = self._active_links(handle)
        if not active:
            return links, switch_gbps
        # Megabytes a second and link (NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON).
        one_gbps = (self._field(handle, self._nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON) or 0) * 8 / 1000
        for link in active:
            kind = self._quiet(self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            if kind == self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                switch_gbps += one_gbps
                continue
            peer = self._pci(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            if peer is not None and peer != address:
                links[peer] = links.get(peer, 0.0) + one_gbps
        return links, switch_gbps

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
        # Not again, even when refused: a GPU that cannot be watched will not learn it.
        self._watched.add(address)

    def _field(self, handle: Any, field: int) -> int | None:
        values = self._quiet(self._nvml.nvmlDeviceGetFieldValues, handle, [field])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal)

    def _pci(self, ask: Callable[..., Any], *arguments: Any) -> PciAddress | None:
        """Ask for a PCI address; None when refused, or when it is none that we can read."""
        info = self._quiet(ask, *arguments)
        if info is None:
            return None
        text = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
        try:
            return PciAddress.parse(text)
        except ValueError:
            return None

    def _try(self, ask: Callable[..., Any], *arguments: Any) -> Any | None:
        """Ask what every GPU should tell; a refusal becomes a warning."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as err:
            self._warn(f"NVML: {err}")
            return None

    def _quiet(self, ask: Callable[..., Any], *arguments: Any) -> Any | None:
        """Ask what many GPUs and drivers do not support: a refusal is ordinary."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def _observation(
    dimension: Dimension,
    state: HealthState,
    reason: str,
    message: str,
    action: RecoveryAction,
    *,
    value: str = "",
    is_sticky: bool = False,
) -> Observation:
    evidence = {"source": "nvml", **({"value": value} if value else {})}
    return Observation(
        dimension=dimension, state=state, reason=reason, message=message, evidence=evidence, action=action, is_sticky=is_sticky
    )
