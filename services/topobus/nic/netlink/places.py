"""Where namespaces, /proc and /sys are, and how a piece of work is run inside a network namespace.

The work gets a netlink socket that is open in the namespace. It runs on its own thread, which ends
with it, because a thread that has entered a namespace must not be used for anything else. pyroute2
is imported when the first socket is opened, so a service that hands over nothing does not need it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from topobus.values.outcome import Refusal, refuse

__all__ = ["Places", "kernels_refusal", "missing_package", "open_host", "open_namespace", "with_netlink"]

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
# linux/magic.h. A file that is no namespace must not be entered.
_NSFS = 0x6E736673
# That of this process' first thread, which enters no namespace. /proc/thread-self is the calling
# thread, which may be in a pod's.
_OWN_NAMESPACE = "/proc/self/ns/net"


class Places(Struct, frozen=True, kw_only=True):
    """Folders, each as this process sees it."""

    namespaces: str = "/"
    """The host's root in the paths of sandboxes: `/host` where the host's
    /run/netns is mounted at /host/run/netns."""
    proc: str = "/proc"
    """A /proc whose sys/net can be written; in a container the ordinary one cannot."""
    sys: str = "/sys"
    kept: str = "/run/topobus/netns"
    """Where namespaces are kept while an interface of ours is in them, as this process sees it."""
    host_namespace: str = ""
    """Path of the host's network namespace, where this process is not in it; empty: this process is
    in it."""


def kernels_refusal(err: Exception, what: str, step: str) -> Refusal:
    """Make a Refusal of an error of netlink or of a file.

    The code is `hand-over-failed`, or `not-permitted` with the capabilities that are missing.
    """
    code = int(getattr(err, "code", None) or getattr(err, "errno", None) or 0)
    words = err.args[1] if len(err.args) > 1 else str(err)
    if code in (errno.EPERM, errno.EACCES):
        return refuse(
            "not-permitted",
            f"{what}: {words}; topobus-nic needs the capabilities NET_ADMIN and SYS_ADMIN, and a "
            "/proc/sys/net that it may write to",
            step=step,
            error=code,
        )
    return refuse("hand-over-failed", f"{what}: {words}", step=step, error=code)


def missing_package() -> Refusal | None:
    """Refuse when pyroute2 is not installed, or return None."""
    try:
        import pyroute2  # noqa: F401 - only whether it is there
    except ModuleNotFoundError:
        return refuse(
            "package-missing",
            "interfaces are handed over by pyroute2, which is not installed beside topobus-nic; pip "
            "install '.[nic]' from the checkout",
            package="pyroute2",
            extra="nic",
        )
    return None


def open_namespace(places: Places, path: str) -> int | Refusal:
    """Open a network namespace by the runtime's path, or by one of our own. The caller closes the
    descriptor.

    Errors: refuses a path that does not exist, is no network namespace, or is the host's own.
    """
    inside = Path(path.lstrip("/"))
    try:
        place = Path(path) if _is_kept(places, path) else _below(Path(places.namespaces), inside)
        # Opening a pipe would wait for its other end.
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as err:
        return refuse(
            "namespace-gone",
            f"network namespace {path} cannot be opened: {os.strerror(err.errno or 0)}",
            path=path,
            error=err.errno or 0,
        )
    refusal = _not_for_a_pod(places, descriptor, path)
    if refusal is not None:
        os.close(descriptor)
        return refusal
    return descriptor


def open_host(places: Places) -> int:
    """Open the host's network namespace, whatever namespace the calling thread is in. The caller
    closes the descriptor.

    Errors: raises OSError when it cannot be opened.
    """
    return os.open(places.host_namespace or _OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)


def _is_kept(places: Places, path: str) -> bool:
    return path.startswith((f"{places.kept}/", "/proc/self/fd/"))


def with_netlink(places: Places, namespace: int | None, work: Callable[[Any], T]) -> T:
    """Run `work` with a netlink socket in a namespace (None: the host's), on its own thread.

    Errors: raises what `work` raises, pyroute2's NetlinkError included, and OSError when the
    namespace cannot be entered.
    """

    def enter_and_work() -> T:
        _enter(places, namespace)
        from pyroute2 import IPRoute

        # Groups 0: receive nothing but answers. ext_ack: the kernel's own message about what it
        # refuses.
        with IPRoute(groups=0, ext_ack=True, strict_check=True) as socket:
            return work(socket)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="netlink") as thread:
        return thread.submit(enter_and_work).result()


def _enter(places: Places, namespace: int | None) -> None:
    if namespace is not None:
        _set_namespace(namespace)
        return
    # A thread begins in the namespace of the thread that made it: work for the host may be
    # requested from within a pod's namespace.
    descriptor = open_host(places)
    try:
        # A thread that is there already needs no right to enter: a service without CAP_SYS_ADMIN
        # reads the host's interfaces.
        if not os.path.samestat(os.fstat(descriptor), Path("/proc/thread-self/ns/net").stat()):
            _set_namespace(descriptor)
    finally:
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    # os.setns exists since Python 3.12.
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}; it needs CAP_SYS_ADMIN")


def _below(root: Path, path: Path) -> Path:
    """Follow links as they are meant on the host, where an absolute one begins at `root`."""
    resolved = root
    parts = list(path.parts)
    for _ in range(200):
        if not parts:
            return resolved
        part = parts.pop(0)
        if part == "..":
            resolved = resolved.parent if resolved != root else root
            continue
        step = resolved / part
        # Links of /proc/<pid>/ns lead to no path; opening them is what they are for.
        if not step.is_symlink() or step.parent.name == "ns":
            resolved = step
            continue
        target = step.readlink()
        if target.is_absolute():
            resolved = root
            target = target.relative_to("/")
        parts = [*target.parts, *parts]
    raise OSError(40, "too many links", str(path))


def _not_for_a_pod(places: Places, descriptor: int, path: str) -> Refusal | None:
    library = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(256)
    if library.fstatfs(descriptor, answer) != 0 or ctypes.cast(answer, ctypes.POINTER(ctypes.c_long))[0] != _NSFS:
        return refuse("namespace-gone", f"{path} is no namespace (any more): the sandbox is gone", path=path)
    entered = os.fstat(descriptor)
    own = Path(places.host_namespace or _OWN_NAMESPACE).stat()
    if (entered.st_dev, entered.st_ino) == (own.st_dev, own.st_ino):
        return refuse(
            "namespace-of-host", f"{path} is the host's own network namespace: the pod has hostNetwork", path=path
        )
    return None
