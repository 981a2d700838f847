"""Compares a configuration with the interface that is to have it, so that what this device cannot
do is refused before anything is changed.

A Refusal names each field, the value wanted and what the device has. The kernel is never asked.
What only the pod's namespace can show (a name that is taken there) is checked when the interface is
handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address, ip_interface, ip_network

from topobus.nic.interfaces.rules.interface_config import InterfaceConfig, Route
from topobus.nic.interfaces.rules.interface_fields import LARGEST_MTU, Faults, Interface
from topobus.nic.interfaces.rules.interface_state import InterfaceState
from topobus.values.outcome import Refusal

__all__ = ["addresses_in_pod", "check_interface_config", "name_in_pod"]

# RFC 8200 section 5: on a link with a smaller MTU the kernel switches IPv6 off.
_LEAST_IPV6_MTU = 1280
# The kernel never moves these into another namespace (netns_immutable of struct net_device), and
# refuses only after the interface was switched off.
_IMMOVABLE = frozenset({"bridge", "bond", "team", "vrf", "openvswitch", "batadv"})


def name_in_pod(config: InterfaceConfig, state: InterfaceState) -> str:
    """Return the name that the pod will see."""
    return config.interface.name or state.name


def addresses_in_pod(config: InterfaceConfig, state: InterfaceState) -> tuple[str, ...]:
    """Return the addresses that Topobus gives the interface: those configured, else those it has on
    the host, unless a CNI chain or a share brings its own.
    """
    if config.interface.addresses is not None:
        return config.interface.addresses
    if config.has_own_addressing or config.share is not None:
        return ()
    return tuple(
        held.address for held in state.addresses if not ip_interface(held.address).is_link_local or "." in held.address
    )


def check_interface_config(
    config: InterfaceConfig, state: InterfaceState, *, is_virtual_function: bool = False
) -> Refusal | None:
    """Refuse the part of a configuration that this interface cannot have, or return None when it
    can have all.

    Shapes: state — the device on the host; with `share`, the parent. is_virtual_function — whether
    there is a physical function to configure it.
    Errors: raises nothing.
    """
    faults = Faults()
    addresses = [ip_interface(text) for text in addresses_in_pod(config, state)]
    if config.share is None and state.kind in _IMMOVABLE:
        wanted = (
            f"host, for the kernel never moves a {state.kind} such as {state.name}; or have the operator share it "
            "(interfaces.share)"
        )
        faults.wrong("mode", config.mode or "the pod's, by default", wanted)
    mtu = config.interface.mtu
    if mtu is not None:
        # A child's MTU is at most its parent's (macvlan and ipvlan).
        largest = state.mtu if config.share is not None else min(state.largest_mtu or LARGEST_MTU, LARGEST_MTU)
        least = max(68, state.least_mtu)
        if not least <= mtu <= largest:
            faults.wrong("interface.mtu", mtu, f"{least} to {largest} bytes, which {state.name} takes")
    has_ipv6 = any(address.version == 6 for address in addresses)
    if has_ipv6 and (mtu or state.mtu) < _LEAST_IPV6_MTU:
        faults.wrong(
            "interface.mtu", mtu or state.mtu, f"{_LEAST_IPV6_MTU} bytes at least, since it has an IPv6 address"
        )
    if has_ipv6 and config.sysctls.get("net.ipv6.conf.IFNAME.disable_ipv6"):
        faults.wrong("sysctls[net.ipv6.conf.IFNAME.disable_ipv6]", 1, "0, since it has an IPv6 address")
    if not state.mac and config.interface.mac is not None:
        faults.wrong("interface.mac", config.interface.mac, f"none: {state.name} has no hardware address")
    if config.vf is not None and not is_virtual_function:
        faults.wrong(
            "vf", "set", f"none: {state.name} is no virtual function, so no physical function can configure it"
        )
    if config.interface.up is False and config.routes:
        faults.wrong("interface.up", got=False, wanted="true, since routes need an interface that is on")
    if not config.has_own_addressing:
        _check_routes(config.routes, addresses, faults)
    return faults.refusal()


def _check_routes(routes: Sequence[Route], addresses: Sequence[Interface], faults: Faults) -> None:
    """Check that each gateway is a neighbour: in a network of an address, or of an earlier route
    without a gateway.

    The kernel refuses others as well, but only when it is too late.
    """
    networks = [address.network for address in addresses]
    for index, route in enumerate(routes):
        if route.source is not None and not any(ip_address(route.source) == address.ip for address in addresses):
            faults.wrong(f"routes[{index}].source", route.source, "an address of the interface")
        if route.gateway is None:
            networks.append(ip_network(route.destination))
            continue
        gateway = ip_address(route.gateway)
        if route.onlink or (gateway.version == 6 and gateway.is_link_local):
            continue
        if any(gateway == address.ip for address in addresses):
            faults.wrong(
                f"routes[{index}].gateway", route.gateway, "another machine's address: this one is the interface's own"
            )
        elif not any(gateway in network for network in networks):
            near = (
                ", ".join(sorted({str(network) for network in networks if network.version == gateway.version}))
                or "none of its family"
            )
            faults.wrong(
                f"routes[{index}].gateway",
                route.gateway,
                f"a neighbour (networks of the interface: {near}), or onlink true",
            )
