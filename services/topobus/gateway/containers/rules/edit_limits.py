"""Checks the container edits that a device service requests against an allow-list for its class.

The result is None, or a Refusal that names class, device, edit and what would be allowed. The check
is repeated here because kubelet and the container runtime apply the edits as root, and every client
that may publish on the bus could have written them.
"""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from msgspec import Struct, structs

from topobus.formats.messages.messages import Prepared
from topobus.gateway.containers.rules.driver_file_rights import (
    DRIVER_FILES,
    DRIVER_HOOKS,
    DRIVER_LIBRARIES,
    DRIVER_VARIABLES,
    LIBRARY_NAME,
)
from topobus.gateway.containers.rules.guarded_names import (
    ALSO_CALLED,
    FORBIDDEN,
    FORBIDDEN_PREFIXES,
    GUARD_FOLDER,
    GUARD_SOURCE,
    GUARDED_EXACTLY,
    GUARDED_FOLDERS,
    LOADED_BY_ALL,
    LOADER,
    OPTIONS,
    PROGRAM_FOLDERS,
    PROTECTED_ANNOTATIONS,
    PROTECTED_NODES,
    RUNTIMES_OWN,
)
from topobus.values.edits import ContainerEdits, DeviceNode, Mount
from topobus.values.outcome import Reason, Refusal

__all__ = [
    "FOREIGN_RIGHTS",
    "NO_RIGHTS",
    "NVIDIA_HOOKS",
    "SHIPPED_RIGHTS",
    "EditRights",
    "host_paths",
    "is_plain_path",
    "node_paths",
    "refuse_forbidden",
    "rights_of",
]


