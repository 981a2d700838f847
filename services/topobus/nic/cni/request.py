"""Reads the object under `cni` of a claim's configuration: an operator's network by name or the
claim's own configuration list, and values for capabilities.

A Refusal names the field. Nothing is run and no file is read here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from topobus.nic.cni.rules.chain import Chain, parse_chain
from topobus.nic.cni.rules.refusals import chain_forbidden, config_invalid, network_unknown
from topobus.values.outcome import Refusal

__all__ = ["CniRequest", "read_request"]

_FIELDS = ("args", "conflist", "network", "runtimeConfig")
_MAC = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")
_GUID = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){7}")
# CNI_ARGS names of pods are set here, because plugins decide by them whose address it is.
_ARGUMENT = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_PODS_OWN = "K8S_"
_MOST_ENTRIES = 32


class CniRequest(Struct, frozen=True, kw_only=True):
    """What a claim asks for. Exactly one of `network` and `chain` is set."""

    network: str = ""
    """One of the operator's."""
    chain: Chain | None = None
    """The claim's own."""
    arguments: tuple[tuple[str, str], ...] = ()
    """CNI_ARGS besides those of the pod, by name."""
    runtime_values: dict[str, Any] = {}
    """For capabilities: mac, ips, infinibandGUID."""


def read_request(
    cni: object, where: str, *, networks: Mapping[str, str], may_bring_chain: bool
) -> CniRequest | Refusal:
    """Read the object under `cni`.

    Shapes: networks — the operator's, by name.
    Errors: returns Refusal `cni-config-invalid`, `cni-network-unknown` or `cni-chain-forbidden`.
    >>> read_request({"network": "data"}, "cni", networks={"data": "/etc/data.conflist"}, may_bring_chain=False).network
    'data'
    """
    if not isinstance(cni, Mapping):
        return config_invalid(where, "cni", "an object with network or conflist", cni)
    for field in cni:
        if field not in _FIELDS:
            return config_invalid(where, f"cni.{field}", f"one of {', '.join(_FIELDS)}", cni[field])
    network, conflist = cni.get("network"), cni.get("conflist")
    if (network is None) == (conflist is None):
        return config_invalid(where, "cni", "network or conflist, and not both", sorted(map(str, cni)))
    chain: Chain | None = None
    if network is not None:
        if not isinstance(network, str):
            return config_invalid(where, "cni.network", "a name", network)
        if network not in networks:
            return network_unknown(where, network, sorted(networks))
    else:
        if not may_bring_chain:
            return chain_forbidden(where)
        parsed = parse_chain(conflist, f"{where}: cni.conflist")
        if isinstance(parsed, Refusal):
            return parsed
        if parsed.name in networks:
            # Plugins keep their state by the network's name, so the claim would take the operator's
            # addresses.
            return config_invalid(
                where, "cni.conflist.name", "another name than those of the operator's networks", parsed.name
            )
        chain = parsed
    arguments = _arguments(cni.get("args", {}), where)
    values = _values(cni.get("runtimeConfig", {}), where)
    if isinstance(arguments, Refusal):
        return arguments
    if isinstance(values, Refusal):
        return values
    return CniRequest(network=network or "", chain=chain, arguments=arguments, runtime_values=values)


def _arguments(entries: object, where: str) -> tuple[tuple[str, str], ...] | Refusal:
    if not isinstance(entries, Mapping) or len(entries) > _MOST_ENTRIES:
        return config_invalid(where, "cni.args", f"an object of {_MOST_ENTRIES} texts at most", entries)
    for name, value in entries.items():
        if (
            not isinstance(name, str)
            or _ARGUMENT.fullmatch(name) is None
            or name.startswith(_PODS_OWN)
            or name == "IgnoreUnknown"
        ):
            return config_invalid(
                where,
                f"cni.args.{name}",
                f"a name of letters, digits and '_' that does not begin with {_PODS_OWN}",
                name,
            )
        if not isinstance(value, str) or not value.isprintable() or ";" in value:
            return config_invalid(where, f"cni.args.{name}", "a text without ';'", value)
    return tuple(sorted(entries.items()))


def _values(entries: object, where: str) -> dict[str, Any] | Refusal:
    """Read the values that a user may give. Those of the pod and of the device come from
    Topobus.
    """
    if not isinstance(entries, Mapping):
        return config_invalid(where, "cni.runtimeConfig", "an object with ips, mac or infinibandGUID", entries)
    values: dict[str, Any] = {}
    for name, value in sorted(entries.items()):
        field = f"cni.runtimeConfig.{name}"
        if name == "mac" and (not isinstance(value, str) or _MAC.fullmatch(value) is None):
            return config_invalid(where, field, "a hardware address such as 02:00:00:00:00:01", value)
        if name == "infinibandGUID" and (not isinstance(value, str) or _GUID.fullmatch(value) is None):
            return config_invalid(where, field, "eight bytes such as 02:00:00:00:00:00:00:01", value)
        if name == "ips" and not _are_addresses(value):
            return config_invalid(where, field, "a list of addresses such as 10.1.2.3/24", value)
        if name not in ("mac", "infinibandGUID", "ips"):
            return config_invalid(where, field, "one of infinibandGUID, ips, mac", value)
        values[name] = value
    return values


def _are_addresses(value: object) -> bool:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= _MOST_ENTRIES:
        return False
    try:
        return all(isinstance(text, str) and ipaddress.ip_interface(text) is not None for text in value)
    except ValueError:
        return False
