"""Console script `topobus-nic-hook`: hands an interface to a container by an OCI runtime's own
hooks, for runc alone, without a gateway, a kubelet or NRI.

It reads the container's state from its standard input, as the runtime writes it. The hook
createRuntime puts the interface into the container, and the hook poststop restores it on the host.
At poststop the container's process is gone, and with it its network namespace and every virtual
interface in it. So the namespace is kept by a bind mount beside the record until the interface is
taken back. Both are below /run: after a reboot there is neither a namespace nor anything to undo.
Source: OCI runtime specification 1.0.2, runtime.md (state) and config.md (POSIX-platform hooks).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError

from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.devicekit.journal import durable_file
from topobus.formats.messages.codec import decode, encode
from topobus.nic.interfaces.rules.interface_fields import is_interface_name
from topobus.nic.interfaces.rules.interface_reading import read_interface_config
from topobus.nic.interfaces.rules.interface_state import InterfaceState, state_from_journal
from topobus.nic.netlink.hand_over import check_hand_over, hand_over
from topobus.nic.netlink.kept_namespaces import mount_namespace, unmount_namespace
from topobus.nic.netlink.places import Places
from topobus.nic.netlink.take_back import TakenBack, take_back
from topobus.values.errors import ContractError, HardwareError
from topobus.values.outcome import Refusal, refuse
from topobus.values.sandbox import AttachedInterface

__all__ = ["FOLDER", "ContainerState", "attach", "detach", "handed_over", "main", "read_state"]

FOLDER = Path("/run/topobus/oci")
"""Where records and namespaces are kept; one folder for all containers of a node."""

# The ids that runc allows for containers. The id becomes the name of files.
_ID = re.compile(r"[A-Za-z0-9_+.-]{1,128}")
_STATE_BYTES = 1 << 20


class ContainerState(Struct, frozen=True, kw_only=True):
    """The part of a container's state that a hook needs."""

    id: str
    pid: int = 0
    """Of the container's first process, as the host counts; 0 when it is gone."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the container's state from standard input, and attach or detach the interface.

    Exits with 1 and a line with the reason when it cannot be done.
    """
    parser = argparse.ArgumentParser(
        prog="topobus-nic-hook",
        description="OCI hook (createRuntime, poststop): hand an interface to a container, and take it back.",
    )
    parser.add_argument("stage", choices=("attach", "detach"), help="attach at createRuntime, detach at poststop")
    parser.add_argument("--interface", required=True, help="the interface's name on the host")
    parser.add_argument(
        "--parameters", default="[]", help="its configuration as JSON: an object of nic.topobus.dev, or a list of them"
    )
    parser.add_argument("--state-dir", type=Path, default=FOLDER, help=f"where records are kept; default: {FOLDER}")
    options = parser.parse_args(arguments)
    try:
        state, folder = read_state(sys.stdin.buffer.read(_STATE_BYTES)), options.state_dir.absolute()
        if options.stage == "detach":
            detach(state, options.interface, folder=folder)
            return
        answer = attach(state, options.interface, _read_parameters(options.parameters), folder=folder)
    except (ContractError, HardwareError) as err:
        sys.exit(f"topobus-nic-hook: {err}")
    if isinstance(answer, Refusal):
        sys.exit(f"topobus-nic-hook: container {state.id}, interface {options.interface}: {answer.why}")


def read_state(data: bytes) -> ContainerState:
    """Read the state that a runtime writes to a hook.

    Errors: raises ContractError that names the field.
    """
    state = decode(data, ContainerState, where="state on standard input")
    if not _ID.fullmatch(state.id) or state.id.startswith("."):
        raise ContractError(f"state on standard input: id is {state.id!r}, wanted letters, digits and _+.-")
    if state.pid < 0:
        raise ContractError(f"state on standard input: pid is {state.pid}, wanted a process, or 0")
    return state


