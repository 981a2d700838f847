"""The verbs of a driver whose claims ask for functions: check, prepare, unprepare and clean around
the loader, the same for the cards of every maker.

The driver gives two callables, for reading a device's region and for making a container's edits.
Programming is long work, which runs beside the driver's other methods. A claim asks for a function
by an opaque configuration, of which the last that names a function counts, so that a claim
overrides its class:

    apiVersion: fpga.topobus.dev/v1
    kind: FunctionParameters
    function: matrix
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import Capabilities, DeviceDriver, HostServices, LongWork, PrepareContext
from topobus.formats.kubernetes.classic.classic_parameters import SHARING_KIND
from topobus.formats.kubernetes.shape import did_you_mean
from topobus.fpga.bitstreams.store import StoreEntry
from topobus.fpga.bitstreams.values import normal_id
from topobus.fpga.config import FunctionSettings
from topobus.fpga.function_loader import FunctionLoader
from topobus.fpga.host_services import FpgaServices
from topobus.fpga.region import Region
from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue, Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.outcome import Reason, Refusal, refuse

__all__ = ["FunctionHands", "LoadsFunctions"]

Edits = Mapping[str, ContainerEdits]
_FUNCTION_VERSION = "fpga.topobus.dev/v1"
_FUNCTION_KIND = "FunctionParameters"
_FIELDS = ("apiVersion", "kind", "function")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,26}|[0-9a-f]{32}|sha256:[0-9a-f]{64}")


class FunctionHands:
    """The part of a driver's verbs that concerns functions."""

    def __init__(self, region_of: Callable[[Tree, Device], Region]) -> None:
        """Read regions by `region_of`.

        Until `configure` there is no store, and nothing is programmed.
        """
        self._region_of = region_of
        self.loader = FunctionLoader(FunctionSettings(store=""))

    def configure(self, settings: FunctionSettings, *, can_program: bool) -> None:
        """Load functions by these settings.

        `can_program` is False also where the operator wants it and this machine cannot.
        """
        self.loader = FunctionLoader(settings, can_program=can_program)

    def attributes(self, tree: Tree, device: Device, *, id_name: str = "") -> Mapping[str, AttributeValue]:
        """Return attributes for selectors: which function is loaded, and which ones fit.

        Empty when the region cannot be read, a fault that `observe` reports.

        Shapes: id_name — the attribute for the loaded function's id, where the driver does not
        publish it itself.
        """
        try:
            region = self._region_of(tree, device)
            loaded = self.loader.loaded(region)
            return {**({id_name: loaded} if id_name and loaded else {}), **self.loader.attributes(region)}
        except HardwareError:
            return {}

    def check(self, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        """Refuse a configuration that cannot be read."""
        for device in devices:
            wanted = _read_function(context.config_of(device.name))
            if isinstance(wanted, Refusal):
                return wanted
        return None

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext, edits: Callable[[], Edits | Refusal]
    ) -> Edits | Refusal | LongWork:
        """Return the edits, at once where every region has the function asked for, else after the
        programming.
        """
        plans: list[tuple[Device, StoreEntry]] = []
        for device in devices:
            wanted = _read_function(context.config_of(device.name))
            if isinstance(wanted, Refusal):
                return wanted
            if not wanted:
                continue
            plan = self.loader.plan(self._region_of(tree, device), wanted, context)
            if isinstance(plan, Refusal):
                return plan
            if plan is not None:
                plans.append((device, plan))
        if not plans:
            return edits()

        def work() -> Edits | Refusal:
            for device, entry in plans:
                record = context.records.get(device.name, DeviceRecord())
                refusal = self.loader.load(self._looker(tree, device), entry, record)
                if refusal is not None:
                    return refusal
            return edits()

        what = ", ".join(f"{device.name} with {entry.name}" for device, entry in plans)
        return LongWork(limit_s=self.loader.settings.limit_s, what=f"programming {what}", work=work)

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Release each device by `FunctionLoader.undo`."""
        for device in devices:
            record = context.records.get(device.name)
            if record is not None and record.steps:
                self.loader.undo(self._looker(tree, device), record)

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Clean a device by `FunctionLoader.clean`.

        Errors: raises nothing; returns Refusal code region-unreadable when the region cannot be
        read.
        """
        try:
            return self.loader.clean(self._looker(tree, device), record)
        except HardwareError as err:
            return refuse("region-unreadable", err.message, device=device.name)

    def _looker(self, tree: Tree, device: Device) -> Callable[[], Region]:
        return lambda: self._region_of(tree.for_scan(), device)


class LoadsFunctions(DeviceDriver):
    """Base of the drivers of such cards: the verbs in which only the region differs."""

    _functions: FunctionHands

    @property
    def capabilities(self) -> Capabilities:
        """Add cleaning of a region after its user where cards may be programmed."""
        return replace(super().capabilities, cleans=self._functions.loader.can_program)

    def configure(self, host: HostServices) -> None:
        """Load functions from the operator's store."""
        super().configure(host)
        if isinstance(host, FpgaServices):
            self._functions.configure(host.functions, can_program=host.can_program)

    def check(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        """Refuse a configuration that cannot be read."""
        return self._functions.check(devices, context)

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Release the function, which stays loaded until the next user wants another.

        Programming that was interrupted is repeated.
        """
        self._functions.unprepare(tree, devices, context)

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Reset the region, and load the blank function where the store has one."""
        return self._functions.clean(tree, device, record)


def _read_function(config: Sequence[Mapping[str, Any]]) -> str | Refusal:
    """Find the function that a device is wanted with, or "" when none is asked for.

    Shapes: result — a name of the store, an id of 32 hexadecimal digits, or `sha256:` and a digest.
    Errors: raises nothing; returns a Refusal that names the field when the configuration is wrong.
    >>> _read_function([{"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": "matrix"}])
    'matrix'
    """
    function = ""
    reasons: list[Reason] = []
    for index, entry in enumerate(config):
        where = f"config[{index}]"
        kind = entry.get("kind")
        if kind == SHARING_KIND:
            continue
        if kind != _FUNCTION_KIND:
            wanted = f"{_FUNCTION_KIND} or {SHARING_KIND}{did_you_mean(str(kind), (_FUNCTION_KIND, SHARING_KIND))}"
            reasons.append(_wrong(f"{where}.kind", kind, wanted))
            continue
        if entry.get("apiVersion") != _FUNCTION_VERSION:
            reasons.append(_wrong(f"{where}.apiVersion", entry.get("apiVersion"), _FUNCTION_VERSION))
        reasons += [
            _wrong(f"{where}.{name}", entry[name], f"no such field{did_you_mean(str(name), _FIELDS)}")
            for name in entry
            if name not in _FIELDS
        ]
        word = entry.get("function")
        function = _word(word) if isinstance(word, str) else ""
        if not function:
            wanted = (
                "a name of the node's bitstream store, 32 hexadecimal digits of an AFU id or xclbin uuid, or "
                "sha256: and a digest"
            )
            reasons.append(_wrong(f"{where}.function", word, wanted))
    return Refusal(reasons=tuple(reasons)) if reasons else function


def _word(text: str) -> str:
    """Write the name of a function as the store does, or "" for text that is no such name."""
    word = text if text.startswith("sha256:") else normal_id(text)
    return word if _WORD.fullmatch(word) else ""


def _wrong(field: str, value: object, wanted: str) -> Reason:
    text = f"{field} is {str(value)[:80]!r}, wanted {wanted}"
    return Reason(code="function-config-invalid", message=text, facts={"field": field})
