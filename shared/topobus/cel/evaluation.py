"""From tree to steps, and what a run of them may cost.

A checked tree becomes nested functions once; a run is one call with a frame that holds the variables and the cost so far. Costs are Kubernetes' own: a variable or
field 1, a list 10, a map 30, functions by what they walk over, `&&`, `||`, `?:` and `has` nothing themselves. A run that costs more than its limit ends.
Source: cel-go interpreter/runtimecost.go; k8s.io/apiserver/pkg/cel/library/cost.go, 1.36.
"""

from __future__ import annotations

from collections.abc import Callable

from topobus.cel.access import (
    as_index,
    field_of,
    has_field,
    items_of,
    optional_item,
    taken_out,
)
from topobus.cel.checker import TYPE_NAMES
from topobus.cel.errors import EvaluationError
from topobus.cel.frame import Frame
from topobus.cel.macros import ACCUMULATOR, UNUSED
from topobus.cel.registry import Functions
from topobus.cel.runtime_cost import charge_before, cost_of_call, weigh
from topobus.cel.tokens import fail_at
from topobus.cel.tree import (
    Call,
    Constant,
    Fold,
    Identifier,
    ListLiteral,
    MapLiteral,
    Node,
    Select,
    dotted,
)
from topobus.cel.values import (
    OptionalValue,
    TypeValue,
    Uint,
    are_equal,
    as_key,
    is_key_of,
    is_same,
    keys_of,
    kind_of,
    look_up,
    no_such_overload,
    size_of,
    some,
)
from topobus.domain.errors import InvariantError

__all__ = ["Step", "plan"]

_LIST_COST, _MAP_COST = 10, 30
# Reading a text takes longer than most selectors do otherwise; of constants it gives the same each time.
_FOLDED = frozenset(["quantity", "semver", "ip", "cidr", "url"])
_CONVERSIONS = frozenset(["bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint"])
_INDICES = frozenset(["_[_]", "_?._", "_[?_]"])
_UNSET = object()

Step = Callable[[Frame], object]


