"""Settings of the gateway: kubelet's folders, the gateway's own files, how devices are offered, and
how long it waits for other processes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from topobus.engine.health.silence import SilenceSettings
from topobus.gateway.claims.rules.device_metadata import MetadataVersion
from topobus.gateway.claims.rules.socket_paths import SOCKET_PATH_LIMIT, driver_sockets, is_instance_name
from topobus.gateway.cluster.rules.class_conditions import read_taint
from topobus.gateway.cluster.rules.vendor_attributes import with_vendor_names
from topobus.gateway.containers.rules.edit_limits import EditRights, is_plain_path
from topobus.gateway.device_plugins.rules.multus import with_attributes
from topobus.process.config import ServiceSettings
from topobus.sysfs.tree import HardwareSettings
from topobus.values.cpu_groups import cut_group
from topobus.values.device import Device
from topobus.values.dra_names import DRIVER
from topobus.values.errors import ConfigError
from topobus.values.idset import CpuSet
from topobus.values.names import is_dns_label, is_extended_resource_name
from topobus.values.vendor_profiles import (
    IdProfile,
    VendorProfile,
    ids_of_profile,
    pool_in,
    profile_in,
    resource_in_profile,
)

__all__ = [
    "SHORT_NAME",
    "ClusterSettings",
    "CpuSettings",
    "DeadlineSettings",
    "Exposure",
    "ForeignSettings",
    "GatewaySettings",
    "KubeletSettings",
    "MetadataSettings",
    "ResourcesBy",
    "RuntimeSettings",
    "check",
    "owned_cpus",
]

Exposure = Literal["both", "dra", "device-plugin", "none"]
"""How a class is offered to kubelet."""

ResourcesBy = Literal["auto", "claims", "device-plugin"]
"""How pods that ask for a resource by its name are served."""

Seconds = Annotated[float, Meta(gt=0)]


SHORT_NAME = 16
"""The most characters of a resource's part in the names of our own sockets."""


class KubeletSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where kubelet keeps its sockets.

    The defaults are kubelet's own, which it does not move with --root-dir.
    """

    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    """Folder of kubelet.sock and of our device plugin sockets."""
    plugins_registry_dir: str = "/var/lib/kubelet/plugins_registry"
    """Registration sockets of DRA drivers, which kubelet watches."""
    plugins_dir: str = "/var/lib/kubelet/plugins"
    """Service sockets of DRA drivers, in a folder for each, which is made when missing."""


class DeadlineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the gateway waits, in seconds. kubelet sets no deadline for Allocate and 45 s for
    claims, so these deadlines end a call that hangs.
    """

    first_list_s: Seconds = 5.0
    """Time from Register to kubelet's ListAndWatch. When it is over, the gateway registers again
    (kubelets before 1.36 lose a plugin that replaces another)."""
    retry_s: Seconds = 1.0
    """Pause after a registration that failed."""
    watchdog_s: Seconds = 1.0
    """How often sockets are checked, in addition to the file system's own events."""
    prefer_s: Seconds = 0.04
    """The topology service's choice of devices. When it is over, the gateway chooses by name. A
    choice takes a few milliseconds, and an answer within 50 ms is promised."""
    allocate_s: Seconds = 20.0
    """All of Allocate: `adopt_s`, `prepare_s` and, when preparing fails, `adopt_s` again to give
    back. kubelet itself waits without a limit, and all other pods with it."""
    pre_start_s: Seconds = 25.0
    """All of PreStartContainer, below kubelet's 30 s, so that our error arrives instead of a
    broken call."""
    adopt_s: Seconds = 3.0
    """Writing the ledger."""
    prepare_s: Seconds = 10.0
    """A device service's prepare or unprepare, drivers included."""
    claim_s: Seconds = 40.0
    """All of one claim, below kubelet's 45 s, so that our error arrives instead of a broken
    call."""
    claim_retry_s: Annotated[float, Meta(ge=0)] = 10.0
    """How long a claim is tried again while a peer is not there: a service that restarts, NATS,
    the API server. kubelet itself would retry only after more than a minute. A peer that hangs
    uses up this time with its first missing answer."""
    health_refresh_s: Annotated[float, Meta(gt=0, lt=30)] = 10.0
    """How often DRA health is sent again without news. kubelet calls a
    device Unknown after 30 s."""
    reconcile_s: Seconds = 10.0
    """How often kubelet's PodResources are compared with what device plugin allocations hold: that
    API has no deallocate."""
    forgotten_s: Seconds = 60.0
    """How often prepared claims without a container in kubelet's list are checked. Two checks
    that find them also deallocated undo them."""
    kubelet_grace_s: Annotated[float, Meta(ge=0)] = 60.0
    """How long after kubelet's start only allocations that it has listed since are released: at
    first it lists no pods at all."""


class ClusterSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Kubernetes API server to read claims from and to publish ResourceSlices to.

    Off: claims come from the stand-alone store. With a NATS server of the node's own
    (`nats.provisioner` is `topology`) there is no such store, and no claim is prepared while this
    is off.
    """

    mode: Literal["off", "in-cluster", "kubeconfig"] = "off"
    """Which cluster: none, the one of our pod (service account), or that of a kubeconfig file."""
    kubeconfig: str = ""
    """Path of the file, with mode `kubeconfig`."""
    context: str = ""
    """Context of the file. Empty: its current one."""
    call_s: Seconds = 10.0
    """How long one call may take, in seconds."""
    retry_s: Seconds = 1.0
    """First pause after a call that failed, in seconds, doubled up to ten."""
    publish_delay_s: Annotated[float, Meta(ge=0)] = 0.2
    """How long changes are collected before slices are written, in seconds: a burst becomes one
    write."""
    silence_effect: Literal["NoSchedule", "NoExecute", "none"] = "NoSchedule"
    """Effect of the taint on the devices of a silent device service, or `none` for no taint.
    Silence is no evidence of a fault, so by default no pod is evicted for it."""
    retries_pods: bool = True
    """Whether a pod whose claims could not be prepared is annotated
    (`topobus.dev/prepare-again`) when the obstacle is gone. kubelet then tries at once, and
    otherwise only after 60 to 90 s. Needs the right to patch pods."""
    evict_after_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that a pod waits for a device that another owner holds before it is evicted, if a
    controller recreates it. Its claim is then allocated again. A pod that names a resource which
    claims serve keeps an unhealthy device for the same time, because the cluster evicts only
    pods that name their claims. 0: never. Needs the right to create evictions."""
    shapes: bool = False
    """Whether parts of the machine are published as one device each: a GPU with its nearest NIC, a
    switch, a NUMA node, a socket, a quarter, a half, the whole machine. Without the feature
    DRAPartitionableDevices of the API server (on by default since 1.36) there are none. Off by
    default because counters make kube-scheduler 1.36 slow in large clusters
    (docs/how-to/shapes.md)."""
    expected_devices: dict[str, Annotated[int, Meta(ge=0)]] = field(default_factory=dict)
    """The least number of devices by class with which the Node's condition `topobus.dev/gpu-ready`
    is True: `{"gpu": 8, "nic": 0}`. With 0 it is enough that the class's service has looked. A
    class that is not named is ready with one device, and has no condition without any:
    docs/how-to/keep-pods-away.md."""
    startup_taint: str = ""
    """The taint with which kubelet registers the Node (--register-with-taints):
    `topobus.dev/starting:NoSchedule`. The gateway takes it off when the classes of
    `expected_devices` become ready, and never sets it. Needs the right to patch nodes. Empty:
    none."""
    condition_verdicts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Conditions of the Node that say how devices are, by type, with the classes or devices they
    are about: `{"KernelDeadlock": ["gpu", "nic-0000-3b-00-0"]}`. True means unhealthy. They reach a
    device service as source `node-condition`, which its `health.sources` must list
    (docs/how-to/take-in-others-verdicts.md). Empty: none."""
    resync_s: Seconds = 300.0
    """How often slices and the Node are compared without news, in seconds."""


class ForeignSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device plugins of other vendors, which register with the gateway as with kubelet."""

    dir: str = ""
    """A folder of the gateway's own in which kubelet.sock is served. Mount it into the plugin's
    container in place of kubelet's. Empty: none."""
    dial_s: Seconds = 10.0
    """How long a plugin's socket may take to answer when it registers, in seconds. The default
    is kubelet's own limit."""
    allocate_s: Seconds = 4.0
    """How long its Allocate may take, in seconds. Twice this must fit
    into `deadlines.prepare_s`."""
    look_s: Seconds = 0.5
    """How often its list is taken over, in seconds."""


class CpuSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which CPUs Topobus gives to containers exclusively, and by which interface."""

    owned: str = ""
    """CPUs that claims may have exclusively: a list in the kernel's notation (`4-63,68-127`), or
    `all`. Empty: none. A claim of class cpu then only informs its container which CPUs were
    chosen and pins nothing, because kubelet manages the node's CPUs. With kubelet's static CPU
    manager name only CPUs that it does not give (its reserved ones)."""


class RuntimeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The container runtime's plugin interface (NRI).

    It reports when a container has ended, so that no other owner gets its devices before. Through
    it claims get exclusive CPUs, and devices reach a pod's sandbox.
    """

    socket: str = "/var/run/nri/nri.sock"
    """The runtime's socket for plugins, where containerd and CRI-O have it. A claim that needs
    it for its CPUs or interfaces is refused while it does not answer. Where the socket does not
    exist, kubelet's list alone decides whether a pod has ended
    (docs/explanation/double-hand-out.md). A process with access to the socket may change every
    container of the node. Empty: it is not opened, and no CPUs may be owned."""
    attach_s: Annotated[float, Meta(gt=0, lt=2)] = 1.5
    """How long a new sandbox waits for the devices of its claims, in seconds. The runtime
    disconnects a plugin after 2 s, and starts nothing else on the node meanwhile. An attachment
    that takes longer continues, and the pod's containers wait for it."""
    adjust_s: Annotated[float, Meta(gt=0, lt=2)] = 1.0
    """How long a new container waits for its device services' edits, in seconds, or less where
    attaching has used up the runtime's 2 s. Then it is refused, and kubelet tries again."""


class MetadataSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files in containers that describe the devices of their claims (KEP-5304), below
    /var/run/kubernetes.io/dra-device-attributes.
    """

    versions: tuple[MetadataVersion, ...] = ()
    """Which versions of metadata.resource.k8s.io a file has, newest first: `["v1alpha1"]`.
    Empty: claims get no files, as with Kubernetes' own library without a version. The format is
    alpha, and a container with a read-only mount at /var/run could not be created."""
    dir: str = ""
    """Where the files are, under the same path on the host and in the gateway. It must survive a
    reboot. Empty: `device-metadata` beside the checkpoint."""


class GatewaySettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the gateway service."""

    kubelet: KubeletSettings = KubeletSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    cluster: ClusterSettings = ClusterSettings()
    foreign: ForeignSettings = ForeignSettings()
    cpus: CpuSettings = CpuSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    metadata: MetadataSettings = MetadataSettings()
    silence: SilenceSettings = SilenceSettings()
    hardware: HardwareSettings = HardwareSettings()
    """Where the kernel's cpusets of containers are read: their control groups below
    `sys/fs/cgroup` of `root`."""
    instance: str = ""
    """Part of the names of this gateway's DRA sockets, so that two gateways can run side by side
    while one replaces the other: the pod's uid, from the downward API. Empty: another name at
    each start."""
    pod_resources_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    """kubelet's PodResources service."""
    cdi_dir: str = "/var/run/cdi"
    """Where CDI files of claims are written: the folder of highest priority, emptied at boot and
    then written again from the checkpoint."""
    checkpoint_path: str = "/var/lib/topobus/gateway/checkpoint.json"
    """What is prepared on this node. The file must survive a reboot."""
    resource_prefix: str = "topobus.dev"
    """Prefix of the device plugin's resource names: `topobus.dev/gpu`."""
    exposure: dict[str, Exposure] = field(default_factory=dict)
    """How a class or one of its pools is offered:
    `{"cpu": "both", "gpu": "none", "gpu-h100": "both"}`. A pool that is not named is offered
    like its class. Class `cpu` has no device plugin unless it is named here: such a plugin
    cannot pin CPUs, so other containers would run on a pod's CPUs as well."""
    profiles: tuple[VendorProfile, ...] = ()
    """Vendors whose device plugin and DRA driver the gateway replaces. Pods and exporters find the
    resource names and ids of `nvidia` (`nvidia.com/gpu`), `amd` (`amd.com/gpu`), `intel-sriov`
    (pools of NICs, `intel.com/…`). Claims find the attributes of that vendor's DRA driver
    (`gpu.nvidia.com/productName`), also those of `intel` (GPUs, whose resources keep our names).
    The vendor's own plugin and driver must not run on the node: docs/how-to/drop-in.md. Change it
    while no pod has such a device."""
    ids: dict[str, IdProfile] = field(default_factory=dict)
    """The ids that kubelet gets for devices of a class or one of its pools: `topobus` (their
    name, the default), `pci`, `uuid` or `card` (`pci`, and parts of a card by their name);
    `{"nic-vf": "pci", "gpu": "uuid"}`. What is not named here follows `profiles`. With `pci`,
    Multus and sriov-cni work as with their own device plugin: docs/how-to/use-multus.md. Change
    it while no pod has such a device."""
    device_info_dir: str = "/var/run/k8s.cni.cncf.io/devinfo/dp"
    """Multus' own folder, for the files by which it learns of a device with `ids` `pci`."""
    node_labels_dir: str = ""
    """A folder of Node Feature Discovery, where a file `topobus` names this node's labels:
    `/etc/kubernetes/node-feature-discovery/features.d`. Empty: none is written. Labels as the
    vendors' own feature discovery sets them (`nvidia.com/gpu.product`, `amd.com/gpu.vram`, …):
    docs/how-to/drop-in.md."""
    edits: dict[str, EditRights] = field(default_factory=dict)
    """What devices of a class may bring into containers, in addition to the needs of the drivers
    that come with Topobus: `{"fpga": {"device_nodes": ["/dev/acme"]}}`. Any other edit of a
    device service is refused, because a container runtime applies edits as root."""
    default_exposure: Exposure = "both"
    """For classes not named in `exposure`. `both`: a pod may take a device either way. The
    ledger prevents that it is given twice."""

    resources_by: ResourcesBy = "auto"
    """How pods that ask for `topobus.dev/gpu: 1` are served, where a class is offered both ways
    and there is a cluster. `auto`: by claims that kube-scheduler makes, as soon as the API
    server has a DeviceClass whose `extendedResourceName` is the resource and which selects its
    devices and no others; else by the device plugin. `claims`, `device-plugin`: always so. Pods
    that have devices keep them when it changes: docs/explanation/double-hand-out.md."""

    def offers_plugin(self, device_class: str, pool: str = "") -> bool:
        """Return whether a class's pool (empty: devices without one) has a device plugin."""
        return self._exposure_of(device_class, pool) in ("both", "device-plugin")

    def offers_dra(self, device_class: str, pool: str = "") -> bool:
        """Return whether a class's pool (empty: devices without one) has the DRA driver."""
        return self._exposure_of(device_class, pool) in ("both", "dra")

    def ids_of(self, device_class: str, resource: str) -> IdProfile:
        """Return the kind of ids that kubelet gets for the devices of a class's resource."""
        profile = profile_in(resource, device_class, self.profiles)
        pool = pool_in(resource, profile) if profile is not None else resource.rpartition("/")[2]
        return self.ids.get(pool) or self.ids.get(device_class) or ids_of_profile(profile)

    def offers_cpu(self, cpu: int | None) -> bool:
        """Return whether Topobus may give a device if it is a CPU.

        True for all CPUs where Topobus gives none exclusively, and for devices that are not a CPU.
        """
        owned = owned_cpus(self.cpus)
        return cpu is None or owned is None or not owned or cpu in owned

    def shown(self, device: Device) -> Device | None:
        """Return a device as claims see it.

        None when claims may not have it: another exposure, or CPUs that Topobus may not give.
        """
        if not self.offers_dra(device.device_class, device.pool) or not self.offers_cpu(device.cpu):
            return None
        resource = (
            resource_in_profile(device, device.pool, self.profiles)
            or f"{self.resource_prefix}/{device.pool or device.device_class}"
        )
        if self.ids_of(device.device_class, resource) == "pci":
            device = with_attributes(device, resource)
        device = with_vendor_names(device, self.profiles)
        return cut_group(device, owned_cpus(self.cpus) or None)

    @property
    def offers_any_dra(self) -> bool:
        """Return whether anything may be offered through a DRA driver."""
        return not {"both", "dra"}.isdisjoint((self.default_exposure, *self.exposure.values()))

    def _exposure_of(self, device_class: str, pool: str) -> Exposure:
        default = _WITHOUT_PLUGIN[self.default_exposure] if device_class == "cpu" else self.default_exposure
        return self.exposure.get(pool) or self.exposure.get(device_class, default)


