"""`topobus oci hook`: what a container runtime runs as an OCI hook, so that an interface is in the container before its program starts, and back when it has ended."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from topobus.cli.exits import ExitCode
from topobus.values.edits import Hook
from topobus.values.errors import ConfigError, ContractError
from topobus.values.outcome import Refusal

__all__ = ["hook", "interface_hooks"]

# A hand-over takes a tenth of a second; waiting for duplicate address detection four more.
_TIMEOUT_S = 30
_STATE_BYTES = 1 << 20


def hook(
    stage: Annotated[Literal["attach", "detach"], Parameter(help="attach at createRuntime, detach at poststop.")],
    /,
    *,
    interface: Annotated[str, Parameter(name="--interface", help="The interface's name on the host.")],
    parameters: Annotated[
        str, Parameter(name="--parameters", help="Its configuration as JSON: one object of nic.topobus.dev, or a list of them.")
    ] = "[]",
    state_dir: Annotated[Path | None, Parameter(name="--state-dir", help="Where records are kept. Default: /run/topobus/oci.")] = None,
) -> int:
    """Hand an interface over to a container, or take it back; the runtime writes the container's state to standard input."""
    hooks = _nic_hooks()
    state = hooks.read_state(sys.stdin.buffer.read(_STATE_BYTES))
    folder = {"folder": state_dir.absolute()} if state_dir is not None else {}
    if stage == "detach":
        hooks.detach(state, interface, **folder)
        return ExitCode.OK
    answer = hooks.attach(state, interface, _read_parameters(parameters), **folder)
    if isinstance(answer, Refusal):
        raise ContractError(f"container {state.id}, interface {interface}: {'; '.join(reason.message for reason in answer.reasons)}")
    return ExitCode.OK


def interface_hooks(interface: str, parameters: list[dict[str, Any]], *, state_dir: Path | None = None) -> tuple[Hook, ...]:
    """Make the two hooks of one interface: this program, by the interpreter that runs now."""
    shared = ["--interface", interface, *(["--state-dir", str(state_dir)] if state_dir is not None else [])]
    begin = (sys.executable, "-m", "topobus.cli.main", "oci", "hook")
    given = json.dumps(parameters, separators=(",", ":"), sort_keys=True)
    return (
        Hook(
            name="createRuntime",
            path=sys.executable,
            args=(*begin, "attach", *shared, "--parameters", given),
            timeout_s=_TIMEOUT_S,
        ),
        Hook(name="poststop", path=sys.executable, args=(*begin, "detach", *shared), timeout_s=_TIMEOUT_S),
    )


def _read_parameters(text: str) -> list[dict[str, Any]]:
    try:
        document = json.loads(text)
    except ValueError as err:
        raise ContractError(f"--parameters: no JSON: {err}") from err
    entries = document if isinstance(document, list) else [document]
    if not all(isinstance(entry, dict) for entry in entries):
        raise ContractError("--parameters: wanted an object, or a list of objects")
    return entries


def _nic_hooks() -> Any:
    """Load the nic service's part, which may not be installed beside the command line; by name, for no service is a part of another one."""
    try:
        return importlib.import_module("topobus.nic.oci_hook")
    except ModuleNotFoundError as err:
        raise ConfigError(
            "interfaces are handed over by topobus-nic, which is not installed", next_step="pip install '.[nic]' from the checkout"
        ) from err
