"""CEL selectors: what an expression sees, what it may do, and what a wrong one is told."""

from __future__ import annotations

import pytest

from topobus.engine.cel.seam import (
    DeviceFacts,
    Reads,
    SelectorError,
    Version,
)
from topobus.engine.cel.selector import CelCompiler
from topobus.values.quantity import Quantity

DEVICE = DeviceFacts(
    driver="gpu.example.com",
    attributes={
        "gpu.example.com": {
            "model": "H100",
            "numa": 1,
            "ok": True,
            "fw": Version("1.10.0"),
            "nodes": (0, 1),
            "tags": ("a", "b"),
            "blank": "",
        },
        "resource.kubernetes.io": {"pcieRoot": "pci0000:17"},
    },
    capacity={"gpu.example.com": {"memory": Quantity.parse("80Gi"), "share": Quantity.parse("1500m")}},
)


@pytest.fixture(scope="module")
def compiler() -> CelCompiler:
    """One compiler for all cases, as in a controller."""
    return CelCompiler()


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("true", True),
        ('device.driver == "gpu.example.com"', True),
        ("device.allowMultipleAllocations", False),
        ('device.attributes["gpu.example.com"].model == "H100"', True),
        ('device.attributes["gpu.example.com"].model in ["A100", "L4"]', False),
        ('device.attributes["gpu.example.com"].model.startsWith("H") && device.attributes["gpu.example.com"].ok', True),
        ('device.attributes["gpu.example.com"].model.lowerAscii() == "h100"', True),
        ('device.attributes["gpu.example.com"].model.matches("^H[0-9]+$")', True),
        ('device.attributes["gpu.example.com"].ok', True),
        ('device.attributes["gpu.example.com"].numa < 1.5', True),
        ('device.attributes["gpu.example.com"].numa != 1', False),
        ('device.attributes["resource.kubernetes.io"].pcieRoot == "pci0000:17"', True),
        ('has(device.attributes["gpu.example.com"].model)', True),
        ('has(device.attributes["gpu.example.com"].nothing)', False),
        ('"gpu.example.com" in device.attributes', True),
        ('"other.example.com" in device.attributes', False),
        ('has(device.attributes["other.example.com"].model)', False),
        ('!("other.example.com" in device.attributes) || device.attributes["other.example.com"].model == "x"', True),
        ('"other.example.com" in device.attributes || has(device.attributes["other.example.com"].model)', False),
        (
            'device.attributes.exists(domain, domain == "other.example.com") || '
            'has(device.attributes["other.example.com"].x)',
            False,
        ),
        ('size(device.attributes) == 2 && !has(device.attributes["other.example.com"].x)', True),
        ("has(device.attributes[device.driver].model)", True),
        ("device.attributes /* not a comment in CEL */ ", None),
        ('device.attributes // a comment with device.attributes["x"]\n["gpu.example.com"].ok', True),
        ('device.attributes["gpu.example.com"].model == "device.attributes[1]"', False),
        ('device.capacity["gpu.example.com"].memory.compareTo(quantity("40Gi")) >= 0', True),
        ('device.capacity["gpu.example.com"].memory.isGreaterThan(quantity("80Gi"))', False),
        ('device.capacity["gpu.example.com"].memory == quantity("81920Mi")', True),
        ('device.capacity["gpu.example.com"].memory.asInteger() == 85899345920', True),
        ('device.capacity["gpu.example.com"].memory.sub(quantity("79Gi")).compareTo(quantity("1Gi")) == 0', True),
        ('device.capacity["gpu.example.com"].memory.add(1).isLessThan(quantity("80Gi"))', False),
        ('device.capacity["gpu.example.com"].share.isInteger()', False),
        ('device.capacity["gpu.example.com"].share.asApproximateFloat() == 1.5', True),
        ('has(device.capacity["other.example.com"].memory)', False),
        ('sign(quantity("1Ki")) == 1 && isQuantity("1Ki") && !isQuantity("1KiB")', True),
        ('device.attributes["gpu.example.com"].fw.isGreaterThan(semver("1.9.0"))', True),
        ('device.attributes["gpu.example.com"].fw == semver("1.10.0")', True),
        ('device.attributes["gpu.example.com"].fw.compareTo(semver("v1.10", true)) == 0', True),
        ('device.attributes["gpu.example.com"].fw.minor() == 10', True),
        ('semver("1.0.0-rc.1").isLessThan(semver("1.0.0")) && !isSemver("1.0")', True),
        ('device.attributes["gpu.example.com"].nodes.includes(1)', True),
        ('device.attributes["gpu.example.com"].numa.includes(1)', True),
        ('device.attributes["gpu.example.com"].tags.includes("c")', False),
        ('cel.bind(mine, device.attributes["gpu.example.com"], mine.numa == 1 && mine.ok)', True),
        ('device.attributes["gpu.example.com"].?nothing.orValue(7) == 7', True),
        ("[1, 2, 3].exists(one, one == 2)", True),
        ("[1, 2, 3].sum() == 6 && [1.5, 2.0].sum() == 3.5 && [3, 1].min() == 1 && ['a', 'b'].max() == 'b'", True),
        ('device.attributes["gpu.example.com"].nodes.isSorted() && ![2, 1].isSorted()', True),
        ('[semver("1.9.0"), semver("1.10.0")].isSorted()', None),
        ('sets.contains(device.attributes["gpu.example.com"].nodes, [1])', True),
        (
            'sets.intersects(["a", "z"], device.attributes["gpu.example.com"].tags) && !sets.equivalent([1], [1, 2])',
            True,
        ),
    ],
)
def test_selector_gives_verdict_when_expression_is_legal(
    compiler: CelCompiler, expression: str, verdict: bool | None
) -> None:
    """Each expression answers as Kubernetes' environment does.

    None marks one that Kubernetes refuses to compile.
    """
    selector = compiler.compile(expression)

    if verdict is None:
        assert isinstance(selector, SelectorError)
    else:
        assert not isinstance(selector, SelectorError), selector
        assert selector.matches(DEVICE) is verdict


