"""Checks single fields of an interface's configuration: addresses, names, numbers and words.

Each check returns the canonical value, and notes a fault with the field, the value and what was
wanted.
Sources: net/core/dev.c dev_valid_name; include/uapi/linux/if_link.h; RFC 791 section 3.1 and RFC
8200 section 5 for the least MTUs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, IPv6Network, ip_address, ip_interface, ip_network

from topobus.formats.kubernetes.shape import did_you_mean
from topobus.values.outcome import Reason, Refusal

__all__ = ["LARGEST_MTU", "SYSCTLS", "Faults", "Interface", "Network", "is_interface_name"]

Interface = IPv4Interface | IPv6Interface
Network = IPv4Network | IPv6Network

# IFNAMSIZ is 16 with the final zero (include/uapi/linux/if.h).
_NAME_BYTES = 15
_MAC = re.compile(r"[0-9a-fA-F]{2}([:-])(?:[0-9a-fA-F]{2}\1){4}[0-9a-fA-F]{2}")
# 68: every IPv4 network carries as much. 65535: the largest IP packet. The kernel keeps an MTU in
# 32 bits, and devices have their own limits.
_LEAST_MTU, LARGEST_MTU = 68, 65535
_SHOWN = 80

_IPV4 = "net.ipv4.conf.IFNAME."
_IPV6 = "net.ipv6.conf.IFNAME."
SYSCTLS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(
        (
            f"{_IPV4}{name}"
            for name in ("accept_local", "accept_redirects", "accept_source_route", "arp_notify", "bc_forwarding")
        ),
        (0, 1),
    ),
    **dict.fromkeys(
        (f"{_IPV4}{name}" for name in ("drop_unicast_in_l2_multicast", "forwarding", "proxy_arp", "route_localnet")),
        (0, 1),
    ),
    **dict.fromkeys(
        (f"{_IPV4}{name}" for name in ("secure_redirects", "send_redirects", "shared_media", "src_valid_mark")), (0, 1)
    ),
    f"{_IPV4}arp_accept": (0, 2),
    f"{_IPV4}arp_announce": (0, 2),
    f"{_IPV4}arp_filter": (0, 1),
    f"{_IPV4}arp_ignore": (0, 8),
    f"{_IPV4}rp_filter": (0, 2),
    **dict.fromkeys(
        (f"{_IPV6}{name}" for name in ("accept_ra_defrtr", "accept_ra_pinfo", "accept_redirects", "autoconf")), (0, 1)
    ),
    **dict.fromkeys((f"{_IPV6}{name}" for name in ("disable_ipv6", "forwarding", "proxy_ndp", "ndisc_notify")), (0, 1)),
    f"{_IPV6}accept_dad": (0, 2),
    f"{_IPV6}accept_ra": (0, 2),
    f"{_IPV6}accept_source_route": (-1, 0),
    f"{_IPV6}addr_gen_mode": (0, 3),
    f"{_IPV6}dad_transmits": (0, 16),
    f"{_IPV6}use_tempaddr": (-1, 2),
}
"""Which settings of an interface a claim may have, and the least and largest value of each: those
that control how this interface receives and sends packets. None of another interface or of the
whole namespace, which are `securityContext.sysctls` of the pod. Source:
Documentation/networking/ip-sysctl.rst."""


def is_interface_name(name: str) -> bool:
    """Return whether the kernel takes this as an interface's name and it has no other meaning.

    >>> [is_interface_name(name) for name in ("net1", "a/b", "sixteen-bytes-xx", "eth%d", "lo")]
    [True, False, False, False, False]
    """
    # % asks the kernel for a number, lo is in every namespace, and the last ones are folders of
    # net.ipv4.conf.
    return (
        0 < len(name.encode(errors="replace")) <= _NAME_BYTES
        and not any(character in "/:%" or character.isspace() or not character.isprintable() for character in name)
        and name not in (".", "..", "lo", "all", "default")
    )


@dataclass
class Faults:
    """Collects what is wrong, by field.

    Each method returns the canonical value, or None where there is none.
    """

    reasons: list[Reason] = field(default_factory=list)

    def refusal(self) -> Refusal | None:
        """Return all faults in the order of the fields, or None when there are none."""
        return Refusal(reasons=tuple(self.reasons)) if self.reasons else None

    def wrong(self, where: str, got: object, wanted: str) -> None:
        """Note one field that is wrong."""
        shown = repr(got) if len(repr(got)) <= _SHOWN else repr(got)[:_SHOWN] + "…"
        message = f"{where} is {shown}, wanted {wanted}"
        self.reasons.append(
            Reason(
                code="interface-config-invalid", message=message, facts={"field": where, "got": shown, "wanted": wanted}
            )
        )

    def name(self, where: str, value: str) -> str | None:
        """Check an interface's name."""
        if is_interface_name(value):
            return value
        self.wrong(where, value, "a name of 1 to 15 bytes without blanks, '/', ':' and '%', and not lo, all or default")
        return None

    def number(self, where: str, value: int, least: int, most: int, unit: str = "") -> int | None:
        """Check a whole number's range."""
        if least <= value <= most:
            return value
        self.wrong(where, value, f"{least} to {most}{unit}")
        return None

    def mtu(self, where: str, value: int) -> int | None:
        """Check an MTU against what any device could have."""
        return self.number(where, value, _LEAST_MTU, LARGEST_MTU, " bytes")

    def word(self, where: str, value: str, words: Sequence[str]) -> str | None:
        """Check a word against the known ones. Capitals do not matter."""
        for known_word in words:
            if value.lower() == known_word.lower():
                return known_word
        self.wrong(where, value, f"{', '.join(words[:-1])} or {words[-1]}{did_you_mean(value, words)}")
        return None

    def mac(self, where: str, value: str) -> str | None:
        """Check a hardware address that one station can have: no group bit, not all zero."""
        if _MAC.fullmatch(value) is not None:
            lower = value.lower().replace("-", ":")
            if not int(lower[:2], 16) & 1 and lower != "00:00:00:00:00:00":
                return lower
        self.wrong(
            where,
            value,
            "a hardware address of one station, such as 02:00:00:00:00:01 (no group address, not all zero)",
        )
        return None

    def address(self, where: str, value: str) -> Interface | None:
        """Check an address with its length that an interface can have."""
        wanted = "an address with the length of its network, such as 10.1.2.3/24 or fd00::3/64"
        text, slash, length = value.partition("/")
        try:
            address = ip_interface(value) if slash and length.isdecimal() else None
        except ValueError:
            address = None
        if address is None or "%" in text:
            self.wrong(where, value, wanted)
            return None
        network = address.network
        if address.is_multicast or address.is_unspecified or address.is_loopback:
            self.wrong(where, value, "an address of one interface, not a group, the loopback or all zero")
            return None
        if isinstance(network, IPv4Network) and network.prefixlen < 31 and address.ip in (network[0], network[-1]):
            self.wrong(where, value, f"an address within {network}, not that of the network itself or its broadcast")
            return None
        return address

    def host(self, where: str, value: str) -> str | None:
        """Check an address without a length, and return its canonical form."""
        try:
            address = ip_address(value)
        except ValueError:
            address = None
        if address is None or "%" in value or address.is_multicast or address.is_unspecified:
            self.wrong(where, value, "an address without a length, such as 10.1.2.1 or fe80::1")
            return None
        return str(address)

    def network(self, where: str, value: str) -> Network | None:
        """Check a network: no bits of a host behind its length."""
        wanted = "a network with its length, such as 10.0.0.0/8 or fd00::/8"
        try:
            network = ip_network(value, strict=False)
        except ValueError:
            network = None
        length = value.partition("/")[2]
        if network is None or "%" in value or (length and not length.isdecimal()):
            self.wrong(where, value, wanted)
            return None
        if ip_interface(value).ip != network.network_address:
            self.wrong(where, value, f"{network}: the address has bits behind the length")
            return None
        return network
