"""What Kubernetes 1.36.2's own selector compiler and evaluator answered when it was asked: rules
that random expressions seldom meet.
"""

from __future__ import annotations

import pytest

from topobus.engine.cel.seam import DeviceFacts, SelectorError, Version
from topobus.engine.cel.selector import compile_expression

DEVICE = DeviceFacts(
    "d.io",
    {
        "d.io": {
            "n": 1,
            "s": "fish",
            "fw": Version("1.10.0"),
            "vs": (Version("1.0.0"), Version("2.0.0")),
            "l": ("a", "b"),
            "big": 2**53 + 1,
        }
    },
    {},
)
A = "device.attributes['d.io']"

TRUE = [
    # equality of Kubernetes' own types: the left one decides, and within lists what
    # cannot be compared counts as equal
    f"{A}.fw != '1.10.0' && '1.10.0' != {A}.fw",
    "dyn('x') != ip('1.1.1.1')",
    f"{A}.vs == ['a', 'b']",
    f"{A}.vs.indexOf('a') == -1 && !sets.contains({A}.vs, ['a']) && !{A}.vs.includes('a')",
    # optional values
    f"{A}.?n.orValue({A}.none) == 1 && {A}.?n.or({A}.?none.none).value() == 1",
    f"!{A}.?s.x.hasValue() && !has({A}.?s.x) && !has({A}.s.x) && !{A}.?fw.x.y.hasValue()",
    "!has(device.attributes[dyn(1)].x)",
    # numbers of different types are compared as doubles
    f"{A}.big == 9007199254740992.0 && !({A}.big in [9007199254740992.0])",
    "!(9223372036854775807 < 9223372036854775808.0)",
    "!([][1] in [])",
    # literals
    "{'a': 1, 'a': 2}.a == 2 && {1.5: 1}.size() == 1 && {null: 1}.size() == 1",
    f"'%s-%d'.format([{A}.s, 1]) == 'fish-1' && '%s'.format([[1, 'a', [2.5]]]) == '[1, \"a\", [2.500000]]'",
    "'%x %X %.2s %%'.format(['aé', -255, 'abc']) == '61c3a9 -FF abc %'",
    "'%e|%e|%.3e'.format([0.00012, -1.0 / 0.0, 9.9999]) == '1.200000×10⁻⁰⁴|    -∞|9.999900×10⁰⁰'",
    # nanoseconds
    "duration('1ns') > duration('0s') && string(duration('1.5us')) == '0.0000015s' && "
    "duration('0.9999999999s') < duration('1s')",
    "string(timestamp('2026-01-01T00:00:00.123456789Z')) == '2026-01-01T00:00:00.123456789Z'",
    "string(timestamp('2026-01-01T0:00:00+05:60')) == '2026-01-01T00:00:00+06:00'",
    "string(timestamp('0000-12-31T23:00:00-02:00')) == '0000-12-31T23:00:00-02:00'",
    "timestamp('2026-01-01T00:00:00,5Z').getMilliseconds() == 500 && "
    "timestamp('2026-01-01T00:00:00Z').getMinutes('-02:30') == 30",
    "string(duration('-9223372036.854775808s')) == '-9223372036.854776s'",
    "!optional.ofNonZeroValue(timestamp('0001-01-01T00:00:00Z')).hasValue() && "
    "!optional.ofNonZeroValue(duration('0s')).hasValue()",
    # quantities keep the form in which they were read
    "quantity('G') == quantity('0') && isQuantity('+') && !isQuantity('Pi') && !isQuantity('１Gi')",
    "!quantity('1Pi').isInteger() && !quantity('0n').isInteger() && !quantity('1000m').isInteger() && "
    "quantity('1Ti').isInteger()",
    "!quantity('9999999999999999999999G').isInteger() && quantity('0.3').asApproximateFloat() == 0.1 * 3.0",
    # texts
    "'abc'.indexOf('a', 99) == -1 && 'abc'.indexOf('', 99) == 99 && 'abc'.lastIndexOf('', 99) == 99 && "
    "'abc'.lastIndexOf('a', 99) == -1",
    "double('1_0') == 10.0 && double('0x1p-2') == 0.25 && bool('T')",
    "semver('v01.2', true) == semver('1.2.0') && isSemver('1.2.3-rc', true) && !isSemver('2+b', true) && "
    "!isSemver('1.2-a', true)",
    # looking for what cannot be a key, and into what an optional value holds
    "!(dyn([1]) in {'a': 1}) && !(dyn(1) in device.attributes) && !has({1: 1}.x) && "
    "!has(optional.ofNonZeroValue(device.attributes).x)",
    f"!({A}.fw in device.attributes)",
    # what has no order among itself counts as sorted
    "[1, 2].map(x, x == 2 ? dyn('a') : dyn(x)).isSorted() && [1, 2].map(x, x == 2 ? dyn('a') : dyn(x)).max() == 1",
    # lists of no known type
    f"{A}.l.sort() == ['a', 'b'] && {A}.l.reverse()[0] == 'b' && {A}.l.sortBy(x, x)[1] == 'b' && "
    f"{A}.l.slice(0, 1) == ['a']",
]
FAILING = [
    f"{A}.fw == '1.10.0'",
    f"{A}.fw in ['1.10.0']",
    f"{A}.vs.exists(x, x == 'a')",
    "dyn(ip('1.1.1.1')) == 'x'",
    "dyn(b'a') in ['a']",
    f"has({A}.l.x)",
    "'%d'.format([dyn(1.5)]) == '1'",
    "'%s'.format([b'\\xff']) == ''",
    "'%f'.format(['x']) == ''",
    "quantity('1000m').asInteger() == 1",
    "[1, 2].map(x, x == 2 ? dyn('a') : dyn(x)).sort() == []",
    "[1, 2].slice(1, 3) == []",
    "[[1]].flatten(-1) == []",
    f"has(optional.of({A}.fw).x)",
    f"[{A}.l].isSorted()",
    "duration([1, 2][1]) < duration('1s')",
    "dyn(b'a') in {1: 1}",
    "duration('2540400h') + duration('2540400h') > duration('0s')",
    "timestamp('9999-12-31T23:59:59Z') + duration('1s') > timestamp(0)",
]
REFUSED = [
    "int('x') == 1 || true",
    "[1].exists(x, x == 1 && duration('x') == duration('1s'))",
    "timestamp('2026-01-01t00:00:00Z') > timestamp(0)",
    "timestamp(253402300800) > timestamp(0)",
    f"[1, {A}.n].size() == 2",
    f"[?optional.of(1), {A}.n].size() == 2",
    "{'a': 1, 'b': 'c'}.size() == 2",
    "quantity('1').sign() == 1",
    "type(1) == kubernetes.Quantity",
    "type(1) == kubernetes.Semver",
    "type(1) == dyn",
    "'%d'.format(['a']) == ''",
    "'%d'.format([1, 2]) == ''",
    "'%d %d'.format([1]) == ''",
    "'%y'.format([1]) == ''",
    "'%.f'.format([1.5]) == ''",
    "'%s'.format([quantity('1')]) == ''",
    "[quantity('1')].sort().size() == 1",
    "dyn([1])[?0].orValue(duration('1s')) == 'x'",
    "[].map(x, x * dyn(2)).map(x, x + 1) == []",
    "[1].flatten() == [1]",
    "int(string(1) + 'x') == 'a'",
]
DEAR = [
    "quantity('1') != quantity('2')",
    "type(1) == type('a')",
    "string(device.driver).matches('a')",
    "isIP(string(device.driver))",
    "cidr('10.0.0.0/8').containsIP(string(device.driver))",
    f"lists.range({A}.n).size() == 1",
]
CHEAP = {f"{A}.l.join(',') == 'a,b'": 12, f"{A}.l.distinct().size() == 2": 8209, f"{A}.l.sortBy(x, x)[0] == 'a'": 9474}


