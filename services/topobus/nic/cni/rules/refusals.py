"""Makes the refusals of the CNI room: one code for each cause, with the plugin, the command and the
next step. Pure.

docs/reference/cni-errors.md is the operator's page of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.values.outcome import Refusal, refuse

__all__ = [
    "chain_forbidden",
    "config_invalid",
    "interface_missing",
    "network_unknown",
    "output_too_large",
    "plugin_failed",
    "plugin_forbidden",
    "plugin_killed",
    "plugin_missing",
    "plugin_nonsense",
    "plugin_timeout",
    "plugin_unusable",
    "state_unreadable",
    "version_answered",
    "version_unsupported",
]

# CNI specification, section "Error": 11 is "try again later".
_TRY_AGAIN = 11
# A plugin's own message goes into events and claims: this much of it.
_MESSAGE_CHARACTERS = 400


def config_invalid(where: str, field: str, wanted: str, got: object) -> Refusal:
    """Refuse a configuration list, with the field, the value wanted there and the value found."""
    shown = _shown(got)
    return refuse(
        "cni-config-invalid",
        f"{where}: {field} must be {wanted}, got {shown}; mend the configuration list and ask again",
        where=where,
        field=field,
        wanted=wanted,
        got=shown,
    )


def plugin_missing(where: str, plugin: str, field: str, looked_in: Sequence[str]) -> Refusal:
    """Refuse a chain with a plugin whose binary is in no folder."""
    return refuse(
        "cni-plugin-missing",
        f"{where}: {field} names the CNI plugin {plugin}, and no executable of that name is in "
        f"{', '.join(looked_in)};"
        " install it there, or name its folder in the setting cni.bin_dirs",
        where=where,
        plugin=plugin,
        field=field,
        looked_in=tuple(looked_in),
    )


def plugin_forbidden(where: str, plugin: str, field: str, allowed: Sequence[str]) -> Refusal:
    """Refuse a chain with a plugin type that the operator does not allow."""
    return refuse(
        "cni-plugin-forbidden",
        f"{where}: {field} names the CNI plugin {plugin}, which the setting cni.plugins does not allow"
        f" ({', '.join(allowed) or 'it allows none'}); ask the operator to add it, or use another",
        where=where,
        plugin=plugin,
        field=field,
        allowed=tuple(allowed),
    )


def chain_forbidden(where: str) -> Refusal:
    """Refuse a claim with its own configuration list where only the operator's networks are
    allowed.
    """
    return refuse(
        "cni-chain-forbidden",
        f"{where}: the claim brings a configuration list of its own, and this node's setting "
        "cni.allow_claim_chains is off"
        " (a chain runs programs as root); name one of the operator's networks instead",
        where=where,
    )


def network_unknown(where: str, network: str, names: Sequence[str]) -> Refusal:
    """Refuse a network that the operator has not named."""
    return refuse(
        "cni-network-unknown",
        f"{where}: there is no network {network} in the setting cni.networks; it has {', '.join(names) or 'none'}",
        where=where,
        network=network,
        known=tuple(names),
    )


def version_unsupported(where: str, wanted: Sequence[str], plugin: str, supported: Sequence[str]) -> Refusal:
    """Refuse a chain when one of its plugins, by its own answer to VERSION, supports none of its
    versions.
    """
    return refuse(
        "cni-version-unsupported",
        f"{where}: the configuration list is of CNI version {' or '.join(wanted)}, and {plugin} "
        f"speaks {', '.join(supported) or 'none'};"
        " set cniVersion to one of these, or install a newer plugin",
        where=where,
        wanted=tuple(wanted),
        plugin=plugin,
        supported=tuple(supported),
    )


def version_answered(plugin: str, command: str, wanted: str, answered: str) -> Refusal:
    """Refuse a result of another version than the plugin was asked for."""
    return refuse(
        "cni-version-answered",
        f"the CNI plugin {plugin} was asked to {command} in version {wanted} and answered in {answered}; "
        "its result is not used",
        plugin=plugin,
        command=command,
        wanted=wanted,
        answered=answered,
    )


def plugin_timeout(plugin: str, command: str, limit_s: float) -> Refusal:
    """Refuse the work of a plugin that did not end in time, and was killed with all that it
    started.
    """
    return refuse(
        "cni-plugin-timeout",
        f"the CNI plugin {plugin} did not end its {command} within {limit_s:g} s and was killed;"
        " find what it waits for, or raise the setting cni.timeout_s",
        plugin=plugin,
        command=command,
        limit_s=limit_s,
    )


def plugin_killed(plugin: str, command: str, signal: str, said: str) -> Refusal:
    """Refuse the work of a plugin that died by a signal."""
    return refuse(
        "cni-plugin-killed",
        f"the CNI plugin {plugin} died of {signal} during {command}{_also(said)}",
        plugin=plugin,
        command=command,
        signal=signal,
    )


def plugin_nonsense(plugin: str, command: str, problem: str, said: str) -> Refusal:
    """Refuse an answer that does not follow the specification."""
    return refuse(
        "cni-plugin-nonsense",
        f"the answer of the CNI plugin {plugin} to {command} cannot be used: {problem}{_also(said)}",
        plugin=plugin,
        command=command,
        problem=problem,
    )


def output_too_large(plugin: str, command: str, limit_bytes: int) -> Refusal:
    """Refuse an answer that is longer than any real one."""
    return refuse(
        "cni-output-too-large",
        f"the CNI plugin {plugin} wrote more than {limit_bytes} bytes in answer to {command} and was killed",
        plugin=plugin,
        command=command,
        limit_bytes=limit_bytes,
    )


def plugin_failed(plugin: str, command: str, error_code: int, message: str, details: str) -> Refusal:
    """Return a plugin's own error as a Refusal: its number, its message, its details."""
    text = f"the CNI plugin {plugin} answered error {error_code} to {command}: {_cut(message) or 'no message'}"
    if details:
        text += f" ({_cut(details)})"
    facts: dict[str, str | int | float | bool | tuple[str, ...]] = {
        "plugin": plugin,
        "command": command,
        "error_code": error_code,
    }
    if error_code == _TRY_AGAIN:
        return refuse("cni-try-again", text + "; it asks to be tried again later", **facts)
    return refuse("cni-plugin-failed", text, **facts)


def plugin_unusable(plugin: str, path: str, problem: str) -> Refusal:
    """Refuse a binary that exists but cannot or must not be started."""
    return refuse(
        "cni-plugin-unusable",
        f"the CNI plugin {plugin} ({path}) cannot be run: {problem}; install it again",
        plugin=plugin,
        path=path,
        problem=problem,
    )


def interface_missing(network: str, interface: str, got: Sequence[str]) -> Refusal:
    """Refuse a chain whose result has no such interface inside the sandbox."""
    return refuse(
        "cni-interface-missing",
        f"the CNI network {network} reports no interface {interface} inside the sandbox (it reports "
        f"{', '.join(got) or 'none'});"
        " its first plugin must be one that makes or moves an interface",
        network=network,
        interface=interface,
        got=tuple(got),
    )


def state_unreadable(path: str, problem: str) -> Refusal:
    """Refuse to go by a record of an attachment that cannot be read or written."""
    return refuse(
        "cni-state-unreadable",
        f"{path}: the record of a CNI attachment cannot be used: {problem}; see what it names, then mend "
        "or delete the file",
        path=path,
        problem=problem,
    )


def _shown(value: object) -> str:
    return _cut(repr(value), 80)


def _also(said: str) -> str:
    return f"; it wrote: {_cut(said)}" if said else ""


def _cut(text: str, limit: int = _MESSAGE_CHARACTERS) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
