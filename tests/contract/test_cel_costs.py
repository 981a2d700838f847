"""What an API server estimates that an expression may cost, and how it is evaluated: situations
that Kubernetes publishes for its own environment.

Source: k8s.io/dynamic-resource-allocation/cel/compile_test.go, 1.36 (Apache-2.0); the situations
are put in our own words, the numbers are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

from topobus.engine.cel.seam import (
    DeviceFacts,
    FactValue,
    SelectorError,
    Version,
)
from topobus.engine.cel.selector import COST_LIMIT, compile_expression
from topobus.values.quantity import Quantity

D = 'device.attributes["dra.example.com"]'
C = 'device.capacity["dra.example.com"]'
MEBI = Quantity.parse("1Mi")


class Case(NamedTuple):
    """An expression over a device with attributes in the driver's domain.

    A text as the verdict is part of an error.
    """

    expression: str
    cost: int
    verdict: bool | str = True
    attributes: Mapping[str, FactValue] = MappingProxyType({})
    capacity: Mapping[str, Quantity] = MappingProxyType({})
    driver: str = "dra.example.com"
    is_shared: bool = False


ALL_KINDS: dict[str, FactValue] = {"bool": True, "int": 1, "string": "fish", "version": Version("1.0.0")}
EVERYTHING = " && ".join(
    f"{value}{test}"
    for attribute, capacity in (((f"{D}.{{}}"), f"{C}.quantity"), (f'{D}["{{}}"]', f'{C}["quantity"]'))
    for value, test in (
        (capacity, '.isGreaterThan(quantity("1Ki"))'),
        (attribute.format("bool"), ""),
        (attribute.format("int"), " > 0"),
        (attribute.format("string"), ' == "fish"'),
        (attribute.format("version"), '.isGreaterThan(semver("0.0.1"))'),
    )
)
TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"

CASES = {
    "true": Case("true", 0),
    "false": Case("false", 0, verdict=False),
    "name-of-unknown-domain": Case(
        'device.attributes["none"].noSuchAttr.isGreaterThan(quantity("0"))', 6, "no such key: noSuchAttr"
    ),
    "key-of-unknown-domain": Case(
        'device.attributes["none"]["noSuchAttr"].isGreaterThan(quantity("0"))', 6, "no such key: noSuchAttr"
    ),
    "domain-is-not-there": Case('"none" in device.attributes', 3, verdict=False),
    "domain-is-there": Case('"dra.example.com" in device.attributes', 3, attributes={"x": True}),
    "no-driver": Case('device.driver == ""', 2, driver=""),
    "driver": Case('device.driver == "dra.example.com"', 4),
    "name": Case(f"{D}.name", 4, attributes={"name": True}),
    "key": Case(f'{D}["name"]', 4, attributes={"name": True}),
    "bind": Case(f"cel.bind(dra, {D}, dra.name)", 15, attributes={"name": True}),
    "int": Case(f"{D}.name > 0", 5, attributes={"name": 1}),
    "text": Case(f'{D}.name == "fish"', 5, attributes={"name": "fish"}),
    "loop-over-int": Case(f"{D}.name.exists(x, x > 0)", 5 + 6 * 64, "expected iterable type", {"name": 1}),
    "loop-over-bool": Case(f"{D}.name.exists(x, x == true)", 5 + 6 * 64, "expected iterable type", {"name": True}),
    "loop-over-text": Case(f'{D}.name.exists(x, x == "fish")', 5 + 6 * 64, "expected iterable type", {"name": "fish"}),
    "loop-over-version": Case(
        f'{D}.name.exists(x, x.isGreaterThan(semver("0.0.1")))',
        5 + 7 * 64,
        "expected iterable type",
        {"name": Version("1.0.0")},
    ),
    "list-is-no-verdict": Case(f"{D}.names", 4, "type list", {"names": ("fish", "bird")}),
    "size": Case(f"{D}.names.size() == 2", 6, attributes={"names": (1, 2)}),
    "size-of-versions": Case(f"{D}.names.size() == 2", 6, attributes={"names": (Version("1.0.0"), Version("2.0.0"))}),
    "exists-in-ints": Case(f"{D}.names.exists(x, x > 0)", 5 + 6 * 64, attributes={"names": (1, 2)}),
    "all-of-texts": Case(f'{D}.names.all(x, x != "")', 5 + 4 * 64, attributes={"names": ("fish", "bird")}),
    "all-of-versions": Case(
        f'{D}.names.all(x, x.isGreaterThan(semver("0.0.1")))',
        5 + 6 * 64,
        attributes={"names": (Version("1.0.0"), Version("2.0.0"))},
    ),
    "in-list": Case(f"1 in {D}.names", 4 + 64, attributes={"names": (1, 2, 3)}),
    "version": Case(f'{D}.name.isGreaterThan(semver("0.0.1"))', 6, attributes={"name": Version("1.0.0")}),
    "loose-version": Case(
        f'{D}.name.isGreaterThan(semver("v0.0.1", true)) && isSemver("v1.0.0", true)',
        7,
        attributes={"name": Version("1.0.0")},
    ),
    "quantity": Case(f'{C}.name.isGreaterThan(quantity("1Ki"))', 6, capacity={"name": MEBI}),
    "guarded": Case(f'"name" in {C} && {C}.name.isGreaterThan(quantity("1Ki"))', 10, capacity={"name": MEBI}),
    "guarded-absent": Case(f'!("name" in {C}) || {C}.name.isGreaterThan(quantity("1Ki"))', 11),
    "everything": Case(EVERYTHING, 52, attributes=ALL_KINDS, capacity={"quantity": MEBI}),
    "many": Case(f"{D}.a && {D}.b && {D}.c", 12, attributes={"a": True, "b": True, "c": True}),
    "domains": Case('device.attributes.exists_one(x, x == "dra.example.com")', 164, attributes={"services": "x"}),
    "names": Case(f'{D}.exists_one(x, x == "services")', 133, attributes={"services": "x"}),
    "split": Case(f'{D}.services.split("example").size() >= 2', 19, attributes={"services": "some_example_value"}),
    "pattern": Case(f'{D}.services.matches("[^a]?sym")', 18, attributes={"services": "asymetric"}),
    "capacity-domains": Case('device.capacity.exists_one(x, x == "dra.example.com")', 164, capacity={"memory": MEBI}),
    "capacity-names": Case(f'{C}.exists_one(x, x == "memory")', 133, capacity={"memory": MEBI}),
    "expensive": Case(
        f"{TEN}.all(x, {TEN}.all(y, {TEN}.all(z, {TEN}.all(z2, {TEN}.all(z3, {TEN}.all(z4, {TEN}.all(z5, "
        "int('1'.find('[0-9]*')) < 100)))))))",
        85555551,
        "actual cost limit exceeded",
    ),
    "shared": Case("device.allowMultipleAllocations == true", 3, is_shared=True),
    "not-shared": Case("device.allowMultipleAllocations == false", 3),
    **{
        f"includes-{name}": Case(f"{D}.name.includes({wanted})", 4 + 48 + extra, verdict, {"name": value})
        for name, wanted, value, verdict, extra in (
            ("bool", "true", True, True, 0),
            ("other-bool", "true", False, False, 0),
            ("bools", "true", (True, False), True, 0),
            ("int", "1", 1, True, 0),
            ("ints", "3", (1, 2), False, 0),
            ("text", '"fish"', "fish", True, 0),
            ("texts", '"cat"', ("fish", "bird"), False, 0),
            ("version", 'semver("1.0.0")', Version("1.0.0"), True, 1),
            ("versions", 'semver("3.0.0")', (Version("1.0.0"), Version("2.0.0")), False, 1),
            ("at-limit", '"value-48"', tuple(f"value-{number}" for number in range(48)), False, 0),
            (
                "over-limit",
                '"value-49"',
                tuple(f"value-{number}" for number in range(49)),
                "lists longer than 48 values",
                0,
            ),
        )
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_selector_costs_and_says_what_upstream_does(case: Case) -> None:
    """The estimate is upstream's number, the verdict or the error is its own, and no evaluation
    costs more than was estimated.
    """
    selector = compile_expression(case.expression)
    assert not isinstance(selector, SelectorError), selector
    device = DeviceFacts(
        case.driver,
        {case.driver: case.attributes} if case.attributes else {},
        {case.driver: case.capacity} if case.capacity else {},
        case.is_shared,
    )

    verdict, cost = selector.evaluate(device)

    assert selector.max_cost == case.cost
    assert cost <= selector.max_cost
    if isinstance(case.verdict, str):
        assert isinstance(verdict, SelectorError)
        assert case.verdict in verdict.message
    else:
        assert verdict is case.verdict


def test_selector_is_objected_to_when_its_estimate_is_above_the_limit() -> None:
    """An expression that an API server would refuse says so, and by how much."""
    cheap, dear = compile_expression("true"), compile_expression(CASES["expensive"].expression)

    assert not isinstance(cheap, SelectorError)
    assert not isinstance(dear, SelectorError)
    assert cheap.objection is None
    assert dear.objection is not None
    assert str(COST_LIMIT) in dear.objection.message
