"""Writes the input and environment of a CNI plugin, and reads its results, errors and versions. It
runs no plugin.

Source: CNI specification 1.1.0, sections 2 (environment), 3 (execution configuration) and 5 (result
types).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from topobus.nic.cni.rules.chain import Chain, Plugin
from topobus.nic.cni.rules.refusals import config_invalid, plugin_nonsense, version_answered
from topobus.values.outcome import Refusal

__all__ = [
    "Address",
    "CniError",
    "CniResult",
    "Interface",
    "Target",
    "check_target",
    "environment",
    "plugin_input",
    "read_error",
    "read_result",
    "read_versions",
]

# Container ids follow the same rule as network names. Runtimes give 64 hexadecimal digits. 128: it
# becomes part of a file's name.
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
# IFNAMSIZ is 16 bytes with the closing NUL. The specification forbids '/', ':' and white space, the
# kernel only '.' and '..'. ASCII only.
_INTERFACE = re.compile(r"[!-.0-9;-~]{1,15}")
_ARGUMENT = re.compile(r"[^;=\s]+")
# Keys of one plugin's configuration that the runner itself sets or removes.
_RUNNERS_OWN = ("capabilities", "cniVersion", "name", "prevResult", "runtimeConfig")
# A result of hundreds of interfaces is no result of one attachment.
_MOST_ENTRIES = 256


class Target(Struct, frozen=True, kw_only=True):
    """One attachment: which sandbox, which interface in it, and the runtime's values of the pod."""

    container_id: str
    interface: str
    network_namespace: str = ""
    """Path as the plugins see it; empty: it is gone (DEL only)."""
    arguments: tuple[tuple[str, str], ...] = ()
    """CNI_ARGS, in order."""
    runtime_values: dict[str, Any] = {}
    """By capability: portMappings, bandwidth, ips, mac, deviceID and the like; a plugin gets those
    that it declares."""


class Interface(Struct, frozen=True, kw_only=True):
    """An interface of a result. With an empty `sandbox` it is on the host."""

    name: str
    mac: str = ""
    sandbox: str = ""
    mtu: int = 0


class Address(Struct, frozen=True, kw_only=True):
    """An address of a result and the position of its interface, None where the plugin gives
    none.
    """

    address: str
    interface: int | None = None


class CniResult(Struct, frozen=True, kw_only=True):
    """The result of ADD. The next plugin gets `document` unchanged."""

    document: dict[str, Any]
    interfaces: tuple[Interface, ...] = ()
    addresses: tuple[Address, ...] = ()


class CniError(Struct, frozen=True, kw_only=True):
    """A plugin's own error."""

    code: int
    message: str = ""
    details: str = ""


def check_target(target: Target, where: str) -> Refusal | None:
    """Refuse names that the kernel or the specification does not allow, before a plugin gets
    them.
    """
    if _CONTAINER.fullmatch(target.container_id) is None:
        return config_invalid(
            where, "the container id", "1 to 128 of letters, digits, '_', '.', '-'", target.container_id
        )
    if _INTERFACE.fullmatch(target.interface) is None or target.interface in (".", ".."):
        return config_invalid(
            where, "the interface name", "1 to 15 ASCII characters without '/', ':' or white space", target.interface
        )
    for name, value in target.arguments:
        if _ARGUMENT.fullmatch(name) is None or ";" in value or "\0" in value:
            return config_invalid(where, "CNI_ARGS", "names and values without ';'", f"{name}={value}")
    return None


def environment(command: str, target: Target, plugin_path: Sequence[str], program_path: str) -> dict[str, str]:
    """Build a plugin's whole environment. Nothing of this process's environment is inherited.

    Shapes: plugin_path — the folders of plugins; program_path — PATH, where plugins look for
    iptables and the like.
    """
    return {
        "CNI_COMMAND": command,
        "CNI_PATH": ":".join(plugin_path),
        "PATH": program_path,
        "CNI_CONTAINERID": target.container_id,
        "CNI_IFNAME": target.interface,
        "CNI_NETNS": target.network_namespace,
        "CNI_ARGS": ";".join(f"{name}={value}" for name, value in target.arguments),
    }


