"""Selectors in CEL, by Google's own engine: the environment that Kubernetes gives to DRA expressions.

Flows in: expressions and device facts. Flows out: verdicts, or errors with the place. Cost is bounded by the length of an expression (Kubernetes' 10 KiB) and by
the engine's own budget for loops.

`device` is not a variable but a prefix of three: so `device.drivr` is a compile error with its position, as in Kubernetes. A domain that no attribute
has is an empty map when it is looked into (`device.attributes["x"].y` fails with "no such key y", `has()` says no), but `"x" in device.attributes` says
no: so looked-into domains read from a second map that has every domain the expression names. Source: k8s.io/dynamic-resource-allocation/cel, 1.36.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping

from cel_expr_python import cel  # type: ignore[import-untyped]  # the package has no py.typed
from cel_expr_python.ext import ext_bindings, ext_optional, ext_strings  # type: ignore[import-untyped]  # as above

from topobus.contracts.kubernetes.limits import MAX_EXPRESSION_BYTES
from topobus.controller.celfunctions import mark_quantity, plain_value, selector_functions
from topobus.controller.celtext import Reading, read_expression
from topobus.controller.core.selectors import DeviceFacts, Reads, Selector, SelectorError, seen

__all__ = ["CelCompiler", "CelSelector"]

# A cluster has some dozens of different expressions; this many compiled ones take some 20 MB at most.
_CACHE_SIZE = 1024
# Verdicts remembered by one expression; a cluster has some hundreds of different devices as far as an expression can tell.
_VERDICTS = 4096

_POSITION = re.compile(r"ERROR: <input>:(\d+):(\d+): (.*)")


class CelSelector:
    """One compiled expression, with the verdicts that it gave."""

    def __init__(self, expression: cel.Expression, reading: Reading) -> None:
        self._expression = expression
        self._domains = reading.domains
        self.reads: tuple[Reads, ...] | None = tuple(sorted(reading.reads, key=str)) if reading.reads is not None else None
        self._verdicts: dict[tuple[object, ...], bool | SelectorError] = {}

    def matches(self, device: DeviceFacts) -> bool | SelectorError:
        """Give the verdict on a device; evaluated once for all devices that agree on what the expression reads."""
        if self.reads is None:
            return self._evaluate(device)
        what = tuple([seen(one, device) for one in self.reads])
        verdict = self._verdicts.get(what)
        if verdict is None:
            if len(self._verdicts) >= _VERDICTS:
                self._verdicts.clear()
            verdict = self._verdicts[what] = self._evaluate(device)
        return verdict

    def _evaluate(self, device: DeviceFacts) -> bool | SelectorError:
        attributes = {domain: {name: plain_value(value) for name, value in found.items()} for domain, found in device.attributes.items()}
        capacity = {domain: {name: mark_quantity(one) for name, one in found.items()} for domain, found in device.capacity.items()}
        data = {
            "device.driver": device.driver,
            "device.allowMultipleAllocations": device.allow_multiple_allocations,
            "device.attributes": attributes,
            "device.capacity": capacity,
            "device.attributes_": self._with_domains(attributes, device.driver),
            "device.capacity_": self._with_domains(capacity, device.driver),
        }
        try:
            value = self._expression.eval(data=data)
            result = value.value()
        except (RuntimeError, ValueError, TypeError) as err:  # what the engine raises when it gives up
            return SelectorError(f"cannot be evaluated: {_first_line(err)}")
        if isinstance(result, bool):
            return result
        kind = str(value.type())
        return SelectorError(
            f"cannot be evaluated: {result}" if kind == "ERROR" else f"gave {kind.lower()} {result!r}, wanted true or false"
        )

    def _with_domains(self, found: Mapping[str, Mapping[str, object]], driver: str) -> dict[str, Mapping[str, object]]:
        return {driver: {}, **{domain: {} for domain in self._domains}, **found}


class CelCompiler:
    """Compiles each expression once and remembers the newest ones."""

    def __init__(self) -> None:
        self._environment = _make_environment()
        self._cache: OrderedDict[str, Selector | SelectorError] = OrderedDict()

    def compile(self, expression: str) -> Selector | SelectorError:
        """Compile an expression, or tell line and column of what is wrong."""
        known = self._cache.get(expression)
        if known is not None:
            self._cache.move_to_end(expression)
            return known
        made = self._cache[expression] = self._compile(expression)
        if len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return made

    def _compile(self, expression: str) -> Selector | SelectorError:
        if len(expression.encode()) > MAX_EXPRESSION_BYTES:
            return SelectorError(f"is longer than {MAX_EXPRESSION_BYTES} bytes")
        try:
            compiled = self._environment.compile(expression)
            kind = str(compiled.return_type())
            if kind not in ("BOOL", "DYN"):
                return SelectorError(f"gives {kind.lower()}, wanted true or false", line=1, column=1)
            reading = read_expression(expression)
            return CelSelector(self._environment.compile(reading.rewritten), reading)
        except (RuntimeError, ValueError) as err:
            found = _POSITION.search(str(err))
            if found is None:
                return SelectorError(f"cannot be compiled: {_first_line(err)}", line=1, column=1)
            return SelectorError(
                f"cannot be compiled: {found[3].removesuffix(' [INVALID_ARGUMENT]')}", line=int(found[1]), column=int(found[2])
            )


def _first_line(err: BaseException) -> str:
    return (str(err).splitlines() or [type(err).__name__])[0]


def _make_environment() -> cel.Env:
    text, boolean = cel.Type.STRING, cel.Type.BOOL
    attributes = cel.Type.Map(text, cel.Type.Map(text, cel.Type.DYN))
    capacity = cel.Type.Map(text, cel.Type.Map(text, text))
    return cel.NewEnv(
        variables={
            "device.driver": text,
            "device.allowMultipleAllocations": boolean,
            "device.attributes": attributes,
            "device.capacity": capacity,
            "device.attributes_": attributes,
            "device.capacity_": capacity,
        },
        extensions=[ext_strings.ExtStrings(), ext_optional.ExtOptional(), ext_bindings.ExtBindings()],
        functions=selector_functions(),
    )