@pytest.mark.parametrize(
    ("expression", "line", "column", "wanted"),
    [
        ("device.drivr == 1", 1, 7, "undefined field 'drivr'"),
        ('true &&\n  device.driver = "x"', 2, 17, "Syntax error"),
        ('device.capacity["x"].memory > 5', 1, 29, "no matching overload"),
        ('device.driver + "x"', 1, 1, "wanted true or false"),
        ("nothing()", 1, 8, "undeclared reference to 'nothing'"),
        ("device.driver.nothing()", 1, 22, "undeclared reference to 'nothing'"),
        ('quantity("1") == "1"', 1, 15, "(kubernetes.Quantity, string)"),
        ('[1, "a"].size() == 2', 1, 5, "expected type 'int' but found 'string'"),
        ('device.driver.matches("(")', 1, 23, "invalid matches argument"),
        ("has(device)", 1, 5, "invalid argument to has()"),
        ("[1].all(device.driver, true)", 1, 15, "argument must be a simple name"),
        ("1.all(x, true)", 1, 1, "cannot be range of a comprehension"),
        ("device.driver.all(x, true)", 1, 7, "cannot be range of a comprehension"),
        ("9223372036854775808 > 0", 1, 1, "invalid int literal"),
        ("'\\ud800' == ''", 1, 1, "invalid unicode code point"),
        ("'abc", 1, 1, "token recognition error"),
        ("return == 1", 1, 1, "reserved identifier"),
        ("(" * 250 + "true" + ")" * 250, 1, 0, "nests deeper"),
        ("!" * 3 + "1 == 1", 1, 0, "no matching overload"),
        (" + ".join(["1"] * 251) + " == 251", 1, 0, "nests deeper"),
        ("", 1, 0, ""),
        ("x" * 10241, 0, 0, "longer than 10240"),
    ],
)
def test_compiler_names_the_position_when_expression_is_wrong(
    compiler: CelCompiler, expression: str, line: int, column: int, wanted: str
) -> None:
    """A wrong expression is told line and column, and never raises."""
    answer = compiler.compile(expression)

    assert isinstance(answer, SelectorError)
    assert wanted in answer.message
    assert answer.line == line
    assert column in (0, answer.column)


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ('device.attributes["gpu.example.com"].colour == "red"', "colour"),
        ('device.attributes["other.example.com"].colour == "red"', "colour"),
        ('device.capacity["gpu.example.com"].speed == quantity("1")', "speed"),
        ('device.attributes["gpu.example.com"].model', "wanted true or false"),
        (
            'device.attributes["gpu.example.com"].model.isGreaterThan(semver("1.0.0"))',
            "no such overload: isGreaterThan(string, kubernetes.Semver)",
        ),
        ('quantity("1KiB") == quantity("1")', "quantity"),
        ('device.attributes["gpu.example.com"].numa / 0 == 1', "zero"),
        ("[].max() == 1", "empty"),
        ("dyn([[1]]).isSorted()", "no such overload"),
        ("dyn(['a']).sum() == 1", "no such overload"),
        ('device.attributes["gpu.example.com"].numa.exists(x, x == 1)', "expected iterable type"),
        ('device.attributes["gpu.example.com"].nodes', "type list"),
    ],
)
def test_selector_says_why_when_evaluation_fails(compiler: CelCompiler, expression: str, wanted: str) -> None:
    """A run-time error is an answer with the cause, never an exception and never a silent no."""
    selector = compiler.compile(expression)

    assert not isinstance(selector, SelectorError)
    answer = selector.matches(DEVICE)
    assert isinstance(answer, SelectorError)
    assert wanted in answer.message


