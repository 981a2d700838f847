"""The steps of an evaluation: nested functions over a frame, one for each node of the tree.

A step takes the frame of one evaluation and returns a value or raises EvaluationError. The frame
sums the cost and ends an evaluation that exceeds its limit. Errors propagate as upstream's do: `&&`
and `||` ignore an error that another operand makes irrelevant, and a bound name that is never read
raises nothing. The planner decides which step a node becomes.
Source: cel-go interpreter/interpretable.go and runtimecost.go; the language definition's section on
errors.
"""

from __future__ import annotations

from collections.abc import Callable

from topobus.engine.cel.access import as_index, optional_item
from topobus.engine.cel.cost.runtime_cost import charge_before, cost_of_call, weigh
from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.frame import Frame
from topobus.engine.cel.registry import Functions
from topobus.engine.cel.values import (
    OptionalValue,
    Uint,
    are_equal,
    is_same,
    kind_of,
    look_up,
    no_such_overload,
    size_of,
    some,
)
from topobus.values.errors import InvariantError

__all__ = [
    "UNSET",
    "Step",
    "alternative_step",
    "bound_step",
    "call_step",
    "choice_step",
    "equality_step",
    "gathering_step",
    "index_step",
    "logic_step",
    "new_list",
    "new_map",
    "not_strictly_false_step",
    "optional_index_step",
]

UNSET = object()
"""Stands in the slot of a bound name until its value is first read."""

Step = Callable[[Frame], object]


def call_step(functions: Functions, name: str, *, is_member: bool, steps: list[Step]) -> Step:
    """Call the overload that takes the types of this evaluation's arguments.

    The cost is checked before the call, as far as the arguments determine it, and charged after it.
    """
    choose = functions.choose

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


def index_step(functions: Functions, operand: Step, index: Step) -> Step:
    """Look into a map, list or optional value."""
    choose = functions.choose

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


def gathering_step(kept: Step, item: Step) -> Step:
    """Append one item in place to the list that a macro makes: the list is not visible elsewhere,
    and a copy for each item would cost the square of its length.
    """

    def run(frame: Frame) -> object:
        collected, more = kept(frame), item(frame)
        if not isinstance(collected, list) or not isinstance(more, list):
            raise InvariantError("a macro gathers in something else than a list", found=collected, more=more)
        frame.charge(1)
        collected += more
        return collected

    return run


def new_list(_: Frame) -> object:
    """Return a new list for each evaluation, to which a macro appends."""
    return []


def new_map(_: Frame) -> object:
    """Return a new map for each evaluation, to which a macro adds."""
    return {}


def bound_step(slot: int, value: Step) -> Step:
    """Read a bound name. Its value is computed at the first use."""

    def run(frame: Frame) -> object:
        frame.charge(1)
        stored = frame.slots[slot]
        if stored is UNSET:
            try:
                stored = value(frame)
            except EvaluationError as err:
                stored = err
            frame.slots[slot] = stored
        if isinstance(stored, EvaluationError):
            raise stored
        return stored

    return run


def alternative_step(first: Step, second: Step, *, is_value: bool) -> Step:
    """Return the first value when it is present. The second is evaluated only when it is not."""

    def run(frame: Frame) -> object:
        optional = first(frame)
        if not isinstance(optional, OptionalValue):
            return optional
        if optional.is_present:
            return optional.value if is_value else optional
        return second(frame)

    return run


def optional_index_step(operand: Step, index: Step) -> Step:
    """Look into a value with `a[?b]` or `a.?b`: an absent part is an empty optional value, no
    error.
    """

    def run(frame: Frame) -> object:
        container, key = operand(frame), index(frame)
        frame.charge(1)
        return optional_item(container if isinstance(container, OptionalValue) else some(container), key)

    return run


def logic_step(steps: list[Step], *, decisive: bool) -> Step:
    """`&&` ends at the first false, `||` at the first true.

    An error counts only when no value decides.
    """

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


def choice_step(condition: Step, first: Step, second: Step) -> Step:
    """Run the side of `a ? b : c` that the condition chooses, and never the other one."""

    def run(frame: Frame) -> object:
        value = condition(frame)
        if value is True:
            return first(frame)
        if value is False:
            return second(frame)
        raise EvaluationError(f"no such overload: {kind_of(value)} ? _ : _")

    return run


def equality_step(left: Step, right: Step, *, is_equal: bool) -> Step:
    """Compare two values with `==`, or `!=` when `is_equal` is False."""

    def run(frame: Frame) -> object:
        first, other = left(frame), right(frame)
        # A tenth of the shorter one, rounded up.
        frame.charge((min(size_of(first), size_of(other)) + 9) // 10)
        if isinstance(first, list | tuple | dict | OptionalValue):
            frame.labour(weigh(first))
        return are_equal(first, other) if is_equal else not is_same(first, other)

    return run


def not_strictly_false_step(step: Step) -> Step:
    """Continue a macro's loop unless its condition is False.

    An error does not end the loop, because a later element may decide.
    """

    def run(frame: Frame) -> object:
        try:
            value = step(frame)
        except EvaluationError:
            value = True
        frame.charge(1)
        return value is not False

    return run
