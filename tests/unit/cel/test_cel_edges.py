"""What the language does where upstream gives no answer to compare with: it crashes there, has no
limit, or never comes there.
"""

from __future__ import annotations

import pytest

from topobus.engine.cel import selector as selectors
from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.seam import DeviceFacts, Reads, SelectorError, Version, seen
from topobus.engine.cel.selector import CelSelector, compile_expression
from topobus.engine.cel.semantic_version import SemanticVersion
from topobus.engine.cel.types import Bindings, list_of, read_type
from topobus.engine.cel.values import OptionalValue, compare

DEVICE = DeviceFacts("d.io", {"d.io": {"n": 1}}, {})


def _verdict(expression: str, device: DeviceFacts = DEVICE) -> bool | str:
    selector = compile_expression(expression)
    assert isinstance(selector, CelSelector), selector
    verdict = selector.matches(device)
    return verdict.message if isinstance(verdict, SelectorError) else verdict


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("[?dyn(optional.of(1))] == [1]", True),
        ("[?dyn(optional.none())] == []", True),
        ("{?'a': dyn(optional.of(1))} == {'a': 1}", True),
        ("{?'a': dyn(optional.none())} == {}", True),
        (
            "[?dyn(1)] == [1]",
            "cannot be evaluated: cannot initialize optional list element from non-optional value int",
        ),
        ("{?'a': dyn(1)} == {}", "cannot be evaluated: cannot initialize optional entry from non-optional value int"),
    ],
)
def test_literal_takes_an_optional_part_when_only_the_run_knows_its_type(expression: str, verdict: bool | str) -> None:
    """The part is left out or put in when it is an optional value, and an error when it is none.

    Upstream's compiler crashes on these.
    """
    assert _verdict(expression) == verdict


@pytest.mark.parametrize("key", ["quantity('1')", "optional.of(1)", "[device.driver]", "dyn(bytes(device.driver))"])
def test_map_fails_when_a_key_is_no_plain_value(key: str) -> None:
    """Keys are numbers, texts, booleans and null.

    Whatever else a selector puts there ends in an error that names its type.
    """
    verdict = _verdict(f"{{{key}: 1}}.size() == 1")

    assert isinstance(verdict, str)
    assert verdict.startswith("cannot be evaluated: unsupported key type")


def test_map_is_refused_when_a_constant_key_is_no_plain_value() -> None:
    """What fails on every device is refused when it is compiled."""
    error = compile_expression("{[1]: 1}.size() == 1")

    assert isinstance(error, SelectorError)
    assert "unsupported key type: list" in error.message
    assert (error.line, error.column) == (1, 1)


@pytest.mark.parametrize("precision", ["1101", "99999999999"])
def test_format_is_refused_when_its_precision_is_above_what_a_double_has(precision: str) -> None:
    """Upstream has no limit, and would write a text of gigabytes."""
    error = compile_expression(f"'%.{precision}f'.format([1.5]) == ''")

    assert isinstance(error, SelectorError)
    assert f"precision {precision} exceeds the largest one" in error.message


@pytest.mark.parametrize(
    "moment",
    ["timestamp(253402300799).getFullYear('+02:00')", "timestamp(-62135596800).getFullYear('America/New_York')"],
)
def test_timestamp_fails_when_its_zone_leads_out_of_the_years_that_have_a_name(moment: str) -> None:
    """The years are 1 to 9999 in every zone."""
    assert _verdict(f"{moment} > 0") == "cannot be evaluated: time out of range"


def test_selector_gives_an_error_when_a_version_of_the_device_is_none() -> None:
    """A device is shown whole: a version that cannot be read fails each expression, and the
    attribute is named.
    """
    device = DeviceFacts("d.io", {"d.io": {"firmware": Version("1.x")}}, {})

    assert _verdict("device.driver == 'd.io' || true", device) == (
        "cannot be evaluated: attribute firmware: not a semantic version: '1.x', wanted MAJOR.MINOR.PATCH"
    )


