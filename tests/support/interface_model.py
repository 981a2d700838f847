"""A model of the kernel's interfaces, and configurations as users write them, for laws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from topobus.nic.interfaces.rules.interface_config import CONFIG_KIND, CONFIG_VERSION, InterfaceConfig
from topobus.nic.interfaces.rules.interface_state import HeldAddress, HeldRoute, InterfaceState
from topobus.nic.netlink.hand_over_plan import Change

__all__ = ["apply_to_state", "render_interface_config"]


def apply_to_state(state: InterfaceState, change: Change) -> InterfaceState:
    """Return the state of an interface after a change, for changes that a state shows."""
    fields: Mapping[str, str] = {
        "mac": "mac",
        "mtu": "mtu",
        "name": "name",
        "queue": "tx_queue_length",
        "alias": "alias",
        "master": "master",
    }
    if change.name == "drop-names":
        return msgspec.structs.replace(
            state, alternative_names=tuple(sorted(set(state.alternative_names) - set(change.value)))
        )
    if change.name == "add-names":
        return msgspec.structs.replace(
            state, alternative_names=tuple(sorted({*state.alternative_names, *change.value}))
        )
    if change.name in fields:
        return msgspec.structs.replace(state, **{fields[change.name]: change.value})
    if change.name == "mark":
        return msgspec.structs.replace(state, alias=change.value)
    if change.name in ("down", "up"):
        return msgspec.structs.replace(state, is_up=change.value, routes=state.routes if change.value else ())
    if change.name == "move":
        others = tuple(name for name in state.alternative_names if name != change.value)
        return msgspec.structs.replace(
            state, name=change.value, alternative_names=others, is_up=False, addresses=(), routes=(), master=""
        )
    if change.name == "sysctls":
        return msgspec.structs.replace(state, sysctls={**state.sysctls, **change.value})
    if change.name == "addresses":
        return msgspec.structs.replace(state, addresses=tuple(HeldAddress(address=text) for text in change.value))
    if change.name == "held-addresses":
        return msgspec.structs.replace(state, addresses=msgspec.convert(change.value, type=tuple[HeldAddress, ...]))
    if change.name == "held-routes":
        return msgspec.structs.replace(state, routes=msgspec.convert(change.value, type=tuple[HeldRoute, ...]))
    return state


def render_interface_config(config: InterfaceConfig) -> dict[str, Any]:
    """Write a configuration in a user's form."""
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return {"apiVersion": CONFIG_VERSION, "kind": CONFIG_KIND, **body}
