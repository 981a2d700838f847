"""Decides which sandboxes a claim's devices may be attached to, and checks what a device service
reports about them.

The result is a Refusal with the first violation, or None.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from msgspec import structs

from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.values.outcome import Refusal, refuse
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = [
    "claim_undone",
    "failed",
    "not_reserved",
    "of_claim",
    "pending",
    "purpose",
    "refuse_interfaces",
    "refuse_sandbox",
    "refuse_taken",
    "unanswered",
]

# IFNAMSIZ with its zero, linux/if.h.
_NAME = re.compile(r"[^\s/:]{1,15}")
_MAC = re.compile(r"([0-9a-f]{2}:){5,19}[0-9a-f]{2}")
# ResourceClaim's networkData.ips has no more (k8s.io/api/resource/v1).
_ADDRESSES = 16


def purpose(claim: ClaimEntry) -> str:
    """Return what a claim needs the container runtime for."""
    if claim.to_attach:
        return f"bring {', '.join(claim.to_attach)} into its pod"
    return f"give containers what is theirs of {', '.join(claim.to_adjust)}"


def refuse_sandbox(claim: ClaimEntry, sandbox: Sandbox) -> Refusal | None:
    """Refuse a sandbox that nothing can be moved into, or in another namespace than the claim."""
    if sandbox.namespace != claim.namespace:
        return _refuse(claim, "claim-not-for-pod", f"it is of another namespace than pod {sandbox}")
    if not sandbox.network_namespace:
        devices = ", ".join(claim.to_attach)
        text = (
            f"{devices} goes into the pod's network namespace, and pod {sandbox} has none of its own: leave "
            "hostNetwork out, or the claim"
        )
        return _refuse(claim, "pod-on-host-network", text)
    return None


def refuse_taken(
    claim: ClaimEntry, other: Sandbox | None, sandbox: Sandbox, alive: Mapping[str, Sandbox]
) -> Refusal | None:
    """Refuse a sandbox while the devices are in that of another pod that is alive.

    A former sandbox of the same pod is left for the new one.

    Shapes: other — the sandbox in which the devices are, or may be; alive — the existing sandboxes,
    by id.
    """
    if other is None or other.uid == sandbox.uid or other.id not in alive:
        return None
    text = (
        f"{', '.join(claim.to_attach)} is in pod {other} (uid {other.uid}), and a device "
        "that is attached serves one pod at a time:"
        " give each pod a claim of its own (resourceClaimTemplateName)"
    )
    return _refuse(claim, "device-in-another-pod", text)


def refuse_interfaces(claim: ClaimEntry, interfaces: Mapping[str, AttachedInterface]) -> Refusal | None:
    """Refuse an impossible answer to `attach`, which would end up in the claim's status."""
    strange = sorted(interfaces.keys() - set(claim.to_attach))
    if strange:
        return _malformed(claim, f"an interface of {ascii(strange[0])[:80]}, which was not asked for")
    for device, interface in sorted(interfaces.items()):
        wrong = _wrong_in(interface)
        if wrong:
            return _malformed(claim, f"for {device} {wrong}")
    return None


def not_reserved(claim: ClaimEntry, sandbox: Sandbox) -> Refusal:
    """Refuse a pod that the claim is not reserved for."""
    return _refuse(claim, "claim-not-for-pod", f"it is not reserved for pod {sandbox} (uid {sandbox.uid})")


def failed(claim: ClaimEntry, error: str) -> Refusal:
    """Refuse because of an error on our side, or at a device service that gave no reason."""
    return _refuse(claim, "attach-failed", error)


def unanswered(claim: ClaimEntry, remark: str) -> Refusal:
    """Refuse a sandbox whose devices could not even be requested."""
    return _refuse(
        claim, "attach-unanswered", f"{', '.join(claim.to_attach)} could not be brought into the pod in time: {remark}"
    )


def pending(claim: ClaimEntry, what: str) -> Refusal:
    """Refuse a container while its pod's devices are being attached."""
    return _refuse(
        claim, "attach-pending", f"{', '.join(claim.to_attach)} is not in the pod yet ({what}); kubelet tries again"
    )


def of_claim(claim: ClaimEntry, refusal: Refusal) -> Refusal:
    """Add the claim's name to a device service's reasons, for people who see only the pod.

    A service without reasons gets a reason that states so.
    """
    if not refusal.reasons:
        return _refuse(
            claim,
            "attach-malformed",
            "its device service refuses without a reason: look into that service's log on the node",
        )
    where = f"claim {claim.namespace}/{claim.name}"
    return Refusal(
        reasons=tuple(structs.replace(reason, message=f"{where}: {reason.message}") for reason in refusal.reasons)
    )


def claim_undone(sandbox: Sandbox) -> Refusal:
    """Refuse a sandbox whose claim was unprepared meanwhile."""
    text = f"a claim of pod {sandbox} was unprepared meanwhile"
    return refuse("claim-not-prepared", text, pod=sandbox.uid)


def _wrong_in(interface: AttachedInterface) -> str:
    if not _NAME.fullmatch(interface.name) or not interface.name.isprintable() or interface.name in (".", ".."):
        return f"the interface name {ascii(interface.name)[:80]}, wanted one to 15 characters"
    if interface.mac and not _MAC.fullmatch(interface.mac):
        return f"the MAC {ascii(interface.mac)[:80]}, wanted pairs of hexadecimal digits with colons"
    if len(interface.addresses) > _ADDRESSES:
        return f"{len(interface.addresses)} addresses, wanted at most {_ADDRESSES}"
    for address in interface.addresses:
        try:
            ipaddress.ip_interface(address)
        except ValueError:
            return f"the address {ascii(address)[:80]}, wanted one such as 10.1.2.3/24"
        if "/" not in address:
            return f"the address {address} without its prefix"
    return ""


def _refuse(claim: ClaimEntry, code: str, message: str) -> Refusal:
    where = f"{claim.namespace}/{claim.name}"
    return refuse(code, f"claim {where}: {message}", claim=where, devices=claim.to_attach)


def _malformed(claim: ClaimEntry, what: str) -> Refusal:
    return _refuse(claim, "attach-malformed", f"its device service answers {what}")
