"""Every function of the selector environment, by example.

The reference page lists exactly these, each with an example.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from topobus.engine.cel.checker import check
from topobus.engine.cel.environment import ENVIRONMENT, LIBRARIES
from topobus.engine.cel.macros import MACROS
from topobus.engine.cel.parser import parse
from topobus.engine.cel.seam import DeviceFacts, SelectorError
from topobus.engine.cel.selector import compile_expression
from topobus.engine.cel.tree import Call, Node, children

ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)
"""A function of the reference page, and its example."""
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "selectors.md"
DEVICE = DeviceFacts("d.io", {"d.io": {"n": 3, "s": "fish", "l": ("a", "b")}}, {})

# All of these are true.
EXAMPLES = [
    # arithmetic
    "1 + 2 == 3 && 1 - 2 == -1 && 2 * 3 == 6 && 7 / 2 == 3 && -7 / 2 == -3 && 7 % 3 == 1 && -7 % 3 == -1",
    "1u + 2u == 3u && 3u - 2u == 1u && 2u * 3u == 6u && 7u / 2u == 3u && 7u % 3u == 1u",
    "1.5 + 2.0 == 3.5 && 1.5 - 1.0 == 0.5 && 1.5 * 2.0 == 3.0 && 1.0 / 4.0 == 0.25 && 1.0 / 0.0 > 1e300",
    "-(1 + 1) == -2 && -(1.0 + 1.0) == -2.0 && !(1 == 2)",
    "'a' + 'b' == 'ab' && b'a' + b'b' == b'ab' && [1] + [2] == [1, 2]",
    "timestamp('2026-01-01T00:00:00Z') + duration('1h') == timestamp('2026-01-01T01:00:00Z')",
    "duration('1h') + timestamp('2026-01-01T00:00:00Z') - duration('30m') == timestamp('2026-01-01T00:30:00Z')",
    "timestamp('2026-01-01T00:01:00Z') - timestamp('2026-01-01T00:00:00Z') == duration('60s') + "
    "duration('1m') - duration('1m')",
    "9223372036854775807 + 0 > 0 && -9223372036854775808 < 0 && 0xFF == 255 && 18446744073709551615u > 0u",
    # comparison
    "false < true && false <= true && true > false && true >= true && 1 < 2 && 1 <= 1 && 2 > 1 && 2 >= 2",
    "1u < 2u && 1u <= 1u && 2u > 1u && 2u >= 2u && 1.0 < 1.5 && 1.0 <= 1.0 && 1.5 > 1.0 && 1.0 >= 1.0",
    "'a' < 'b' && 'a' <= 'a' && 'b' > 'a' && 'b' >= 'b' && b'a' < b'b' && b'a' <= b'a' && b'b' > b'a' && b'b' >= b'b'",
    "duration('1s') < duration('2s') && duration('1s') <= duration('1s') && duration('2s') > duration('1s') "
    "&& duration('2s') >= duration('2s')",
    *(
        f"timestamp('2026-01-01T00:00:00Z') {comparison} timestamp('2026-01-01T00:00:0{second}Z')"
        for comparison, second in (("<", 1), ("<=", 0), (">=", 0))
    ),
    "timestamp('2026-01-01T00:00:01Z') > timestamp('2026-01-01T00:00:00Z')",
    *(
        f"{left} {sign} {right}"
        for left in ("1", "1u", "1.0")
        for sign, right in (("<", "2"), ("<=", "2u"), ("<", "2.0"))
    ),
    *(
        f"{left} {sign} {right}"
        for left in ("2", "2u", "2.0")
        for sign in ("<", "<=", ">", ">=")
        for right in ("dyn(3)", "dyn(3u)", "dyn(3.0)")
        if sign[0] == "<"
    ),
    *(f"3 {sign} {right}" for sign in (">", ">=") for right in ("2u", "2.0")),
    *(f"3u {sign} {right}" for sign in (">", ">=") for right in ("2", "2.0")),
    *(f"3.0 {sign} {right}" for sign in (">", ">=") for right in ("2", "2u")),
    *(f"2 {sign} {right}" for sign in ("<", "<=") for right in ("3u", "3.0")),
    *(f"2u {sign} {right}" for sign in ("<", "<=") for right in ("3", "3.0")),
    *(f"2.0 {sign} {right}" for sign in ("<", "<=") for right in ("3", "3u")),
    "dyn(1) == dyn(1u) && dyn(1) == dyn(1.0) && dyn(1) != dyn('1') && dyn(true) != dyn(1) && [1] == [1] && "
    "{'a': 1} == {'a': 1} && null == null",
    # conversion
    "int(1) == 1 && int(2u) == 2 && int(2.9) == 2 && int('-7') == -7 && "
    "int(timestamp('1970-01-01T00:00:05Z')) == 5 && int(duration('1s')) == 1000000000",
    "uint(1u) == 1u && uint(1) == 1u && uint(1.5) == 1u && uint('7') == 7u",
    "double(1.5) == 1.5 && double(1) == 1.0 && double(1u) == 1.0 && double('1.5') == 1.5",
    "bool(true) && bool('true') && !bool('f')",
    "string('a') == 'a' && string(1) == '1' && string(1u) == '1' && string(1.5) == '1.5' && string(true) == "
    "'true' && string(b'abc') == 'abc'",
    "string(timestamp('2026-01-01T00:00:00Z')) == '2026-01-01T00:00:00Z' && string(duration('90s')) == '90s'",
    "string(ip('::1')) == '::1' && string(cidr('10.0.0.0/8')) == '10.0.0.0/8'",
    "bytes('abc') == b'abc' && bytes(b'a') == b'a' && dyn(1) == 1 && type(1) == int && type([1]) == list && "
    "type(type(1)) == type",
    "type(quantity('1')) == type(quantity('2')) && type(quantity('1')) != type(semver('1.0.0')) && "
    "type(ip('::1')) == net.IP",
    "type(optional.none()) == optional_type && type(timestamp(0)) == google.protobuf.Timestamp && type(1) != type('a')",
    "duration(duration('1h')) == duration('60m') && duration('1.5s') == duration('1500ms')",
    "timestamp(0) == timestamp('1970-01-01T00:00:00Z') && timestamp(timestamp(1)) == timestamp(1)",
    # texts and containers
    "size('abc') == 3 && size(b'abc') == 3 && size([1]) == 1 && size({'a': 1}) == 1 && size('äö') == 2",
    "'abc'.size() == 3 && b'abc'.size() == 3 && [1].size() == 1 && {'a': 1}.size() == 1",
    "'abc'.contains('b') && 'abc'.startsWith('a') && 'abc'.endsWith('c') && 'abc'.matches('^a.c$') && "
    "matches('abc', 'b')",
    "2 in [1, 2] && 'a' in {'a': 1} && !(dyn(true) in {1: 1}) && [1, 2][1] == 2 && {'a': 1}['a'] == 1 && "
    "{'a': 1}.a == 1 && {1: 'x'}[1] == 'x'",
    "r'\\d' == '\\\\d' && '''a\nb''' == 'a\\nb' && b'\\xff' != b'f' && '\\u00e4' == 'ä' && '\\101' == 'A'",
    # optional values
    "optional.of(1).value() == 1 && optional.of(1).hasValue() && !optional.none().hasValue() && "
    "!optional.ofNonZeroValue(0).hasValue()",
    "optional.none().or(optional.of(2)).value() == 2 && optional.none().orValue(3) == 3 && {'a': "
    "1}[?'b'].orValue(5) == 5 && [1][?9].orValue(4) == 4",
    "optional.unwrap([optional.of(1), optional.none()]) == [1] && [optional.of(2)].unwrapOpt() == [2] && [1, "
    "2].first().value() == 1 && [1, 2].last().value() == 2",
    "[1][?0].value() == 1 && {'a': 1}[?'a'].value() == 1 && optional.of([1])[?0].value() == 1 && "
    "optional.of({'a': 1})[?'a'].value() == 1",
    "optional.of([1])[0].value() == 1 && optional.of({'a': 1})['a'].value() == 1 && !(false && "
    "duration(size('a')) == duration('1s'))",
    "{'a': {'b': 1}}.?a.b.orValue(0) == 1 && !{'a': {'b': 1}}.?x.b.hasValue() && [?optional.none(), 1] == "
    "[1] && {?'a': optional.of(1)} == {'a': 1}",
    "has({'a': 1}.a) && !has({'a': 1}.b) && has({'a': {'b': 1}}.?a.b)",
    # time
    "timestamp('2026-11-20T13:14:15.250Z').getFullYear() == 2026 && timestamp('2026-11-20T13:14:15Z').getMonth() == 10",
    "timestamp('2026-11-20T13:14:15Z').getDate() == 20 && timestamp('2026-11-20T13:14:15Z').getDayOfMonth() == 19",
    "timestamp('2026-11-20T13:14:15Z').getDayOfWeek() == 5 && timestamp('2026-01-20T13:14:15Z').getDayOfYear() == 19",
    "timestamp('2026-11-20T13:14:15.250Z').getHours() == 13 && "
    "timestamp('2026-11-20T13:14:15.250Z').getMinutes() == 14",
    "timestamp('2026-11-20T13:14:15.250Z').getSeconds() == 15 && "
    "timestamp('2026-11-20T13:14:15.250Z').getMilliseconds() == 250",
    *(
        f"timestamp('2026-11-20T23:14:15.250Z').{name}('{zone}') == {value}"
        for name, zone, value in (
            ("getFullYear", "UTC", 2026),
            ("getMonth", "UTC", 10),
            ("getDate", "+02:00", 21),
            ("getDayOfMonth", "02:00", 20),
            ("getDayOfWeek", "Europe/Berlin", 6),
            ("getDayOfYear", "-23:30", 322),
            ("getHours", "+02:00", 1),
            ("getMinutes", "UTC", 14),
            ("getSeconds", "UTC", 15),
            ("getMilliseconds", "UTC", 250),
        )
    ),
    "duration('90m').getHours() == 1 && duration('90m').getMinutes() == 90 && duration('90m').getSeconds() "
    "== 5400 && duration('1500ms').getMilliseconds() == 1500",
    # macros
    "[1, 2].all(x, x > 0) && [1, 2].exists(x, x == 2) && [1, 2].exists_one(x, x == 2)",
    "[1, 2].map(x, x * 2) == [2, 4] && [1, 2].map(x, x > 1, x * 2) == [4] && [1, 2].filter(x, x > 1) == [2] "
    "&& {'a': 1}.map(k, k) == ['a']",
    "[1, 2].all(i, v, i < v) && {'a': 1}.exists(k, v, k == 'a' && v == 1) && [5].existsOne(i, v, i == 0) && "
    "[5].exists_one(i, v, v == 5)",
    "[1, 2].transformList(i, v, i + v) == [1, 3] && [1, 2].transformList(i, v, i > 0, v) == [2] && {'a': "
    "1}.transformMap(k, v, v + 1) == {'a': 2}",
    "{'a': 1, 'b': 2}.transformMap(k, v, v > 1, v) == {'b': 2} && [1].transformMapEntry(i, v, {v: i}) == {1: "
    "0} && [1].transformMapEntry(i, v, false, {v: i}) == {}",
    "optional.of(1).optMap(x, x + 1).value() == 2 && optional.of(1).optFlatMap(x, optional.of(x)).value() == "
    "1 && !optional.none().optMap(x, x).hasValue()",
    "cel.bind(a, 1, cel.bind(b, a + 1, a + b)) == 3 && [[1], [2]].all(x, x.all(y, y > 0))",
    "[1, 2].exists(x, x == 2 || 1 / 0 == 1) && !(1 / 0 == 1 && false) && (true || 1 / 0 == 1) && (1 / 0 == 1 || true)",
    "(true ? 1 : 2) == 1 && (false ? 1 : true ? 3 : 4) == 3",
    # texts, version 2
    "'abc'.charAt(1) == 'b' && 'abc'.charAt(3) == '' && 'abcb'.indexOf('b') == 1 && 'abcb'.indexOf('b', 2) "
    "== 3 && 'abcb'.lastIndexOf('b') == 3",
    "'abcb'.lastIndexOf('b', 2) == 1 && ['a', 'b'].join() == 'ab' && ['a', 'b'].join('-') == 'a-b' && "
    "'aÄ'.upperAscii() == 'AÄ' && 'AÄ'.lowerAscii() == 'aÄ'",
    "'abab'.replace('a', 'c') == 'cbcb' && 'abab'.replace('a', 'c', 1) == 'cbab' && 'a,b,c'.split(',') == "
    "['a', 'b', 'c'] && 'a,b,c'.split(',', 2) == ['a', 'b,c']",
    "'abc'.substring(1) == 'bc' && 'abc'.substring(0, 1) == 'a' && ' a '.trim() == 'a' && "
    "strings.quote('a\"b') == '\"a\\\\\"b\"'",
    "'%s %d %.2f %x %X %o %b %e %%'.format(['a', 1, 1.5, 255, 'z', 8, 5, 1.5]) == 'a 1 1.50 ff 7A 10 101 "
    "1.500000×10⁰⁰ %'",
    "'%s %s %s'.format([['a', 'b'], {'b': 1.5, 'a': [duration('1s')]}, null]) == '[\"a\", \"b\"] "
    '{"a":[duration("1s")], "b":1.500000} null\'',
    "'%f %s %.0f'.format([1.0 / 0.0, -1.0 / 0.0, 1234567.5]) == '∞ -Inf 1,234,568'",
    # quantities
    "sign(quantity('1Ki')) == 1 && isQuantity('1Ki') && !isQuantity('x') && "
    "quantity('2').isGreaterThan(quantity('1')) && quantity('1').isLessThan(quantity('2'))",
    "quantity('1').compareTo(quantity('1000m')) == 0 && quantity('1500m').asApproximateFloat() == 1.5 && "
    "quantity('1k').asInteger() == 1000",
    "!quantity('1m').isInteger() && quantity('1').add(quantity('1')) == quantity('2') && "
    "quantity('1').add(1) == quantity('2')",
    "quantity('2').sub(quantity('1')) == quantity('1') && quantity('2').sub(1) == quantity('1')",
    # versions
    "semver('1.2.3').major() == 1 && semver('1.2.3').minor() == 2 && semver('1.2.3').patch() == 3 && "
    "semver('v1.2', true) == semver('1.2.0')",
    "isSemver('1.2.3') && !isSemver('v1') && isSemver('v1', true) && semver('1.2.3').compareTo(semver('1.2.4')) == -1",
    "semver('2.0.0').isGreaterThan(semver('1.0.0')) && semver('1.0.0-rc.1').isLessThan(semver('1.0.0'))",
    # lists
    *(
        f"[{low}, {high}].isSorted() && [{low}, {high}].min() == {low} && [{low}, {high}].max() == {high}"
        for low, high in (
            ("1", "2"),
            ("1u", "2u"),
            ("1.0", "2.0"),
            ("false", "true"),
            ("'a'", "'b'"),
            ("b'a'", "b'b'"),
            ("duration('1s')", "duration('2s')"),
            ("timestamp(1)", "timestamp(2)"),
        )
    ),
    "[1, 2].sum() == 3 && [1u].sum() == 1u && [1.5].sum() == 1.5 && [duration('1s'), duration('1s')].sum() "
    "== duration('2s')",
    "[1, 2, 1].indexOf(1) == 0 && [1, 2, 1].lastIndexOf(1) == 2 && [1].indexOf(9) == -1 && ![2, 1].isSorted()",
    *(
        f"[{high}, {low}].sort() == [{low}, {high}] && ['x', 'y'].sortBy(key, key == 'x' ? {high} : {low}) == "
        "['y', 'x']"
        for low, high in (
            ("1", "2"),
            ("1u", "2u"),
            ("1.0", "2.0"),
            ("false", "true"),
            ("'a'", "'b'"),
            ("b'a'", "b'b'"),
            ("duration('1s')", "duration('2s')"),
            ("timestamp(1)", "timestamp(2)"),
        )
    ),
    "[1, 2, 3].slice(1, 2) == [2] && [1, 2].slice(0, 0) == [] && [1, 2].reverse() == [2, 1] && [1, 1, "
    "2].distinct() == [1, 2]",
    "[[1], [2, 3]].flatten() == [1, 2, 3] && [[[1]]].flatten(2) == [1] && lists.range(3) == [0, 1, 2] && "
    "lists.range(-1) == []",
    "device.attributes['d.io'].l.sort() == ['a', 'b'] && device.attributes['d.io'].l.distinct().size() == 2",
    # patterns
    "'a12b3'.find('[0-9]+') == '12' && 'a'.find('x') == '' && 'a12b3'.findAll('[0-9]+') == ['12', '3'] && "
    "'a12b3'.findAll('[0-9]+', 1) == ['12']",
    # sets
    "sets.contains([1, 2], [2]) && sets.intersects([1], [1, 2]) && sets.equivalent([1, 1], [1]) && "
    "!sets.contains([1], [2])",
    # attributes
    "device.attributes['d.io'].l.includes('a') && device.attributes['d.io'].n.includes(3) && "
    "!device.attributes['d.io'].s.includes('x')",
    "[device].exists(one, one.driver == 'd.io') && device.attributes.all(domain, names, domain == 'd.io' && "
    "'n' in names)",
    # addresses and networks
    "ip('10.0.0.1').family() == 4 && isIP('::1') && !isIP('::ffff:1.2.3.4') && !isIP('fe80::1%eth0') && "
    "!isIP('010.0.0.1') && ip.isCanonical('2001:db8::1') && !ip.isCanonical('2001:DB8::1')",
    "ip('0.0.0.0').isUnspecified() && ip('127.0.0.1').isLoopback() && ip('224.0.0.1').isLinkLocalMulticast() "
    "&& ip('fe80::1').isLinkLocalUnicast() && ip('10.0.0.1').isGlobalUnicast()",
    "isCIDR('10.0.0.0/8') && !isCIDR('10.0.0.0/33') && cidr('10.0.0.0/8').containsIP('10.1.1.1') && "
    "cidr('10.0.0.0/8').containsIP(ip('10.1.1.1'))",
    "cidr('10.0.0.0/8').containsCIDR('10.1.0.0/16') && !cidr('10.1.0.0/16').containsCIDR(cidr('10.0.0.0/8')) "
    "&& cidr('10.0.0.1/8').masked() == cidr('10.0.0.0/8')",
    "cidr('10.0.0.1/8').ip() == ip('10.0.0.1') && cidr('::1/128').prefixLength() == 128",
    # URLs
    "isURL('https://a.io/x') && !isURL('../x') && !isURL('https://a:b:c/') && isURL('/absolute') && !isURL('')",
    "url('https://a.io:80/p').getScheme() == 'https' && url('https://a.io:80/p').getHost() == 'a.io:80' && "
    "url('https://[::1]:80/').getHostname() == '::1'",
    "url('https://[::1]:80/').getPort() == '80' && url('/p').getPort() == '' && url('https://a.io/with "
    "space/').getEscapedPath() == '/with%20space/'",
    "url('https://a.io/p?k=a&k=b&c=').getQuery() == {'k': ['a', 'b'], 'c': ['']} && "
    "url('https://user@a.io/p#f').getHost() == 'a.io'",
    # formats
    "!format.dns1123Label().validate('a-b').hasValue() && format.dns1123Label().validate('A').hasValue() && "
    "!format.dns1123LabelPrefix().validate('a-').hasValue()",
    "!format.dns1123Subdomain().validate('a.b').hasValue() && "
    "!format.dns1123SubdomainPrefix().validate('a.b-').hasValue() && "
    "format.dns1035Label().validate('1a').hasValue()",
    "!format.dns1035LabelPrefix().validate('a-').hasValue() && "
    "!format.qualifiedName().validate('a.io/b').hasValue() && !format.labelValue().validate('').hasValue()",
    "!format.uri().validate('https://a.io').hasValue() && "
    "!format.uuid().validate('123e4567-e89b-12d3-a456-426614174000').hasValue()",
    "!format.byte().validate('aGVsbG8=').hasValue() && !format.date().validate('2026-02-28').hasValue() && "
    "format.date().validate('2026-02-30').hasValue()",
    "!format.datetime().validate('2026-01-01T00:00:00Z').hasValue() && "
    "format.named('uuid').value().validate('x').value().size() == 1 && !format.named('x').hasValue()",
]


@pytest.mark.parametrize("expression", EXAMPLES)
def test_function_gives_what_kubernetes_gives_by_example(expression: str) -> None:
    """Each example is true."""
    selector = compile_expression(expression)

    assert not isinstance(selector, SelectorError), selector
    assert selector.matches(DEVICE) is True


@pytest.mark.parametrize("expression", EXAMPLES)
def test_estimate_is_never_below_the_cost(expression: str) -> None:
    """What is estimated before an evaluation covers what it then costs."""
    selector = compile_expression(expression)

    assert not isinstance(selector, SelectorError), selector
    verdict, cost = selector.evaluate(DEVICE)
    assert verdict is True
    assert cost <= selector.max_cost


def test_every_function_is_used_by_an_example() -> None:
    """No function stands in the environment, and so in the reference, that no example calls."""
    used: set[str] = set()
    for expression in EXAMPLES:
        tree = parse(expression)
        check(expression, tree, ENVIRONMENT)
        used |= _used(tree)

    assert {overload.signature for overload in ENVIRONMENT.all()} - used == set()


def _used(node: Node) -> set[str]:
    own = set(node.overloads) if isinstance(node, Call) else set()
    return own.union(*map(_used, children(node)))


def test_reference_shows_each_function_by_an_example_that_is_true() -> None:
    """Each row's example compiles, calls the function of the row, and is true."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))

    wrong: list[tuple[str, str, object]] = []
    for signature, example in rows:
        selector = compile_expression(example)
        verdict = selector if isinstance(selector, SelectorError) else selector.matches(DEVICE)
        tree = parse(example)
        check(example, tree, ENVIRONMENT)
        if verdict is not True or signature not in _used(tree):
            wrong.append((signature, example, verdict))

    assert rows
    assert wrong == []


def test_reference_lists_what_there_is() -> None:
    """The page of selectors lists every function with its signature, and none that is not there."""
    page = PAGE.read_text(encoding="utf-8")
    listed = set(dict(ROW.findall(page)))
    wanted = {
        overload.signature
        for library in LIBRARIES.values()
        for overload in library
        if not overload.name.startswith(("_", "@", "!", "-", "cel.@"))
    }

    assert listed == wanted
    assert {name for name in MACROS if f"`{name}`" not in page} == set()
