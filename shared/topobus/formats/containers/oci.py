"""Applies devices to a container's OCI spec as kubelet and a container runtime do, and reports
every conflict.

Pure. Order: kubelet merges the answers of all resources (the first answer keeps a key), the pod's
own values win over them, and CDI edits come last and win. Kubelet and runtimes drop the losing
value without a message. Here it is a Conflict.
Source: kubelet cm/devicemanager (deviceRunContainerOptions) and kubelet_pods.go; containerd
internal/cri/opts; CDI pkg/cdi container-edits.go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from topobus.formats.containers.cdi import NO_ACCESS, CdiSpec
from topobus.values.edits import ContainerEdits, DeviceNode, IntelRdt, Mount
from topobus.values.outcome import Reason, Refusal

__all__ = [
    "CdiFile",
    "Conflict",
    "HostNode",
    "OciResult",
    "PluginAnswer",
    "as_on_host",
    "device_paths",
    "oci_spec",
    "resolve_cdi",
]

# The access that a runtime grants when edits name no permissions.
_ALL_ACCESS = "rwm"


class PluginAnswer(Struct, frozen=True, kw_only=True):
    """What one resource's Allocate added to a container."""

    resource: str
    edits: ContainerEdits = ContainerEdits()
    cdi_devices: tuple[str, ...] = ()


class CdiFile(Struct, frozen=True, kw_only=True):
    """A CDI file of the host.

    Of two folders the later one hides the earlier one (`/etc/cdi`, then `/var/run/cdi`).
    """

    path: str
    spec: CdiSpec
    priority: int = 0


class HostNode(Struct, frozen=True, kw_only=True):
    """A device node as it is on the host."""

    kind: str
    """`c`, `b` or `p`, as in an OCI spec."""
    major: int = 0
    minor: int = 0
    mode: int = 0o666
    uid: int = 0
    gid: int = 0


class Conflict(Struct, frozen=True, kw_only=True):
    """Two sources that set one thing differently."""

    what: str
    """`variable NVIDIA_VISIBLE_DEVICES`, `mount /opt/x`, `device node /dev/x`, `annotation x`."""
    kept_from: str
    lost_from: str

    def __str__(self) -> str:
        return f"{self.what}: {self.kept_from} wins over {self.lost_from}"


class OciResult(Struct, frozen=True, kw_only=True):
    """The spec. It can be run when nothing is missing."""

    spec: dict[str, Any]
    conflicts: tuple[Conflict, ...] = ()
    missing: tuple[str, ...] = ()
    """Device nodes that the host does not have: a runtime would refuse to start the container. In
    the spec they have only a path, because type and numbers are not known."""


def device_paths(
    answers: Iterable[PluginAnswer], cdi_devices: Iterable[str], files: Iterable[CdiFile]
) -> tuple[str, ...]:
    """List the device nodes of the host whose numbers `oci_spec` needs.

    Shapes: as in `oci_spec`; result — absolute host paths, sorted, each once. Pass them to
            `oci_host.look_up`.
    """
    names = set(cdi_devices) | {name for plugin_answer in answers for name in plugin_answer.cdi_devices}
    parts = [plugin_answer.edits for plugin_answer in answers]
    for file in files:
        chosen = [device for device in file.spec.devices if file.spec.qualified_name(device.name) in names]
        parts += [file.spec.common, *(cdi_device.edits for cdi_device in chosen)] if chosen else []
    return tuple(
        sorted(
            {
                node.host_path or node.path
                for container_edits in parts
                for node in container_edits.device_nodes
                if not _has_numbers(node)
            }
        )
    )


def oci_spec(
    base: Mapping[str, Any],
    *,
    answers: Sequence[PluginAnswer] = (),
    cdi_devices: Sequence[str] = (),
    files: Iterable[CdiFile] = (),
    nodes: Mapping[str, HostNode],
    cpus: str = "",
    memory_nodes: str = "",
) -> OciResult | Refusal:
    """Merge everything into the base spec.

    Shapes: answers — in the order of the container's resources; cdi_devices — of the container's
            claims, which kubelet names before those of plugins; nodes — host path to facts, for all
            of `device_paths`.
    Errors: raises nothing; Refusal codes cdi-unresolved, cdi-ambiguous, as a runtime would refuse
            the container.
    """
    names = tuple(
        dict.fromkeys((*cdi_devices, *(name for plugin_answer in answers for name in plugin_answer.cdi_devices)))
    )
    injected = resolve_cdi(names, tuple(files))
    if isinstance(injected, Refusal):
        return injected
    merge = _Merge(base, nodes)
    for answer in answers:
        merge.add_answer(answer)
    for source, edits in injected:
        merge.inject(source, edits)
    return merge.finish(cpus, memory_nodes)


