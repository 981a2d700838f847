"""Reads CNI configuration lists: which plugins run, in which order, and which versions the list may
be run in.

A document comes decoded from an operator or a claim, and a Refusal names the wrong field. Nothing
is run and no file is read here. A list of one plugin may be written as the plugin's configuration
alone (`type` at the top level), as 0.3.x and 0.4.0 allow.

Source: CNI specification 1.1.0, section 1 (network configuration format).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from topobus.nic.cni.rules.refusals import config_invalid
from topobus.values.outcome import Refusal

__all__ = ["VERSIONS", "Chain", "Plugin", "is_at_least", "parse_chain"]

VERSIONS = ("1.1.0", "1.0.0", "0.4.0", "0.3.1", "0.3.0")
"""The versions that this runner supports, newest first. 0.3.0 has the results of 0.3.1."""
_WANTED = f"one of {', '.join(VERSIONS)}"
# Before 0.3.0 a result names no interface (ip4, ip6), so it does not show what a plugin made.
# Source: CNI specification 0.2.0, "Result"; libcni takes "" for 0.1.0.
_TOO_OLD = f"{_WANTED} (a list without it is of 0.1.0, and before 0.3.0 a result names no interface)"
# Section 1: a network's name begins with a letter or digit, and has the same characters as an
# attachment's container id. 63: it becomes part of a file's name.
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
# A plugin's type is the name of a file in one of the folders of plugins, so never a path. The
# specification forbids slashes. Leading dots are forbidden here.
_TYPE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# A chain in real use has three to six plugins, and each costs a process.
_MOST_PLUGINS = 16

# Keys that decide what is run, and those that only the runner writes. Plugins in Go accept them in
# any case (encoding/json), and would run what was not checked.
_OWN = {
    key.casefold(): key for key in ("type", "ipam", "capabilities", "cniVersion", "name", "prevResult", "runtimeConfig")
}


class Plugin(Struct, frozen=True, kw_only=True):
    """One plugin of a chain."""

    type: str
    capabilities: tuple[str, ...] = ()
    """Keys of `runtimeConfig` that it declares to understand, sorted."""
    ipam: str = ""
    """Type of the address plugin that it runs by itself; empty: none."""
    configuration: dict[str, Any]
    """As in the list, with every key."""


class Chain(Struct, frozen=True, kw_only=True):
    """A configuration list that can be run."""

    name: str
    versions: tuple[str, ...]
    """What it may be run in, newest first; never empty."""
    plugins: tuple[Plugin, ...]
    where: str = ""
    """Where it was read from, for messages: a file, or a claim's field."""

    @property
    def types(self) -> tuple[tuple[str, str], ...]:
        """List every plugin that will be run and the field that names it, address plugins
        included.
        """
        named: list[tuple[str, str]] = []
        for position, plugin in enumerate(self.plugins):
            named.append((plugin.type, f"plugins[{position}].type"))
            if plugin.ipam:
                named.append((plugin.ipam, f"plugins[{position}].ipam.type"))
        return tuple(named)


def parse_chain(document: object, where: str) -> Chain | Refusal:
    """Read a configuration list.

    Errors: returns Refusal `cni-config-invalid` with the field.
    >>> parse_chain({"cniVersion": "1.0.0", "name": "lo", "plugins": [{"type": "loopback"}]}, "net.conflist").types
    (('loopback', 'plugins[0].type'),)
    >>> parse_chain({"cniVersion": "9", "name": "lo", "plugins": [{"type": "loopback"}]}, "net.conflist").reasons[0].facts["field"]
    'cniVersion'
    """  # noqa: E501
    if not isinstance(document, Mapping):
        return config_invalid(where, "the list", "a JSON object", document)
    if not isinstance(name := document.get("name"), str) or _NETWORK.fullmatch(name) is None:
        return config_invalid(
            where, "name", "1 to 63 of letters, digits, '_', '.', '-', beginning with a letter or digit", name
        )
    versions = _versions(document, where)
    if isinstance(versions, Refusal):
        return versions
    entries = document.get("plugins", [document] if "type" in document else None)
    if not isinstance(entries, list | tuple) or not 1 <= len(entries) <= _MOST_PLUGINS:
        return config_invalid(where, "plugins", f"a list of 1 to {_MOST_PLUGINS} plugins", entries)
    plugins: list[Plugin] = []
    for position, entry in enumerate(entries):
        plugin = _plugin(entry, f"plugins[{position}]", where)
        if isinstance(plugin, Refusal):
            return plugin
        plugins.append(plugin)
    return Chain(name=name, versions=versions, plugins=tuple(plugins), where=where)


