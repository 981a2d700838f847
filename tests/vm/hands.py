"""Faults that hands make at this machine and take back: cables, cards, drivers, and errors that
cards report.

Each has the kernel's own word of it, by which a test knows that the fault is there.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from topobus.values.pci import PciAddress
from vm.kernel import PCI, driver, number, sh
from vm.monitor import Monitor
from vm.node import Node

CARD_AT, FUNCTION_AT, VIRTIO_AT, _PARENT_AT = "0000:63:00.0", "0000:21:10.4", "0000:01:00.0", "0000:21:00.0"
VIRTIO_NAME = "enp1s0"
# At least so many corrected errors between two looks are a sign.
_STORM = 100


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one function."""

    address: str
    cause: Callable[[], object]
    take_back: Callable[[], object] = lambda: None
    is_there: Callable[[], bool] | None = None
    """The kernel's word for a fault that lasts. None: an error that is over once it is counted."""
    count: Callable[[], int] = lambda: 0
    """The kernel's count of such errors."""
    others: Sequence[str] = ()
    """Addresses of functions that have it with this one; which of them are seen with it, and so
    repaired, is a matter of when a look comes."""

    @property
    def device(self) -> str:
        """Name the device."""
        return self.devices[0]

    @property
    def devices(self) -> tuple[str, ...]:
        """Name the devices that have it."""
        return tuple(f"nic-{address.replace(':', '-').replace('.', '-')}" for address in (self.address, *self.others))


def resets() -> int:
    """Give the kernel's count of resets of PCI functions, from the first call on."""
    return int(
        sh(
            """
            mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
            cd /sys/kernel/tracing
            if [ ! -e events/kprobes/resets ]; then
              echo p:resets __pci_reset_function_locked > kprobe_events
              echo 1 > events/kprobes/resets/enable
            fi
            awk '$1 == "resets" { print $2 }' kprobe_profile
            """
        )
    )


def set_virtio() -> None:
    """Set speed and duplex of the one card here that lets them be set."""
    sh(
        f"until ip link show {VIRTIO_NAME}; do sleep 0.2; done; ip link set {VIRTIO_NAME} addrgenmode none up; "
        f"ethtool -s {VIRTIO_NAME} speed 10000 duplex full"
    )


def has_no_address(address: str, register: int) -> bool:
    """Say whether a function has lost a base address, as after a reset."""
    return sh(f"setpci -s {address} BASE_ADDRESS_{register}").strip() == "00000000"


def inject_fatal(address: str) -> str:
    """Have the kernel believe that a function below a root port has reported a fatal error, and wait
    until it has logged how the recovery ended: `successful`, `failed`.

    Source: struct aer_error_inj in drivers/pci/pcie/aer_inject.c.
    """
    count = "dmesg | grep -c 'AER: device recovery'"
    before = sh(f"modprobe aer_inject; {count} || true").strip()
    at = PciAddress.parse(address)
    data_link_protocol = 0x10
    header_log = (0, 0, 0, 0)
    error = struct.pack("<3Bx7I", at.bus, at.device, at.function, data_link_protocol, 0, *header_log, at.domain)
    Path("/dev/aer_inject").write_bytes(error)
    return sh(f"until [ $({count}) -gt {before} ]; do sleep 0.2; done; dmesg | grep 'AER: device recovery'").split()[-1]