def resolve_cdi(names: Sequence[str], files: Sequence[CdiFile]) -> tuple[tuple[str, ContainerEdits], ...] | Refusal:
    """Find the edits of each name, with the file that they come from.

    A file's common edits come once, before those of its first device.

    Errors: raises nothing; Refusal codes cdi-unresolved, cdi-ambiguous.
    """
    edits: list[tuple[str, ContainerEdits]] = []
    begun: set[str] = set()
    reasons: list[Reason] = []
    for name in names:
        matches = [
            (file, device)
            for file in files
            for device in file.spec.devices
            if file.spec.qualified_name(device.name) == name
        ]
        highest = max((file.priority for file, _ in matches), default=0)
        chosen = [match for match in matches if match[0].priority == highest]
        if not chosen:
            reasons.append(Reason(code="cdi-unresolved", message=f"no CDI file defines {name}", facts={"device": name}))
        elif len(chosen) > 1:
            paths = tuple(sorted(file.path for file, _ in chosen))
            text = f"{name} is defined by {' and '.join(paths)}: a runtime ignores both"
            reasons.append(Reason(code="cdi-ambiguous", message=text, facts={"device": name, "files": paths}))
        else:
            file, device = chosen[0]
            if file.path not in begun:
                begun.add(file.path)
                edits.append((f"CDI file {file.path}", file.spec.common))
            edits.append((f"CDI device {name}", device.edits))
    return Refusal(reasons=tuple(reasons)) if reasons else tuple(edits)


def as_on_host(edits: ContainerEdits, host_nodes: Mapping[str, HostNode]) -> ContainerEdits:
    """Return device nodes as CDI's specification wants them: all access where no permissions are
    named, and without the properties that equal those of the host's own node.

    Numbers, mode and owner that equal the host's need no permission of their own. Without them a
    pod that requests the resource can have the node, although kubelet's API cannot express them.
    """
    nodes: list[DeviceNode] = []
    for node in edits.device_nodes:
        host = host_nodes.get(node.host_path or node.path)
        settled = replace(node, permissions=node.permissions or _ALL_ACCESS)
        kind = "c" if node.kind == "u" else node.kind
        if (
            host is not None
            and kind in ("", host.kind)
            and (node.major, node.minor) in ((0, 0), (host.major, host.minor))
        ):
            settled = replace(settled, kind="", major=0, minor=0)
            if node.file_mode in (None, host.mode) and node.uid in (None, host.uid) and node.gid in (None, host.gid):
                settled = replace(settled, file_mode=None, uid=None, gid=None)
        nodes.append(settled)
    return replace(edits, device_nodes=tuple(nodes))


