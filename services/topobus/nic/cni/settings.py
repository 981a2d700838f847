"""Settings for CNI: where plugins and networks are, and what may be run."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["CniSettings"]


class CniSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the nic service attaches through CNI plugins."""

    networks: dict[str, str] = {}
    """The networks that a claim may name: name to the path of a configuration list (JSON). Empty,
    as by default: none. A file is read at each use."""
    allow_claim_chains: bool = False
    """Whether a claim may bring a configuration list of its own. Off: a chain runs programs as
    root, with what its author writes as their input."""
    plugins: tuple[str, ...] = (
        "bandwidth",
        "bridge",
        "dhcp",
        "host-device",
        "host-local",
        "ib-sriov",
        "ipvlan",
        "loopback",
        "macvlan",
        "portmap",
        "ptp",
        "sbr",
        "sriov",
        "static",
        "tuning",
        "vlan",
        "vrf",
    )
    """Types of plugins that may be run, address plugins included, by whomever they are named. The
    default: those of the CNI project that make or change one interface, and the two of the SR-IOV
    project."""
    bin_dirs: tuple[str, ...] = ("/opt/cni/bin", "/usr/lib/cni")
    """Folders of the plugins below `root`, the first that has one wins. The defaults: Kubernetes'
    own place, and Debian's."""
    root: str = "/"
    """The folder below which this process sees the host's plugins and network namespaces; `/host`
    where the manifest mounts the host's root there."""
    program_path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    """PATH of the plugins: where they look for iptables and the like."""
    state_dir: str = "/var/lib/topobus/nic/cni"
    """Where records of attachments are kept; it must outlive this process and a reboot.
    docs/reference/cni-errors.md has their format."""
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 4.0
    """Seconds that one run of a plugin may take before it is killed. 4 s: less than the 5 s of
    `drivers.timeout_s`, so that the error names the plugin that hangs. Raise both to give a slow
    DHCP server more time."""
    has_loopback: bool = True
    """Whether the plugin `loopback` switches on `lo` in each sandbox before a chain runs; it is
    never switched off again. A runtime of today has done it already."""

    def __post_init__(self) -> None:
        """Refuse relative paths, which would depend on where the process was started."""
        for key, paths in (
            ("bin_dirs", self.bin_dirs),
            ("networks", tuple(self.networks.values())),
            ("state_dir", (self.state_dir,)),
        ):
            for path in paths:
                if not path.startswith("/"):
                    raise ValueError(f"cni.{key}: got {path!r}, wanted an absolute path")