def is_at_least(version: str, least: str) -> bool:
    """Compare two versions of the specification.

    >>> is_at_least("1.0.0", "0.4.0"), is_at_least("0.3.1", "0.4.0")
    (True, False)
    """
    return tuple(map(int, version.split("."))) >= tuple(map(int, least.split(".")))


def _versions(document: Mapping[str, Any], where: str) -> tuple[str, ...] | Refusal:
    """Collect the versions that the list may be run in: `cniVersion`, and since 1.1
    `cniVersions`.
    """
    single, several = document.get("cniVersion"), document.get("cniVersions", [])
    if single is not None and not isinstance(single, str):
        return config_invalid(where, "cniVersion", _WANTED, single)
    if not isinstance(several, list | tuple) or not all(isinstance(version, str) for version in several):
        return config_invalid(where, "cniVersions", "a list of versions", several)
    if not single and not several:
        return config_invalid(where, "cniVersion", _TOO_OLD, single)
    stated = {*several, *([single] if single is not None else [])}
    versions = tuple(version for version in VERSIONS if version in stated)
    is_old = any(version.startswith(("0.1.", "0.2.")) for version in stated)
    return versions or config_invalid(where, "cniVersion", _TOO_OLD if is_old else _WANTED, ", ".join(sorted(stated)))


def _plugin(entry: object, field: str, where: str) -> Plugin | Refusal:
    if not isinstance(entry, Mapping):
        return config_invalid(where, field, "a JSON object", entry)
    if (other := _misspelt(entry, _OWN)) is not None:
        return config_invalid(where, f"{field}.{other}", f"the key written {_OWN[other.casefold()]}", other)
    if not isinstance(kind := entry.get("type"), str) or _TYPE.fullmatch(kind) is None:
        return config_invalid(where, f"{field}.type", "a plugin's file name without folder", kind)
    capabilities = entry.get("capabilities", {})
    if not isinstance(capabilities, Mapping) or not all(isinstance(value, bool) for value in capabilities.values()):
        return config_invalid(where, f"{field}.capabilities", "names with true or false", capabilities)
    ipam = entry.get("ipam", {})
    if not isinstance(ipam, Mapping):
        return config_invalid(where, f"{field}.ipam", "a JSON object", ipam)
    if (other := _misspelt(ipam, {"type": "type"})) is not None:
        return config_invalid(where, f"{field}.ipam.{other}", "the key written type", other)
    ipam_type = ipam.get("type", "")
    if not isinstance(ipam_type, str) or (ipam_type and _TYPE.fullmatch(ipam_type) is None):
        return config_invalid(where, f"{field}.ipam.type", "a plugin's file name without folder", ipam_type)
    return Plugin(
        type=kind,
        capabilities=tuple(sorted(str(key) for key, value in capabilities.items() if value)),
        ipam=ipam_type,
        configuration={str(key): value for key, value in entry.items()},
    )


def _misspelt(entry: Mapping[Any, Any], keys: Mapping[str, str]) -> str | None:
    """Find a key that is one of the known ones in another case, or return None."""
    return next((str(key) for key in entry if keys.get(str(key).casefold(), key) != key), None)