def attach(
    state: ContainerState,
    interface: str,
    parameters: Sequence[Mapping[str, Any]],
    *,
    folder: Path = FOLDER,
    places: Places | None = None,
) -> AttachedInterface | Refusal:
    """Put an interface into a container that is being created.

    A repeated call first undoes what was begun.

    Shapes: parameters — opaque configurations, of which the last one to write a field counts, as in
    a claim.
    Errors: refuses with the field, before anything is changed; what the kernel refuses later is
    undone. Raises HardwareError when that fails.
    """
    places = places or Places()
    if not is_interface_name(interface):
        return refuse(
            "interface-gone", f"--interface is {interface!r}, wanted the name of an interface", interface=interface
        )
    if state.pid == 0:
        return refuse(
            "namespace-gone",
            "state on standard input: pid is missing, which a runtime gives at createRuntime",
            container=state.id,
        )
    config = read_interface_config(list(parameters))
    if isinstance(config, Refusal):
        return config
    detach(state, interface, folder=folder, places=places)
    refusal = check_hand_over(places, interface, config)
    if refusal is not None:
        return refusal
    namespace = _keep_namespace(state, interface, folder)
    record = _record(state, interface, folder)
    attached = hand_over(places, interface, str(namespace), config, record, tag=f"topobus oci {state.id}")
    if isinstance(attached, Refusal):
        detach(state, interface, folder=folder, places=places)
    return attached


def detach(state: ContainerState, interface: str, *, folder: Path = FOLDER, places: Places | None = None) -> TakenBack:
    """Take an interface back from a container that has ended.

    Nothing is done for one that was never attached.

    Errors: raises HardwareError when it could not be restored; the record and the namespace stay,
    and the next call continues there.
    """
    namespace = _namespace_file(state, interface, folder)
    taken = take_back(
        places or Places(), str(namespace) if namespace.exists() else "", _record(state, interface, folder)
    )
    if namespace.exists():
        unmount_namespace(namespace)
        namespace.unlink()
    durable_file.delete(folder, f"{_stem(state, interface)}.json") if folder.exists() else False
    return taken


def handed_over(folder: Path = FOLDER) -> dict[str, InterfaceState]:
    """Read which interfaces containers have by these hooks, and what each was on the host.

    A record that cannot be read names none.
    """
    states: dict[str, InterfaceState] = {}
    for file in sorted(folder.glob("*@*.json")):
        with suppress(OSError, ContractError, ValidationError):
            steps = {step.name: step for step in decode(file.read_bytes(), RecordState, where=str(file)).steps}
            if "mark" in steps:
                states[file.stem.partition("@")[2]] = state_from_journal(steps["mark"].before.get("state"))
    return states


def _read_parameters(text: str) -> list[dict[str, Any]]:
    try:
        document = json.loads(text)
    except ValueError as err:
        raise ContractError(f"--parameters: no JSON: {err}") from err
    entries = document if isinstance(document, list) else [document]
    if not all(isinstance(entry, dict) for entry in entries):
        raise ContractError("--parameters: wanted an object, or a list of objects")
    return entries


def _record(state: ContainerState, interface: str, folder: Path) -> DeviceRecord:
    name = f"{_stem(state, interface)}.json"
    file = folder / name
    before = decode(file.read_bytes(), RecordState, where=str(file)) if file.exists() else None
    return DeviceRecord(before, lambda after: _write(folder, name, after))


def _write(folder: Path, name: str, state: RecordState) -> None:
    durable_file.write(folder, name, encode(state), mode=0o600)


def _keep_namespace(state: ContainerState, interface: str, folder: Path) -> Path:
    """Mount the container's network namespace over a file, so that it outlives the container's
    process.
    """
    file = _namespace_file(state, interface, folder)
    try:
        mount_namespace(f"/proc/{state.pid}/ns/net", file)
    except OSError as err:
        raise HardwareError(f"{file}: mount: {err.strerror}; it needs root and CAP_SYS_ADMIN", path=str(file)) from err
    return file


def _namespace_file(state: ContainerState, interface: str, folder: Path) -> Path:
    return folder / f"{_stem(state, interface)}.netns"


def _stem(state: ContainerState, interface: str) -> str:
    return f"{state.id}@{interface}"


if __name__ == "__main__":
    main()
