"""Compiles a checked tree to steps, and charges the cost of each.

A checked tree becomes nested functions once. An evaluation is one call with a frame that holds the
variables and the cost so far. This module decides which step a node becomes
(`topobus.engine.cel.steps`), which slot of the frame a variable has, and which values are computed
in advance because they are the same in each evaluation. Costs are Kubernetes': a variable or field
1, a list 10, a map 30, functions by the values that they walk over. `&&`, `||`, `?:` and `has` are
free. An evaluation that costs more than its limit ends.
Source: cel-go interpreter/planner.go and runtimecost.go; k8s.io/apiserver/pkg/cel/library/cost.go,
1.36.
"""

from __future__ import annotations

from topobus.engine.cel.access import field_of, has_field, items_of, optional_item, taken_out
from topobus.engine.cel.checker import TYPE_NAMES
from topobus.engine.cel.cost.runtime_cost import cost_of_call
from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.frame import Frame
from topobus.engine.cel.macros import ACCUMULATOR, UNUSED
from topobus.engine.cel.registry import Functions
from topobus.engine.cel.steps import (
    UNSET,
    Step,
    alternative_step,
    bound_step,
    call_step,
    choice_step,
    equality_step,
    gathering_step,
    index_step,
    logic_step,
    new_list,
    new_map,
    not_strictly_false_step,
    optional_index_step,
)
from topobus.engine.cel.tokens import fail_at
from topobus.engine.cel.tree import Call, Constant, Fold, Identifier, ListLiteral, MapLiteral, Node, Select, dotted
from topobus.engine.cel.values import OptionalValue, TypeValue, as_key, is_key_of, keys_of, kind_of, no_such_overload
from topobus.values.errors import InvariantError

__all__ = ["plan"]

_LIST_COST, _MAP_COST = 10, 30
# Reading a text takes longer than most selectors do otherwise; of
# constants it gives the same each time.
_FOLDED = frozenset(["quantity", "semver", "ip", "cidr", "url"])
_CONVERSIONS = frozenset(["bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint"])
_INDICES = frozenset(["_[_]", "_?._", "_[?_]"])


def plan(node: Node, functions: Functions, expression: str = "") -> tuple[Step, int]:
    """Turn a checked tree into steps.

    Literals, and conversions of them, are computed once and cost nothing, as upstream.
    Shapes: result — the step, and the number of variables that an evaluation needs besides
            `device`.
    Errors: raises CompileError for a conversion of a literal that fails (`int('x')`), with its
            place in the expression.
    """
    planner = _Planner(functions, expression)
    return planner.plan(node, {"device": 0}), planner.slots