def plan(node: Node, functions: Functions, expression: str = "") -> tuple[Step, int]:
    """Turn a checked tree into steps; gives how many variables a run needs besides `device`, too.

    Literals, and conversions of them, are worked out once and cost nothing, as upstream does.
    Errors: raises CompileError for a conversion of a literal that fails (`int('x')`), with its place in the expression.
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
            return _lazily(slot, bound)

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
        """Plan what is looked into. An optional value that a function or name gives, not a selection, is taken out as upstream does."""
        step = self.plan(node, scope)
        is_selection = isinstance(node, Select) or (isinstance(node, Call) and node.name in _INDICES and node.target is None)
        if is_selection or (node.type.name != "optional_type" and not node.type.is_dynamic):
            return step
        return lambda frame: taken_out(step(frame))

    def _call(self, node: Call, scope: dict[str, int]) -> Step:
        if node.name == "_+_" and _is_gathering(node):
            return self._gather(node, scope)
        is_index = node.name in _INDICES and node.target is None
        steps = [
            self._operand(argument, scope) if is_index and not place else self.plan(argument, scope)
            for place, argument in enumerate(node.arguments)
        ]
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
                case "@in" if isinstance(values := self._constants.get(steps[1]), list):
                    membership = self._membership(steps[0], values)
                    if membership is not None:
                        return membership
                case name if name in _CONVERSIONS and len(steps) == 1 and steps[0] in self._constants:
                    return self._converted(node, self._constants[steps[0]])
        else:
            steps = [self.plan(node.target, scope), *steps]
            if node.name in ("or", "orValue") and len(steps) == 2:
                return _alternative(steps[0], steps[1], is_value=node.name == "orValue")
        folded = self._folded(node) if node.name in _FOLDED else None
        return folded if folded is not None else self._function(node.name, is_member=node.target is not None, steps=steps)

    def _gather(self, node: Call, scope: dict[str, int]) -> Step:
        """Put one more item into the list that a macro makes, in place: nobody else has it, and a copy each time would cost the square of its length."""
        kept, item = self.plan(node.arguments[0], scope), self.plan(node.arguments[1], scope)

        def run(frame: Frame) -> object:
            collected, more = kept(frame), item(frame)
            if not isinstance(collected, list) or not isinstance(more, list):
                raise InvariantError("a macro gathers in something else than a list", found=collected, more=more)
            frame.charge(1)
            collected += more
            return collected

        return run

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
        """Look for a value in a literal list by its hash, as upstream does: it costs nothing, and finds no number that the list has not without loss."""
        if not values:
            return self._constant(value=False)
        keys = keys_of(values)
        if keys is None:
            return None

        def run(frame: Frame) -> object:
            return is_key_of(wanted(frame), keys)

        return run

    def _folded(self, node: Call) -> Step | None:
        """Work out a call on constants once; what it costs is charged each time all the same. None where it fails, which is for the run to tell."""
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

    def _function(self, name: str, *, is_member: bool, steps: list[Step]) -> Step:
        choose = self._functions.choose

        def run(frame: Frame) -> object:
            values = tuple([step(frame) for step in steps])
            overload = choose(name, is_member=is_member, values=values)
            if overload is None:
                raise no_such_overload(name, *values)
            charge_before(frame, name, values)
            result = overload.work(*values)
            frame.charge(cost_of_call(name, overload.signature, values, result))
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
                return optional_item(values[0], values[1])
            if isinstance(values[0], list | tuple) and isinstance(values[1], Uint | float):
                values = (values[0], as_index(values[1]))
            overload = choose("_[_]", is_member=False, values=values)
            if overload is None:
                raise no_such_overload("_[_]", *values)
            return overload.work(*values)

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
                    raise EvaluationError(f"cannot initialize optional list element from non-optional value {kind_of(value)}")
                elif value.is_present:
                    items.append(value.value)
            frame.charge(_LIST_COST)
            return items

        return run

    def _map(self, node: MapLiteral, scope: dict[str, int]) -> Step:
        steps = [(self.plan(entry.key, scope), self.plan(entry.value, scope), entry.is_optional) for entry in node.entries]

        def run(frame: Frame) -> object:
            entries: dict[object, object] = {}
            for key_step, value_step, is_optional in steps:
                key, value = as_key(key_step(frame)), value_step(frame)
                if is_optional:
                    if not isinstance(value, OptionalValue):
                        raise EvaluationError(f"cannot initialize optional entry from non-optional value {kind_of(value)}")
                    if not value.is_present:
                        entries.pop(key, None)
                        continue
                    value = value.value
                entries[key] = value  # as upstream: of two entries with one key the last one counts
            frame.charge(_MAP_COST)
            return entries

        if all(key in self._constants and value in self._constants and not is_optional for key, value, is_optional in steps):
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
            frame.slots[slot] = _UNSET  # worked out where it is first used, and never when it is not
            return result(frame)

        return run

    def _start(self, node: Node, scope: dict[str, int]) -> Step:
        """Plan what a loop begins with; its list or map is its own, for it grows in place."""
        if isinstance(node, ListLiteral) and not node.items:
            return _new_list
        if isinstance(node, MapLiteral) and not node.entries:
            return _new_map
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


def _new_list(_: Frame) -> object:
    return []


def _new_map(_: Frame) -> object:
    return {}


def _lazily(slot: int, value: Step) -> Step:
    """Read a bound name; what it stands for is worked out at the first use."""

    def run(frame: Frame) -> object:
        frame.charge(1)
        stored = frame.slots[slot]
        if stored is _UNSET:
            try:
                stored = value(frame)
            except EvaluationError as err:
                stored = err
            frame.slots[slot] = stored
        if isinstance(stored, EvaluationError):
            raise stored
        return stored

    return run


def _alternative(first: Step, second: Step, *, is_value: bool) -> Step:
    """Give the first one when it is there; the second one is looked at only when it is not."""

    def run(frame: Frame) -> object:
        optional = first(frame)
        if not isinstance(optional, OptionalValue):
            return optional
        if optional.is_present:
            return optional.value if is_value else optional
        return second(frame)

    return run


def _is_gathering(node: Call) -> bool:
    """Say whether a call is a macro's own step to a longer list."""
    first, second = node.arguments if len(node.arguments) == 2 else (None, None)
    return isinstance(first, Identifier) and first.name == ACCUMULATOR and isinstance(second, ListLiteral) and len(second.items) == 1


def _optional_index(operand: Step, index: Step) -> Step:
    def run(frame: Frame) -> object:
        container, key = operand(frame), index(frame)
        frame.charge(1)
        return optional_item(container if isinstance(container, OptionalValue) else some(container), key)

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
        first, other = left(frame), right(frame)
        # A tenth of the shorter one, rounded up.
        frame.charge((min(size_of(first), size_of(other)) + 9) // 10)
        if isinstance(first, list | tuple | dict | OptionalValue):
            frame.labour(weigh(first))
        return are_equal(first, other) if is_equal else not is_same(first, other)

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