_WITHOUT_PLUGIN: dict[Exposure, Exposure] = {"both": "dra", "device-plugin": "none", "dra": "dra", "none": "none"}


def owned_cpus(settings: CpuSettings) -> CpuSet | None:
    """Read `owned`. None: all CPUs.

    Errors: raises ConfigError when it is not a list.
    """
    if settings.owned.strip() == "all":
        return None
    try:
        return CpuSet.parse(settings.owned)
    except ValueError as err:
        raise ConfigError(
            f"gateway: cpus.owned: {err}",
            next_step="set TOPOBUS_GATEWAY__CPUS__OWNED to a list such as 4-63,68-127, to all, or leave it empty",
            key="cpus.owned",
        ) from err


def check(settings: GatewaySettings) -> None:
    """Refuse settings that would only fail later, at a socket or at kubelet, and folders of other
    programs.

    Errors: raises ConfigError that names the key.
    """
    owned = owned_cpus(settings.cpus)
    for key, fault, next_step in (
        *_faults(settings, has_cpus=owned is None or bool(owned)),
        *_path_faults(settings),
        *_socket_faults(settings),
    ):
        raise ConfigError(f"gateway: {key}: {fault}", next_step=next_step, key=key)


# Of a condition. The API server takes longer ones; no program is known to set one.
_CONDITION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_Faults = Iterator[tuple[str, str, str]]
"""Key, what is wrong, and the next step."""


def _faults(settings: GatewaySettings, *, has_cpus: bool) -> _Faults:
    if not is_extended_resource_name(f"{settings.resource_prefix}/x"):
        yield (
            "resource_prefix",
            f"got {settings.resource_prefix!r}, wanted a DNS subdomain that is not Kubernetes' own",
            "set TOPOBUS_GATEWAY__RESOURCE_PREFIX",
        )
    if has_cpus and not settings.runtime.socket:
        yield (
            "runtime.socket",
            f"cpus.owned is {settings.cpus.owned!r} and runtime.socket is empty: containers get CPUs by the container "
            "runtime's socket (NRI)",
            "set TOPOBUS_GATEWAY__RUNTIME__SOCKET, or leave TOPOBUS_GATEWAY__CPUS__OWNED empty",
        )
    for key, names, wanted in (
        ("exposure", settings.exposure, "a class or a pool of one, such as gpu or gpu-h100"),
        ("ids", settings.ids, "a class or a pool of one, such as gpu or gpu-h100"),
        ("edits", settings.edits, "a class such as gpu or widget-acme"),
        ("cluster.expected_devices", settings.cluster.expected_devices, "a class such as gpu"),
        (
            "cluster.condition_verdicts",
            itertools.chain(*settings.cluster.condition_verdicts.values()),
            "a class such as gpu, or a device such as gpu-0000-3b-00-0",
        ),
    ):
        for name in names:
            if not is_dns_label(name):
                yield key, f"got {name!r}, wanted {wanted}", f"name it so in {key}"
    if settings.ids.get("cpu", "topobus") != "topobus":
        yield (
            "ids",
            f"got {settings.ids['cpu']!r} for class cpu: CPUs have neither a PCI address nor a UUID",
            "take cpu out of the setting ids",
        )
    yield from _node_faults(settings.cluster)
    if (settings.cluster.mode == "kubeconfig") != bool(settings.cluster.kubeconfig):
        yield (
            "cluster",
            f"mode {settings.cluster.mode!r} and kubeconfig {settings.cluster.kubeconfig!r} do not go together",
            "set both TOPOBUS_GATEWAY__CLUSTER__MODE=kubeconfig and TOPOBUS_GATEWAY__CLUSTER__KUBECONFIG, or neither",
        )