class _Planner:
    def __init__(self, functions: Functions, expression: str) -> None:
        self._functions = functions
        self._expression = expression
        self._constants: dict[Step, object] = {}
        self._bound: dict[int, Step] = {}
        self.slots = 0

    def _constant(self, value: object) -> Step:
        def step(_: Frame) -> object:
            return value

        self._constants[step] = value
        return step

    def plan(self, node: Node, scope: dict[str, int]) -> Step:
        """Plan a node with the variables that it sees."""
        match node:
            case Constant(value=value):
                return self._constant(value)
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
                raise InvariantError(f"no step for {node}")

    def _identifier(self, node: Identifier, scope: dict[str, int]) -> Step:
        slot = scope.get(node.name)
        if slot is None:
            return self._constant(TypeValue(node.name))
        bound = self._bound.get(slot)
        if bound is not None:
            return bound_step(slot, bound)

        def run(frame: Frame) -> object:
            frame.charge(1)
            value = frame.slots[slot]
            if isinstance(value, EvaluationError):
                raise value
            return value

        return run

    def _select(self, node: Select, scope: dict[str, int]) -> Step:
        name = dotted(node)
        if name in TYPE_NAMES:
            return self._constant(TypeValue(name))
        operand, field = self._operand(node.operand, scope), node.field

        def test(frame: Frame) -> object:
            return has_field(operand(frame), field)

        def run(frame: Frame) -> object:
            value = operand(frame)
            if isinstance(value, OptionalValue):
                return optional_item(value, field)
            frame.charge(1)
            return field_of(value, field)

        return test if node.is_test else run

    def _operand(self, node: Node, scope: dict[str, int]) -> Step:
        """Plan the operand of a selection.

        An optional value that comes from a function or name, not from a selection, is unwrapped as
        upstream does.
        """
        step = self.plan(node, scope)
        is_selection = isinstance(node, Select) or (
            isinstance(node, Call) and node.name in _INDICES and node.target is None
        )
        if is_selection or (node.type.name != "optional_type" and not node.type.is_dynamic):
            return step
        return lambda frame: taken_out(step(frame))

    def _call(self, node: Call, scope: dict[str, int]) -> Step:
        if node.name == "_+_" and _is_gathering(node):
            return gathering_step(self.plan(node.arguments[0], scope), self.plan(node.arguments[1], scope))
        is_index = node.name in _INDICES and node.target is None
        steps = [
            self._operand(argument, scope) if is_index and not place else self.plan(argument, scope)
            for place, argument in enumerate(node.arguments)
        ]
        if node.target is None:
            match node.name:
                case "_&&_":
                    return logic_step(steps, decisive=False)
                case "_||_":
                    return logic_step(steps, decisive=True)
                case "_?_:_":
                    return choice_step(*steps)
                case "_==_" | "_!=_":
                    return equality_step(steps[0], steps[1], is_equal=node.name == "_==_")
                case "@not_strictly_false":
                    return not_strictly_false_step(steps[0])
                case "_?._" | "_[?_]":
                    return optional_index_step(steps[0], steps[1])
                case "_[_]":
                    return index_step(self._functions, steps[0], steps[1])
                case "@in" if isinstance(values := self._constants.get(steps[1]), list):
                    membership = self._membership(steps[0], values)
                    if membership is not None:
                        return membership
                case name if name in _CONVERSIONS and len(steps) == 1 and steps[0] in self._constants:
                    return self._converted(node, self._constants[steps[0]])
        else:
            steps = [self.plan(node.target, scope), *steps]
            if node.name in ("or", "orValue") and len(steps) == 2:
                return alternative_step(steps[0], steps[1], is_value=node.name == "orValue")
        folded = self._folded(node) if node.name in _FOLDED else None
        return (
            folded
            if folded is not None
            else call_step(self._functions, node.name, is_member=node.target is not None, steps=steps)
        )

    def _converted(self, node: Call, value: object) -> Step:
        """Convert a literal once."""
        overload = self._functions.choose(node.name, is_member=False, values=(value,))
        try:
            if overload is None:
                raise no_such_overload(node.name, value)
            return self._constant(overload.work(value))
        except EvaluationError as err:
            raise fail_at(self._expression, node.offset, f"program instantiation failed: {err}") from err

    def _membership(self, wanted: Step, values: list[object]) -> Step | None:
        """Look for a value in a literal list by its hash, as upstream does.

        It costs nothing, and finds a number only where the list has it without loss.
        """
        if not values:
            return self._constant(value=False)
        keys = keys_of(values)
        if keys is None:
            return None

        def run(frame: Frame) -> object:
            return is_key_of(wanted(frame), keys)

        return run

    def _folded(self, node: Call) -> Step | None:
        """Compute a call on constants once. Its cost is still charged each time.

        None where it fails, so that the evaluation reports the error.
        """
        if node.target is not None or not all(isinstance(argument, Constant) for argument in node.arguments):
            return None
        values = tuple([argument.value for argument in node.arguments if isinstance(argument, Constant)])
        overload = self._functions.choose(node.name, is_member=False, values=values)
        if overload is None:
            raise InvariantError("the check let a call pass that no function takes", name=node.name)
        try:
            result = overload.work(*values)
        except EvaluationError:
            return None
        cost = cost_of_call(node.name, overload.signature, values, result)

        def run(frame: Frame) -> object:
            frame.charge(cost)
            return result

        return run

    def _list(self, node: ListLiteral, scope: dict[str, int]) -> Step:
        steps = [(self.plan(element, scope), index in node.optional) for index, element in enumerate(node.items)]
        if not node.optional and all(step in self._constants for step, _ in steps):
            return self._constant([self._constants[step] for step, _ in steps])

        def run(frame: Frame) -> object:
            items: list[object] = []
            for step, is_optional in steps:
                value = step(frame)
                if not is_optional:
                    items.append(value)
                elif not isinstance(value, OptionalValue):
                    raise EvaluationError(
                        f"cannot initialize optional list element from non-optional value {kind_of(value)}"
                    )
                elif value.is_present:
                    items.append(value.value)
            frame.charge(_LIST_COST)
            return items

        return run

    def _map(self, node: MapLiteral, scope: dict[str, int]) -> Step:
        steps = [
            (self.plan(entry.key, scope), self.plan(entry.value, scope), entry.is_optional) for entry in node.entries
        ]

        def run(frame: Frame) -> object:
            entries: dict[object, object] = {}
            for key_step, value_step, is_optional in steps:
                key, value = as_key(key_step(frame)), value_step(frame)
                if is_optional:
                    if not isinstance(value, OptionalValue):
                        raise EvaluationError(
                            f"cannot initialize optional entry from non-optional value {kind_of(value)}"
                        )
                    if not value.is_present:
                        entries.pop(key, None)
                        continue
                    value = value.value
                entries[key] = value  # as upstream: of two entries with one key the last one counts
            frame.charge(_MAP_COST)
            return entries

        if all(
            key in self._constants and value in self._constants and not is_optional for key, value, is_optional in steps
        ):
            try:
                return self._constant(run(Frame(None, 0, _MAP_COST)))
            except EvaluationError as err:
                raise fail_at(self._expression, node.offset, f"program instantiation failed: {err}") from err
        return run

    def _slot(self) -> int:
        self.slots += 1
        return self.slots

    def _bind(self, node: Fold, scope: dict[str, int]) -> Step:
        slot = self._slot()
        self._bound[slot] = self.plan(node.start, scope)
        result = self.plan(node.result, {**scope, node.accumulator: slot})

        def run(frame: Frame) -> object:
            frame.slots[slot] = UNSET  # computed at its first use, or never
            return result(frame)

        return run

    def _start(self, node: Node, scope: dict[str, int]) -> Step:
        """Plan the initial value of a loop. Its list or map is not shared, because it grows in
        place.
        """
        if isinstance(node, ListLiteral) and not node.items:
            return new_list
        if isinstance(node, MapLiteral) and not node.entries:
            return new_map
        return self.plan(node, scope)

    def _fold(self, node: Fold, scope: dict[str, int]) -> Step:
        over, start = self.plan(node.over, scope), self._start(node.start, scope)
        accumulator, first = self._slot(), self._slot()
        inner = {**scope, node.variable: first, node.accumulator: accumulator}
        second = 0
        if node.second_variable:
            second = inner[node.second_variable] = self._slot()
        condition, step = self.plan(node.condition, inner), self.plan(node.step, inner)
        result = self.plan(node.result, {**scope, node.accumulator: accumulator})

        def run(frame: Frame) -> object:
            items = items_of(over(frame), has_two=bool(second))
            slots = frame.slots
            slots[accumulator] = start(frame)
            for left, right in items:
                slots[first] = left
                if second:
                    slots[second] = right
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
    return (
        isinstance(first, Identifier)
        and first.name == ACCUMULATOR
        and isinstance(second, ListLiteral)
        and len(second.items) == 1
    )