def plugin_input(
    chain: Chain,
    plugin: Plugin,
    version: str,
    target: Target,
    *,
    previous: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Build the configuration that one plugin gets on its input.

    Shapes: previous — the previous result, None where the command has none.
    >>> plugin = Plugin(type="portmap", capabilities=("portMappings",), configuration={"type": "portmap", "snat": True})
    >>> target = Target(container_id="c", interface="net1", runtime_values={"portMappings": [], "mac": "02:00:00:00:00:01"})
    >>> plugin_input(Chain(name="n", versions=("1.0.0",), plugins=(plugin,)), plugin, "1.0.0", target, previous=None)
    {'type': 'portmap', 'snat': True, 'cniVersion': '1.0.0', 'name': 'n', 'runtimeConfig': {'portMappings': []}}
    """  # noqa: E501
    document = {key: value for key, value in plugin.configuration.items() if key not in _RUNNERS_OWN}
    # Within `plugins` of 1.1, the list's own keys belong to the runner. A plugin that is a list by
    # itself has them as well.
    for key in ("plugins", "disableCheck", "disableGC", "cniVersions"):
        document.pop(key, None)
    document |= {"cniVersion": version, "name": chain.name}
    values = {key: value for key, value in target.runtime_values.items() if key in plugin.capabilities}
    if values:
        document["runtimeConfig"] = values
    if previous is not None:
        document["prevResult"] = dict(previous)
    return document


def read_result(content: bytes, plugin: str, command: str, version: str) -> CniResult | Refusal:
    """Read the result of ADD.

    A result without cniVersion counts as in the version asked for, which several plugins in use
    rely on.

    Errors: returns Refusal `cni-plugin-nonsense` for output that is no result,
    `cni-version-answered` for another version.
    """
    document = _decoded(content)
    if not isinstance(document, dict):
        return plugin_nonsense(
            plugin, command, "it is not a JSON object" if content.strip() else "it is empty", _text(content)
        )
    answered = document.get("cniVersion", version)
    if answered != version:
        return version_answered(plugin, command, version, str(answered))
    document["cniVersion"] = version
    interfaces, addresses = document.get("interfaces") or [], document.get("ips") or []
    if (
        not isinstance(interfaces, list)
        or not isinstance(addresses, list)
        or len(interfaces) + len(addresses) > _MOST_ENTRIES
    ):
        return plugin_nonsense(
            plugin, command, f"interfaces and ips must be lists of {_MOST_ENTRIES} entries at most", _text(content)
        )
    try:
        return CniResult(
            document=document,
            interfaces=tuple(_interface(entry) for entry in interfaces),
            addresses=tuple(_address(entry, len(interfaces)) for entry in addresses),
        )
    except (TypeError, ValueError) as err:
        return plugin_nonsense(plugin, command, str(err), _text(content))


def read_error(content: bytes) -> CniError | None:
    """Read a plugin's error object, or return None for output that is no error."""
    document = _decoded(content)
    if not isinstance(document, dict) or not isinstance(code := document.get("code"), int) or isinstance(code, bool):
        return None
    return CniError(code=code, message=str(document.get("msg", "")), details=str(document.get("details", "")))


def read_versions(content: bytes, plugin: str) -> tuple[str, ...] | Refusal:
    """Read a plugin's answer to VERSION: the versions that it supports.

    Errors: returns Refusal `cni-plugin-nonsense` for output without them.
    """
    document = _decoded(content)
    supported = document.get("supportedVersions") if isinstance(document, dict) else None
    if not isinstance(supported, list) or not supported or not all(isinstance(version, str) for version in supported):
        return plugin_nonsense(plugin, "VERSION", "it has no list supportedVersions", _text(content))
    return tuple(supported)


def _interface(entry: object) -> Interface:
    if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str) or not name:
        raise ValueError("an interface has no name")
    mtu = entry.get("mtu", 0)
    if not isinstance(mtu, int):
        raise TypeError(f"the mtu of {name} is no number")
    return Interface(
        name=name, mac=str(entry.get("mac") or "").lower(), sandbox=str(entry.get("sandbox") or ""), mtu=mtu
    )


def _address(entry: object, interfaces: int) -> Address:
    if not isinstance(entry, dict):
        raise TypeError("an entry of ips is no object")
    # Raises ValueError with the text when it is no address.
    address = ipaddress.ip_interface(str(entry.get("address")))
    position = entry.get("interface")
    if position is not None and (not isinstance(position, int) or not 0 <= position < interfaces):
        raise ValueError(f"the address {address} belongs to interface {position} of {interfaces}")
    return Address(address=str(address), interface=position)


def _decoded(content: bytes) -> object:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _text(content: bytes) -> str:
    return content[:2000].decode("utf-8", "replace")
