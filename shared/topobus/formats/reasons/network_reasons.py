"""The reason codes of network interfaces and CNI plugins, as part of `reasons`."""

from __future__ import annotations

from topobus.formats.reasons.reason_values import ReasonGroup, ReasonSection

__all__ = ["NETWORK_SECTIONS"]

NETWORK_SECTIONS: tuple[ReasonSection, ...] = (
    ReasonSection(
        title="Network interfaces",
        before="By the nic service, when it checks, hands over or takes back an interface; "
        "[configuration](nic-configuration.md).",
        groups=(
            ReasonGroup(
                ("interface-config-invalid",),
                "a field of the configuration is wrong, or this device cannot have it; one reason a field",
                ("field", "got", "wanted"),
            ),
            ReasonGroup(
                ("package-missing",),
                "interfaces are handed over by a package that is not installed",
                ("package", "extra"),
            ),
            ReasonGroup(
                ("namespace-gone", "namespace-of-host"),
                "the path of the sandbox leads to no network namespace, or to the host's own",
                ("path", "error"),
            ),
            ReasonGroup(("interface-gone",), "the host has no interface of that name", ("interface",)),
            ReasonGroup(
                ("interface-of-node", "interface-changed"),
                "since it was offered, the node's default route came to the interface, or its name became "
                "another's; nothing was changed",
                ("device", "interface"),
            ),
            ReasonGroup(
                ("interface-missing",),
                "the function has no interface to hand over: not yet (a driver makes it a moment after the "
                "function is there; asked again, the claim gets it), not here, or never",
                ("device", "interface"),
            ),
            ReasonGroup(
                ("name-taken",), "the pod has an interface of that name already; nothing was changed", ("field", "name")
            ),
            ReasonGroup(
                ("not-permitted",), "the service may not change interfaces: a capability is missing", ("step", "error")
            ),
            ReasonGroup(("hand-over-failed",), "the kernel refuses a step; what was done is undone", ("step", "error")),
            ReasonGroup(
                ("address-in-use", "address-not-ready"),
                "duplicate detection, asked for by `wait`, found another machine with the address, or did "
                "not end in time",
                ("address",),
            ),
            ReasonGroup(
                ("share-failed",), "the kernel makes no child of this interface", ("interface", "mode", "error")
            ),
            ReasonGroup(("vf-gone",), "the physical function has no such virtual function", ("physical", "index")),
            ReasonGroup(
                ("vf-refused",),
                "the driver of the physical function does not take a setting",
                ("field", "physical", "error"),
            ),
            ReasonGroup(
                ("vf-count-held", "vf-count-in-use", "vf-count-impossible", "vf-count-failed"),
                "the number of virtual functions that the settings ask for cannot be had, or not now",
                ("address", "wanted", "present", "total", "users", "error"),
            ),
            ReasonGroup(
                ("interface-renamed",),
                "it came back under another name, since its own is taken on the host",
                ("interface", "name"),
            ),
            ReasonGroup(
                ("interface-name-lost",),
                "it came back without one of its alternative names, which is another interface's by now",
                ("interface", "name"),
            ),
            ReasonGroup(
                ("interface-lost",),
                "an interface went away: a virtual one with the pod's namespace or with a reboot, hardware "
                "with its device; what is in its place now was not changed",
                ("interface", "kind"),
            ),
            ReasonGroup(
                ("vf-setting-kept",),
                "the driver refuses for good to put a setting back; it stays, and is not tried again",
                ("field", "physical", "index"),
            ),
        ),
    ),
    ReasonSection(
        title="CNI plugins",
        before="By the nic service, when a pod is attached by a chain of CNI plugins; [what to do about "
        "each](cni-errors.md).",
        groups=(
            ReasonGroup(
                ("cni-config-invalid",),
                "a configuration list, a claim's part of it, or a name cannot be used",
                ("where", "field", "wanted"),
            ),
            ReasonGroup(
                ("cni-chain-forbidden",),
                "a claim brings a list of its own, and the operator does not allow that",
                ("where",),
            ),
            ReasonGroup(("cni-network-unknown",), "the operator has named no such network", ("network", "known")),
            ReasonGroup(
                ("cni-plugin-forbidden",), "the operator does not allow this type of plugin", ("plugin", "allowed")
            ),
            ReasonGroup(
                ("cni-plugin-missing",), "no folder of plugins has this binary", ("plugin", "field", "looked_in")
            ),
            ReasonGroup(
                ("cni-plugin-unusable",),
                "the binary cannot be started, or everybody may write to it",
                ("plugin", "path"),
            ),
            ReasonGroup(
                ("cni-version-unsupported",),
                "list and plugin have no version in common",
                ("wanted", "plugin", "supported"),
            ),
            ReasonGroup(
                ("cni-version-answered",),
                "a plugin answered in another version than asked",
                ("plugin", "wanted", "answered"),
            ),
            ReasonGroup(
                ("cni-plugin-timeout", "cni-plugin-killed"),
                "a plugin did not end in time, or died of a signal; with its children, it is dead",
                ("plugin", "command", "limit_s", "signal"),
            ),
            ReasonGroup(
                ("cni-plugin-nonsense", "cni-output-too-large"),
                "a plugin's answer does not follow the specification, or has no end",
                ("plugin", "command", "limit_bytes"),
            ),
            ReasonGroup(
                ("cni-plugin-failed",), "a plugin's own error, with its number", ("plugin", "command", "error_code")
            ),
            ReasonGroup(
                ("cni-try-again",),
                "a plugin's own error 11: it is to be asked later",
                ("plugin", "command", "error_code"),
            ),
            ReasonGroup(
                ("cni-ports-unknown",), "the chain opens host ports, and the pod's could not be read", ("pod",)
            ),
            ReasonGroup(
                ("cni-interface-missing",),
                "the chain reports no interface inside the sandbox",
                ("network", "interface", "got"),
            ),
            ReasonGroup(
                ("cni-check-unsupported",),
                "CHECK came with 0.4.0, and a list may switch it off",
                ("network", "version"),
            ),
            ReasonGroup(("cni-state-unreadable",), "the record of an attachment cannot be read or written", ("path",)),
        ),
    ),
)
