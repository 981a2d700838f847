"""The objects of resource.k8s.io/v1 on the wire: the fields that we read or write, under
Kubernetes' names.

A struct reads what is there and refuses only wrong types. The limits are in `limits`, unknown names
in `shape`. Fields that a newer server adds are ignored here and kept in the stored object, which
stays a dict. Source: k8s.io/api/resource/v1/types.go, 1.36.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

__all__ = [
    "API_VERSION",
    "AllocationResult",
    "Attribute",
    "Capacity",
    "CapacityRequirements",
    "CelSelector",
    "ClaimRequest",
    "ClaimSpec",
    "ClaimStatus",
    "ClaimTemplateSpec",
    "Condition",
    "Configuration",
    "Constraint",
    "Counter",
    "CounterConsumption",
    "CounterSet",
    "DeviceClaim",
    "DeviceClassSpec",
    "DevicesAllocated",
    "ExactRequest",
    "GrantedConfiguration",
    "GrantedDevice",
    "NodeRequirement",
    "NodeSelector",
    "NodeSelectorTerm",
    "OpaqueConfiguration",
    "Pool",
    "QuantityText",
    "RequestPolicy",
    "Selector",
    "SliceDevice",
    "SliceSpec",
    "SubRequest",
    "Taint",
    "TaintRuleSpec",
    "TaintSelector",
    "Toleration",
    "ValidRange",
]

API_VERSION = "resource.k8s.io/v1"

QuantityText = str | int | float
"""A quantity on the wire: text, or a bare number."""


class Wire(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The base of these structs: camelCase names, and fields that are not set are left out."""


class CelSelector(Wire, frozen=True, kw_only=True):
    """A CEL expression over one device."""

    expression: str


class Selector(Wire, frozen=True, kw_only=True):
    """One of several kinds.

    A kind that we do not know leaves `cel` empty and must fail, never be skipped.
    """

    cel: CelSelector | None = None


class Toleration(Wire, frozen=True, kw_only=True):
    """The taints that a request tolerates."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class CapacityRequirements(Wire, frozen=True, kw_only=True):
    """Amounts wanted from a device that is shared by capacity."""

    requests: dict[str, QuantityText] = {}


class ExactRequest(Wire, frozen=True, kw_only=True):
    """A number of devices of one class."""

    device_class_name: str = ""
    selectors: tuple[Selector, ...] = ()
    allocation_mode: str = ""
    """`ExactCount` (also when empty) or `All`."""
    count: int | None = None
    """Devices wanted by ExactCount; None counts as 1."""
    admin_access: bool | None = None
    tolerations: tuple[Toleration, ...] = ()
    capacity: CapacityRequirements | None = None


class SubRequest(Wire, frozen=True, kw_only=True):
    """One alternative of a request."""

    name: str
    device_class_name: str = ""
    selectors: tuple[Selector, ...] = ()
    allocation_mode: str = ""
    count: int | None = None
    tolerations: tuple[Toleration, ...] = ()
    capacity: CapacityRequirements | None = None


class ClaimRequest(Wire, frozen=True, kw_only=True):
    """A named request: exactly one of `exactly` and `first_available`."""

    name: str
    exactly: ExactRequest | None = None
    first_available: tuple[SubRequest, ...] = ()


class Constraint(Wire, frozen=True, kw_only=True):
    """What must be equal, or different, among the devices of these requests (all when empty)."""

    requests: tuple[str, ...] = ()
    match_attribute: str | None = None
    distinct_attribute: str | None = None


class OpaqueConfiguration(Wire, frozen=True, kw_only=True):
    """Parameters that only one driver understands."""

    driver: str
    parameters: Any = None


class Configuration(Wire, frozen=True, kw_only=True):
    """A configuration of a class or claim. Empty `requests` means all."""

    requests: tuple[str, ...] = ()
    opaque: OpaqueConfiguration | None = None


class DeviceClaim(Wire, frozen=True, kw_only=True):
    """What a claim asks for."""

    requests: tuple[ClaimRequest, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    config: tuple[Configuration, ...] = ()


class ClaimSpec(Wire, frozen=True, kw_only=True):
    """ResourceClaim.spec."""

    devices: DeviceClaim = DeviceClaim()


class ClaimTemplateSpec(Wire, frozen=True, kw_only=True):
    """ResourceClaimTemplate.spec: metadata and spec for each claim made of it."""

    metadata: dict[str, Any] = {}
    spec: ClaimSpec


class DeviceClassSpec(Wire, frozen=True, kw_only=True):
    """DeviceClass.spec."""

    selectors: tuple[Selector, ...] = ()
    config: tuple[Configuration, ...] = ()
    extended_resource_name: str | None = None


class NodeRequirement(Wire, frozen=True, kw_only=True):
    """One requirement on labels or fields of a node."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeSelectorTerm(Wire, frozen=True, kw_only=True):
    """Requirements that must all hold."""

    match_expressions: tuple[NodeRequirement, ...] = ()
    match_fields: tuple[NodeRequirement, ...] = ()


