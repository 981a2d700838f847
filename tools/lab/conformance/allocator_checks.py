"""Answers conformance cases: runs the allocator, or one selector, on a case. JSON in, JSON out.

For `lab.conformance` and for the tests. A case has a node, classes, slices, claims, allocated
devices and features. An answer is `{"outcome": ..., "results": [...], "steps": n, "reasons":
[...]}` with share ids as "SHARE". A case of a selector is an expression over the device of the
file's first line. The comparison covers whether it is refused, its verdict or that there is an
error, and whether an API server would refuse it for its cost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.search import DEFAULT_STEP_BUDGET, allocate
from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    ClaimToAllocate,
    DeviceId,
    Fault,
    Gate,
    GaveUp,
    Mode,
    Node,
    NoFit,
    Outcome,
    Usage,
)
from topobus.engine.cel.seam import (
    DeviceFacts,
    FactValue,
    SelectorCompiler,
    SelectorError,
    Version,
)
from topobus.engine.cel.selector import COST_LIMIT, CelCompiler, compile_expression
from topobus.formats.kubernetes.resource import ClaimSpec, DeviceClassSpec, SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.codec import encode
from topobus.values.errors import TopobusError
from topobus.values.quantity import Quantity

__all__ = ["CelSelectors", "answer", "answer_case", "check_allocation", "read_case"]

# What upstream answers within its 10 s must be answered. That is a million steps.
_STEPS = 1_000_000


def check_allocation(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `structured-allocation` of `python -m lab.conformance`: outcome and results as expected,
    and as we have them.
    """
    expect = case["expect"]
    wanted = {"outcome": expect["outcome"], "results": expect.get("results")}
    try:
        got = answer_case(case, _compiler(), step_budget=_STEPS)
    except (TopobusError, LookupError, TypeError, ValueError, AttributeError) as err:
        # One case of an unknown shape fails alone, and the others of the file still count.
        return wanted, {"outcome": f"cannot be read: {type(err).__name__}: {err}", "results": None}
    return wanted, {"outcome": got["outcome"], "results": got.get("results")}


class CelSelectors:
    """Kind `cel-selectors` of `python -m lab.conformance`: expressions over one device, as
    Kubernetes' own compiler and evaluator answer.
    """

    def __init__(self) -> None:
        self._device: DeviceFacts | None = None
        self._counts: Counter[tuple[str, str]] = Counter()

    def begin(self, header: dict[str, Any]) -> None:
        """Read the device.

        Errors: raises KeyError, TypeError or ValueError for a line of another shape.
        """
        device = header["device"]
        driver: str = device["driver"]
        attributes: dict[str, dict[str, FactValue]] = {}
        for name, attribute in device["attributes"].items():
            domain, identifier = _qualified(name, driver)
            ((kind, value),) = attribute.items()
            attributes.setdefault(domain, {})[identifier] = _fact(kind, value)
        capacity: dict[str, dict[str, Quantity]] = {}
        for name, amount in device["capacity"].items():
            domain, identifier = _qualified(name, driver)
            capacity.setdefault(domain, {})[identifier] = Quantity.parse(amount)
        self._device = DeviceFacts(driver, attributes, capacity, bool(device.get("allowMultipleAllocations")))

    def __call__(self, case: dict[str, Any]) -> tuple[Any, Any]:
        """Return the expected answer of an expression, and ours."""
        expect = case["expect"]
        if self._device is None:
            raise ValueError("the file has no device")
        selector = compile_expression(case["expression"])
        refused = {"outcome": "refused"}
        wanted: dict[str, Any] = refused
        if "refused" not in expect:
            wanted = {
                "outcome": "error" if "error" in expect else expect["match"],
                "is_too_dear": expect["maxCost"] > COST_LIMIT,
            }
        if isinstance(selector, SelectorError):
            return wanted, refused
        verdict, cost = selector.evaluate(self._device)
        got = {
            "outcome": "error" if isinstance(verdict, SelectorError) else verdict,
            "is_too_dear": selector.objection is not None,
        }
        if "refused" not in expect:
            self._count("estimates", expect["maxCost"], selector.max_cost)
            if "cost" in expect:
                self._count(
                    "costs of a run that failed" if "error" in expect else "costs of a run", expect["cost"], cost
                )
        return wanted, got

    def remarks(self) -> list[str]:
        """Report how many estimates and costs are Kubernetes' own numbers, and how many are above
        or below.

        No case fails by them.
        """
        return [
            f"{what}: " + ", ".join(f"{self._counts[what, how]} {how}" for how in ("equal", "cheaper", "dearer"))
            for what in ("estimates", "costs of a run", "costs of a run that failed")
        ]

    def _count(self, what: str, wanted: int, got: int) -> None:
        self._counts[what, "equal" if got == wanted else "cheaper" if got < wanted else "dearer"] += 1


