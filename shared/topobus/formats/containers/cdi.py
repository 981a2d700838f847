"""CDI files as values: the model, its rules, the lowest version that can express it, JSON and back.

Pure: `cdi_files` writes the bytes. The lowest version that can express the file is used, because
older runtimes refuse newer ones. Annotations of a container edit have no CDI form (CDI's own
annotations describe the file), so a container gets them only through the device plugin API. Source:
CDI spec 1.1.0 and the reference library's checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from topobus.formats.first_read import ready
from topobus.values.edits import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from topobus.values.errors import ContractError

__all__ = [
    "HOOK_NAMES",
    "NO_ACCESS",
    "VERSIONS",
    "CdiDevice",
    "CdiSpec",
    "file_name",
    "lowest_version",
    "parse",
    "problems",
    "read_value",
    "render",
]

E = TypeVar("E")

HOOK_NAMES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
NO_ACCESS = "none"
"""Permissions of a node that is there and may not be opened."""
VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_KIND_PART = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
# Fields of other types than text.
_NUMBERS = ("major", "minor", "fileMode", "uid", "gid", "timeout", "additionalGids")
_FLAGS = ("enableMonitoring",)
# Far beyond any real file: NVIDIA's for sixteen GPUs has some thousands.
_MOST_VALUES = 100_000
# A class longer than this is refused by the reference library (a label of the annotation form).
_CLASS_LIMIT = 63


class CdiDevice(Struct, frozen=True, kw_only=True):
    """One device of a file."""

    name: str
    edits: ContainerEdits


class CdiSpec(Struct, frozen=True, kw_only=True):
    """One file: devices of one kind, and the edits that come with any of them."""

    vendor: str
    device_class: str
    devices: tuple[CdiDevice, ...]
    common: ContainerEdits = ContainerEdits()

    @property
    def kind(self) -> str:
        """Vendor and class: `topobus.dev/gpu`."""
        return f"{self.vendor}/{self.device_class}"

    def qualified_name(self, device: str) -> str:
        """Name by which a runtime finds a device: `topobus.dev/gpu=gpu-0`."""
        return f"{self.kind}={device}"


class _Edits(Struct, rename="camel", omit_defaults=True):
    env: list[str] = []
    device_nodes: list[_Node] = []
    net_devices: list[_NetDevice] = []
    hooks: list[_Hook] = []
    mounts: list[_Mount] = []
    intel_rdt: _IntelRdt | None = None
    additional_gids: list[int] = []


# The wire form of an edit has the attributes of its value and CDI's names for them.


class _Node(Struct, rename="camel", omit_defaults=True):
    path: str
    host_path: str = ""
    kind: str = msgspec.field(name="type", default="")
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


class _NetDevice(Struct):
    host_name: str = msgspec.field(name="hostInterfaceName")
    name: str


class _Hook(Struct, omit_defaults=True):
    name: str = msgspec.field(name="hookName")
    path: str
    args: list[str] = []
    env: list[str] = []
    timeout_s: int | None = msgspec.field(name="timeout", default=None)


class _Mount(Struct, rename="camel", omit_defaults=True):
    host_path: str
    container_path: str
    options: list[str] = []
    kind: str = msgspec.field(name="type", default="")


class _IntelRdt(Struct, omit_defaults=True):
    clos_id: str = msgspec.field(name="closID", default="")
    l3_cache_schema: str = msgspec.field(name="l3CacheSchema", default="")
    mem_bw_schema: str = msgspec.field(name="memBwSchema", default="")
    schemata: list[str] = []
    enable_monitoring: bool = msgspec.field(name="enableMonitoring", default=False)


class _Device(Struct, rename="camel"):
    name: str
    container_edits: _Edits = msgspec.field(default_factory=_Edits)


class _File(Struct, rename="camel", omit_defaults=True):
    cdi_version: str
    kind: str
    devices: list[_Device]
    container_edits: _Edits = msgspec.field(default_factory=_Edits)


def problems(spec: CdiSpec) -> tuple[str, ...]:
    """List what a runtime would refuse, a sentence each. Empty when the file is good.

    >>> problems(CdiSpec(vendor="topobus.dev", device_class="gpu", devices=()))
    ('topobus.dev/gpu has no devices',)
    """
    lines: list[str] = []
    if not _KIND_PART.fullmatch(spec.vendor):
        lines.append(
            f"vendor {spec.vendor!r} must begin with a letter, end with a letter or digit, and hold letters, "
            "digits, '-', '_' and '.'"
        )
    if not _KIND_PART.fullmatch(spec.device_class) or len(spec.device_class) > _CLASS_LIMIT:
        lines.append(
            f"class {spec.device_class!r} must begin with a letter, end with a letter or digit, and have at "
            f"most {_CLASS_LIMIT} characters"
        )
    if not spec.devices:
        lines.append(f"{spec.kind} has no devices")
    names = [device.name for device in spec.devices]
    lines += [f"device {name} is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    for device in spec.devices:
        if not _DEVICE_NAME.fullmatch(device.name):
            lines.append(
                f"device name {device.name!r} must begin and end with a letter or digit and hold letters, "
                "digits, '-', '_', '.' and ':'"
            )
        if device.edits.is_empty:
            lines.append(f"device {device.name} has no edits")
        lines += _edit_problems(f"device {device.name}", device.edits)
    return (*lines, *_edit_problems("the common edits", spec.common))


def lowest_version(spec: CdiSpec) -> str:
    """Find the lowest version that can express all of this.

    >>> node = DeviceNode(path="/dev/a", host_path="/dev/b")
    >>> lowest_version(CdiSpec(vendor="v", device_class="c", devices=(CdiDevice(name="a", edits=ContainerEdits(device_nodes=(node,))),)))
    '0.5.0'
    """  # noqa: E501
    edits = (spec.common, *(device.edits for device in spec.devices))
    needed = [VERSIONS[0]]
    if any(
        edit.net_devices or (edit.intel_rdt and (edit.intel_rdt.schemata or edit.intel_rdt.enable_monitoring))
        for edit in edits
    ):
        needed.append("1.1.0")
    if any(edit.additional_gids or edit.intel_rdt for edit in edits):
        needed.append("0.7.0")
    if "." in spec.device_class:
        needed.append("0.6.0")
    has_other_host_path = any(node.host_path not in ("", node.path) for edit in edits for node in edit.device_nodes)
    if has_other_host_path or any(device.name[:1].isdigit() for device in spec.devices):
        needed.append("0.5.0")
    if any(mount.kind for edit in edits for mount in edit.mounts):
        needed.append("0.4.0")
    return max(needed, key=VERSIONS.index)


def render(spec: CdiSpec) -> bytes:
    """Write the file's JSON, the same bytes for the same value.

    Errors: raises ContractError with every problem when a runtime would refuse it.
    """
    refusals = (*problems(spec), *_start_problems(spec))
    if refusals:
        raise ContractError(
            f"CDI file of {spec.kind}: {'; '.join(refusals)}", next_step="mend the driver that made these edits"
        )
    file = _File(
        cdi_version=lowest_version(spec),
        kind=spec.kind,
        devices=[_Device(name=device.name, container_edits=_to_wire(device.edits)) for device in spec.devices],
        container_edits=_to_wire(spec.common),
    )
    plain: dict[str, Any] = msgspec.to_builtins(file)
    if not plain["containerEdits"]:
        # No edits at all, and some readers take an empty object for a mistake.
        del plain["containerEdits"]
    return (json.dumps(plain, indent=2) + "\n").encode()


def parse(data: bytes, *, where: str = "CDI file") -> CdiSpec:
    """Read a file as runtimes do: ignore unknown fields, and accept a version higher than those
    that we know.

    Errors: raises ContractError that names the place, for bytes that are no CDI file and for a file
            that a runtime would refuse. Source: CDI pkg/cdi/spec.go, container-edits.go.
    """
    try:
        file = msgspec.json.decode(data, type=ready(_File))
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ContractError(f"{where}: not a CDI file that we can read: {err}") from err
    return _checked(file, where)


def read_value(value: object, *, where: str) -> CdiSpec:
    """Read what a YAML or JSON reader made of a file of somebody else, as runtimes do: a number
    where text is wanted is its text (`name: 0`), null is absent.

    Errors: as `parse`. Also ContractError for a file that is empty, or that anchors make enormous.
    """
    if value is None:
        raise ContractError(f"{where}: it is empty, wanted a CDI file with cdiVersion, kind and devices")
    try:
        file = msgspec.convert(_plain(value, "", [_MOST_VALUES]), type=ready(_File))
    except (msgspec.MsgspecError, RecursionError) as err:
        raise ContractError(f"{where}: not a CDI file that we can read: {err}") from err
    except _TooManyValuesError as err:
        raise ContractError(f"{where}: it has more than {_MOST_VALUES} values") from err
    return _checked(file, where)


class _TooManyValuesError(Exception):
    """Raised inside this module for a file that anchors make enormous."""


def _plain(value: object, key: str, left: list[int]) -> object:
    """Return a value with text where the field wants text.

    Shapes: left — how many more values may come.
    """
    left[0] -= 1
    if left[0] < 0:
        raise _TooManyValuesError
    if isinstance(value, dict):
        return {str(name): _plain(part, str(name), left) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_plain(part, key, left) for part in value]
    if isinstance(value, bool):
        return value if key in _FLAGS else str(value).lower()
    return value if value is None or isinstance(value, str) or key in _NUMBERS else str(value)


def _checked(file: _File, where: str) -> CdiSpec:
    version = _numbers(file.cdi_version)
    if version is None:
        raise ContractError(f"{where}: cdiVersion is {file.cdi_version!r}, wanted three numbers such as {VERSIONS[-1]}")
    vendor, _, device_class = file.kind.partition("/")
    spec = CdiSpec(
        vendor=vendor,
        device_class=device_class,
        devices=tuple(CdiDevice(name=device.name, edits=_from_wire(device.container_edits)) for device in file.devices),
        common=_from_wire(file.container_edits),
    )
    found_problems = list(problems(spec))
    if version < (_numbers(lowest_version(spec)) or ()):
        found_problems.append(f"cdiVersion {file.cdi_version} is too low, wanted {lowest_version(spec)}")
    if found_problems:
        raise ContractError(f"{where}: {'; '.join(found_problems)}")
    return spec


def file_name(vendor: str, device_class: str, transient_id: str = "") -> str:
    """Name the file: `<vendor>-<class>.json`, and with `_<id>` for a file that lives as long as a
    claim.

    >>> file_name("topobus.dev", "gpu", "3cec")
    'topobus.dev-gpu_3cec.json'
    """
    tail = f"_{transient_id}" if transient_id else ""
    return f"{vendor}-{device_class}{tail}.json".replace("/", "-")


def _edit_problems(where: str, edits: ContainerEdits) -> Iterable[str]:
    for key in edits.env:
        if not key or "=" in key:
            yield f"{where}: environment variable {key!r} needs a name without '='"
    for node in edits.device_nodes:
        if not node.path:
            yield f"{where}: a device node without a path"
        if node.permissions != NO_ACCESS and not set(node.permissions) <= set("rwm"):
            yield (
                f"{where}: device node {node.path} has permissions {node.permissions!r}, wanted letters of 'rwm', "
                f"or {NO_ACCESS}"
            )
        if node.kind not in ("", "b", "c", "u", "p"):
            yield f"{where}: device node {node.path} has type {node.kind!r}, wanted b, c, u or p"
    for hook in edits.hooks:
        if hook.name not in HOOK_NAMES:
            yield f"{where}: hook {hook.name!r} is none of {', '.join(HOOK_NAMES)}"
        if not hook.path:
            yield f"{where}: hook {hook.name} without a path"
        if any("=" not in variable or variable.startswith("=") for variable in hook.env):
            yield f"{where}: hook {hook.path} has an environment variable without name and value"
    for what, interfaces in (
        ("host interface", [device.host_name for device in edits.net_devices]),
        ("name", [device.name for device in edits.net_devices]),
    ):
        yield from (f"{where}: network device without a {what}" for interface in interfaces if not interface)
        yield from (
            f"{where}: {what} {interface} of two network devices"
            for interface in sorted(set(interfaces))
            if interfaces.count(interface) > 1
        )
    if edits.intel_rdt is not None and not _is_clos_id(edits.intel_rdt.clos_id):
        yield f"{where}: closID {edits.intel_rdt.clos_id[:80]!r} is no name of a folder"
    for mount in edits.mounts:
        if not mount.host_path or not mount.container_path:
            yield f"{where}: mount {mount.host_path!r} on {mount.container_path!r} needs both paths"


def _is_clos_id(name: str) -> bool:
    """Say whether resctrl can have a group of this name. `/` is its root."""
    return name == "/" or (
        len(name.encode()) < 4096 and name not in (".", "..") and "/" not in name and "\n" not in name
    )


def _numbers(version: str) -> tuple[int, ...] | None:
    """Read a version. Return None for a text that is no version."""
    match = _VERSION.fullmatch(version)
    return tuple(map(int, match.groups())) if match else None


def _start_problems(spec: CdiSpec) -> Iterable[str]:
    """List what a runtime accepts but a container cannot start with: a path that is not absolute, a
    zero byte in the environment.
    """
    for where, edits in (
        ("the common edits", spec.common),
        *((f"device {device.name}", device.edits) for device in spec.devices),
    ):
        paths = [path for node in edits.device_nodes for path in (node.path, node.host_path or node.path)]
        paths += [
            path for mount in edits.mounts for path in (mount.host_path if not mount.kind else "", mount.container_path)
        ]
        paths += [hook.path for hook in edits.hooks]
        yield from (f"{where}: {path!r} is no absolute path" for path in paths if path and not path.startswith("/"))
        yield from (
            f"{where}: environment variable {key!r} has a zero byte"
            for key, value in edits.env.items()
            if "\x00" in key + value
        )


def _to_wire(edits: ContainerEdits) -> _Edits:
    nodes = [
        structs.replace(node, host_path="") if node.host_path == node.path else node for node in edits.device_nodes
    ]
    return _Edits(
        env=[f"{key}={value}" for key, value in sorted(edits.env.items())],
        device_nodes=_convert(nodes, list[_Node]),
        net_devices=_convert(edits.net_devices, list[_NetDevice]),
        hooks=_convert(edits.hooks, list[_Hook]),
        mounts=_convert(edits.mounts, list[_Mount]),
        intel_rdt=_convert(edits.intel_rdt, _IntelRdt) if edits.intel_rdt is not None else None,
        additional_gids=list(edits.additional_gids),
    )


def _from_wire(edits: _Edits) -> ContainerEdits:
    return ContainerEdits(
        env={name: value for name, _, value in (variable.partition("=") for variable in edits.env)},
        device_nodes=_convert(edits.device_nodes, tuple[DeviceNode, ...]),
        mounts=_convert(edits.mounts, tuple[Mount, ...]),
        hooks=_convert(edits.hooks, tuple[Hook, ...]),
        additional_gids=tuple(edits.additional_gids),
        net_devices=_convert(edits.net_devices, tuple[NetDevice, ...]),
        intel_rdt=_convert(edits.intel_rdt, IntelRdt) if edits.intel_rdt is not None else None,
    )


def _convert(edits: object, kind: type[E]) -> E:
    return msgspec.convert(edits, ready(kind), from_attributes=True)