def faults(monitor: Monitor, node: Node) -> Mapping[str, Fault]:
    """List all by name."""
    up = "until ip link show {0}; do sleep 0.2; done; ip link set {0} up"

    def bind(name: str, address: str, interface: str) -> Callable[[], object]:
        return lambda: sh(f"echo {address} > /sys/bus/pci/drivers/{name}/bind; {up.format(interface)}")

    def plug_card() -> None:
        monitor.plug("igb,bus=down31,id=nic3,mac=52:54:00:00:03:00,netdev=net3")
        sh(up.format("ens31"))

    def exchange_card() -> None:
        monitor.unplug("nic3")
        plug_card()

    def fail_unbound() -> None:
        (PCI / CARD_AT / "driver/unbind").write_text(CARD_AT)
        inject_fatal(CARD_AT)

    def plug_parent() -> None:
        monitor.plug("igb,bus=root1,id=nic1,mac=52:54:00:00:01:00,netdev=net1")
        sh(up.format("ens1"))

    def exchange_virtio() -> None:
        monitor.unplug("nic9")
        monitor.plug(
            "virtio-net-pci,id=nic9,bus=root0,netdev=net9,mac=52:54:00:00:09:00,aer=on,"
            "ctrl_vq=off,ctrl_rx=off,ctrl_vlan=off,ctrl_mac_addr=off,guest_announce=off,disable-legacy=on,romfile="
        )
        set_virtio()

    def put_back_reset() -> None:
        (PCI / CARD_AT / "reset_method").write_text("default")
        monitor.link("nic3", is_up=True)

    def lose_reset() -> None:
        (PCI / CARD_AT / "reset_method").write_text("\n")
        monitor.link("nic3", is_up=False)

    def counted(kind: str) -> int:
        return int(sh(f"tail -n 1 {PCI}/{VIRTIO_AT}/aer_dev_{kind}").split()[-1])

    def storm() -> None:
        """Report errors one after the other, because the kernel counts those that it reads together
        as one; the service looks when they are over.
        """
        with node.stopped("nic"):
            for wanted in range(counted("correctable") + 1, counted("correctable") + 1 + _STORM):
                monitor.fail("nic9", "BAD_TLP")
                while counted("correctable") < wanted:
                    time.sleep(0.01)

    def attribute(name: str) -> str:
        return sh(f"cat /sys/class/net/{VIRTIO_NAME}/{name}").strip()

    return {
        "cable": Fault(
            address=CARD_AT,
            cause=lambda: monitor.link("nic3", is_up=False),
            take_back=lambda: monitor.link("nic3", is_up=True),
            is_there=lambda: not number(PCI / CARD_AT / "net/ens31/carrier"),
        ),
        # The kernel refuses a reset for which it may use no method.
        "cable-without-reset": Fault(
            address=CARD_AT,
            cause=lose_reset,
            take_back=put_back_reset,
            is_there=lambda: not number(PCI / CARD_AT / "net/ens31/carrier"),
        ),
        "card-unbound": Fault(
            address=CARD_AT,
            cause=lambda: (PCI / CARD_AT / "driver/unbind").write_text(CARD_AT),
            take_back=bind("igb", CARD_AT, "ens31"),
            is_there=lambda: not driver(CARD_AT),
        ),
        "function-unbound": Fault(
            address=FUNCTION_AT,
            cause=lambda: (PCI / FUNCTION_AT / "driver/unbind").write_text(FUNCTION_AT),
            take_back=bind("igbvf", FUNCTION_AT, "ens1v2"),
            is_there=lambda: not driver(FUNCTION_AT),
        ),
        "taken-out": Fault(
            address=CARD_AT,
            cause=lambda: monitor.unplug("nic3"),
            take_back=plug_card,
            is_there=lambda: not (PCI / CARD_AT).exists(),
        ),
        "cable-of-virtio": Fault(
            address=VIRTIO_AT,
            cause=lambda: monitor.link("nic9", is_up=False),
            take_back=lambda: monitor.link("nic9", is_up=True),
            is_there=lambda: attribute("carrier") == "0",
        ),
        "parent-taken-out": Fault(
            address="0000:21:10.0",
            # A card without functions is offered itself: for a moment, as its functions go before it.
            others=("0000:21:10.2", FUNCTION_AT, "0000:21:10.6", _PARENT_AT),
            cause=lambda: monitor.unplug("nic1"),
            take_back=plug_parent,
            is_there=lambda: not (PCI / _PARENT_AT).exists(),
        ),
        "parent-cable": Fault(
            address="0000:21:10.0",
            others=("0000:21:10.2", FUNCTION_AT, "0000:21:10.6"),
            cause=lambda: monitor.link("nic1", is_up=False),
            take_back=lambda: monitor.link("nic1", is_up=True),
            is_there=lambda: not number(PCI / _PARENT_AT / "net/ens1/carrier"),
        ),
        "storm": Fault(address=VIRTIO_AT, cause=storm, count=lambda: counted("correctable")),
        "errors": Fault(
            address=VIRTIO_AT, cause=lambda: monitor.fail("nic9", "COMP_TIME"), count=lambda: counted("nonfatal")
        ),
        "fatal-error": Fault(
            address=VIRTIO_AT,
            cause=lambda: monitor.fail("nic9", "DLP"),
            # The kernel resets the slot, and the driver of a virtio card cannot set it up again.
            take_back=exchange_virtio,
            is_there=lambda: has_no_address(VIRTIO_AT, 1),
        ),
        # The same without a driver, below a switch.
        "fatal-error-unbound": Fault(
            address=CARD_AT,
            cause=fail_unbound,
            take_back=exchange_card,
            is_there=lambda: has_no_address(CARD_AT, 0),
        ),
        "slow": Fault(
            address=VIRTIO_AT,
            cause=lambda: sh(f"ethtool -s {VIRTIO_NAME} speed 1000"),
            take_back=set_virtio,
            is_there=lambda: attribute("speed") == "1000",
        ),
        "half-duplex": Fault(
            address=VIRTIO_AT,
            cause=lambda: sh(f"ethtool -s {VIRTIO_NAME} duplex half"),
            take_back=set_virtio,
            is_there=lambda: attribute("duplex") == "half",
        ),
    }