def _qualified(name: str, driver: str) -> tuple[str, str]:
    domain, slash, identifier = name.partition("/")
    return (domain, identifier) if slash else (driver, name)


def _fact(kind: str, value: Any) -> FactValue:
    match kind:
        case "bigint":
            return int(value)  # written as text, for JSON has no 64 bits
        case "version":
            return Version(value)
        case "versions":
            return tuple(Version(text) for text in value)
        case "bools" | "ints" | "strings":
            return tuple(value)
        case "bool" | "int" | "string":
            fact: FactValue = value
            return fact
        case _:
            raise ValueError(f"unknown type of an attribute: {kind!r}")


def answer_case(
    case: Mapping[str, Any],
    compiler: SelectorCompiler,
    *,
    mode: Mode = Mode.COMPATIBLE,
    step_budget: int = DEFAULT_STEP_BUDGET,
    is_clever: bool = True,
) -> dict[str, Any]:
    """Read a case, allocate, and write the answer."""
    return answer(allocate(read_case(case, mode=mode), compiler, step_budget=step_budget, is_clever=is_clever))


def read_case(case: Mapping[str, Any], *, mode: Mode = Mode.COMPATIBLE) -> AllocationInput:
    """Read a case. Unknown feature gates change nothing here and are left out.

    Errors: raises ContractError for an object that is none, KeyError for a case without its parts.
    """
    allocated = case.get("allocated") or {}
    # Cases that fail before any node matters name none.
    node = (case.get("node") or {}).get("metadata") or {}
    claims = case.get("claims") or ()
    gates = {gate.value for gate in Gate}
    features: set[str] = set(case.get("features") or ())
    if features.issuperset(Gate.BINDING_CONDITIONS.split("+")):
        features.add(Gate.BINDING_CONDITIONS)
    return AllocationInput(
        node=Node(node.get("name") or "", node.get("labels") or {}),
        claims=tuple(
            ClaimToAllocate(
                _name(claim), read_as(claim.get("spec") or {}, ClaimSpec, where=_name(claim)), len(claims) > 1
            )
            for claim in claims
        ),
        classes={
            device_class["metadata"]["name"]: read_as(
                device_class.get("spec") or {}, DeviceClassSpec, where=device_class["metadata"]["name"]
            )
            for device_class in case.get("classes") or ()
        },
        slices=tuple(
            Slice(
                resource_slice["metadata"]["name"],
                read_as(resource_slice["spec"], SliceSpec, where=resource_slice["metadata"]["name"]),
            )
            for resource_slice in case.get("slices") or ()
        ),
        usage=Usage(
            {_device(device): "somebody" for device in allocated.get("devices") or ()},
            {
                _device(key): {name: Quantity.parse(amount) for name, amount in (used or {}).items()}
                for key, used in (allocated.get("consumedCapacity") or {}).items()
            },
        ),
        gates=frozenset(Gate(feature) for feature in features if feature in gates),
        mode=mode,
    )


def answer(outcome: Outcome) -> dict[str, Any]:
    """Write an outcome in the shape of the data."""
    match outcome:
        case Allocated():
            results: list[dict[str, Any]] = json.loads(encode(outcome.results))
            for result in results:
                for device in result["devices"].get("results", ()):
                    if "shareID" in device:
                        device["shareID"] = "SHARE"
            return {"outcome": "allocated", "results": results, "steps": outcome.steps}
        case NoFit():
            return {
                "outcome": "no-fit",
                "steps": outcome.steps,
                "reasons": [reason.message for reason in outcome.reasons],
            }
        case Fault():
            kind = "node-error" if outcome.is_local else "error"
            return {"outcome": kind, "steps": outcome.steps, "reasons": [outcome.reason.message]}
        case GaveUp():
            return {"outcome": "gave-up", "steps": outcome.steps}


@cache
def _compiler() -> CelCompiler:
    """One compiler for a whole file: building its environment costs more than a case."""
    return CelCompiler()


def _name(api_object: Mapping[str, Any]) -> str:
    metadata = api_object["metadata"]
    return f"{metadata.get('namespace') or 'default'}/{metadata['name']}"


def _device(text: str) -> DeviceId:
    """Split a device's id. The pool's name may have slashes itself."""
    driver, _, rest = text.partition("/")
    pool, _, device = rest.rpartition("/")
    return DeviceId(driver, pool, device)