class _Merge:
    """The spec in progress, and the source that set each part of it."""

    def __init__(self, base: Mapping[str, Any], nodes: Mapping[str, HostNode]) -> None:
        self._spec: dict[str, Any] = copy.deepcopy(dict(base))
        self._nodes = nodes
        self._conflicts: list[Conflict] = []
        self._missing: list[str] = []
        process = self._spec.setdefault("process", {})
        self._env = {
            key: (value, "the pod")
            for key, _, value in (variable.partition("=") for variable in process.get("env", ()))
        }
        self._annotations = {key: (value, "the pod") for key, value in self._spec.get("annotations", {}).items()}
        self._mounts = {mount["destination"]: (mount, "the pod") for mount in self._spec.get("mounts", ())}
        self._devices = {
            device["path"]: (device, "the pod") for device in self._spec.get("linux", {}).get("devices", ())
        }
        self._access: list[dict[str, Any]] = []
        self._user: dict[str, Any] = process.setdefault("user", {})
        self._interfaces = {
            name: (device, "the pod") for name, device in self._spec.get("linux", {}).get("netDevices", {}).items()
        }

    def add_answer(self, answer: PluginAnswer) -> None:
        """Add a device plugin's answer. A value that is set already stays."""
        edits = answer.edits
        for key, value in edits.env.items():
            self._set(self._env, key, value, answer.resource, "variable")
        for key, value in edits.annotations.items():
            self._set(self._annotations, key, value, answer.resource, "annotation")
        for mount in edits.mounts:
            self._set(self._mounts, mount.container_path, _mount(mount), answer.resource, "mount")
        for node in edits.device_nodes:
            host_node = self._find(node)
            if host_node is None:
                self._set(self._devices, node.path, {"path": node.path}, answer.resource, "device node")
            else:
                # The host's own mode and owner, as a runtime takes them
                # for a device that kubelet names.
                device = {
                    **_device(node, host_node),
                    "fileMode": host_node.mode,
                    "uid": host_node.uid,
                    "gid": host_node.gid,
                }
                if self._set(self._devices, node.path, device, answer.resource, "device node"):
                    self._grant(node, host_node)

    def inject(self, source: str, edits: ContainerEdits) -> None:
        """Inject CDI edits. They replace values that were set before."""
        for key, value in edits.env.items():
            self._replace(self._env, key, value, source, "variable")
        for mount in edits.mounts:
            self._replace(self._mounts, mount.container_path, _mount(mount), source, "mount")
        for hook in edits.hooks:
            wire = {
                "path": hook.path,
                **({"args": list(hook.args)} if hook.args else {}),
                **({"env": list(hook.env)} if hook.env else {}),
            }
            self._spec.setdefault("hooks", {}).setdefault(hook.name, []).append(
                wire if hook.timeout_s is None else {**wire, "timeout": hook.timeout_s}
            )
        for interface in edits.net_devices:
            self._replace(self._interfaces, interface.host_name, {"name": interface.name}, source, "network device")
        gids = self._user.setdefault("additionalGids", []) if edits.additional_gids else []
        gids += [gid for gid in edits.additional_gids if gid and gid not in gids]
        if edits.intel_rdt is not None:
            self._spec.setdefault("linux", {})["intelRdt"] = _rdt(edits.intel_rdt)
        for node in edits.device_nodes:
            host_node = self._find(node)
            if host_node is None:
                self._replace(self._devices, node.path, {"path": node.path}, source, "device node")
            else:
                device = _device(node, host_node)
                # A node belongs to the container's user, unless that is root.
                device |= {key: self._user[key] for key in ("uid", "gid") if self._user.get(key, 0) > 0}
                device |= {
                    key: value
                    for key, value in (("uid", node.uid), ("gid", node.gid), ("fileMode", node.file_mode))
                    if value is not None
                }
                self._replace(self._devices, node.path, device, source, "device node")
                self._grant(node, host_node)

    def finish(self, cpus: str, memory_nodes: str) -> OciResult:
        """Write everything into the spec."""
        spec = self._spec
        spec["process"]["env"] = [f"{key}={value}" for key, (value, _) in self._env.items()]
        if self._annotations:
            spec["annotations"] = {key: value for key, (value, _) in self._annotations.items()}
        # Outer folders first, or an inner mount would disappear below an outer one.
        mounts = [mount for mount, _ in self._mounts.values()]
        spec["mounts"] = sorted(mounts, key=lambda mount: len(PurePosixPath(mount["destination"]).parts))
        linux = spec.setdefault("linux", {})
        if self._interfaces:
            linux["netDevices"] = {name: device for name, (device, _) in self._interfaces.items()}
        if self._devices:
            linux["devices"] = [device for device, _ in self._devices.values()]
        if self._access:
            rules = linux.setdefault("resources", {}).setdefault("devices", [])
            rules += [rule for rule in self._access if rule not in rules]
        for key, value in (("cpus", cpus), ("mems", memory_nodes)):
            if value:
                linux.setdefault("resources", {}).setdefault("cpu", {})[key] = value
        return OciResult(spec=spec, conflicts=tuple(self._conflicts), missing=tuple(sorted(set(self._missing))))

    def _set(self, entries: dict[str, tuple[Any, str]], key: str, value: Any, source: str, what: str) -> bool:
        kept, kept_from = entries.setdefault(key, (value, source))
        if kept != value:
            self._conflicts.append(Conflict(what=f"{what} {key}", kept_from=kept_from, lost_from=source))
        return kept_from == source

    def _replace(self, entries: dict[str, tuple[Any, str]], key: str, value: Any, source: str, what: str) -> None:
        if key in entries and entries[key][0] != value:
            self._conflicts.append(Conflict(what=f"{what} {key}", kept_from=source, lost_from=entries[key][1]))
        # A replaced mount or device moves to the end, as when a runtime removes the old one and
        # appends.
        entries.pop(key, None)
        entries[key] = (value, source)

    def _find(self, node: DeviceNode) -> HostNode | None:
        if _has_numbers(node):
            # The numbers suffice, so the node need not exist on the host.
            return HostNode(kind="c" if node.kind == "u" else node.kind, major=node.major, minor=node.minor)
        path = node.host_path or node.path
        host_node = self._nodes.get(path)
        if host_node is None:
            self._missing.append(path)
        return host_node

    def _grant(self, node: DeviceNode, host_node: HostNode) -> None:
        if host_node.kind in ("c", "b") and node.permissions != NO_ACCESS:
            access = node.permissions or _ALL_ACCESS
            rule = {
                "allow": True,
                "type": host_node.kind,
                "major": host_node.major,
                "minor": host_node.minor,
                "access": access,
            }
            if rule not in self._access:
                self._access.append(rule)


def _has_numbers(node: DeviceNode) -> bool:
    """Say whether a node has type and numbers.

    A runtime takes what is missing from the host's node, even where the type alone is given
    (Intel's files).
    """
    return node.kind == "p" or bool(node.kind and node.major)


def _rdt(rdt: IntelRdt) -> dict[str, Any]:
    named = {
        "closID": rdt.clos_id,
        "l3CacheSchema": rdt.l3_cache_schema,
        "memBwSchema": rdt.mem_bw_schema,
        "schemata": list(rdt.schemata),
        "enableMonitoring": rdt.enable_monitoring,
    }
    return {name: value for name, value in named.items() if value}


def _mount(mount: Mount) -> dict[str, Any]:
    options = list(mount.options)
    if mount.kind:
        return {"destination": mount.container_path, "source": mount.host_path, "type": mount.kind, "options": options}
    if "bind" not in options and "rbind" not in options:
        options.append("rbind")
    return {"destination": mount.container_path, "source": mount.host_path, "type": "bind", "options": options}


def _device(node: DeviceNode, host_node: HostNode) -> dict[str, Any]:
    numbers = {"major": host_node.major, "minor": host_node.minor} if host_node.kind != "p" else {}
    return {"path": node.path, "type": host_node.kind, **numbers}
