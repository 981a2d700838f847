"""Runs chains of unmodified CNI plugins: ADD and DEL of configuration lists.

The record of an attachment is on disk before the first plugin runs, so that a DEL is possible after
a crash at any time. All calls block, for worker threads. Each container has one operation at a
time, as the specification requires.

Source: CNI specification 1.1.0, sections 2 and 3; libcni for the order of steps.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from topobus.nic.cni.process import OUTPUT_LIMIT_BYTES, Ended, OutputTooLarge, TimedOut, run_plugin
from topobus.nic.cni.records import AttachmentRecord, AttachmentRecords
from topobus.nic.cni.rules.chain import VERSIONS, Chain, Plugin, is_at_least
from topobus.nic.cni.rules.messages import (
    CniResult,
    Target,
    check_target,
    environment,
    plugin_input,
    read_error,
    read_result,
    read_versions,
)
from topobus.nic.cni.rules.refusals import (
    config_invalid,
    output_too_large,
    plugin_failed,
    plugin_forbidden,
    plugin_killed,
    plugin_missing,
    plugin_nonsense,
    plugin_timeout,
    plugin_unusable,
    version_unsupported,
)
from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree
from topobus.values.outcome import Refusal

__all__ = ["CniRunner", "RunnerSettings"]

# DEL with the previous result came with 0.4.0.
_WITH_RESULT = "0.4.0"
# Measured with version 1.1.1 of the plugins: its DEL fails with 999 when the interface has left the
# sandbox already, and does not release the address when there is no sandbox.
_MOVES_A_DEVICE = "host-device"
_CLONE_NEWNET = 0x40000000
_OWN = Path("/proc/self/ns/net")


class RunnerSettings(Struct, frozen=True, kw_only=True):
    """The machine's folders, limits and allowed plugins for a runner."""

    bin_dirs: tuple[str, ...]
    """Folders of plugins, the first that has one wins."""
    allowed: frozenset[str] | None = None
    """Types of plugins that may be run, whether a claim or a file names them; None: all."""
    program_path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    """PATH of the plugins."""
    limit_s: float = 30.0
    """Seconds that one run of a plugin may take."""


