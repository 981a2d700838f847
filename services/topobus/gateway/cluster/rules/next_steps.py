"""What an operator or user can do about a refusal on the node, by its reason code: the last words
of an event on a pod or a claim.

A code without its own sentence gets the one for a condition that ends without intervention.
"""

from __future__ import annotations

__all__ = ["AGAIN", "next_step"]

AGAIN = "tried again as soon as that is over"
_MEND = "correct the configuration of the claim or its class, then create claim and pod again"
_OPERATOR = "the node's operator can allow it in the settings of the gateway or of the device service"
_LOOK = "look into the log of the class's device service on the node"

_RIGHTS = "give the class's device service the rights that attaching needs (docs/reference/rights.md)"

# By the code's prefix. The longest matching prefix counts.
_STEPS = {
    "address-in-use": "ask for another address, or find the machine that answers for this one",
    "attach-unsupported": _RIGHTS,
    "attach-failed": _LOOK,
    "attach-malformed": _LOOK,
    "claim-": AGAIN,
    "claim-not-for-pod": "let the pod name claims of its own alone",
    "cni-": _MEND,
    "cni-chain-forbidden": _OPERATOR,
    "cni-plugin-": _LOOK,
    "cni-plugin-forbidden": _OPERATOR,
    "cni-plugin-missing": "install the plugin on the node, or mend the chain",
    "cni-state-": _LOOK,
    "cni-try-again": AGAIN,
    "cdi-": "correct the CDI files in /etc/cdi and /var/run/cdi on the node",
    "cpu-of-claim": "end the other claim's pod, or create this claim and its pod again",
    "cpu-not-ours": "ask for other CPUs, or let the gateway's setting cpus.owned name them",
    "cpu-of-kubelet": "let only one of kubelet's CPU manager and the gateway's setting cpus.owned have these CPUs",
    "device-in-another-pod": "give each pod a claim of its own (resourceClaimTemplateName)",
    "driver-": _LOOK,
    "edits-": _OPERATOR,
    "hand-over-failed": _LOOK,
    "interface-config-": _MEND,
    "journal-": _LOOK,
    "mps-": "start the MPS control daemon on the node, or ask for another sharing strategy",
    "mps-mixed": "ask for the strategy of those that have a part of the GPU, or for another device",
    "mps-partition": _MEND,
    "mps-program-missing": "install MPS with the driver on the node, or name its folder (hardware.driver_files.root)",
    "mps-several-daemons": _MEND,
    "mps-start-failed": "look into the daemon's log on the node, which the message names; its clients wait until it starts",  # noqa: E501
    "name-taken": "write another interface.name into the configuration of the claim or its class, then create claim and "  # noqa: E501
    "pod again",
    "not-permitted": _RIGHTS,
    "package-missing": "install it on the node with the class's device service (docs/reference/installing.md)",
    "pinning-": "let the container runtime's plugin interface (NRI) be on, and the gateway's setting runtime.socket lead "  # noqa: E501
    "to it",
    "plugin-": _LOOK,
    "pod-on-host-network": "leave hostNetwork, or the claim, out of the pod",
    "prepare-": _LOOK,
    "runtime-": "let the container runtime's plugin interface (NRI) be on, and the gateway's setting runtime.socket lead "  # noqa: E501
    "to it",
    "shape-unknown": "delete the pod once all device services of the node are ready: its claim is allocated again",
    "share-failed": _MEND,
    "shared-pool-empty": "ask for fewer CPUs: the other containers need one",
    "sharing-": _MEND,
    "time-slice-": _MEND,
    "undo-failed": _LOOK,
    "work-overdue": _LOOK,
    "vf-refused": _MEND,
}


def next_step(code: str) -> str:
    """Return what to do about a refusal.

    >>> next_step("shared-pool-empty"), next_step("device-sick"), next_step("cni-plugin-timeout")[:8]
    ('ask for fewer CPUs: the other containers need one', 'tried again as soon as that is over', 'look int')
    """
    fitting = [beginning for beginning in _STEPS if code.startswith(beginning)]
    return _STEPS[max(fitting, key=len)] if fitting else AGAIN
