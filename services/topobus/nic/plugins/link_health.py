"""Judges the link of a network device from what its interfaces and RDMA ports show: carrier, port state, speed, duplex.

Flows in: frozen values read by `topobus.sysfs`. Flows out: observations. It reads no file but the error counters.

- No carrier on an interface that is switched on is Unhealthy, not Degraded: a pod on it has no network, and another device would serve it.
- An RDMA port that is not active is Unhealthy for the same reason, unless its interface is switched off or not visible.
- A link slower than this process has seen it before is Degraded: sysfs publishes no rated speed, so the highest observed speed is the reference.
- A virtual function without a carrier on its physical function is Unhealthy: its own interface may sit in a pod, where nobody sees it, or have a link
  state that the operator forced on.

Source: Documentation/ABI/testing/sysfs-class-net, stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.counter_rises import CounterRises
from topobus.domain.health import Dimension, HealthState, Observation
from topobus.domain.pci import PciAddress
from topobus.sysfs.net import NetInterface
from topobus.sysfs.rdma import RdmaPort
from topobus.sysfs.tree import Tree

__all__ = ["BestSpeeds", "judge_carrier", "judge_duplex", "judge_errors", "judge_parent", "judge_rdma_ports"]


# Frames with a bad checksum or a broken end, frames that the carrier failed under; then all that the driver counts as damaged or not sent, where it does not tell
# the kinds (Documentation/networking/statistics.rst). Each with what is counted in it and is no fault of the link: too long frames are the sender's setting.
_ERROR_COUNTERS = {
    "rx_crc_errors": "",
    "rx_frame_errors": "",
    "tx_carrier_errors": "",
    "rx_errors": "rx_length_errors",
    "tx_errors": "",
}
# A good link has none for days; as many as this between two looks is no accident.
_ERROR_STORM = 100


class BestSpeeds:
    """Keeps the best link speed that each device has shown, by the device's name."""

    def __init__(self) -> None:
        self._best_mbps: dict[str, int] = {}

    def forget(self, device: str) -> None:
        """Forget a device that is gone: what takes its place may be another one."""
        self._best_mbps.pop(device, None)

    def judge(self, device: str, interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort] = ()) -> Observation | None:
        """Compare the speed now with the best so far; None while no link is up, and when it is no slower."""
        now_mbps, path = _present_speed(interfaces, ports)
        if not now_mbps:
            return None
        best_mbps = self._best_mbps[device] = max(now_mbps, self._best_mbps.get(device, 0))
        if now_mbps >= best_mbps:
            return None
        return Observation(
            dimension=Dimension.LINK,
            state=HealthState.DEGRADED,
            reason="speed-dropped",
            message=f"the link runs at {now_mbps} Mbit/s, ran at {best_mbps} before",
            evidence={"path": path, "value": str(now_mbps)},
        )


def judge_carrier(interfaces: Sequence[NetInterface]) -> Observation | None:
    """Judge the carrier of a device's own interfaces."""
    # The kernel tells a carrier only of interfaces that are switched on.
    net_interfaces = [interface for interface in interfaces if interface.carrier is not None]
    lost = [net_interface for net_interface in net_interfaces if not net_interface.carrier]
    if not lost:
        return None
    return Observation(
        dimension=Dimension.LINK,
        state=HealthState.UNHEALTHY if len(lost) == len(net_interfaces) else HealthState.DEGRADED,
        reason="carrier-lost",
        message=f"no carrier on {', '.join(net_interface.name for net_interface in lost)}: cable, transceiver or switch port",
        evidence={"path": f"{lost[0].path}/carrier", "value": "0"},
    )