class EditRights(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What devices of one class may bring into a container.

    Prefixes are compared as text: `/dev/nvidia` covers `/dev/nvidia0`. Folders cover what is below
    them.
    """

    device_nodes: tuple[str, ...] = ()
    """Prefixes of the host's device nodes. Raw memory, disks, consoles and the like are covered
    only by a prefix that names them (`/dev/sdb`)."""
    may_mknod: bool = False
    """Allow permission `m`: the container may create the node again, under another name."""
    mounts: tuple[str, ...] = ()
    """Folders or files of the host that may be mounted read-only, with what is below them."""
    libraries: tuple[str, ...] = ()
    """Folders of the host below which single libraries (`lib*.so`, with or without a version) may
    be mounted read-only."""
    writable_mounts: tuple[str, ...] = ()
    """Those that may also be mounted for writing."""
    variables: tuple[str, ...] = ()
    """Names of variables that would be refused otherwise, such as `LD_PRELOAD`: a program obeys
    them before it does anything of its own. `NAME=VALUE` allows only this value."""
    annotations: tuple[str, ...] = ()
    """Prefixes of annotations. Those that a runtime obeys (`cdi.k8s.io/`) are covered only by a
    prefix that names them."""
    cpus: bool = False
    """Allow exclusive CPUs for the container: they are taken from all others."""
    hooks: tuple[str, ...] = ()
    """Programs of the host that the container runtime may run as root for the container: whole
    paths."""
    gids: bool = False
    """Allow groups for the container's processes: those of the device nodes in the same answer,
    such as video and render, but never root's."""
    majors: tuple[int, ...] = ()
    """Major numbers of device nodes that need not exist on the host: a number reaches its device
    under any path."""
    net_devices: bool = False
    """Allow network interfaces of the host to be moved into the container."""
    rdt: bool = False
    """Allow cache and memory bandwidth to be set (resctrl)."""
    as_kubelet: bool = False
    """Only for another vendor's device plugin: check nothing but the gateway's own guard, as
    kubelet checks nothing of a plugin that registers with it."""


# The longest string of an environment (MAX_ARG_STRLEN, 32 pages), and a path with its zero
# (PATH_MAX), both from execve(2) and Linux' limits.h.
_ENTRY_BYTES = 32 * 4096 - 1
_PATH_BYTES = 4095
# For one device, or for the common edits: far more than any driver needs, and far less than would
# hurt kubelet or a runtime.
_EDITS_LIMIT = 512
# For all edits of one answer: kubelet accepts answers of 4 MiB from a device plugin (gRPC's
# default).
_TOTAL_BYTES = 4 * 1024 * 1024
# Keeps an error readable and short enough for a status.
_REASONS_LIMIT = 8
_SHOWN_CHARACTERS = 80

# Folders of the pipes of MPS daemons. A container that may write them may also have the host's
# shared memory.
_MPS_PIPES = ("/tmp/nvidia-mps", "/run/topobus/mps")
_SHARED_MEMORY = "/dev/shm"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Where NVIDIA's container toolkit, its operator and GKE install the two programs that its CDI files
# name.
NVIDIA_HOOKS = tuple(
    f"{folder}/{program}"
    for folder in ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/toolkit", "/home/kubernetes/bin/nvidia/toolkit")
    for program in ("nvidia-cdi-hook", "nvidia-ctk")
)

NO_RIGHTS = EditRights()
SHIPPED_RIGHTS: Mapping[str, EditRights] = MappingProxyType(
    {
        # NVIDIA's, AMD's and Intel's nodes and their groups, the files of NVIDIA's driver, and the
        # program by which a container's loader finds them. An MPS client needs the daemon's pipes
        # and its files in shared memory (CUDA MPS guide). The host's own /dev/shm is allowed only
        # together with pipes.
        "gpu": EditRights(
            device_nodes=("/dev/nvidia", "/dev/dri/", "/dev/kfd", "/dev/gdrdrv"),
            mounts=DRIVER_FILES,
            libraries=DRIVER_LIBRARIES,
            writable_mounts=("/tmp/nvidia-mps", "/run/topobus/mps", "/run/topobus/mps-shm"),
            variables=DRIVER_VARIABLES,
            hooks=DRIVER_HOOKS,
            gids=True,
        ),
        "nic": EditRights(device_nodes=("/dev/infiniband/", "/dev/vfio/")),
        # Ports and render nodes, but not the management nodes (dfl-fme, xclmgmt), which can
        # reprogram a card.
        "fpga": EditRights(device_nodes=("/dev/dfl-port.", "/dev/dri/renderD")),
        "cpu": EditRights(cpus=True),
    }
)
"""What the drivers that come with Topobus need, by class."""
FOREIGN_RIGHTS = EditRights(
    device_nodes=("/dev/",),
    may_mknod=True,
    # NVIDIA's CDI files name each file of its driver. On WSL they name all of Windows' driver.
    mounts=(*DRIVER_FILES, "/usr/lib/wsl"),
    libraries=DRIVER_LIBRARIES,
    annotations=("",),
    hooks=NVIDIA_HOOKS,
    gids=True,
)
"""For another vendor's device plugin, unless the operator configures more."""


def rights_of(device_class: str, configured: EditRights, *, is_foreign: bool) -> EditRights:
    """Return the rights of a class: the built-in ones of its kind, and what the operator adds.

    >>> rights_of("fpga", EditRights(device_nodes=("/dev/acme",)), is_foreign=False).device_nodes
    ('/dev/dfl-port.', '/dev/dri/renderD', '/dev/acme')
    """
    own = FOREIGN_RIGHTS if is_foreign else SHIPPED_RIGHTS.get(device_class, NO_RIGHTS)
    return _joined(own, structs.replace(configured, as_kubelet=configured.as_kubelet and is_foreign))


def host_paths(prepared: Prepared) -> tuple[str, ...]:
    """Return the host's paths in the edits whose links must be resolved."""
    parts = (prepared.common, *prepared.edits.values())
    nodes = {node.host_path or node.path for edits in parts for node in edits.device_nodes}
    return tuple(sorted(nodes | {mount.host_path for edits in parts for mount in edits.mounts}))


def node_paths(prepared: Prepared) -> tuple[str, ...]:
    """Return the host's device nodes of an answer with groups, whose own groups must be read.

    Empty when the answer has no group.
    """
    parts = (prepared.common, *prepared.edits.values())
    if not any(edits.additional_gids for edits in parts):
        return ()
    return tuple(sorted({node.host_path or node.path for edits in parts for node in edits.device_nodes}))


def is_plain_path(path: str) -> bool:
    """Return whether a path is absolute, in its shortest form, and without invisible characters.

    >>> [is_plain_path(path) for path in ("/dev/a", "/dev/../etc", "dev/a", "/dev//a", "/", "/a/")]
    [True, False, False, False, True, False]
    """
    return (
        path.startswith("/")
        and posixpath.normpath(path) == path
        and not path.startswith("//")
        and not _has_control(path)
    )


def refuse_forbidden(
    device_class: str,
    prepared: Prepared,
    rights: EditRights,
    leads_to: Mapping[str, str] = MappingProxyType({}),
    groups: frozenset[int] | None = None,
) -> Refusal | None:
    """Refuse an answer of `prepare` with anything outside the rights of its class.

    None: all of it is allowed.

    Shapes: leads_to — host path to the target of its links, for those where it is known and
    differs. groups — those of the answer's device nodes on this host; None: the nodes are not on
    this host, as on a machine that is only recorded.
    Errors: raises nothing; Refusal code edits-forbidden with at most eight reasons, one for each
    rule that is broken.
    """
    breaches: dict[str, list[tuple[str, str]]] = {}
    has_pipes = any(
        _is_below(mount.host_path, folder)
        and any(_is_below(mount.host_path, allowed) for allowed in rights.writable_mounts)
        for edits in (prepared.common, *prepared.edits.values())
        for mount in edits.mounts
        for folder in _MPS_PIPES
    )
    for device, edits in (("", prepared.common), *sorted(prepared.edits.items())):
        for edit, wanted in (
            _guard_breaches(edits)
            if rights.as_kubelet
            else _breaches(edits, rights, leads_to, groups, has_pipes=has_pipes)
        ):
            breaches.setdefault(wanted, []).append((device, edit))
    size_bytes = sum(map(_size_bytes, (prepared.common, *prepared.edits.values())))
    if size_bytes > _TOTAL_BYTES and not rights.as_kubelet:
        breaches[f"at most {_TOTAL_BYTES}"] = [("", f"edits of {size_bytes} bytes in all")]
    reasons = tuple(_reason(device_class, alike, wanted) for wanted, alike in islice(breaches.items(), _REASONS_LIMIT))
    return Refusal(reasons=reasons) if reasons else None


def _joined(first: EditRights, second: EditRights) -> EditRights:
    """Return rights that allow what either of the two allows."""
    joined: dict[str, Any] = {}
    for name, right in structs.asdict(first).items():
        other = getattr(second, name)
        joined[name] = (*right, *other) if isinstance(right, tuple) else right or other
    return EditRights(**joined)


def _reason(device_class: str, breaches: Sequence[tuple[str, str]], wanted: str) -> Reason:
    """Name the first of the edits that break one rule, and how many more do: a driver without the
    right to one node of a card usually lacks it for all eight.
    """
    device, edit = breaches[0]
    whose = f"device {_shown(device)}" if device else "all devices"
    more = f" and {len(breaches) - 1} more" if len(breaches) > 1 else ""
    text = f"the {device_class} service wants to give {whose} {edit}{more}, which the gateway forbids: wanted {wanted}"
    return Reason(
        code="edits-forbidden",
        message=text,
        facts={"class": device_class, "device": device, "edit": edit, "wanted": wanted, "count": len(breaches)},
    )


def _guard_breaches(edits: ContainerEdits) -> Iterator[tuple[str, str]]:
    """List uses of the gateway's own guard, which no device service may make, whatever its rights:
    a container with the guard counts as one of ours.
    """
    for mount in edits.mounts:
        if _is_below(mount.container_path, GUARD_FOLDER) or _is_below(mount.host_path, GUARD_SOURCE):
            yield (
                f"a mount of {_shown(mount.host_path)} on {_shown(mount.container_path)}",
                f"none on {GUARD_FOLDER} and none of {GUARD_SOURCE}",
            )


def _breaches(
    edits: ContainerEdits,
    rights: EditRights,
    leads_to: Mapping[str, str],
    groups: frozenset[int] | None,
    *,
    has_pipes: bool,
) -> Iterator[tuple[str, str]]:
    """List what is not allowed, each with what would be allowed."""
    yield from _guard_breaches(edits)
    for what, count in (
        ("variables", len(edits.env)),
        ("device nodes", len(edits.device_nodes)),
        ("mounts", len(edits.mounts)),
        ("annotations", len(edits.annotations)),
        ("hooks", len(edits.hooks)),
        ("groups", len(edits.additional_gids)),
    ):
        if count > _EDITS_LIMIT:
            yield f"{count} {what}", f"at most {_EDITS_LIMIT} a device"
    for name, value in sorted(edits.env.items()):
        yield from _variable_breaches(name, value, rights)
    for node in edits.device_nodes:
        yield from _node_breaches(node, rights, leads_to)
    for mount in edits.mounts:
        yield from _place_breaches(mount, rights)
        yield from _mount_breaches(mount, rights, leads_to, has_pipes=has_pipes)
    for name, value in sorted(edits.annotations.items()):
        yield from _annotation_breaches(name, value, rights)
    yield from _runtime_breaches(edits, rights)
    if rights.gids and groups is not None and (strange := sorted({*edits.additional_gids} - groups - {0})):
        yield (
            f"groups {tuple(strange[:8])}",
            "groups of the device nodes that come with them: "
            f"{', '.join(map(str, sorted(groups))) or 'they have none'}",
        )


def _runtime_breaches(edits: ContainerEdits, rights: EditRights) -> Iterator[tuple[str, str]]:
    """List edits by which the runtime would change more than the container's own files."""
    if edits.cpuset is not None and not rights.cpus:
        yield f"CPUs {edits.cpuset.cpus} for the container alone", "none: only devices that are CPUs bring some"
    for hook in edits.hooks:
        if hook.path not in rights.hooks or not is_plain_path(hook.path):
            yield f"hook {_shown(hook.path)}", f"one of the programs {_listed(rights.hooks)}"
        # The variables are read by a program that runs as root on the host.
        for name in (variable.partition("=")[0] for variable in hook.env):
            if name.upper() in FORBIDDEN or name.upper().startswith(FORBIDDEN_PREFIXES):
                yield (
                    f"hook {_shown(hook.path)} with variable {_shown(name)}",
                    "none that a loader, a shell or an interpreter obeys",
                )
    if edits.additional_gids and (not rights.gids or 0 in edits.additional_gids):
        yield f"groups {edits.additional_gids[:8]}", "groups of device nodes, and not root's" if rights.gids else "none"
    if edits.net_devices and not rights.net_devices:
        yield f"network interface {_shown(edits.net_devices[0].host_name)}", "none by the runtime"
    if edits.intel_rdt is not None and not rights.rdt:
        yield "cache or memory bandwidth", "none"


def _variable_breaches(name: str, value: str, rights: EditRights) -> Iterator[tuple[str, str]]:
    shown = f"variable {_shown(name)}"
    if not _VARIABLE.fullmatch(name):
        yield shown, "a name of letters, digits and '_' that does not begin with a digit"
    elif not {name, f"{name}={value}"} & set(rights.variables) and (
        name.upper() in FORBIDDEN or name.upper().startswith(FORBIDDEN_PREFIXES)
    ):
        yield shown, "none that a loader, a shell or an interpreter obeys"
    if _has_control(value):
        yield f"{shown} with value {_shown(value)}", "a value without control characters"
    if _length(name) + 1 + _length(value) > _ENTRY_BYTES:
        yield f"{shown} of {_length(value)} bytes", f"at most {_ENTRY_BYTES} with its name"


def _node_breaches(node: DeviceNode, rights: EditRights, leads_to: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    host = node.host_path or node.path
    shown = f"device node {_shown(host)}"
    for path in dict.fromkeys((node.path, host)):
        yield from _path_breaches(shown, path)
    if not node.path.startswith("/dev/"):
        yield f"{shown} as {_shown(node.path)}", "a path below /dev in the container"
    if node.path in RUNTIMES_OWN:
        yield f"{shown} as {node.path}", "a name that the runtime does not use itself"
    for where in dict.fromkeys((host, leads_to.get(host, host))):
        if not _is_covered(where, rights.device_nodes, PROTECTED_NODES):
            yield _with_target(shown, host, where), f"a node whose path begins with {_listed(rights.device_nodes)}"
    allowed = "rwm" if rights.may_mknod else "rw"
    if (node.kind or node.major or node.minor) and node.major not in rights.majors:
        yield (
            f"{shown} with numbers {node.major}:{node.minor} of its own",
            f"a node of the host, or major number {_listed(tuple(map(str, rights.majors)))}",
        )
    if node.permissions == "none":
        return
    if (
        not node.permissions
        or not set(node.permissions) <= set(allowed)
        or len(set(node.permissions)) != len(node.permissions)
    ):
        yield f"{shown} with permissions {_shown(node.permissions)}", f"one or more of the letters {allowed}"


def _place_breaches(mount: Mount, rights: EditRights) -> Iterator[tuple[str, str]]:
    """List mounts that replace what runs in a container: its loader, its C library, its shell."""
    host, inside = mount.host_path, mount.container_path
    folder, _, name = inside.rpartition("/")
    shown = f"a mount of {_shown(host)} on {_shown(inside)}"
    if LOADER.fullmatch(name) or LOADED_BY_ALL.fullmatch(name):
        yield shown, "none in place of a container's loader or of a library that every program loads"
    elif (
        folder in PROGRAM_FOLDERS
        and not host.endswith(inside)
        and not (inside in rights.mounts and host.endswith(f"/{name}"))
    ):
        # A driver's root may have its programs in another folder (`bin`). A program that the rights
        # name at this path may come from there under its own name.
        yield shown, f"a program at its own path (…{_shown(inside)})"


def _mount_breaches(
    mount: Mount, rights: EditRights, leads_to: Mapping[str, str], *, has_pipes: bool
) -> Iterator[tuple[str, str]]:
    host, inside = mount.host_path, mount.container_path
    shown = f"a mount of {_shown(host)} on {_shown(inside)}"
    for path in (host, inside):
        yield from _path_breaches(shown, path)
    if inside in GUARDED_EXACTLY or any(_is_below(inside, folder) for folder in GUARDED_FOLDERS):
        yield shown, "a folder of its own in the container"
    if mount.kind not in ("", "bind", "none"):
        yield f"{shown} of type {_shown(mount.kind)}", "a bind mount"
    strange = sorted(set(mount.options) - OPTIONS)
    if strange or len(mount.options) > len(OPTIONS):
        yield f"{shown} with options {_shown(','.join(strange))}", f"options of {', '.join(sorted(OPTIONS))}"
    if host == _SHARED_MEMORY == inside == leads_to.get(host, host) and has_pipes:
        return
    for where in dict.fromkeys((host, leads_to.get(host, host))):
        if any(_is_below(where, folder) for folder in rights.writable_mounts):
            continue
        if _is_library(where, rights) and not _is_same_library(host, inside):
            yield shown, "a library under its own name"
        if not _is_library(where, rights) and not any(_is_below(where, folder) for folder in rights.mounts):
            yield _with_target(shown, host, where), f"a mount of {_listed_mounts(rights)}"
        elif "ro" not in mount.options or "rw" in mount.options:
            yield f"{shown} for writing", "option ro"


def _annotation_breaches(name: str, value: str, rights: EditRights) -> Iterator[tuple[str, str]]:
    shown = f"annotation {_shown(name)}"
    if not name or _has_control(name) or _has_control(value):
        yield f"{shown} with value {_shown(value)}", "a name, and no control characters"
    if not _is_covered(name, rights.annotations, PROTECTED_ANNOTATIONS):
        yield shown, f"an annotation whose name begins with {_listed(rights.annotations)}"
    if _length(name) + _length(value) > _ENTRY_BYTES:
        yield f"{shown} of {_length(value)} bytes", f"at most {_ENTRY_BYTES} with its name"


def _path_breaches(shown: str, path: str) -> Iterator[tuple[str, str]]:
    if not is_plain_path(path):
        yield f"{shown} by the path {_shown(path)}", "an absolute path without '..', '//' and control characters"
    elif _length(path) > _PATH_BYTES:
        yield f"{shown} by a path of {_length(path)} bytes", f"at most {_PATH_BYTES}"


def _is_covered(text: str, prefixes: Iterable[str], protected: re.Pattern[str]) -> bool:
    """Return whether a prefix covers a text.

    A protected text is covered only by a prefix that is protected itself.
    """
    is_protected = protected.match(text) is not None
    return any(
        text.startswith(prefix) and (not is_protected or protected.match(prefix) is not None) for prefix in prefixes
    )


def _is_library(path: str, rights: EditRights) -> bool:
    folder, _, name = path.rpartition("/")
    return LIBRARY_NAME.fullmatch(name) is not None and any(_is_below(folder, allowed) for allowed in rights.libraries)


def _is_same_library(host: str, inside: str) -> bool:
    """Return whether a mount puts a library only at its own name: `libcuda.so.580` may be
    `libcuda.so.1` in the container.
    """
    host_name, name = (path.rpartition("/")[2].partition(".so")[0] for path in (host, inside))
    if name == ALSO_CALLED.get(host_name):
        return True
    return LIBRARY_NAME.fullmatch(inside.rpartition("/")[2]) is not None and name == host_name


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _has_control(text: str) -> bool:
    """Return whether a text has control characters, line separators or invalid characters."""
    return not text.isprintable() and any(
        unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp", "Cf") for letter in text
    )


def _length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _size_bytes(edits: ContainerEdits) -> int:
    texts = [*edits.env, *edits.env.values(), *edits.annotations, *edits.annotations.values()]
    texts += [text for node in edits.device_nodes for text in (node.path, node.host_path)]
    texts += [text for mount in edits.mounts for text in (mount.host_path, mount.container_path, *mount.options)]
    texts += [text for hook in edits.hooks for text in (hook.path, *hook.args, *hook.env)]
    return sum(map(_length, texts))


def _with_target(shown: str, host: str, where: str) -> str:
    return shown if where == host else f"{shown}, which leads to {_shown(where)}"


def _shown(text: str) -> str:
    """Escape any text so that it fits into one line."""
    return ascii(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")


def _listed_mounts(rights: EditRights) -> str:
    if rights.libraries:
        return (
            "a file of the GPU's driver (docs/how-to/cuda-without-a-toolkit.md), "
            f"{_listed(rights.writable_mounts)}, {_SHARED_MEMORY} along with an MPS daemon's pipes, or what "
            "setting edits names"
        )
    return _listed((*rights.mounts, *rights.writable_mounts))


def _listed(prefixes: Iterable[str]) -> str:
    return (
        " or ".join(repr(prefix) for prefix in prefixes)
        or "nothing, for this class has no right to any (setting edits)"
    )