def _outcome(expression: str) -> object:
    selector = compile_expression(expression)
    if isinstance(selector, SelectorError):
        return "refused"
    verdict = selector.matches(DEVICE)
    return "error" if isinstance(verdict, SelectorError) else verdict


@pytest.mark.parametrize("expression", TRUE)
def test_selector_is_true_as_upstream(expression: str) -> None:
    """True in Kubernetes, true here."""
    assert _outcome(expression) is True


@pytest.mark.parametrize("expression", FAILING)
def test_selector_fails_as_upstream(expression: str) -> None:
    """Compiles in Kubernetes, and ends in an error on this device."""
    assert _outcome(expression) == "error"


@pytest.mark.parametrize("expression", REFUSED)
def test_selector_is_refused_as_upstream(expression: str) -> None:
    """Refused by Kubernetes' compiler, whatever the device."""
    assert _outcome(expression) == "refused"


@pytest.mark.parametrize("expression", DEAR)
def test_selector_is_objected_to_as_upstream(expression: str) -> None:
    """Compiles, but its estimate is above what an API server takes: something it walks has no known
    size.
    """
    selector = compile_expression(expression)

    assert not isinstance(selector, SelectorError)
    assert selector.objection is not None


@pytest.mark.parametrize(("expression", "cost"), CHEAP.items())
def test_selector_is_estimated_as_upstream(expression: str, cost: int) -> None:
    """Lists of an attribute are bounded by what a device may carry, so that their functions have an
    estimate below the limit.
    """
    selector = compile_expression(expression)

    assert not isinstance(selector, SelectorError)
    assert selector.max_cost == cost