def judge_parent(parent: PciAddress, interfaces: Sequence[NetInterface]) -> Observation | None:
    """Judge the carrier of a virtual function's physical one: whether any of its interfaces that are switched on has one.

    Shapes: interfaces — of the physical function, as far as this network namespace shows them; without one that is on there is no word.
    """
    switched_on = [interface for interface in interfaces if interface.carrier is not None]
    if not switched_on or any(interface.carrier for interface in switched_on):
        return None
    names = ", ".join(interface.name for interface in switched_on)
    return Observation(
        dimension=Dimension.LINK,
        state=HealthState.UNHEALTHY,
        reason="parent-carrier-lost",
        message=f"no carrier on {names} of the physical function {parent}: cable, transceiver or switch port",
        evidence={"path": f"{switched_on[0].path}/carrier", "value": "0"},
    )


def judge_rdma_ports(interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort]) -> Observation | None:
    """Judge the RDMA ports of a device beside its interfaces."""
    # A RoCE port follows its interface, so without one that is on and in sight its state says nothing about the hardware.
    is_interface_on = any(interface.is_up for interface in interfaces)
    rdma_ports = [port for port in ports if port.link_layer == "InfiniBand" or is_interface_on]
    down = [rdma_port for rdma_port in rdma_ports if not rdma_port.is_active]
    if not down:
        return None
    first = down[0]
    return Observation(
        dimension=Dimension.LINK,
        state=HealthState.UNHEALTHY if len(down) == len(rdma_ports) else HealthState.DEGRADED,
        reason="rdma-port-down",
        message=f"RDMA port {', '.join(str(rdma_port.number) for rdma_port in down)} is {first.state} ({first.physical_state or 'no physical state'})",
        evidence={"path": f"{first.path}/state", "value": first.state},
    )


def judge_errors(tree: Tree, interfaces: Sequence[NetInterface], counters: CounterRises) -> Observation | None:
    """Compare the frames that came in damaged, and those that were lost on the way out, with the last look.

    Errors: raises HardwareError for a file that is no number.
    """
    for interface in interfaces:
        folder = f"{interface.path}/statistics"
        kinds = {kind for pair in _ERROR_COUNTERS.items() for kind in pair if kind}
        # All of them at each look, or the next one would count a rise of two.
        rises = {kind: counters.rise(f"{folder}/{kind}", tree.read_int(f"{folder}/{kind}")) for kind in sorted(kinds)}
        if not interface.carrier:
            # A link that trains counts errors, which say nothing.
            continue
        for name, without in _ERROR_COUNTERS.items():
            rise = rises[name] - rises.get(without, 0)
            if rise >= _ERROR_STORM:
                return Observation(
                    dimension=Dimension.LINK,
                    state=HealthState.DEGRADED,
                    reason="link-errors",
                    message=f"{interface.name}: {rise} new {name}: cable, transceiver or switch port",
                    evidence={"path": f"{folder}/{name}", "value": str(rise)},
                )
    return None


def judge_duplex(interfaces: Sequence[NetInterface]) -> Observation | None:
    """Judge whether a link runs half duplex, which no network card of a node should."""
    half = next((interface for interface in interfaces if interface.carrier and interface.duplex == "half"), None)
    if half is None:
        return None
    return Observation(
        dimension=Dimension.LINK,
        state=HealthState.DEGRADED,
        reason="half-duplex",
        message=f"{half.name} runs half duplex: the link partner does not negotiate",
        evidence={"path": f"{half.path}/duplex", "value": half.duplex},
    )


def _present_speed(interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort]) -> tuple[int, str]:
    """Give the speed now in Mbit/s and where it stands; 0 while no link is up."""
    fast = max(
        (interface for interface in interfaces if interface.carrier and interface.speed_mbps),
        key=lambda interface: interface.speed_mbps or 0,
        default=None,
    )
    if fast is not None:
        return fast.speed_mbps or 0, f"{fast.path}/speed"
    port = max(
        (rdma_port for rdma_port in ports if rdma_port.is_active and rdma_port.rate_gbps),
        key=lambda rdma_port: rdma_port.rate_gbps or 0,
        default=None,
    )
    return (int((port.rate_gbps or 0) * 1000), f"{port.path}/rate") if port is not None else (0, "")
