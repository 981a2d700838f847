"""Attaches a device to a pod's sandbox by a chain of CNI plugins, and detaches it again. Drivers of
the nic service call it.

The device's record has the intent before any plugin runs. All calls block, for the driver's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from topobus.devicekit.device_record import DeviceRecord
from topobus.formats.first_read import ready
from topobus.nic.cni.pod_values import chain_for_device, pod_arguments, pod_values
from topobus.nic.cni.records import AttachmentRecords
from topobus.nic.cni.request import CniRequest, read_request
from topobus.nic.cni.rules.chain import Chain, parse_chain
from topobus.nic.cni.rules.messages import CniResult, Target
from topobus.nic.cni.rules.refusals import config_invalid, interface_missing
from topobus.nic.cni.runner import CniRunner, RunnerSettings
from topobus.nic.cni.settings import CniSettings
from topobus.nic.interfaces.rules.interface_config import interface_of
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["STEP", "CniAttachment"]

STEP = "cni"
"""The step's name in a device's record."""
_LOOPBACK = {
    "cniVersion": "0.4.0",
    "cniVersions": ["0.3.1", "1.0.0"],
    "name": "topobus-loopback",
    "plugins": [{"type": "loopback"}],
}
# A configuration list has a few kilobytes.
_LIST_BYTES = 1 << 20


class CniAttachment:
    """Attaches and detaches by CNI. Safe to use from several threads."""

    def __init__(self, settings: CniSettings) -> None:
        self._settings = settings
        self.runner = CniRunner(
            RunnerSettings(
                bin_dirs=tuple(_below(settings.root, folder) for folder in settings.bin_dirs),
                allowed=frozenset(settings.plugins),
                program_path=settings.program_path,
                limit_s=settings.timeout_s,
            ),
            AttachmentRecords(Path(settings.state_dir)),
        )

    def check(self, cni: object, device: Device, where: str = "the claim", *, interface: str = "") -> Refusal | None:
        """Refuse what cannot be attached, before anything is changed: fields, networks, plugin
        types, binaries, versions.

        It runs plugins only with VERSION.

        Shapes: cni — the object under `cni`; where — for messages; interface — the device's name on
        the host, where its attribute has none.
        """
        chain = self._chain(cni, device, where, interface)
        version = chain if isinstance(chain, Refusal) else self.runner.check_chain(chain[1])
        return version if isinstance(version, Refusal) else None

    def check_networks(self) -> dict[str, Refusal]:
        """Check every network of the operator's: name to what is wrong with it, sorted.

        It runs plugins only with VERSION.
        """
        faults: dict[str, Refusal] = {}
        for name, path in sorted(self._settings.networks.items()):
            chain = _read_list(path)
            version = chain if isinstance(chain, Refusal) else self.runner.check_chain(chain)
            if isinstance(version, Refusal):
                faults[name] = version
        return faults

    def attach(
        self, cni: object, sandbox: Sandbox, interface: str, device: Device, record: DeviceRecord, *, on_host: str = ""
    ) -> AttachedInterface | Refusal:
        """Run the chain. A repeated call returns the recorded result.

        Shapes: interface — its name inside the pod; on_host — its name on the host, where the
        device's attribute has none.
        Errors: returns a Refusal after DEL of the whole chain; what DEL could not undo stays in the
        record, and `detach` tries again.
        """
        where = f"claim of {sandbox}"
        if (attached := _attached_before(record, sandbox, interface)) is not None:
            return attached
        if not sandbox.network_namespace:
            return config_invalid(where, "the pod", "one with a network of its own", "hostNetwork")
        chosen = self._chain(cni, device, where, on_host)
        if isinstance(chosen, Refusal):
            return chosen
        request, chain = chosen
        values = pod_values(
            sandbox, device, needs_ports=any("portMappings" in plugin.capabilities for plugin in chain.plugins)
        )
        if isinstance(values, Refusal):
            return values
        target = Target(
            container_id=sandbox.id,
            interface=interface,
            network_namespace=_below(self._settings.root, sandbox.network_namespace),
            arguments=(*pod_arguments(sandbox), *request.arguments),
            runtime_values=values | request.runtime_values,
        )
        version = self.runner.check_chain(chain)
        if isinstance(version, Refusal):
            return version
        refusal = self._switch_on_loopback(target)
        if refusal is not None:
            return refusal
        record.intend(STEP, {"network": chain.name, "container": sandbox.id, "interface": interface})
        result = self.runner.add(chain, target)
        outcome = result if isinstance(result, Refusal) else _attached(chain, interface, result)
        if isinstance(outcome, Refusal):
            # After a failed ADD nothing is attached. After an unusable result everything is.
            if self.runner.delete(chain.name, sandbox.id, interface) is None:
                record.undone(STEP)
            return outcome
        record.done(STEP, {"interface": msgspec.to_builtins(outcome)})
        return outcome

    def detach(self, record: DeviceRecord) -> Refusal | None:
        """Run DEL for what the record and the runner's own records have.

        None when nothing is attached, with or without a sandbox.

        Errors: returns the Refusal of the plugin that failed; the step stays in the record, and the
        next call continues there.
        """
        step = record.step(STEP)
        if step is None:
            return None
        refusal = self.runner.delete(
            str(step.before["network"]), str(step.before["container"]), str(step.before["interface"])
        )
        if refusal is None:
            record.undone(STEP)
        return refusal

    def _chain(self, cni: object, device: Device, where: str, interface: str) -> tuple[CniRequest, Chain] | Refusal:
        """Find the chain that is asked for, with the device written in."""
        networks = self._settings.networks
        request = read_request(cni, where, networks=networks, may_bring_chain=self._settings.allow_claim_chains)
        if isinstance(request, Refusal):
            return request
        chain = request.chain if request.chain is not None else _read_list(networks[request.network])
        if isinstance(chain, Refusal):
            return chain
        written = chain_for_device(chain, device, interface or interface_of(device))
        return written if isinstance(written, Refusal) else (request, written)

    def _switch_on_loopback(self, target: Target) -> Refusal | None:
        """Switch on `lo`. It is not recorded, because DEL would switch it off while the pod uses
        it.
        """
        if not self._settings.has_loopback:
            return None
        chain = parse_chain(_LOOPBACK, "loopback")
        if isinstance(chain, Refusal):
            return chain
        result = self.runner.add_unrecorded(chain, structs.replace(target, interface="lo", runtime_values={}))
        return result if isinstance(result, Refusal) else None


def _attached_before(record: DeviceRecord, sandbox: Sandbox, interface: str) -> AttachedInterface | None:
    """Return what is attached already, by the record, or None when it is not, or in part, or
    elsewhere.
    """
    step = record.step(STEP)
    if (
        step is None
        or not step.is_done
        or (step.before.get("container"), step.before.get("interface")) != (sandbox.id, interface)
    ):
        return None
    return msgspec.convert(step.after["interface"], ready(AttachedInterface))


def _attached(chain: Chain, interface: str, result: CniResult) -> AttachedInterface | Refusal:
    """Find the interface inside the sandbox in a result."""
    inside = [position for position, entry in enumerate(result.interfaces) if entry.sandbox]
    position = next((position for position in inside if result.interfaces[position].name == interface), None)
    if position is None:
        return interface_missing(chain.name, interface, [result.interfaces[position].name for position in inside])
    # Some plugins do not name the interface of an address. With one interface inside, the address
    # is that one's.
    positions = (position, None) if len(inside) == 1 else (position,)
    return AttachedInterface(
        name=interface,
        mac=result.interfaces[position].mac,
        addresses=tuple(address.address for address in result.addresses if address.interface in positions),
        mtu=max(result.interfaces[position].mtu, 0),
    )


def _read_list(path: str) -> Chain | Refusal:
    """Read an operator's configuration list."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LIST_BYTES + 1)
        if len(content) > _LIST_BYTES:
            return config_invalid(path, "the file", f"at most {_LIST_BYTES} bytes", len(content))
        document: Mapping[str, Any] = msgspec.json.decode(content)
    except (OSError, ValueError, RecursionError) as err:
        return config_invalid(path, "the file", "a readable configuration list in JSON", str(err))
    return parse_chain(document, path)


def _below(root: str, path: str) -> str:
    """Return a path of the host as this process sees it."""
    return str(Path(root, path.lstrip("/")))