class NodeSelector(Wire, frozen=True, kw_only=True):
    """Terms of which one must hold."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class GrantedDevice(Wire, frozen=True, kw_only=True):
    """One device that a claim got (DeviceRequestAllocationResult)."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    tolerations: tuple[Toleration, ...] = ()
    binding_conditions: tuple[str, ...] = ()
    binding_failure_conditions: tuple[str, ...] = ()
    share_id: str | None = field(default=None, name="shareID")
    consumed_capacity: dict[str, QuantityText] = {}


class GrantedConfiguration(Wire, frozen=True, kw_only=True):
    """A configuration copied into the allocation, with where it came from."""

    source: str
    """`FromClass` or `FromClaim`; class configurations come first, so that the claim's win."""
    requests: tuple[str, ...] = ()
    opaque: OpaqueConfiguration | None = None


class DevicesAllocated(Wire, frozen=True, kw_only=True):
    """The devices of an allocation and their configurations."""

    results: tuple[GrantedDevice, ...] = ()
    config: tuple[GrantedConfiguration, ...] = ()


class AllocationResult(Wire, frozen=True, kw_only=True):
    """ResourceClaim.status.allocation."""

    devices: DevicesAllocated = DevicesAllocated()
    node_selector: NodeSelector | None = None
    allocation_timestamp: str | None = None


class Condition(Wire, frozen=True, kw_only=True):
    """metav1.Condition. Kubernetes has no conditions on a claim.

    The stand-alone API reports here to the claim's user why the claim waits.
    """

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int | None = None


class ClaimStatus(Wire, frozen=True, kw_only=True):
    """ResourceClaim.status."""

    allocation: AllocationResult | None = None
    reserved_for: tuple[dict[str, Any], ...] = ()
    devices: tuple[dict[str, Any], ...] = ()
    conditions: tuple[Condition, ...] = ()


class Attribute(Wire, frozen=True, kw_only=True):
    """A device attribute: exactly one field is set."""

    int_: int | None = field(default=None, name="int")
    bool_: bool | None = field(default=None, name="bool")
    string: str | None = None
    version: str | None = None
    ints: tuple[int, ...] | None = None
    bools: tuple[bool, ...] | None = None
    strings: tuple[str, ...] | None = None
    versions: tuple[str, ...] | None = None

    @property
    def is_scalar(self) -> bool:
        """Say whether it is one value of a known type."""
        return self.string is not None or self.version is not None or self.int_ is not None or self.bool_ is not None

    @property
    def is_list(self) -> bool:
        """Say whether it is a list of a known type."""
        return self.strings is not None or self.versions is not None or self.ints is not None or self.bools is not None


class ValidRange(Wire, frozen=True, kw_only=True):
    """Amounts from `min` to `max` in steps."""

    min: QuantityText | None = None
    max: QuantityText | None = None
    step: QuantityText | None = None


class RequestPolicy(Wire, frozen=True, kw_only=True):
    """Which amounts of a capacity may be asked for."""

    default: QuantityText | None = None
    valid_values: tuple[QuantityText, ...] = ()
    valid_range: ValidRange | None = None


class Capacity(Wire, frozen=True, kw_only=True):
    """An amount that a device has."""

    value: QuantityText
    request_policy: RequestPolicy | None = None


class Counter(Wire, frozen=True, kw_only=True):
    """An amount that partitions share."""

    value: QuantityText


class CounterSet(Wire, frozen=True, kw_only=True):
    """Counters under one name."""

    name: str
    counters: dict[str, Counter] = {}


class CounterConsumption(Wire, frozen=True, kw_only=True):
    """What a device takes from a counter set."""

    counter_set: str
    counters: dict[str, Counter] = {}


class Taint(Wire, frozen=True, kw_only=True):
    """Why a device should not be used."""

    key: str
    value: str = ""
    effect: str
    time_added: str | None = None


class SliceDevice(Wire, frozen=True, kw_only=True):
    """One device of a slice."""

    name: str
    attributes: dict[str, Attribute] = {}
    capacity: dict[str, Capacity] = {}
    consumes_counters: tuple[CounterConsumption, ...] = ()
    node_name: str | None = None
    node_selector: NodeSelector | None = None
    all_nodes: bool | None = None
    taints: tuple[Taint, ...] = ()
    binds_to_node: bool | None = None
    binding_conditions: tuple[str, ...] = ()
    binding_failure_conditions: tuple[str, ...] = ()
    allow_multiple_allocations: bool | None = None


class Pool(Wire, frozen=True, kw_only=True):
    """The pool that a slice belongs to.

    Complete when as many slices of the newest generation exist.
    """

    name: str
    generation: int = 0
    resource_slice_count: int


class SliceSpec(Wire, frozen=True, kw_only=True):
    """ResourceSlice.spec."""

    driver: str
    pool: Pool
    node_name: str | None = None
    node_selector: NodeSelector | None = None
    all_nodes: bool | None = None
    per_device_node_selection: bool | None = None
    devices: tuple[SliceDevice, ...] = ()
    shared_counters: tuple[CounterSet, ...] = ()


class TaintSelector(Wire, frozen=True, kw_only=True):
    """The devices that a rule taints: those that match every field that is set.

    With no field set it matches all devices.
    """

    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class TaintRuleSpec(Wire, frozen=True, kw_only=True):
    """DeviceTaintRule.spec. Without a selector it taints nothing."""

    device_selector: TaintSelector | None = None
    taint: Taint