def test_selector_gives_the_right_verdict_when_more_devices_came_than_it_remembers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of verdicts is bounded, and forgetting changes none."""
    monkeypatch.setattr(selectors, "_VERDICTS", 2)
    selector = compile_expression("device.attributes['d.io'].n > 2")
    assert isinstance(selector, CelSelector)
    devices = [DeviceFacts("d.io", {"d.io": {"n": number}}, {}) for number in range(5)] * 2

    assert [selector.matches(device) for device in devices] == [False, False, False, True, True] * 2


def _endless(*_: object) -> object:
    return _endless()


def test_selector_gives_an_error_when_an_evaluation_nests_deeper_than_the_stack() -> None:
    """Whatever an expression does to the stack, the caller gets an
    error for its claim and lives.
    """
    selector = CelSelector(lambda _: _endless(), 0, None, 0)

    assert selector.evaluate(DEVICE) == (SelectorError("cannot be evaluated: it nests too deep"), 0)


def test_compiler_gives_an_error_when_a_text_nests_deeper_than_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser counts depth itself; should something behind it nest deeper yet, that is an error
    of the expression as well.
    """
    monkeypatch.setattr(selectors, "parse", _endless)

    assert compile_expression("true") == SelectorError("cannot be compiled: it nests too deep", line=1, column=1)


@pytest.mark.parametrize(
    ("expression", "reads"),
    [
        ("cel.bind(d, device.attributes.other, d.x == 1)", {Reads("attributes", "other", "x")}),
        ("cel.bind(d, has(device.attributes.other), d)", None),
    ],
)
def test_reads_are_known_when_a_name_stands_for_a_domain_that_was_selected(
    expression: str, reads: set[Reads] | None
) -> None:
    """`device.attributes.other` is the domain that `device.attributes['other']` is.

    Whether it is there is not what stands in it.
    """
    selector = compile_expression(expression)

    assert isinstance(selector, CelSelector), selector
    assert (set(selector.reads) if selector.reads is not None else None) == reads


def test_seen_tells_apart_what_python_takes_for_equal() -> None:
    """A verdict on 1 is none on true, nor one on a list of them."""
    reads = Reads("attributes", "d.io", "n")

    values = [seen(reads, DeviceFacts("d.io", {"d.io": {"n": value}}, {})) for value in (1, True, (1,), (True,))]

    assert len(set(values)) == len(values)


@pytest.mark.parametrize("value", [[1], None, {}, OptionalValue()], ids=repr)
def test_compare_fails_when_values_have_no_order(value: object) -> None:
    """Values of one type without an order are an error, not equal."""
    with pytest.raises(EvaluationError, match="no such overload: compare"):
        compare(value, value)


def test_parameter_never_stands_for_a_type_that_has_itself_within() -> None:
    """Else the type would have no end."""
    bindings = Bindings()
    item = bindings.fresh()
    assert bindings.fit(item, list_of(read_type("dyn")))

    assert bindings.fit(item, list_of(item))

    assert str(bindings.finish(item)) == "dyn"


def test_types_differ_from_what_is_no_type() -> None:
    """A type equals types alone, not its name."""
    assert read_type("int") != "int"


@pytest.mark.parametrize(
    "text", ["1.2.3-", "1.2.3-a..b", "1.2.3+", "1.2.3+a..b", "1.2.3-01", "1.2", "1.2.18446744073709551616"]
)
def test_version_is_none_when_a_part_is_empty_or_no_number(text: str) -> None:
    """Identifiers have a character at least, and numbers neither leading zeros nor more than 64
    bits.
    """
    with pytest.raises(ValueError, match="not a semantic version"):
        SemanticVersion.parse(text)


def test_versions_are_one_key_when_they_are_equal() -> None:
    """Build data takes no part in comparison, nor in the hash; and a version is written as it was
    read.
    """
    version, other = SemanticVersion.parse("1.2.3-rc.1+linux"), SemanticVersion.parse("1.2.3-rc.1+mac")

    assert version == other
    assert {version: "x"}[other] == "x"
    assert str(version) == "1.2.3-rc.1+linux"
    assert str(SemanticVersion.parse("1.2.3")) == "1.2.3"
