"""Why an adoption is refused for reasons besides the ledger's holdings: devices that no service
offers, and counters or capacities that are short beside those that others hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from topobus.engine.alignment.planning.claims_only import capacity_shortages, shortages
from topobus.engine.alignment.planning.node_view import cpu_name, with_ledger
from topobus.engine.ledger.holdings import holding_of, without
from topobus.engine.ledger.transitions import gives_way
from topobus.formats.messages.messages import AdoptRequest
from topobus.values.device_sharing import HeldShare
from topobus.values.dra_names import CPU_CLASS
from topobus.values.ledger import Holding, Ledger
from topobus.values.outcome import Reason, Refusal
from topobus.values.shares import shares_held
from topobus.values.view import NodeView

__all__ = ["fault_of_adoption", "shares_of"]


def fault_of_adoption(view: NodeView, ledger: Ledger, asked: AdoptRequest) -> Refusal | None:
    """Refuse devices that no inventory lists (CPUs are checked against the machine), and devices
    that do not fit beside those that others hold.

    Admin access takes nothing of a counter.
    """
    reasons = _unknown(view, asked.devices)
    if not reasons and not asked.is_shared:
        reasons = _short_shares(view, ledger, asked)
    if not reasons and not asked.is_shared and view.counter_sets:
        others = {key: allocation for key, allocation in ledger.allocations.items() if key != asked.owner.key}
        reasons = shortages(with_ledger(view, structs.replace(ledger, allocations=others)), asked.devices)
    return Refusal(reasons=tuple(reasons)) if reasons else None


def shares_of(view: NodeView, asked: AdoptRequest) -> dict[str, tuple[str, ...]]:
    """List the devices that are held by share.

    A device that its driver does not share is not listed, whatever the claim asks for, so it is
    held whole.
    """
    if not asked.shared:
        return {}
    able = {
        name: {device.name for device in devices if device.allows_multiple} for name, devices in view.devices.items()
    }
    # CPUs are no devices of a view, so it does not show which of them are shared.
    return {
        name: kept
        for name, names in asked.shared.items()
        if (kept := tuple(sorted(set(names) if name == CPU_CLASS else able.get(name, set()) & set(names))))
    }


def _short_shares(view: NodeView, ledger: Ledger, asked: AdoptRequest) -> list[Reason]:
    """List the shared devices of which the others hold so much that the amount asked for is not
    left.

    Amounts that an older allocation of kubelet's would lose to this one (its replica is allocated
    again) are not counted.
    """
    shared = shares_of(view, asked)
    wanted: dict[str, dict[str, HeldShare]] = {
        device_class: {name: share for name, share in shares.items() if name in shared.get(device_class, ())}
        for device_class, shares in asked.shares.items()
    }
    if not any(wanted.values()):
        return []
    taken = holding_of(asked.devices, shared, asked.shares)
    others = (
        (
            key,
            without(holding, taken)
            if isinstance(taken, Holding) and gives_way(allocation.owner, asked.owner)
            else holding,
        )
        for key, allocation in ledger.allocations.items()
        if key != asked.owner.key
        for holding in allocation.holdings
    )
    return capacity_shortages(view, wanted, shares_held(others))


def _unknown(view: NodeView, devices: Mapping[str, tuple[str, ...]]) -> list[Reason]:
    reasons: list[Reason] = []
    for device_class, names in sorted(devices.items()):
        if device_class != CPU_CLASS and device_class not in view.devices:
            message = f"no device service on node {view.node} offers class {device_class!r}"
            reasons.append(Reason(code="unknown-class", message=message, facts={"resource": device_class}))
            continue
        if device_class == CPU_CLASS:
            legal_names = {cpu_name(cpu) for core in view.cores for cpu in core.cpus}
        else:
            legal_names = {device.name for device in view.devices[device_class]}
        reasons += [
            Reason(
                code="unknown-device",
                message=f"there is no {device_class} named {name!r} on node {view.node}",
                facts={"resource": device_class, "device": name},
            )
            for name in names
            if name not in legal_names
        ]
    return reasons
