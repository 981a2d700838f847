"""Parameters of our own classic drivers: which devices a class has, and what a claim wants of them.

Each device class has one group, `<class>.resource.topobus.dev/v1alpha1`, with two kinds:
DeviceClassParameters (of the cluster) and ClaimParameters (of a namespace). The fields are those
that the classic GPU drivers of 2023 had, so that their parameters can be carried over. `attribute`
and `capacity` reach whatever else a device of any class publishes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import structs

from topobus.formats.kubernetes.resource import QuantityText, Wire
from topobus.formats.kubernetes.shape import Problem, did_you_mean
from topobus.values.quantity import Quantity

__all__ = [
    "EXCLUSIVE",
    "MPS",
    "OPERATORS",
    "PARAMETERS_GROUP",
    "SHARING_KIND",
    "SHARING_VERSION",
    "STRATEGIES",
    "TIME_SLICES",
    "TIME_SLICING",
    "VERSION_PATTERN",
    "Amount",
    "AttributeCondition",
    "CapacityCondition",
    "ClaimParameters",
    "DeviceClassParameters",
    "DeviceSelector",
    "MpsConfig",
    "Sharing",
    "TimeSlicingConfig",
    "VersionCondition",
    "check_claim_parameters",
    "check_class_parameters",
    "check_sharing",
    "device_class_of_group",
    "group_of_class",
]

PARAMETERS_GROUP = "resource.topobus.dev"
SHARING_VERSION = "topobus.dev/v1"
SHARING_KIND = "SharingParameters"
"""How a sharing strategy travels as opaque configuration: to the node with a classic handle, and in
a structured claim."""

OPERATORS = ("Equals", "NotEquals", "LessThan", "LessThanOrEqualTo", "GreaterThan", "GreaterThanOrEqualTo")
_ORDER_FREE = ("Equals", "NotEquals")
EXCLUSIVE, TIME_SLICING, MPS = "Exclusive", "TimeSlicing", "MPS"
STRATEGIES = (EXCLUSIVE, TIME_SLICING, MPS)
TIME_SLICES = ("Default", "Short", "Medium", "Long")

# resource.k8s.io takes 32 devices for one claim; a classic claim that asks
# for more could never be migrated.
MAX_COUNT = 32
# Deep enough for any written by a person; it keeps a hostile one from costing
# time, and its CEL below 10 KiB.
MAX_DEPTH = 8
MAX_TERMS = 64
MAX_TEXT = 128

VERSION_PATTERN = r"v?[0-9]{1,9}(\.[0-9]{1,9}){0,2}"
"""What counts as a version here, of a condition and of a device: one to three numbers. Drivers
write `535.104.05`, which semantic versioning itself refuses."""

_VERSION = re.compile(VERSION_PATTERN)
# Words that CEL keeps for itself: an attribute of such a name can be published and
# never be read by an expression.
_RESERVED = frozenset(
    [
        "as",
        "break",
        "const",
        "continue",
        "else",
        "false",
        "for",
        "function",
        "if",
        "import",
        "in",
        "let",
        "loop",
        "namespace",
        "null",
        "package",
        "return",
        "true",
        "var",
        "void",
        "while",
    ]
)
_NAME = re.compile(r"(?:[a-z0-9.-]{1,63}/)?[A-Za-z_][A-Za-z0-9_]{0,31}")


class Amount(Wire, frozen=True, kw_only=True):
    """A quantity and how a device's own compares to it: `{value: 40Gi, operator:
    GreaterThanOrEqualTo}`.
    """

    value: QuantityText
    operator: str = "Equals"


class VersionCondition(Wire, frozen=True, kw_only=True):
    """A version and how a device's own compares to it, by semantic versioning. `535.104` counts as
    `535.104.0`.
    """

    value: str
    operator: str = "Equals"


class AttributeCondition(Wire, frozen=True, kw_only=True):
    """Any attribute that a device publishes.

    Text is a pattern with `*` and `?` for Equals and NotEquals. Other operators want a number.
    """

    name: str
    value: bool | int | str
    operator: str = "Equals"


class CapacityCondition(Wire, frozen=True, kw_only=True):
    """Any capacity that a device publishes."""

    name: str
    value: QuantityText
    operator: str = "Equals"


class DeviceSelector(Wire, frozen=True, kw_only=True):
    """Which devices are wanted: all conditions here must hold.

    A device that does not publish a selected attribute or capacity is not wanted.
    """

    product_name: str | None = None
    """A pattern with `*` and `?`, in any case: `*a100*`."""
    brand: str | None = None
    architecture: str | None = None
    uuid: str | None = None
    index: int | None = None
    mig_enabled: bool | None = None
    memory: Amount | None = None
    driver_version: VersionCondition | None = None
    cuda_runtime_version: VersionCondition | None = None
    cuda_compute_capability: VersionCondition | None = None
    attribute: AttributeCondition | None = None
    capacity: CapacityCondition | None = None
    and_expression: tuple[DeviceSelector, ...] = ()
    """All of these."""
    or_expression: tuple[DeviceSelector, ...] = ()
    """At least one of these."""


class TimeSlicingConfig(Wire, frozen=True, kw_only=True):
    """How long one process has the device before the next."""

    interval: str = "Default"


class MpsConfig(Wire, frozen=True, kw_only=True):
    """What one process may have of a device that several share by MPS."""

    default_active_thread_percentage: int | None = None
    default_pinned_device_memory_limit: QuantityText | None = None


class Sharing(Wire, frozen=True, kw_only=True):
    """How the containers of a claim share its devices. No other claim has them, whatever the
    strategy.
    """

    strategy: str = EXCLUSIVE
    time_slicing_config: TimeSlicingConfig | None = None
    mps_config: MpsConfig | None = None


class DeviceClassParameters(Wire, frozen=True, kw_only=True):
    """DeviceClassParameters.spec."""

    shareable: bool = False
    """Whether claims of the class may be used by several pods at once."""
    selector: DeviceSelector = DeviceSelector()
    sharing: Sharing | None = None
    """For claims that do not set sharing themselves."""


class ClaimParameters(Wire, frozen=True, kw_only=True):
    """ClaimParameters.spec."""

    count: int = 1
    selector: DeviceSelector = DeviceSelector()
    sharing: Sharing | None = None


def group_of_class(device_class: str) -> str:
    """Name the API group of a class's parameters.

    >>> group_of_class("gpu")
    'gpu.resource.topobus.dev'
    """
    return f"{device_class}.{PARAMETERS_GROUP}"


def device_class_of_group(group: str) -> str:
    """Name the device class of one of our groups. Empty for a foreign group.

    >>> device_class_of_group("nic.resource.topobus.dev"), device_class_of_group("gpu.resource.example.com")
    ('nic', '')
    """
    head, dot, tail = group.partition(".")
    return head if dot and tail == PARAMETERS_GROUP else ""


def check_class_parameters(spec: DeviceClassParameters) -> list[Problem]:
    """Check the parameters of a class."""
    return [*_check_selector(spec.selector, "spec.selector"), *check_sharing(spec.sharing, "spec.sharing")]


def check_claim_parameters(spec: ClaimParameters) -> list[Problem]:
    """Check the parameters of a claim."""
    problems: list[Problem] = []
    if not 1 <= spec.count <= MAX_COUNT:
        problems.append(Problem("spec.count", f"got {spec.count}, wanted 1 to {MAX_COUNT}"))
    return [
        *problems,
        *_check_selector(spec.selector, "spec.selector"),
        *check_sharing(spec.sharing, "spec.sharing"),
    ]


def check_sharing(sharing: Sharing | None, path: str) -> Iterator[Problem]:
    """Check a sharing strategy: it is a known one, and only its own configuration is given.

    Shapes: sharing — None is sound; path — the place of `sharing` in the object, with which each
            Problem begins.
    """
    if sharing is None:
        return
    if sharing.strategy not in STRATEGIES:
        yield Problem(
            f"{path}.strategy",
            f"got {sharing.strategy!r}, wanted one of "
            f"{', '.join(STRATEGIES)}{did_you_mean(sharing.strategy, STRATEGIES)}",
        )
    if sharing.time_slicing_config is not None:
        if sharing.strategy != TIME_SLICING:
            yield Problem(f"{path}.timeSlicingConfig", f"wanted none with strategy {sharing.strategy}")
        if sharing.time_slicing_config.interval not in TIME_SLICES:
            got = sharing.time_slicing_config.interval
            yield Problem(f"{path}.timeSlicingConfig.interval", f"got {got!r}, wanted one of {', '.join(TIME_SLICES)}")
    if sharing.mps_config is not None:
        here = f"{path}.mpsConfig"
        if sharing.strategy != MPS:
            yield Problem(here, f"wanted none with strategy {sharing.strategy}")
        share = sharing.mps_config.default_active_thread_percentage
        if share is not None and not 1 <= share <= 100:
            yield Problem(f"{here}.defaultActiveThreadPercentage", f"got {share}, wanted 1 to 100")
        if sharing.mps_config.default_pinned_device_memory_limit is not None:
            yield from _check_amount(
                sharing.mps_config.default_pinned_device_memory_limit, f"{here}.defaultPinnedDeviceMemoryLimit"
            )


def _check_selector(selector: DeviceSelector, path: str) -> list[Problem]:
    problems: list[Problem] = []
    terms = _walk(selector, path, 1, problems)
    if terms > MAX_TERMS:
        problems.append(Problem(path, f"got {terms} conditions, wanted at most {MAX_TERMS}"))
    return problems


def _walk(device_selector: DeviceSelector, path: str, depth: int, problems: list[Problem]) -> int:
    """Check one level and the levels below it, and return how many conditions there are."""
    if depth > MAX_DEPTH:
        problems.append(Problem(path, f"expressions nest deeper than {MAX_DEPTH}"))
        return 0
    problems.extend(_check_terms(device_selector, path))
    terms = sum(
        value is not None for name, value in structs.asdict(device_selector).items() if not name.endswith("_expression")
    )
    for key, inner in (
        ("andExpression", device_selector.and_expression),
        ("orExpression", device_selector.or_expression),
    ):
        terms += sum(_walk(part, f"{path}.{key}[{index}]", depth + 1, problems) for index, part in enumerate(inner))
    return terms


def _check_terms(device_selector: DeviceSelector, path: str) -> Iterator[Problem]:
    for name, text in (
        ("productName", device_selector.product_name),
        ("brand", device_selector.brand),
        ("architecture", device_selector.architecture),
        ("uuid", device_selector.uuid),
    ):
        if text is not None:
            yield from _check_text(text, f"{path}.{name}")
    if device_selector.memory is not None:
        yield from _check_operator(device_selector.memory.operator, f"{path}.memory", OPERATORS)
        yield from _check_amount(device_selector.memory.value, f"{path}.memory.value")
    versions = (
        ("driverVersion", device_selector.driver_version),
        ("cudaRuntimeVersion", device_selector.cuda_runtime_version),
        ("cudaComputeCapability", device_selector.cuda_compute_capability),
    )
    for name, version in versions:
        if version is not None:
            yield from _check_operator(version.operator, f"{path}.{name}", OPERATORS)
            if _VERSION.fullmatch(version.value) is None or len(version.value) > MAX_TEXT:
                yield Problem(
                    f"{path}.{name}.value", f"got {version.value!r}, wanted a version such as 535.104.5 or 8.0"
                )
    if device_selector.attribute is not None:
        here = f"{path}.attribute"
        is_number = isinstance(device_selector.attribute.value, int) and not isinstance(
            device_selector.attribute.value, bool
        )
        yield from _check_operator(device_selector.attribute.operator, here, OPERATORS if is_number else _ORDER_FREE)
        yield from _check_name(device_selector.attribute.name, f"{here}.name")
        if isinstance(device_selector.attribute.value, str):
            yield from _check_text(device_selector.attribute.value, f"{here}.value")
    if device_selector.capacity is not None:
        yield from _check_operator(device_selector.capacity.operator, f"{path}.capacity", OPERATORS)
        yield from _check_name(device_selector.capacity.name, f"{path}.capacity.name")
        yield from _check_amount(device_selector.capacity.value, f"{path}.capacity.value")


def _check_operator(got: str, path: str, legal: tuple[str, ...]) -> Iterator[Problem]:
    if got not in legal:
        yield Problem(f"{path}.operator", f"got {got!r}, wanted one of {', '.join(legal)}{did_you_mean(got, legal)}")


def _check_text(text: str, path: str) -> Iterator[Problem]:
    if not 1 <= len(text) <= MAX_TEXT or not text.isprintable():
        yield Problem(path, f"got {text[:MAX_TEXT]!r}, wanted 1 to {MAX_TEXT} printable characters")


def _check_name(text: str, path: str) -> Iterator[Problem]:
    if _NAME.fullmatch(text) is None or text.rpartition("/")[2] in _RESERVED:
        yield Problem(path, f"got {text!r}, wanted a name such as speedGbps or resource.kubernetes.io/numaNode")


def _check_amount(amount: QuantityText, path: str) -> Iterator[Problem]:
    try:
        Quantity.parse(amount)
    except ValueError as err:
        yield Problem(path, str(err))
