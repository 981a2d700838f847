"""Selectors in CEL: the environment that Kubernetes gives to DRA expressions, compiled once and
bounded in the cost of an evaluation.

The language itself is in the other modules of `topobus.engine.cel`.

A domain that no attribute has reads as an empty map (`device.attributes["x"].y` fails with "no such
key: y", `has()` is false), but `"x" in device.attributes` is false.
Source: k8s.io/dynamic-resource-allocation/cel, 1.36.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from topobus.engine.cel.checker import check
from topobus.engine.cel.cost.estimate import estimate
from topobus.engine.cel.depth import DEEP, room
from topobus.engine.cel.environment import ENVIRONMENT
from topobus.engine.cel.errors import CompileError, CostExceeded, EvaluationError
from topobus.engine.cel.frame import Frame
from topobus.engine.cel.parser import parse
from topobus.engine.cel.planner import plan
from topobus.engine.cel.reading import read
from topobus.engine.cel.seam import (
    DeviceFacts,
    FactValue,
    Reads,
    Selector,
    SelectorError,
    Version,
    seen,
)
from topobus.engine.cel.semantic_version import SemanticVersion
from topobus.engine.cel.steps import Step
from topobus.engine.cel.values import DomainMap, TextMap, kind_of
from topobus.formats.kubernetes.limits import MAX_EXPRESSION_BYTES

__all__ = ["COST_LIMIT", "CelCompiler", "CelSelector"]

COST_LIMIT = 1_000_000
"""What one evaluation may cost, in CEL's own unit. Source: CELSelectorExpressionMaxCost,
k8s.io/api/resource/v1, 1.36."""

# A cluster has some dozens of different expressions; this many
# compiled ones take some 20 MB at most.
_CACHE_SIZE = 1024
# Verdicts remembered by one expression. A cluster has some hundreds of devices that an expression
# can distinguish.
_VERDICTS = 4096


class CelSelector:
    """One compiled expression, with its verdicts so far."""

    def __init__(
        self, step: Step, slots: int, reads: frozenset[Reads] | None, max_cost: int, *, is_deep: bool = False
    ) -> None:
        self._step = step
        self._is_deep = is_deep
        self._slots = slots
        self.reads: tuple[Reads, ...] | None = tuple(sorted(reads, key=str)) if reads is not None else None
        self.max_cost = max_cost
        """The most that an evaluation can cost on any device; above `COST_LIMIT` an API server
        refuses the expression."""
        self._verdicts: dict[tuple[object, ...], bool | SelectorError] = {}

    @property
    def objection(self) -> SelectorError | None:
        """Why an API server would refuse the expression, though it compiles."""
        if self.max_cost <= COST_LIMIT:
            return None
        return SelectorError(
            f"is too complex: on some device it could cost {self.max_cost}, wanted at most {COST_LIMIT}"
        )

    def matches(self, device: DeviceFacts) -> bool | SelectorError:
        """Return the verdict on a device.

        Evaluated once for all devices that agree on what the expression reads.
        """
        if self.reads is None:
            return self.evaluate(device)[0]
        what = tuple([seen(reads, device) for reads in self.reads])
        verdict = self._verdicts.get(what)
        if verdict is None:
            if len(self._verdicts) >= _VERDICTS:
                self._verdicts.clear()
            verdict = self._verdicts[what] = self.evaluate(device)[0]
        return verdict

    def evaluate(self, device: DeviceFacts) -> tuple[bool | SelectorError, int]:
        """Return the verdict on a device, and what it cost."""
        try:
            frame = Frame(_value_of(device), self._slots, COST_LIMIT)
        except ValueError as err:
            return SelectorError(f"cannot be evaluated: {err}"), 0
        try:
            result = self._evaluate_deep(frame) if self._is_deep else self._step(frame)
        except (EvaluationError, CostExceeded) as err:
            return SelectorError(f"cannot be evaluated: {err}"), frame.cost
        except RecursionError:
            return SelectorError("cannot be evaluated: it nests too deep"), frame.cost
        if isinstance(result, bool):
            return result, frame.cost
        return SelectorError(f"gave a value of type {kind_of(result)}, wanted true or false"), frame.cost

    def _evaluate_deep(self, frame: Frame) -> object:
        with room():
            return self._step(frame)


class CelCompiler:
    """Compiles each expression once and remembers the newest results, errors included.

    Args: longest — bytes of an expression, as an API server has it.
    Errors: raises nothing. SelectorError is the answer for an expression that is wrong, as
            `compile_expression` returns it.
    """

    def __init__(self, longest: int = MAX_EXPRESSION_BYTES) -> None:
        self._longest = longest
        self._cache: OrderedDict[str, Selector | SelectorError] = OrderedDict()

    def compile(self, expression: str) -> Selector | SelectorError:
        """Compile an expression, or return line and column of what is wrong."""
        cached = self._cache.get(expression)
        if cached is not None:
            self._cache.move_to_end(expression)
            return cached
        made = self._cache[expression] = compile_expression(expression, self._longest)
        if len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return made


def compile_expression(expression: str, longest: int = MAX_EXPRESSION_BYTES) -> CelSelector | SelectorError:
    """Parse, check and plan a CEL expression, without the cache of `CelCompiler`.

    Shapes: result — a selector whose type is bool or dynamic.
    Errors: raises nothing; SelectorError with line and column for one that is too long, does not
            compile, has another type or nests too deep.
    """
    if len(expression.encode("utf-8", "replace")) > longest:
        return SelectorError(f"is longer than {longest} bytes")
    try:
        with room():
            tree = parse(expression)
            kind = check(expression, tree, ENVIRONMENT)
            if kind.name != "bool" and not kind.is_dynamic:
                return SelectorError(f"gives {kind}, wanted true or false", line=1, column=1)
            step, slots = plan(tree, ENVIRONMENT, expression)
            return CelSelector(step, slots, read(tree), estimate(tree), is_deep=tree.depth > DEEP)
    except CompileError as err:
        return SelectorError(f"cannot be compiled: {err.message}", line=err.line, column=err.column)
    except RecursionError:
        return SelectorError("cannot be compiled: it nests too deep", line=1, column=1)


def _value_of(device: DeviceFacts) -> dict[object, object]:
    """Convert a device to the value that expressions see.

    Errors: raises ValueError for a malformed version.
    """
    return {
        "driver": device.driver,
        "allowMultipleAllocations": device.allow_multiple_allocations,
        "attributes": DomainMap({domain: _attributes(attribute) for domain, attribute in device.attributes.items()}),
        "capacity": DomainMap({domain: TextMap(quantities.items()) for domain, quantities in device.capacity.items()}),
    }


def _attributes(facts: Mapping[str, FactValue]) -> dict[object, object]:
    return TextMap({name: _attribute(name, value) for name, value in facts.items()})


def _attribute(name: str, value: FactValue) -> object:
    if isinstance(value, Version):
        try:
            return SemanticVersion.parse(value.text)
        except ValueError as err:
            raise ValueError(f"attribute {name}: {err}") from err
    return [_attribute(name, item) for item in value] if isinstance(value, tuple) else value