def test_selector_stops_when_expression_is_a_bomb(compiler: CelCompiler) -> None:
    """An expression of nested loops ends when it has cost a million.

    A regular expression that would cost more is not begun.
    """
    numbers = str(list(range(10)))
    expression = (
        f"{numbers}.all(a, {numbers}.all(b, {numbers}.all(c, {numbers}.all(d, {numbers}.all(e, {numbers}.all(f, a "
        "+ f >= 0))))))"
    )
    selector = compiler.compile(expression)

    assert not isinstance(selector, SelectorError)
    answer = selector.matches(DEVICE)
    assert isinstance(answer, SelectorError)
    assert "cost limit exceeded" in answer.message


@pytest.mark.parametrize("pattern", ["(a*)*b", "(x+x+)+y", "(a|aa)+$"])
def test_selector_is_quick_when_a_pattern_is_a_bomb(compiler: CelCompiler, pattern: str) -> None:
    """A pattern that makes a backtracking engine search for ever is answered."""
    selector = compiler.compile(f"!{'a' * 4000!r}.matches({pattern!r}) || true")

    assert not isinstance(selector, SelectorError)
    assert selector.matches(DEVICE) is True


def test_compiler_forgets_the_oldest_when_many_are_compiled() -> None:
    """The cache is bounded: what was not asked for long is compiled anew."""
    compiler = CelCompiler()
    first = compiler.compile("0 == 0")
    kept = compiler.compile("1 == 1")
    for number in range(2, 1025):
        compiler.compile("1 == 1")
        compiler.compile(f"{number} == {number}")

    assert compiler.compile("1 == 1") is kept
    assert compiler.compile("0 == 0") is not first


def test_compiler_gives_the_same_selector_when_asked_again(compiler: CelCompiler) -> None:
    """An expression is compiled once."""
    assert compiler.compile("1 == 1") is compiler.compile("1 == 1")


@pytest.mark.parametrize(
    ("expression", "reads"),
    [
        ('device.driver == "x"', {("driver", None, None)}),
        (
            'device.attributes["a.io"].n == 1 && has(device.capacity["a.io"].m)',
            {("attributes", "a.io", "n"), ("capacity", "a.io", "m")},
        ),
        ("device.attributes[device.driver].n == 1", {("attributes", None, "n"), ("driver", None, None)}),
        ('"a.io" in device.attributes', {("attributes", "a.io", None)}),
        ("true", set()),
        ('device.attributes["a.io"].?n.orValue(1) == 1', {("attributes", "a.io", "n")}),
        ('device.attributes["a.io"]["n"] == 1', {("attributes", "a.io", "n")}),
        ('device.attributes["a\\u002eio"].n == 1', {("attributes", "a.io", "n")}),
        ("size(device.attributes) == 1", None),
        ('cel.bind(a, device.attributes["a.io"], a.n == 1)', {("attributes", "a.io", "n")}),
        ('device.attributes["a" + ".io"].n == 1', None),
        ('device.attributes.exists(d, d == "a.io")', None),
        ('"n" in device.attributes["a.io"]', None),
        ("[device].size() == 1", None),
    ],
)
def test_selector_tells_what_it_reads_or_that_it_cannot(
    compiler: CelCompiler, expression: str, reads: set[tuple[str, str | None, str | None]] | None
) -> None:
    """Verdicts are shared only between devices that agree on everything that an expression can
    read.
    """
    selector = compiler.compile(expression)

    assert not isinstance(selector, SelectorError)
    assert (None if selector.reads is None else set(selector.reads)) == (
        None if reads is None else {Reads(*read) for read in reads}
    )


def test_selector_tells_values_apart_that_python_holds_equal(compiler: CelCompiler) -> None:
    """1, true and "1" are different, also when verdicts are shared."""
    selector = compiler.compile('device.attributes["d"].x == 1')
    assert not isinstance(selector, SelectorError)

    verdicts = [selector.matches(DeviceFacts("d", {"d": {"x": value}}, {})) for value in (1, True, "1", (1,), (True,))]

    assert verdicts == [True, False, False, False, False]
