"""What prevents an operator's operation on a device, as far as the node's ledger and inventories
show.

Pure. The device service checks again before it resets, rebinds or tests a device, because only it
knows for certain what it has prepared.
"""

from __future__ import annotations

from topobus.engine.ledger.device_users import owners_of_devices, reset_together
from topobus.formats.messages.device_classes import has_own_service
from topobus.values.device import Device, Inventory
from topobus.values.ledger import Ledger
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.names import meant_name
from topobus.values.outcome import Refusal, refuse

__all__ = ["complaint_of_operation_text", "complaint_of_texts", "fault_of_operation"]

# A sentence or two. The inventory carries it, and all services of the node read that.
_WHY_CHARACTERS = 512
_WHO_CHARACTERS = 253


def complaint_of_operation_text(operation: DeviceOperation) -> str:
    """Explain which of an operation's texts is out of bounds. Empty when none is."""
    if complaint := complaint_of_texts(operation.why, operation.who):
        return complaint
    if not operation.who:
        return "who is empty: an operation names the person who wants it"
    if operation.verb.is_lasting and not operation.why:
        return f"why is empty: `{operation.verb}` lasts until it is undone, and others must be able to read why"
    return ""


def complaint_of_texts(why: str, who: str) -> str:
    """Explain which text of a person is too long, or cannot be shown. Empty when none is."""
    for key, text, most in (("why", why, _WHY_CHARACTERS), ("who", who, _WHO_CHARACTERS)):
        if len(text) > most:
            return f"{key} has {len(text)} characters, wanted at most {most}"
        if not text.isprintable():
            return f"{key} is {text!r}, wanted printable characters only"
    return ""


def fault_of_operation(operation: DeviceOperation, inventory: Inventory | None, ledger: Ledger) -> Refusal | None:
    """Refuse an operation that cannot be done with a device.

    A device that is gone may be returned by its name.

    Errors: raises nothing; Refusal codes unknown-class, not-ours, unknown-device, device-held.
    """
    device_class, name = operation.device_class, operation.device
    if inventory is None:
        text = f"node {ledger.node} has no devices of class {device_class!r}"
        return refuse("unknown-class", text, resource=device_class)
    if not has_own_service(device_class):
        text = (
            f"class {device_class} is served by somebody else's device plugin on node {ledger.node}: operate its "
            "devices by that plugin's own means"
        )
        return refuse("not-ours", text, resource=device_class)
    device = inventory.device(name)
    if device is None:
        if operation.verb is DeviceVerb.RETURN:
            return None
        meant = meant_name(name, [other.name for other in inventory.devices])
        hint = f"; did you mean {meant}?" if meant else ""
        return refuse(
            "unknown-device", f"there is no {device_class} named {name!r} on node {ledger.node}{hint}", device=name
        )
    return _held(operation.verb, device, inventory, ledger) if operation.verb.needs_no_owner else None


def _held(verb: DeviceVerb, device: Device, inventory: Inventory, ledger: Ledger) -> Refusal | None:
    owners = owners_of_devices(ledger, inventory.device_class)
    names = [other.name for other in reset_together(device, inventory.devices)]
    users = {owner.key: f"{owner} holds {name}" for name in names for owner in owners.get(name, ())}
    if not users:
        return None
    text = f"no {verb} of {device.name} while it is held: {'; '.join(users.values())}"
    return refuse("device-held", text, device=device.name, owners=tuple(users))
