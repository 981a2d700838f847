"""From tree to steps, and what a run of them may cost.

A checked tree becomes nested functions once; a run is one call with a frame that holds the variables and the cost so far. Costs are Kubernetes' own: a variable or
field 1, a list 10, a map 30, functions by what they walk over, `&&`, `||`, `?:` and `has` nothing themselves. A run that costs more than its limit ends.
Source: cel-go interpreter/runtimecost.go; k8s.io/apiserver/pkg/cel/library/cost.go, 1.36.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from topobus.controller.expressions.errors import EvaluationError
from topobus.controller.expressions.frame import Frame
from topobus.controller.expressions.macros import ACCUMULATOR, UNUSED
from topobus.controller.expressions.registry import Functions
from topobus.controller.expressions.runtime_cost import charge_before, cost_of_call, weigh
from topobus.controller.expressions.tree import Call, Constant, Fold, Identifier, ListLiteral, MapLiteral, Node, Select
from topobus.controller.expressions.values import (
    DomainMap,
    OptionalValue,
    TypeValue,
    Uint,
    are_equal,
    as_key,
    from_key,
    kind_of,
    look_up,
    no_such_overload,
    size_of,
    some,
)

__all__ = ["Step", "plan"]

_LIST_COST, _MAP_COST = 10, 30
# Reading a text takes longer than most selectors do otherwise; of constants it gives the same each time.
_FOLDED = frozenset(["quantity", "semver", "ip", "cidr", "url", "duration", "timestamp"])


Step = Callable[[Frame], object]


def plan(node: Node, functions: Functions) -> tuple[Step, int]:
    """Turn a checked tree into steps; gives how many variables a run needs besides `device`, too."""
    planner = _Planner(functions)
    return planner.plan(node, {"device": 0}), planner.slots


class _Planner:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self.slots = 0

    def plan(self, node: Node, scope: dict[str, int]) -> Step:
        """Plan a node with the variables that it sees."""
        match node:
            case Constant(value=value):
                return lambda _: value
            case Identifier():
                return self._identifier(node, scope)
            case Select():
                return self._select(node, scope)
            case Call():
                return self._call(node, scope)
            case ListLiteral():
                return self._list(node, scope)
            case MapLiteral():
                return self._map(node, scope)
            case Fold():
                return self._bind(node, scope) if node.variable == UNUSED else self._fold(node, scope)
            case _:
                raise AssertionError(f"no step for {node}")

    def _identifier(self, node: Identifier, scope: dict[str, int]) -> Step:
        slot = scope.get(node.name)
        if slot is None:
            named = TypeValue(node.name)
            return lambda _: named

        def run(frame: Frame) -> object:
            frame.charge(1)
            found = frame.slots[slot]
            if isinstance(found, EvaluationError):
                raise found
            return found

        return run

    def _select(self, node: Select, scope: dict[str, int]) -> Step:
        if node.type.name == "type" and not node.is_test and "." in (name := str(node.type.parameters[0])):
            named = TypeValue(name.partition("(")[0])
            return lambda _: named
        operand, field = self.plan(node.operand, scope), node.field

        def test(frame: Frame) -> object:
            return _has(operand(frame), field)

        def run(frame: Frame) -> object:
            found = operand(frame)
            if isinstance(found, OptionalValue):
                return _optional_field(found, field)
            frame.charge(1)
            return _field(found, field)

        return test if node.is_test else run

    def _call(self, node: Call, scope: dict[str, int]) -> Step:
        if node.name == "_+_" and _is_gathering(node):
            return self._gather(node, scope)
        steps = [self.plan(one, scope) for one in node.arguments]
        if node.target is None:
            match node.name:
                case "_&&_":
                    return _logic(steps, decisive=False)
                case "_||_":
                    return _logic(steps, decisive=True)
                case "_?_:_":
                    return _choice(*steps)
                case "_==_" | "_!=_":
                    return _equality(steps[0], steps[1], is_equal=node.name == "_==_")
                case "@not_strictly_false":
                    return _not_strictly_false(steps[0])
                case "_?._" | "_[?_]":
                    return _optional_index(steps[0], steps[1])
                case "_[_]":
                    return self._index(steps[0], steps[1])
        else:
            steps = [self.plan(node.target, scope), *steps]
        folded = self._folded(node) if node.name in _FOLDED else None
        return folded if folded is not None else self._function(node.name, is_member=node.target is not None, steps=steps)

    def _gather(self, node: Call, scope: dict[str, int]) -> Step:
        """Put one more item into the list that a macro makes, in place: nobody else has it, and a copy each time would cost the square of its length."""
        kept, item = self.plan(node.arguments[0], scope), self.plan(node.arguments[1], scope)

        def run(frame: Frame) -> object:
            found, more = kept(frame), item(frame)
            if not isinstance(found, list) or not isinstance(more, list):
                raise no_such_overload("_+_", found, more)
            frame.charge(1)
            found += more
            return found

        return run

    def _folded(self, node: Call) -> Step | None:
        """Work out a call on constants once; what it costs is charged each time all the same. None where it fails, which is for the run to tell."""
        if node.target is not None or not all(isinstance(one, Constant) for one in node.arguments):
            return None
        values = tuple([one.value for one in node.arguments if isinstance(one, Constant)])
        found = self._functions.choose(node.name, is_member=False, values=values)
        if found is None:
            return None
        try:
            result = found.work(*values)
        except EvaluationError:
            return None
        cost = cost_of_call(node.name, found.signature, values, result)

        def run(frame: Frame) -> object:
            frame.charge(cost)
            return result

        return run

    def _function(self, name: str, *, is_member: bool, steps: list[Step]) -> Step:
        choose = self._functions.choose

        def run(frame: Frame) -> object:
            values = tuple([one(frame) for one in steps])
            found = choose(name, is_member=is_member, values=values)
            if found is None:
                raise no_such_overload(name, *values)
            charge_before(frame, name, values)
            result = found.work(*values)
            frame.charge(cost_of_call(name, found.signature, values, result))
            return result

        return run

    def _index(self, operand: Step, index: Step) -> Step:
        choose = self._functions.choose

        def run(frame: Frame) -> object:
            values = (operand(frame), index(frame))
            frame.charge(1)
            if isinstance(values[0], dict):
                return look_up(values[0], values[1])
            if isinstance(values[0], OptionalValue):
                return _optional_item(values[0], values[1])
            if isinstance(values[0], list | tuple) and isinstance(values[1], Uint | float):
                values = (values[0], _as_index(values[1]))
            found = choose("_[_]", is_member=False, values=values)
            if found is None:
                raise no_such_overload("_[_]", *values)
            return found.work(*values)

        return run

    def _list(self, node: ListLiteral, scope: dict[str, int]) -> Step:
        steps = [(self.plan(one, scope), index in node.optional) for index, one in enumerate(node.items)]

        def run(frame: Frame) -> object:
            items: list[object] = []
            for step, is_optional in steps:
                value = step(frame)
                if not is_optional:
                    items.append(value)
                elif not isinstance(value, OptionalValue):
                    raise EvaluationError(f"cannot initialize optional list element from non-optional value {kind_of(value)}")
                elif value.is_present:
                    items.append(value.value)
            frame.charge(_LIST_COST)
            return items

        return run

    def _map(self, node: MapLiteral, scope: dict[str, int]) -> Step:
        steps = [(self.plan(one.key, scope), self.plan(one.value, scope), one.is_optional) for one in node.entries]

        def run(frame: Frame) -> object:
            found: dict[object, object] = {}
            for key_step, value_step, is_optional in steps:
                key, value = as_key(key_step(frame)), value_step(frame)
                if is_optional:
                    if not isinstance(value, OptionalValue):
                        raise EvaluationError(f"cannot initialize optional entry from non-optional value {kind_of(value)}")
                    if not value.is_present:
                        continue
                    value = value.value
                if key in found:
                    raise EvaluationError(f"repeated key: {from_key(key)}")
                found[key] = value
            frame.charge(_MAP_COST)
            return found

        return run

    def _slot(self) -> int:
        self.slots += 1
        return self.slots

    def _bind(self, node: Fold, scope: dict[str, int]) -> Step:
        slot = self._slot()
        value, result = self.plan(node.start, scope), self.plan(node.result, {**scope, node.accumulator: slot})

        def run(frame: Frame) -> object:
            frame.charge(_LIST_COST)
            try:
                frame.slots[slot] = value(frame)
            except EvaluationError as err:
                frame.slots[slot] = err  # an error only where the name is used
            return result(frame)

        return run

    def _fold(self, node: Fold, scope: dict[str, int]) -> Step:
        over, start = self.plan(node.over, scope), self.plan(node.start, scope)
        accumulator, first = self._slot(), self._slot()
        inner = {**scope, node.variable: first, node.accumulator: accumulator}
        second = 0
        if node.second_variable:
            second = inner[node.second_variable] = self._slot()
        condition, step = self.plan(node.condition, inner), self.plan(node.step, inner)
        result = self.plan(node.result, {**scope, node.accumulator: accumulator})

        def run(frame: Frame) -> object:
            items = _items(over(frame), has_two=bool(second))
            slots = frame.slots
            slots[accumulator] = start(frame)
            for one, other in items:
                slots[first] = one
                if second:
                    slots[second] = other
                if condition(frame) is False:
                    break
                try:
                    slots[accumulator] = step(frame)
                except EvaluationError as err:
                    slots[accumulator] = err
            return result(frame)

        return run


def _is_gathering(node: Call) -> bool:
    """Say whether a call is a macro's own step to a longer list."""
    first, second = node.arguments if len(node.arguments) == 2 else (None, None)
    return isinstance(first, Identifier) and first.name == ACCUMULATOR and isinstance(second, ListLiteral) and len(second.items) == 1