class CniRunner:
    """Runs chains. Safe to use from several threads."""

    def __init__(
        self,
        settings: RunnerSettings,
        records: AttachmentRecords,
    ) -> None:
        self._settings = settings
        self.records = records
        self._supported: dict[tuple[str, int, int, int], tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self._busy: dict[str, tuple[threading.Lock, int]] = {}

    def check_chain(self, chain: Chain) -> str | Refusal:
        """Return the version to run a chain in: the newest that the list and each of its plugins
        support.

        It runs plugins only with VERSION.

        Errors: returns Refusal `cni-plugin-forbidden`, `cni-plugin-missing`, `cni-plugin-unusable`
        or `cni-version-unsupported`; each is checked for the whole chain, in this order.
        """
        for plugin, field in chain.types:
            if (refusal := self._forbidden(chain.where, plugin, field)) is not None:
                return refusal
        for plugin, field in chain.types:
            if self._find(plugin) is None:
                return plugin_missing(chain.where, plugin, field, self._settings.bin_dirs)
        versions = chain.versions
        for plugin, _ in chain.types:
            supported = self._versions(plugin, chain.where)
            if isinstance(supported, Refusal):
                return supported
            common = tuple(version for version in versions if version in supported)
            if not common:
                return version_unsupported(chain.where, versions, plugin, supported)
            versions = common
        return versions[0]

    def add(self, chain: Chain, target: Target) -> CniResult | Refusal:
        """Attach. A repeated call for what is attached returns the same result.

        When a plugin fails, DEL of the whole chain follows.

        Errors: returns the Refusal of the first plugin that failed, followed by the reasons of a
        DEL that failed as well; the next call tries that DEL again.
        """
        refusal = check_target(target, chain.where)
        if refusal is not None:
            return refusal
        inode = _namespace_inode(target.network_namespace)
        if not inode:
            return config_invalid(
                chain.where, "the network namespace", "the path of one that exists", target.network_namespace
            )
        with self._alone(target.container_id):
            before = self.records.read(chain.name, target.container_id, target.interface)
            if isinstance(before, Refusal):
                return before
            version = self.check_chain(chain)
            if isinstance(version, Refusal):
                return version
            record = AttachmentRecord(
                chain=chain, version=version, target=target, namespace_inode=inode, boot_id=read_boot_id(Tree())
            )
            if before is not None:
                if before.is_attached and before.result is not None and _is_same(before, record):
                    return read_result(msgspec.json.encode(before.result), chain.plugins[-1].type, "ADD", version)
                # It is attached in part, undone in part, or belongs to another sandbox or
                # configuration, so it is removed first.
                if (refusal := self._undo(before)) is not None:
                    return refusal
            if (refusal := self.records.write(record)) is not None:
                return refusal
            result = self._add_each(record)
            if isinstance(result, Refusal):
                undone = self._undo(record)
                return result if undone is None else Refusal(reasons=(*result.reasons, *undone.reasons))
            attached = structs.replace(record, result=result.document, is_attached=True)
            if (refusal := self.records.write(attached)) is not None:
                self._undo(attached)
                return refusal
            return result

    def add_unrecorded(self, chain: Chain, target: Target) -> CniResult | Refusal:
        """Run ADD alone, for what is never to be undone (`lo`): no record, no DEL.

        Errors: as `add`.
        """
        version = self.check_chain(chain)
        if isinstance(version, Refusal):
            return version
        with self._alone(target.container_id):
            return self._add_each(AttachmentRecord(chain=chain, version=version, target=target))

    def delete(self, network: str, container_id: str, interface: str) -> Refusal | None:
        """Detach by what was recorded at ADD, in reverse order.

        None also for what was never attached, or is detached already. A sandbox that is gone, or
        whose path now leads to another one, is left out, and the plugins then release what they
        hold outside of it.

        Errors: returns the Refusal of the first plugin that failed; the next call continues there.
        """
        with self._alone(container_id):
            record = self.records.read(network, container_id, interface)
            if record is None or isinstance(record, Refusal):
                return record
            return self._undo(record)

    def _add_each(self, record: AttachmentRecord) -> CniResult | Refusal:
        previous: CniResult | None = None
        for plugin in record.chain.plugins:
            answer = self._run(
                record.chain,
                plugin,
                record.version,
                "ADD",
                record.target,
                previous=previous.document if previous is not None else None,
            )
            result = (
                answer
                if isinstance(answer, Refusal)
                else read_result(answer.output, plugin.type, "ADD", record.version)
            )
            if isinstance(result, Refusal):
                return result
            previous = result
        assert previous is not None
        return previous

    def _undo(self, record: AttachmentRecord) -> Refusal | None:
        """Run DEL from the last plugin to the first, beginning where an earlier DEL ended, and
        delete the record.
        """
        inode = _namespace_inode(record.target.network_namespace)
        # Inodes are used again after a reboot: a plugin must not look for its interface in another
        # pod's sandbox.
        is_there = inode != 0 and inode == record.namespace_inode and record.boot_id == read_boot_id(Tree())
        target = record.target if is_there else structs.replace(record.target, network_namespace="")
        previous = record.result if is_at_least(record.version, _WITH_RESULT) else None
        plugins = record.chain.plugins
        for plugin in reversed(plugins[: len(plugins) - record.undone]):
            refusal = self._delete_one(record, plugin, target, previous)
            if refusal is not None:
                return refusal
            record = structs.replace(record, undone=record.undone + 1)
            # A chain of one plugin needs no note in between, only the removal of the file at the
            # end.
            if record.undone < len(plugins) and (refusal := self.records.write(record)) is not None:
                return refusal
        return self.records.delete(record)

    def _delete_one(
        self, record: AttachmentRecord, plugin: Plugin, target: Target, previous: Mapping[str, Any] | None
    ) -> Refusal | None:
        answer = self._run(record.chain, plugin, record.version, "DEL", target, previous=previous)
        if plugin.type == _MOVES_A_DEVICE:
            if (
                isinstance(answer, Refusal)
                and target.network_namespace
                and _has_interface(target.network_namespace, target.interface) is False
            ):
                # The plugin releases the address before it moves the interface back, so when the
                # interface is gone, all was done.
                return None
            if not isinstance(answer, Refusal) and not target.network_namespace and plugin.ipam:
                answer = self._run(
                    record.chain, plugin, record.version, "DEL", target, previous=previous, binary_of=plugin.ipam
                )
        return answer if isinstance(answer, Refusal) else None

    def _run(
        self,
        chain: Chain,
        plugin: Plugin,
        version: str,
        command: str,
        target: Target,
        *,
        previous: Mapping[str, Any] | None,
        binary_of: str = "",
    ) -> Ended | Refusal:
        """Run one plugin, and return a Refusal for each end but a good one.

        With `binary_of`, that address plugin runs on the same input instead.
        """
        kind = binary_of or plugin.type
        # The last check before a program runs as root, whatever named it and however long ago it
        # was allowed.
        if (refusal := self._forbidden(chain.where, kind, "type")) is not None:
            return refusal
        if (binary := self._find(kind)) is None:
            return plugin_missing(chain.where, kind, "type", self._settings.bin_dirs)
        content = msgspec.json.encode(plugin_input(chain, plugin, version, target, previous=previous))
        variables = environment(command, target, self._settings.bin_dirs, self._settings.program_path)
        return self._start(kind, binary, command, variables, content)

    def _start(
        self, kind: str, binary: Path, command: str, variables: Mapping[str, str], content: bytes
    ) -> Ended | Refusal:
        try:
            if binary.stat().st_mode & stat.S_IWOTH:
                return plugin_unusable(kind, str(binary), "everybody may write to it")
            ended = run_plugin(str(binary), variables, content, self._settings.limit_s)
        except OSError as err:
            return plugin_unusable(kind, str(binary), str(err))
        if isinstance(ended, TimedOut):
            return plugin_timeout(kind, command, self._settings.limit_s)
        if isinstance(ended, OutputTooLarge):
            return output_too_large(kind, command, OUTPUT_LIMIT_BYTES)
        if ended.signal_name:
            return plugin_killed(kind, command, ended.signal_name, ended.said)
        if ended.code != 0:
            error = read_error(ended.output)
            if error is None:
                said = ended.said or ended.output[:2000].decode("utf-8", "replace")
                return plugin_nonsense(kind, command, f"it ended with exit code {ended.code} and no error object", said)
            return plugin_failed(kind, command, error.code, error.message, error.details)
        return ended

    def _versions(self, kind: str, where: str) -> tuple[str, ...] | Refusal:
        """Ask a plugin for its versions, and again only when its file has changed."""
        binary = self._find(kind)
        if binary is None:
            return plugin_missing(where, kind, "type", self._settings.bin_dirs)
        seen = binary.stat()
        key = (str(binary), seen.st_ino, seen.st_size, seen.st_mtime_ns)
        if (supported := self._supported.get(key)) is not None:
            return supported
        # Plugins older than 0.2 require the other variables as well, but use none of them.
        unused = Target(container_id="version", interface="version", network_namespace="version")
        variables = environment("VERSION", unused, self._settings.bin_dirs, self._settings.program_path)
        ended = self._start(kind, binary, "VERSION", variables, msgspec.json.encode({"cniVersion": VERSIONS[0]}))
        if isinstance(ended, Refusal):
            return ended
        versions = read_versions(ended.output, kind)
        if not isinstance(versions, Refusal):
            self._supported[key] = versions
        return versions

    def _find(self, kind: str) -> Path | None:
        """Find a plugin's binary: a regular executable file directly in one of the folders."""
        if "/" in kind or kind in ("", ".", ".."):
            return None
        for folder in self._settings.bin_dirs:
            path = Path(folder, kind)
            if path.is_file() and os.access(path, os.X_OK):
                return path
        return None

    def _forbidden(self, where: str, kind: str, field: str) -> Refusal | None:
        allowed = self._settings.allowed
        return None if allowed is None or kind in allowed else plugin_forbidden(where, kind, field, sorted(allowed))

    @contextmanager
    def _alone(self, container_id: str) -> Iterator[None]:
        """Run one operation on a container at a time. Operations on other containers continue."""
        with self._lock:
            lock, waiting = self._busy.get(container_id, (threading.Lock(), 0))
            self._busy[container_id] = (lock, waiting + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                _, waiting = self._busy[container_id]
                if waiting == 1:
                    del self._busy[container_id]
                else:
                    self._busy[container_id] = (lock, waiting - 1)


def _is_same(before: AttachmentRecord, now: AttachmentRecord) -> bool:
    """Return whether a record is of the very attachment that is asked for. False once DEL has begun
    to undo it.
    """
    return (
        before.chain.plugins,
        before.version,
        before.target,
        before.namespace_inode,
        before.boot_id,
        before.undone,
    ) == (
        now.chain.plugins,
        now.version,
        now.target,
        now.namespace_inode,
        now.boot_id,
        0,
    )


def _namespace_inode(path: str) -> int:
    """Return the inode of the network namespace at a path, or 0 when there is none.

    The mount of a namespace that is gone leaves a plain file behind. So the file system is
    compared: all namespaces are on one (nsfs).
    """
    try:
        there, own = Path(path).stat(), _OWN.stat()
    except (OSError, ValueError):
        return 0
    return there.st_ino if there.st_dev == own.st_dev else 0


def _has_interface(path: str, interface: str) -> bool | None:
    """Return whether an interface is in the namespace at a path, or None when it cannot be read."""
    answers: list[bool | None] = [None]

    def look() -> None:
        # Only this thread changes its namespace, and it ends right after. os.setns came with Python
        # 3.12.
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if libc.setns(descriptor, _CLONE_NEWNET) == 0:
                answers[0] = interface in {name for _, name in socket.if_nameindex()}
        except OSError:
            return
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=look, name="cni-look")
    thread.start()
    thread.join()
    return answers[0]
