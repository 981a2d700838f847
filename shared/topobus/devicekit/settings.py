"""The settings that all device services share: where the hardware is, which drivers run, how health
moves.

A device service's own settings struct subclasses `DeviceServiceSettings` and
adds what only its class needs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from topobus.devicekit.pci import is_vfio
from topobus.devicekit.sharing.shared_devices import SharedPool
from topobus.engine.alignment.devices.spare_choice import SpareSettings
from topobus.engine.health.health_machine import HealthSettings
from topobus.process.config import ServiceSettings
from topobus.sysfs.tree import HardwareSettings
from topobus.values.pools import Condition, Pool

__all__ = [
    "BurnInSettings",
    "CleaningSettings",
    "CpuGroupSettings",
    "DeviceServiceSettings",
    "DriverSettings",
    "FunctionRule",
    "Grouping",
    "JournalSettings",
    "PartitionSettings",
    "PassthroughRule",
    "PassthroughSettings",
]


class DriverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which vendor plugins run and how long they may take."""

    allow: tuple[str, ...] = ()
    """Names of the plugins to run; empty: all that are installed for this class."""
    deny: tuple[str, ...] = ()
    """Names of plugins never to load, not even when `allow` names them."""
    timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """Seconds one call of a plugin may take before its devices count as Unknown. 5 s: half of the
    10 s that a gateway waits for `prepare`."""
    first_wait_s: Annotated[float, Meta(ge=0)] = 2.0
    """Seconds the first inventory waits for slow plugins. 2 s: a node must be registered with
    kubelet within 3 s of its start."""


class JournalSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where acts on devices are recorded, so that the next start can undo what a crash left half
    done.
    """

    dir: str = ""
    """Folder of the journal, one file for each device; empty: `/var/lib/topobus/<class>`, which
    survives a reboot (of a recorded machine: within its tree). It is made when a driver first
    changes something."""


class CleaningSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a device is cleaned after its last owner, where its driver cleans."""

    limit_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds that one try may take before the device counts as dirty. 60 s: longer than a GPU's
    reset or an FPGA's blanking takes."""
    answer_after_s: Annotated[float, Meta(ge=0)] = 1.0
    """Seconds that the answer of `unprepare` waits for it. 1 s: a device that is clean by then
    never leaves the list of those that can be had."""
    retry_s: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds until the second try; each further one waits twice as long, 64 times this at most. 1
    s: most of what is left ends with the last process."""


class BurnInSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a device is tested before an operator returns it (`topobus device burn-in`)."""

    command: tuple[str, ...] = ()
    """Program, as an absolute path, and arguments, run without a shell and with the service's rights;
    it passes a device by ending with 0. It gets `DEVICE_NAME`, `DEVICE_CLASS`, `DEVICE_PCI` and `DEVICE_NODES` (paths,
    separated by spaces) as variables, and PATH, nothing else. Empty: the driver's own test alone,
    where it has one. A setting, for whoever may write to NATS must not choose what runs here."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds that the driver's test, and the program, may take each. 600 s: a GPU's memory is
    written and read several times meanwhile."""

    def __post_init__(self) -> None:
        """Refuse what cannot be started, such as a whole command line in one word.

        Errors: raises ValueError.
        """
        if self.command and not self.command[0].startswith("/"):
            raise ValueError(f"command begins with {self.command[0]!r}, wanted the absolute path of a program")
        if any("\0" in word for word in self.command):
            raise ValueError("command has a NUL character, wanted words that a program can be given")


class FunctionRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Physical functions that are cut into virtual ones when a claim gets one of them."""

    where: tuple[Condition, ...]
    """All of these are true of the physical function's device, in the form of a pool's conditions:
    `[{field = "pci", equals = "0000:3b:00.0"}]`."""
    count: Annotated[int, Meta(ge=1, le=256)]
    """How many virtual functions are made; fewer where the card can have
    no more (sriov_totalvfs)."""
    when_idle: Literal["keep", "remove"] = "keep"
    """What becomes of them when the last is given back. `keep`: the next claim of one waits for
    nothing; a claim of the physical function removes them. `remove`: they are removed at once."""

    def __post_init__(self) -> None:
        """Refuse a rule that would cut every card.

        Errors: raises ValueError.
        """
        if not self.where:
            raise ValueError(
                "where is empty, wanted at least one condition such as {field = 'pci', equals = '0000:3b:00.0'}"
            )


Grouping = Literal["cpu", "numa", "socket", "l3", "machine"]
"""What one device of class `cpu` is."""


class CpuGroupSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How CPUs are offered."""

    groups: Grouping = "cpu"
    """`cpu`: each by itself, so that a claim may choose by CPU. `numa`, `socket`, `l3`, `machine`:
    one device for all CPUs of such a unit, with a capacity `cpus` of which claims have shares;
    which CPUs is decided on the node when a claim is prepared, as kubelet's static policy does it.
    Groups need consumable capacity (DRAConsumableCapacity) in the cluster; they are few, where a
    large machine has hundreds of CPUs. Where a shape of `own_shapes` of topology has CPUs, those of
    `numa` are offered singly and need none. The default needs nothing."""
    whole_cores: bool = False
    """Of groups give whole cores only: what a claim asks for is rounded up to the threads of a
    core. Set it with `alignment.cpu.full_pcpus_only` of the topology service, which refuses half
    cores; off, as that is."""


class PartitionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a card is offered whose parts are devices of their own."""

    parents: Literal["hidden", "counted"] = "hidden"
    """`hidden`: only the parts are offered. `counted`: the card as well, where its plugin can give
    it (a NIC or an Intel GPU with virtual functions on, an AMD GPU in CPX, a DFL card with several
    ports), and counters see to it that never both are held. Hidden by default, for devices that
    exclude each other are for claims alone: kubelet's device plugin can count nothing, and would
    offer neither card nor parts."""
    on_demand: bool = False
    """Whether an idle card is offered as a whole and in parts at the same time, and cut when a
    claim gets one of them, where its plugin can cut: AMD GPUs with compute partition modes, and
    NVIDIA GPUs that are in MIG mode, as instances of each size. It needs a /sys that can be
    written, or the right to make MIG instances. False: for claims alone, as `counted` is; and who
    cuts the cards of a node already (its boot, another operator) would undo it."""
    virtual_functions: tuple[FunctionRule, ...] = ()
    """Physical functions that are offered whole and in virtual functions at the same time, and cut
    when a claim gets one of these (NICs and Intel's GPUs with SR-IOV); the first rule that fits
    counts. Empty: none. It needs a /sys that can be written, is for claims alone, and must not name
    a card whose number of virtual functions somebody else keeps."""


class PassthroughRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Functions that claims may have for a virtual machine, and by which kernel driver."""

    where: tuple[Condition, ...]
    """All of these are true of such a device; the fields are those of pools
    (docs/reference/pools.md)."""
    kernel_driver: str = "vfio-pci"
    """What holds the function meanwhile: vfio-pci, or a maker's variant of it
    (`nvgrace-gpu-vfio-pci`, `mlx5_vfio_pci`); the node must have it loaded."""

    def __post_init__(self) -> None:
        """Refuse a rule for everything, and a driver that is none of VFIO's.

        Errors: raises ValueError.
        """
        if not self.where:
            raise ValueError("where is empty, wanted at least one condition such as {field = 'model', glob = '*H100*'}")
        if not is_vfio(self.kernel_driver) or "/" in self.kernel_driver:
            raise ValueError(
                f"kernel_driver is {self.kernel_driver!r}, wanted vfio-pci or a maker's variant of it, whose "
                "name ends with vfio-pci"
            )


class PassthroughSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which PCI functions a claim may have switched to VFIO, for a virtual machine, and back."""

    allow: tuple[PassthroughRule, ...] = ()
    """The first rule that is true of a device counts. Empty: none, for it needs rights that a
    device service has not by default, and whoever has a function whole can do to it what its driver
    never would; docs/how-to/pass-a-device-to-a-virtual-machine.md."""
    idle_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds that whoever still uses the function may take to end. 30 s: what kubelet gives a pod
    to terminate."""
    switch_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds that a kernel driver may take to let a function go, or to take it. 30 s: a GPU's
    driver takes ten to begin."""


class DeviceServiceSettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every device service."""

    hardware: HardwareSettings = HardwareSettings()
    """Where the hardware is read and how often."""
    drivers: DriverSettings = DriverSettings()
    """Which plugins run."""
    health: HealthSettings = HealthSettings()
    """How health moves."""
    journal: JournalSettings = JournalSettings()
    """Where it is written down what was done to devices."""
    cleaning: CleaningSettings = CleaningSettings()
    """How a device is cleaned before its next owner."""
    burn_in: BurnInSettings = BurnInSettings()
    """How a device is tested before an operator returns it."""
    partitions: PartitionSettings = PartitionSettings()
    """What becomes of a card whose parts are devices of their own."""
    passthrough: PassthroughSettings = PassthroughSettings()
    """Which PCI functions claims may have for virtual machines; class cpu has none."""
    pools: tuple[Pool, ...] = ()
    """Devices that kubelet is offered under resource names of their own, by selectors; the first
    pool that matches a device has it; docs/reference/pools.md has the rules."""
    sharing: tuple[SharedPool, ...] = ()
    """Devices that several containers have at once, by selectors, under resource names of their
    own, through kubelet's device plugins and by claims; they are tried before `pools`.
    docs/reference/pools.md has the rules."""
    spares: SpareSettings = SpareSettings()
    """Devices that are withheld to replace an equal one that gets sick;
    docs/how-to/hot-spare.md."""
