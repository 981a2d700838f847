"""Expressions made to hang, to fill the memory or to break the evaluation: each ends at once, with
an error that says why.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topobus.engine.cel.seam import DeviceFacts, SelectorError
from topobus.engine.cel.selector import CelSelector, compile_expression

DEVICE = DeviceFacts("d.io", {"d.io": {"n": 3, "s": "fish"}}, {})


def _chain(first: str, again: Callable[[str], str], last: Callable[[str], str], times: int) -> str:
    """Name a value made of the one before, so many times: what doubles
    at each step is large soon.
    """
    written = last(f"v{times}")
    for step in range(times, 0, -1):
        written = f"cel.bind(v{step}, {again(f'v{step - 1}')}, {written})"
    return f"cel.bind(v0, {first}, {written})"


NESTED = "[dyn({0}), dyn({0})]"
TEXT = "'" + "x" * 32 + "'"
BOMBS = {
    "list-doubled": _chain("[1, 2]", "{0} + {0}".format, "size({0}) > 0".format, 34),
    "list-doubled-and-compared": _chain("[dyn(1)]", NESTED.format, "cel.bind(z, {0}, z == {0})".format, 30),
    "list-doubled-and-searched": _chain("[dyn(1)]", NESTED.format, "dyn({0}).indexOf({0}) == 0".format, 30),
    "list-doubled-and-written": _chain("[dyn(1)]", NESTED.format, "'%s'.format([{0}]) == ''".format, 30),
    "quotes-of-quotes": "strings.quote(" * 40 + r"'\\\\\\\\'" + ")" * 40 + " == ''",
    "replaced-by-itself": _chain(TEXT, "{0}.replace('x', {0})".format, "{0} == ''".format, 12),
    "joined-often": _chain(f"[{TEXT}.replace('x', {TEXT})]", "{0} + {0}".format, "{0}.join('') == ''".format, 19),
    "sets": _chain("[1, 2]", "{0} + {0}".format, "sets.contains({0}, {0}.map(x, x + 7))".format, 12),
    "searched-again-and-again": _chain("[1, 2]", "{0} + {0}".format, "{0}.all(x, !(5 in {0}))".format, 16),
    "list-mapped": _chain("[1, 2]", "{0} + {0}".format, "{0}.map(x, x).size() > 0".format, 17),
}


@pytest.mark.parametrize("expression", BOMBS.values(), ids=list(BOMBS))
def test_evaluation_is_cancelled_when_it_would_do_too_much(expression: str) -> None:
    """What grows without bound ends as an evaluation that costs too much, whatever Kubernetes
    charges for its steps.
    """
    selector = compile_expression(expression)

    assert isinstance(selector, CelSelector)
    verdict, _ = selector.evaluate(DEVICE)
    assert isinstance(verdict, SelectorError)
    assert "operation cancelled" in verdict.message


def test_compiler_refuses_what_macros_would_double_again_and_again() -> None:
    """`optMap` names its target twice: a chain of them is refused instead of being written out."""
    selector = compile_expression("optional.of(1)" + ".optMap(a, a)" * 18 + ".hasValue()")

    assert isinstance(selector, SelectorError)
    assert "more than 20000 parts" in selector.message


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1" * 5000 + " == 1", "invalid int literal"),
        ("1" * 5000 + "u == 1u", "invalid int literal"),
        ("1e400 == 1.0", "invalid double literal"),
        ("٣ == 3", "token recognition error"),
        ("rb'x' == b'x'", "Syntax error"),
    ],
)
def test_compiler_refuses_literals_that_are_none(expression: str, message: str) -> None:
    """A literal beyond its type, of other digits than ours, or with an unknown prefix is told with
    its place.
    """
    selector = compile_expression(expression)

    assert isinstance(selector, SelectorError)
    assert message in selector.message


@pytest.mark.parametrize(
    "expression",
    [
        "duration(device.driver + '99999999999999999999h') == duration('1s')",
        "[duration('2000000h'), duration('2000000h')].sum() > duration('1s')",
        "timestamp('9999-12-31T23:59:59Z') - timestamp('0001-01-01T00:00:00Z') > duration('1s')",
        "timestamp('9999-12-31T23:59:59Z').getHours('+14:00') == 1",
        "timestamp('0001-01-01T00:00:00Z').getHours('America/New_York') == 1",
        "semver('1.0.0-" + "9" * 5000 + "').compareTo(semver('1.0.0-1')) > 0",
        "semver('18446744073709551616.0.0').major() > 1",
        "semver('1.0.0-01').major() == 1",
        "(-9223372036854775807 - 1) % -1 == 0",
        "double(string(device.driver.size()) + '__0') == 10.0",
        "double(string(device.driver.size()) + 'e999') > 1.0",
        "[1, 2][dyn(1.0 / 0.0)] == 1",
        "[1, 2][dyn(0.5)] == 1",
    ],
)
def test_evaluation_fails_with_a_reason_when_a_value_is_out_of_range(expression: str) -> None:
    """What a type cannot hold is an error of the expression, never one of ours."""
    selector = compile_expression(expression)

    assert isinstance(selector, CelSelector)
    assert isinstance(selector.matches(DEVICE), SelectorError)


@pytest.mark.parametrize(
    "expression",
    [
        "string(1000000.0) == '1e+06' && string(100000.0) == '100000' && string(0.00001) == '1e-05' && "
        "string(123456789.0) == '1.23456789e+08'",
        "string(duration('1234567s')) == '1234567s' && string(duration('1500ms')) == '1.5s' && "
        "string(duration('1us')) == '0.000001s'",
        "string(timestamp('2020-01-01T00:00:00.500Z')) == '2020-01-01T00:00:00.5Z'",
        "timestamp('2020-01-01T12:00:00Z').getHours('') == 12",
        "int('-0000000000000000000000000000005') == -5",
        "[1, 2][dyn(1.0)] == 2 && [1, 2][dyn(1u)] == 2",
        "'%s'.format([type(1)]) == 'int' && [,] == []",
        "semver('v01.2', true).compareTo(semver('1.2.0')) == 0 && semver('18446744073709551615.0.0').minor() == 0",
        "[1, 2].map(x, [x].map(y, y + x)) == [[2], [4]]",
        "[1, 2].map(x, 1 / (x - 1) == 1).size() == 2 || true",
        "{'a': 1}.transformMap(k, v, {k: v}.transformMap(l, w, w + v)) == {'a': {'a': 2}}",
    ],
)
def test_expression_is_true_when_worked_out_as_in_go(expression: str) -> None:
    """Numbers, spans and moments are written as Go writes them.

    Loops within loops keep their results apart.
    """
    selector = compile_expression(expression)

    assert isinstance(selector, CelSelector), selector
    assert selector.matches(DEVICE) is True


@pytest.mark.parametrize(
    ("expression", "cost"),
    [
        ("sets.contains([], [])", 1),
        ("sets.contains([1], [1])", 2),
        ("sets.contains([1], [1, 1])", 3),
        ("sets.equivalent([1, 2], [1])", 5),
    ],
)
def test_sets_cost_the_product_of_their_lists(expression: str, cost: int) -> None:
    """As Kubernetes charges it: one, and each value against each; `equivalent` twice.

    Literal lists, which it makes once, are only estimated.
    """
    selector = compile_expression(expression)

    assert isinstance(selector, CelSelector)
    assert (selector.evaluate(DEVICE)[1], selector.max_cost) == (cost, cost + 20)