def _node_faults(settings: ClusterSettings) -> _Faults:
    """Name a start-up taint that could never go, and conditions of our own as verdicts: they follow
    from the devices.
    """
    for name in settings.condition_verdicts:
        if name.startswith("topobus.dev/") or not _CONDITION.fullmatch(name):
            yield (
                "cluster.condition_verdicts",
                f"got {name!r}, wanted the type of a condition that another program sets, such as KernelDeadlock",
                "name it so in cluster.condition_verdicts",
            )
    if not settings.startup_taint:
        return
    variable = "TOPOBUS_GATEWAY__CLUSTER__STARTUP_TAINT"
    try:
        read_taint(settings.startup_taint)
    except ValueError as err:
        yield (
            "cluster.startup_taint",
            str(err),
            f"set {variable} to kubelet's --register-with-taints, or leave it empty",
        )
    if settings.mode == "off" or not settings.expected_devices:
        yield (
            "cluster.startup_taint",
            f"got {settings.startup_taint!r}, which would never go: "
            + ("cluster.mode is off" if settings.mode == "off" else "cluster.expected_devices is empty"),
            "name the classes to wait for in TOPOBUS_GATEWAY__CLUSTER__EXPECTED_DEVICES and set "
            f"TOPOBUS_GATEWAY__CLUSTER__MODE, or leave {variable} empty",
        )


def _path_faults(settings: GatewaySettings) -> _Faults:
    """Name impossible folders, those of other programs, and rights to all of the host."""
    if settings.node_labels_dir and not is_plain_path(settings.node_labels_dir):
        yield (
            "node_labels_dir",
            f"got {settings.node_labels_dir!r}, wanted an absolute path of a folder, without '..'",
            "set TOPOBUS_GATEWAY__NODE_LABELS_DIR, or leave it empty",
        )
    if settings.metadata.dir and (not is_plain_path(settings.metadata.dir) or settings.metadata.dir == "/"):
        yield (
            "metadata.dir",
            f"got {settings.metadata.dir!r}, wanted an absolute path of a folder, without '..'",
            "set TOPOBUS_GATEWAY__METADATA__DIR",
        )
    kubelet = settings.kubelet
    folders = (kubelet.device_plugin_dir, kubelet.plugins_registry_dir, kubelet.plugins_dir)
    kubelets = {Path(folder).resolve() for folder in (*folders, Path(settings.pod_resources_socket).parent)}
    # Compared after resolving links, because every socket in `foreign.dir` is removed at the start.
    if settings.foreign.dir and Path(settings.foreign.dir).resolve() in kubelets:
        yield (
            "foreign.dir",
            f"got {settings.foreign.dir}, which is a folder of kubelet's: its sockets would be removed",
            "set TOPOBUS_GATEWAY__FOREIGN__DIR to another folder",
        )
    for device_class, rights in settings.edits.items():
        for name in ("device_nodes", "mounts", "libraries", "writable_mounts"):
            for path in getattr(rights, name):
                # A prefix of nodes may end with a slash.
                plain = path.removesuffix("/") if name == "device_nodes" else path
                if plain in ("", "/") or not is_plain_path(plain):
                    yield (
                        f"edits.{device_class}.{name}",
                        f"got {path!r}, wanted an absolute path of the host without '..', and not all of it",
                        "name what the driver of this class gives to containers",
                    )


def _socket_faults(settings: GatewaySettings) -> _Faults:
    """Name folders in which the path of a socket would be too long, with the longest names that we
    make and the shortest to which a driver's sockets can fall back.
    """
    if not is_instance_name(settings.instance):
        yield (
            "instance",
            f"got {settings.instance!r}, wanted at most 63 letters, digits, '-', '_' and '.', such as a pod's uid",
            "set TOPOBUS_GATEWAY__INSTANCE to metadata.uid of the pod, or leave it empty",
        )
    kubelet, longest_class = settings.kubelet, "c" * SHORT_NAME
    sockets = driver_sockets(kubelet.plugins_dir, kubelet.plugins_registry_dir, DRIVER, settings.instance or "00000000")
    for key, path in (
        ("kubelet.device_plugin_dir", f"{kubelet.device_plugin_dir}/topobus-{longest_class}-00000000-00.sock"),
        ("kubelet.plugins_registry_dir", sockets.registration),
        ("kubelet.plugins_dir", sockets.service),
    ):
        size_bytes = len(path.encode())
        if size_bytes > SOCKET_PATH_LIMIT:
            yield (
                key,
                f"{path} has {size_bytes} bytes, a unix socket's path may have {SOCKET_PATH_LIMIT}",
                "use a shorter folder",
            )