def _as_index(place: float) -> int:
    """Take a whole number of another type for an index."""
    if math.isfinite(place) and place == int(place):
        return int(place)
    raise EvaluationError(f"unsupported index value {place}")


def _items(found: object, *, has_two: bool) -> Iterator[tuple[object, object]]:
    """List what a loop runs over: items, or keys; with two variables index or key, and value."""
    if isinstance(found, OptionalValue):
        found = found.value if found.is_present else []
    if isinstance(found, list | tuple):
        return iter(list(enumerate(found))) if has_two else ((one, None) for one in list(found))
    if isinstance(found, dict):
        return iter([(from_key(key), value) for key, value in found.items()])
    raise EvaluationError(f"got '{kind_of(found)}', expected iterable type")


def _field(found: object, field: str) -> object:
    if isinstance(found, dict):
        if field in found:
            return found[field]
        if isinstance(found, DomainMap):
            return {}
        raise EvaluationError(f"no such key: {field}")
    raise EvaluationError(f"no such overload: {kind_of(found)}.{field}")


def _optional_field(found: OptionalValue, field: str) -> OptionalValue:
    if not found.is_present:
        return found
    inside = found.value
    if not isinstance(inside, dict):
        raise EvaluationError(f"no such overload: {kind_of(inside)}.{field}")
    if field in inside:
        return some(inside[field])
    return some({}) if isinstance(inside, DomainMap) else OptionalValue()


