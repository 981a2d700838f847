"""Settings of the topology service: how this node aligns, by kubelet's names."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from topobus.engine.alignment.cpus.cpu_assignment import contradiction
from topobus.engine.health.silence import SilenceSettings
from topobus.formats.messages.device_classes import class_complaint
from topobus.process.config import ServiceSettings
from topobus.values.errors import ConfigError
from topobus.values.idset import CpuSet
from topobus.values.own_shapes import OwnShape, ShapePlace, fault_of_own_shapes
from topobus.values.request import Policy, Scope
from topobus.values.view import AlignmentOptions, CpuOptions, KubeletVersion, PlanMode

__all__ = [
    "AlignmentSettings",
    "CpuSettings",
    "HintSettings",
    "MemorySettings",
    "OwnShapeSettings",
    "ReservationSettings",
    "TopologySettings",
    "check",
]


# kubelet refuses a smaller limit (topologymanager/policy_options.go, defaultMaxAllowableNUMANodes).
_FEWEST_ALLOWABLE = 8


class CpuSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The CPU manager's static policy options, by kubelet's names with underscores.

    All off, as in kubelet.
    """

    full_pcpus_only: bool = False
    """Only whole cores: a request that is not a multiple of the threads per core is refused."""
    distribute_cpus_across_numa: bool = False
    """Share CPUs evenly where more than one NUMA node is needed."""
    align_by_socket: bool = False
    """Align CPUs to sockets instead of NUMA nodes."""
    distribute_cpus_across_cores: bool = False
    """Spread over cores instead of packing them."""
    prefer_align_cpus_by_uncorecache: bool = False
    """Keep CPUs under as few L3 groups as possible."""
    strict_cpu_reservation: bool = False
    """Keep the reserved CPUs out of the shared pool."""
    is_corrected: bool = False
    """False: exactly as kubelet 1.36. True: without its known defects, which
    docs/knowledge/kubelet-defects.md lists."""

    def __post_init__(self) -> None:
        """Refuse pairs of options that kubelet refuses.

        Errors: raises ValueError.
        """
        problem = contradiction(self.options())
        if problem:
            raise ValueError(f"{problem} exclude each other: turn one of them off")

    def options(self) -> CpuOptions:
        """Return the same as the domain's value."""
        return CpuOptions(**structs.asdict(self))


class MemorySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How memory is aligned."""

    policy: Literal["none", "static"] = "none"
    """kubelet's memory manager policy: `static` aligns memory and huge pages of containers that
    ask for them. The default is kubelet's."""
    reserved_bytes: dict[str, Annotated[int, Meta(ge=0)]] = {}
    """Bytes of ordinary memory by NUMA node that are never allocated: kubelet's
    --reserved-memory. Keys are node ids: `{"0" = 1073741824}`."""

    def __post_init__(self) -> None:
        """Refuse keys that are not node ids.

        Errors: raises ValueError.
        """
        for key in self.reserved_bytes:
            if not (key.isascii() and key.isdecimal()):
                raise ValueError(f"reserved_bytes has the key {key!r}, wanted a NUMA node id such as 0")


class AlignmentSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this node aligns pods that do not request otherwise."""

    policy: Policy = Policy.BEST_EFFORT
    """`none`, `best-effort`, `restricted` or `single-numa-node`. The default aligns where it can
    and rejects no pod."""
    scope: Scope = Scope.CONTAINER
    """Whether each `container` or the `pod` as a whole is aligned. The default is kubelet's."""
    prefer_closest_numa_nodes: bool = False
    """Among equally wide node sets take the nearest by distance. kubelet's default, off, takes
    the lowest ids."""
    reserved_cpus: str = ""
    """CPUs that are never allocated exclusively, as a cpulist (`0,112`): kubelet's
    --reserved-cpus. Empty: none is reserved."""
    kubelet: KubeletVersion = KubeletVersion.V1_36
    """Whose semantics to use, where releases differ: `1.35`, `1.36` or `1.37`. Set the version
    of the node's kubelet. The default is the newest version compared with kubelet."""
    max_allowable_numa_nodes: Annotated[int, Meta(ge=0)] = 0
    """kubelet's option of that name: machines with more NUMA nodes are refused. 0: no limit.
    kubelet needs a limit because its merge is exponential."""
    cpu: CpuSettings = CpuSettings()
    """How exclusive CPUs are taken."""
    memory: MemorySettings = MemorySettings()
    """How memory is aligned."""
    mode: PlanMode = PlanMode.COMPATIBLE
    """`compatible`: a pod that kubelet's order of containers and choices refuses is refused.
    `corrected`: other hints, devices and ways to share among its containers are searched first.
    What `compatible` admits is placed alike in both. The default gives kubelet's answer (reasons
    in docs/adr/0009)."""
    search_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 2000
    """Tries of one container that mode `corrected` spends on a pod before it answers `gave-up`.
    2000 take about half a second of one core."""
    allow_request_policy: bool = True
    """Whether pods may ask for a policy, scope or locality of their own. False refuses those
    that ask for another with `policy-forbidden`."""

    def __post_init__(self) -> None:
        """Refuse an invalid cpulist, and an option that does not fit the policy.

        Errors: raises ValueError.
        """
        try:
            CpuSet.parse(self.reserved_cpus)
        except ValueError as err:
            raise ValueError(f"reserved_cpus is {err}, wanted a cpulist such as 0-1,112-113") from err
        if 0 < self.max_allowable_numa_nodes < _FEWEST_ALLOWABLE:
            raise ValueError(
                f"max_allowable_numa_nodes is {self.max_allowable_numa_nodes}, wanted 0 or at least "
                f"{_FEWEST_ALLOWABLE}, as kubelet does"
            )
        if self.cpu.align_by_socket and self.policy is Policy.SINGLE_NUMA_NODE:
            raise ValueError("cpu.align_by_socket cannot go with policy single-numa-node: turn one of them off")

    def options(self) -> AlignmentOptions:
        """Return the same as the domain's value."""
        return AlignmentOptions(
            policy=self.policy,
            scope=self.scope,
            prefer_closest_numa_nodes=self.prefer_closest_numa_nodes,
            cpu=structs.replace(self.cpu.options(), has_affinity_floor=self.kubelet is KubeletVersion.V1_37),
            kubelet=self.kubelet,
            aligns_memory=self.memory.policy == "static",
            max_allowable_numa_nodes=self.max_allowable_numa_nodes,
            mode=self.mode,
            search_steps=self.search_steps,
            allow_request_policy=self.allow_request_policy,
        )


class ReservationSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long devices are held for an owner that has not committed."""

    expire_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds until a reservation that is not committed is released, counted again from the
    start of the service. 60 s: longer than any requester keeps trying."""


class HintSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long to wait for device services that give hints of their own."""

    timeout_s: Annotated[float, Meta(gt=0, le=5)] = 0.02
    """Seconds until silence counts as "no opinion" (and is recorded). 20 ms: a kubelet call has
    10 ms to spare at its 99th percentile."""


class OwnShapeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A shape that is added to those of the machine's own tree: devices that a claim gets as one."""

    name: str
    """Its level, by which a DeviceClass selects it: lower-case letters, digits and single dashes, at
    most 32. Levels of the machine's own tree are taken, and so is what begins with `cpu`."""
    parts: dict[str, int]
    """How many devices of each class it has: `{"gpu": 2, "nic": 1}`, 2 to 64 in all; of class `cpu`
    how many CPUs beside at least one device: `{"gpu": 1, "cpu": 16}`. CPUs need `cpus.groups: numa`
    of the cpu service."""
    within: ShapePlace
    """The level of which one place has all devices. Each place has as many such shapes as it has
    devices for, the nearest together."""

    def shape(self) -> OwnShape:
        """Return the same as the domain's value."""
        return OwnShape(name=self.name, parts=dict(sorted(self.parts.items())), within=self.within)


class TopologySettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the topology service."""

    alignment: AlignmentSettings = AlignmentSettings()
    """How this node aligns."""
    hints: HintSettings = HintSettings()
    """Custom hints."""
    reservations: ReservationSettings = ReservationSettings()
    """Placements that wait for their commit."""
    silence: SilenceSettings = SilenceSettings()
    """When placements are refused on the devices of a device service that does not answer."""
    own_shapes: tuple[OwnShapeSettings, ...] = ()
    """Shapes in addition to those of the machine's own tree, for claims:
    `[{"name": "trio", "parts": {"gpu": 2, "nic": 1}, "within": "numa"}]`, at most 16
    (docs/how-to/shapes.md). Each node has its own."""


def check(settings: TopologySettings) -> None:
    """Refuse shapes that no machine could have.

    Errors: raises ConfigError that names the key.
    """
    shapes = [own.shape() for own in settings.own_shapes]
    fault = fault_of_own_shapes(shapes) or next(
        (
            f"{shape.name}: parts: {complaint}"
            for shape in shapes
            for device_class in shape.parts
            if (complaint := class_complaint(device_class))
        ),
        "",
    )
    if fault:
        raise ConfigError(
            f"topology: own_shapes: {fault}",
            next_step='write each as {"name": "trio", "parts": {"gpu": 2, "nic": 1}, "within": "numa"}; '
            "docs/how-to/shapes.md has the rules",
            key="own_shapes",
        )
