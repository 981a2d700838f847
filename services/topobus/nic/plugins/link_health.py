"""Judges the link of a network device from what its interfaces and RDMA ports show: carrier, port
state, speed, duplex.

It reads no file but the error counters.

- No carrier on an interface that is switched on is Unhealthy, not Degraded: a pod on it has no
  network, and another device would serve it.
- A link that is just coming up (its interface was switched on, or its card was set up again) has no
  carrier yet, which is no loss. `Settling` keeps the time until which this holds.
- An RDMA port that is not active is Unhealthy for the same reason, unless its interface is switched
  off or not visible.
- A link slower than this process has seen it before is Degraded: sysfs publishes no rated speed, so
  the highest observed speed is the reference.
- A virtual function without a carrier on its physical function is Unhealthy: its own interface may
  be invisible in a pod, or have a link state that the operator forced on.

Source: Documentation/ABI/testing/sysfs-class-net, stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from topobus.devicekit.counter_rises import CounterRises
from topobus.sysfs.net import NetInterface
from topobus.sysfs.rdma import RdmaPort
from topobus.sysfs.tree import Tree
from topobus.values.health import HealthState, Observation
from topobus.values.health_reasons import sign
from topobus.values.pci import PciAddress

__all__ = [
    "BestSpeeds",
    "Settling",
    "judge_carrier",
    "judge_duplex",
    "judge_errors",
    "judge_parent",
    "judge_rdma_ports",
    "rdma_links",
]


# Frames with a bad checksum or a broken end, and frames that were lost with the carrier; then all
# that the driver counts as damaged or not sent, where it does not separate the kinds
# (Documentation/networking/statistics.rst). The value names the counter to subtract, because it is
# no fault of the link: frames that are too long are the sender's setting.
_ERROR_COUNTERS = {
    "rx_crc_errors": "",
    "rx_frame_errors": "",
    "tx_carrier_errors": "",
    "rx_errors": "rx_length_errors",
    "tx_errors": "",
}
# A good link has none for days. This many between two looks is no accident.
_ERROR_STORM = 100
# How long a link may take to come up: 1000BASE-T negotiates for 2 to 4 s, and a link of 100 Gbit/s
# lanes has up to 12.4 s to train (link_fail_inhibit_timer, IEEE 802.3ck, clause 73).
_COMING_UP_S = 15.0


class Settling:
    """Keeps from when on a missing link is a loss: not while the link may still be coming up.

    A link whose time is over is lost as soon as it is missing. The same holds for what comes up
    with the link: the kernel driver of a new function, an RDMA port. The time is over for every
    link that a process finds at its first look, because otherwise a dead cable would count as
    healthy for a while after each start.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._settled_at_s: dict[str, float] = {}
        self._seen: set[str] = set()
        self._has_looked = False

    def begin_look(self) -> None:
        """Begin a look at all links."""
        self._seen = set()

    def end_look(self) -> None:
        """Forget the links that were not switched on at this look. They are coming up when they are
        switched on again.
        """
        self._settled_at_s = {path: at for path, at in self._settled_at_s.items() if path in self._seen}
        self._has_looked = True

    def lost(self, links: Iterable[tuple[str, bool | None]], *, is_restarting: bool = False) -> frozenset[str]:
        """Return the links that are lost.

        Shapes: links — path, and whether there is a partner; None: switched off. is_restarting —
                whether their card is being set up now, which takes them down.
        """
        now_s = self._now()
        lost: set[str] = set()
        for path, has_partner in links:
            if has_partner is None:
                continue
            self._seen.add(path)
            is_new = path not in self._settled_at_s
            if is_restarting or is_new:
                self._settled_at_s[path] = now_s + (_COMING_UP_S if is_restarting or self._has_looked else 0.0)
            if not has_partner and now_s >= self._settled_at_s[path]:
                lost.add(path)
        return frozenset(lost)


class BestSpeeds:
    """Keeps the best link speed that each device has shown, by the device's name."""

    def __init__(self) -> None:
        self._best_mbps: dict[str, int] = {}

    def forget(self, device: str) -> None:
        """Forget a device that is gone, because another one may take its name."""
        self._best_mbps.pop(device, None)

    def judge(
        self, device: str, interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort] = ()
    ) -> Observation | None:
        """Compare the speed now with the best so far.

        None while no link is up, and when it is no slower.
        """
        now_mbps, path = _present_speed(interfaces, ports)
        if not now_mbps:
            return None
        best_mbps = self._best_mbps[device] = max(now_mbps, self._best_mbps.get(device, 0))
        if now_mbps >= best_mbps:
            return None
        return sign("speed-dropped", f"the link runs at {now_mbps} Mbit/s, ran at {best_mbps} before", path, now_mbps)