def _has(found: object, field: str) -> bool:
    if isinstance(found, OptionalValue):
        return found.is_present and _has(found.value, field)
    if isinstance(found, dict):
        return field in found or isinstance(found, DomainMap)
    raise EvaluationError(f"no such overload: has({kind_of(found)}.{field})")


def _optional_item(found: OptionalValue, key: object) -> OptionalValue:
    if not found.is_present:
        return found
    inside = found.value
    if isinstance(inside, dict):
        if as_key(key) in inside:
            return some(inside[as_key(key)])
        return some({}) if isinstance(inside, DomainMap) else OptionalValue()
    if isinstance(inside, list | tuple) and isinstance(key, int) and not isinstance(key, bool):
        return some(inside[key]) if 0 <= key < len(inside) else OptionalValue()
    raise no_such_overload("_[?_]", inside, key)


def _optional_index(operand: Step, index: Step) -> Step:
    def run(frame: Frame) -> object:
        found, key = operand(frame), index(frame)
        frame.charge(1)
        return _optional_item(found if isinstance(found, OptionalValue) else some(found), key)

    return run


def _logic(steps: list[Step], *, decisive: bool) -> Step:
    """`&&` ends at the first false, `||` at the first true; an error counts only when no value decides."""

    def run(frame: Frame) -> object:
        error: EvaluationError | None = None
        for step in steps:
            try:
                value = step(frame)
            except EvaluationError as err:
                error = error or err
                continue
            if value is decisive:
                return decisive
            if not isinstance(value, bool):
                error = error or EvaluationError(f"no such overload: {kind_of(value)} in a logical operator")
        if error is not None:
            raise error
        return not decisive

    return run


def _choice(condition: Step, first: Step, second: Step) -> Step:
    def run(frame: Frame) -> object:
        value = condition(frame)
        if value is True:
            return first(frame)
        if value is False:
            return second(frame)
        raise EvaluationError(f"no such overload: {kind_of(value)} ? _ : _")

    return run


def _equality(left: Step, right: Step, *, is_equal: bool) -> Step:
    def run(frame: Frame) -> object:
        one, other = left(frame), right(frame)
        # A tenth of the shorter one, rounded up.
        frame.charge((min(size_of(one), size_of(other)) + 9) // 10)
        if isinstance(one, list | tuple | dict | OptionalValue):
            frame.labour(weigh(one))
        return are_equal(one, other) is is_equal

    return run


def _not_strictly_false(step: Step) -> Step:
    def run(frame: Frame) -> object:
        try:
            value = step(frame)
        except EvaluationError:
            value = True
        frame.charge(1)
        return value is not False

    return run
