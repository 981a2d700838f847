"""Values of a pod and of its chosen device for plugins: host ports, rates, device ids, and the keys
of a chain that name the device. Pure.

The plugins always get the device that the allocator chose: a list that names another interface of
the host would give that one to the pod.

Source: CNI conventions (portMappings, bandwidth, deviceID); the documentation of host-device,
macvlan, ipvlan and sriov-cni; kubelet's limits of the two annotations.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from topobus.nic.cni.rules.chain import Chain, Plugin
from topobus.nic.cni.rules.refusals import config_invalid
from topobus.values.device import Device
from topobus.values.outcome import Refusal, refuse
from topobus.values.quantity import Quantity
from topobus.values.sandbox import BANDWIDTH_ANNOTATIONS, Sandbox

__all__ = ["chain_for_device", "pod_arguments", "pod_values"]

_INGRESS, _EGRESS = BANDWIDTH_ANNOTATIONS
# kubelet's limits (pkg/util/bandwidth): 1k to 1P bits per second.
_LEAST_BITS, _MOST_BITS = 10**3, 10**15
# The burst is 50 ms of the rate, so that a measurement of seconds is within a hundredth, and at
# least 32 KiB, because otherwise each packet of 1500 bytes waits for a tick of the clock. It is in
# bits, and the plugin refuses more than 32 bits hold.
_BURST_FRACTION = 20
_LEAST_BURST_BITS, _MOST_BURST_BITS = 32 * 1024 * 8, 2**32 - 1
# Plugins that take a PCI function as `deviceID`, as Multus gives it.
_BY_DEVICE_ID = frozenset({"sriov", "ib-sriov", "accelerated-bridge", "ovs", "vdpa"})
# Plugins that make a child of an interface of the host.
_BY_MASTER = frozenset({"macvlan", "ipvlan", "vlan"})
_HOST_DEVICE_KEYS = ("device", "hwaddr", "kernelpath", "pciBusID", "runtimeConfig")


def pod_arguments(sandbox: Sandbox) -> tuple[tuple[str, str], ...]:
    """Build the CNI_ARGS that container runtimes give for a pod."""
    return (
        ("IgnoreUnknown", "1"),
        ("K8S_POD_NAMESPACE", sandbox.namespace),
        ("K8S_POD_NAME", sandbox.name),
        ("K8S_POD_INFRA_CONTAINER_ID", sandbox.id),
        ("K8S_POD_UID", sandbox.uid),
    )


def pod_values(sandbox: Sandbox, device: Device, *, needs_ports: bool = False) -> dict[str, Any] | Refusal:
    """Build the values for capabilities: portMappings, bandwidth and deviceID, each only where
    there is one.

    Shapes: needs_ports — a plugin opens the pod's host ports: without them it would open too few
    without an error.
    Errors: returns Refusal `cni-config-invalid` for a rate that cannot be read, and
    `cni-ports-unknown`.
    """
    values: dict[str, Any] = {}
    if needs_ports and sandbox.ports_unknown:
        why = f"the pod's host ports are not known, and the chain has to open them: {sandbox.ports_unknown}"
        return refuse("cni-ports-unknown", why, pod=str(sandbox))
    if sandbox.host_ports:
        values["portMappings"] = [
            {
                "hostPort": port.host_port,
                "containerPort": port.container_port,
                "protocol": port.protocol,
                **({"hostIP": port.host_ip} if port.host_ip else {}),
            }
            for port in sandbox.host_ports
        ]
    bandwidth: dict[str, int] = {}
    for annotation, direction in ((_INGRESS, "ingress"), (_EGRESS, "egress")):
        if (text := sandbox.annotations.get(annotation)) is None:
            continue
        rate = _bits(text)
        if rate is None:
            return config_invalid(
                f"pod {sandbox}", f"annotation {annotation}", "bits a second from 1k to 1P, such as 10M", text
            )
        bandwidth[f"{direction}Rate"] = rate
        bandwidth[f"{direction}Burst"] = min(max(rate // _BURST_FRACTION, _LEAST_BURST_BITS), _MOST_BURST_BITS)
    if bandwidth:
        values["bandwidth"] = bandwidth
    if device.pci is not None:
        values["deviceID"] = str(device.pci)
    return values


def chain_for_device(chain: Chain, device: Device, host_interface: str) -> Chain | Refusal:
    """Write the chosen device into the keys by which plugins of known types name one.

    Shapes: host_interface — its name on the host now; empty: it has none (bound to a userspace
    driver).
    Errors: returns Refusal `cni-config-invalid` when a plugin needs what the device does not have.
    """
    plugins: list[Plugin] = []
    for position, plugin in enumerate(chain.plugins):
        written: dict[str, Any] = {}
        dropped: tuple[str, ...] = ()
        if plugin.type == "host-device":
            dropped = _HOST_DEVICE_KEYS
            written = (
                {"device": host_interface}
                if host_interface
                else {"pciBusID": str(device.pci)}
                if device.pci is not None
                else {}
            )
        elif plugin.type in _BY_MASTER:
            dropped, written = ("master",), {"master": host_interface} if host_interface else {}
        elif plugin.type in _BY_DEVICE_ID:
            dropped, written = ("deviceID", "pciBusID"), {"deviceID": str(device.pci)} if device.pci is not None else {}
        if dropped and not written:
            wanted = (
                "a device with a PCI address"
                if plugin.type in _BY_DEVICE_ID
                else "a device with an interface on the host"
            )
            return config_invalid(chain.where, f"plugins[{position}].type {plugin.type}", wanted, device.name)
        kept = {key: value for key, value in plugin.configuration.items() if key not in dropped}
        capabilities = plugin.capabilities
        if "device" in written:
            # The plugin would choose by PCI address, and one function may have several interfaces.
            capabilities = tuple(name for name in capabilities if name != "deviceID")
        plugins.append(structs.replace(plugin, configuration=kept | written, capabilities=capabilities))
    return structs.replace(chain, plugins=tuple(plugins))


def _bits(text: str) -> int | None:
    """Read a rate, or return None for text that is no rate."""
    try:
        quantity = Quantity.parse(text)
    except ValueError:
        return None
    # Rounded up, as Quantity.Value of apimachinery.
    bits = -(-quantity.nano // 10**9)
    return bits if _LEAST_BITS <= bits <= _MOST_BITS else None