def judge_carrier(interfaces: Sequence[NetInterface], lost_paths: Collection[str]) -> Observation | None:
    """Judge the carrier of a device's own interfaces.

    Shapes: lost_paths — the interfaces that have lost their carrier.
    """
    # The kernel shows a carrier only of interfaces that are switched on.
    net_interfaces = [interface for interface in interfaces if interface.carrier is not None]
    lost = [net_interface for net_interface in net_interfaces if net_interface.path in lost_paths]
    if not lost:
        return None
    return sign(
        "carrier-lost",
        f"no carrier on {', '.join(net_interface.name for net_interface in lost)}: cable, transceiver or switch port",
        f"{lost[0].path}/carrier",
        "0",
        state=HealthState.UNHEALTHY if len(lost) == len(net_interfaces) else HealthState.DEGRADED,
    )


def judge_parent(
    parent: PciAddress, interfaces: Sequence[NetInterface], lost_paths: Collection[str]
) -> Observation | None:
    """Judge the carrier of a virtual function's physical one: a fault when all of its interfaces
    that are switched on have lost it.

    Shapes: interfaces — of the physical function, as far as this network namespace shows them;
    without one that is switched on there is no result.
    """
    switched_on = [interface for interface in interfaces if interface.carrier is not None]
    if not switched_on or any(interface.path not in lost_paths for interface in switched_on):
        return None
    names = ", ".join(interface.name for interface in switched_on)
    return sign(
        "parent-carrier-lost",
        f"no carrier on {names} of the physical function {parent}: cable, transceiver or switch port",
        f"{switched_on[0].path}/carrier",
        "0",
    )


def rdma_links(interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort]) -> tuple[tuple[str, bool | None], ...]:
    """Return path and link of RDMA ports, as Settling takes them.

    A RoCE port follows its interface, so without a visible one that is switched on its state shows
    nothing about the hardware.
    """
    is_interface_on = any(interface.is_up for interface in interfaces)
    return tuple(
        (port.path, port.is_active if port.link_layer == "InfiniBand" or is_interface_on else None) for port in ports
    )


def judge_rdma_ports(
    interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort], lost_paths: Collection[str]
) -> Observation | None:
    """Judge the RDMA ports of a device beside its interfaces."""
    linked_paths = {path for path, is_active in rdma_links(interfaces, ports) if is_active is not None}
    rdma_ports = [port for port in ports if port.path in linked_paths]
    down = [rdma_port for rdma_port in rdma_ports if rdma_port.path in lost_paths]
    if not down:
        return None
    first = down[0]
    return sign(
        "rdma-port-down",
        f"RDMA port {', '.join(str(rdma_port.number) for rdma_port in down)} is {first.state} "
        f"({first.physical_state or 'no physical state'})",
        f"{first.path}/state",
        first.state,
        state=HealthState.UNHEALTHY if len(down) == len(rdma_ports) else HealthState.DEGRADED,
    )


def judge_errors(tree: Tree, interfaces: Sequence[NetInterface], counters: CounterRises) -> Observation | None:
    """Compare the frames that were received damaged, and those lost in sending, with the last look.

    Errors: raises HardwareError for a file that is no number.
    """
    for interface in interfaces:
        folder = f"{interface.path}/statistics"
        kinds = {kind for pair in _ERROR_COUNTERS.items() for kind in pair if kind}
        # Read all of them at each look. Otherwise the next look would count the rise of two.
        rises = {kind: counters.rise(f"{folder}/{kind}", tree.read_int(f"{folder}/{kind}")) for kind in sorted(kinds)}
        if not interface.carrier:
            # The errors that a link counts while it trains mean nothing.
            continue
        for name, without in _ERROR_COUNTERS.items():
            rise = rises[name] - rises.get(without, 0)
            if rise >= _ERROR_STORM:
                return sign(
                    "link-errors",
                    f"{interface.name}: {rise} new {name}: cable, transceiver or switch port",
                    f"{folder}/{name}",
                    rise,
                )
    return None


def judge_duplex(interfaces: Sequence[NetInterface]) -> Observation | None:
    """Judge whether a link runs half duplex, which no network card of a node should."""
    half = next((interface for interface in interfaces if interface.carrier and interface.duplex == "half"), None)
    if half is None:
        return None
    return sign(
        "half-duplex",
        f"{half.name} runs half duplex: the link partner does not negotiate",
        f"{half.path}/duplex",
        half.duplex,
    )


def _present_speed(interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort]) -> tuple[int, str]:
    """Return the speed now in Mbit/s and the path that shows it, or 0 while no link is up."""
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
