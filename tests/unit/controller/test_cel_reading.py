"""What an expression reads of a device, through names of `cel.bind`, too: devices that agree on it
share one verdict.
"""

from __future__ import annotations

import itertools

import pytest

from topobus.engine.cel.seam import DeviceFacts, Reads
from topobus.engine.cel.selector import CelSelector, compile_expression

A = "device.attributes['d.io']"
OWN = "device.attributes[device.driver]"


@pytest.mark.parametrize(
    ("expression", "reads"),
    [
        (
            f"cel.bind(d, {A}, d.model == 'x' && d.tags.exists(t, t == 'b'))",
            {Reads("attributes", "d.io", "model"), Reads("attributes", "d.io", "tags")},
        ),
        (f"cel.bind(d, {OWN}, d['model'] == 'x')", {Reads("attributes", None, "model"), Reads("driver")}),
        (
            "cel.bind(d, device, d.driver == 'x' && d.attributes['a'].n == 1)",
            {Reads("driver"), Reads("attributes", "a", "n")},
        ),
        (
            "cel.bind(m, device.attributes, 'a' in m && has(m['a'].n))",
            {Reads("attributes", "a"), Reads("attributes", "a", "n")},
        ),
        (f"cel.bind(d, {A}, cel.bind(e, d, e.?n.orValue(1) == 1))", {Reads("attributes", "d.io", "n")}),
        (f"cel.bind(d, {A}, true)", set()),
        (f"cel.bind(n, {A}.n, n == 1)", {Reads("attributes", "d.io", "n")}),
        (f"cel.bind(d, {A}, [1].exists(d, d == 1))", set()),
    ],
)
def test_reads_are_known_when_a_name_stands_for_a_part_of_the_device(expression: str, reads: set[Reads]) -> None:
    """A bound name is written out, so that its verdict is remembered by what it leads to."""
    selector = compile_expression(expression)

    assert isinstance(selector, CelSelector), selector
    assert selector.reads is not None
    assert set(selector.reads) == reads


@pytest.mark.parametrize(
    "expression",
    [
        f"cel.bind(d, {A}, size(d) == 1)",
        f"cel.bind(d, {A}, d.exists(k, k == 'n'))",
        f"cel.bind(d, {A}, [d].size() == 1)",
        f"cel.bind(d, {A}, 'n' in d)",
        f"cel.bind(d, {A}, d[string(d.n)] == 1)",
        "cel.bind(k, 'd.io', device.attributes[k].n == 1)",
        f"cel.bind(d, true ? {A} : {OWN}, d.n == 1)",
        "cel.bind(d, device, [d].exists(e, e.driver == 'd.io'))",
    ],
)
def test_reads_are_unknown_when_a_part_of_the_device_is_used_whole(expression: str) -> None:
    """What goes through a whole domain, or finds it by a value, is evaluated for each device."""
    selector = compile_expression(expression)

    assert isinstance(selector, CelSelector), selector
    assert selector.reads is None


def test_remembered_verdict_is_that_of_an_evaluation() -> None:
    """Over all small devices, in both orders: the verdict by what was read before is the one of the
    device itself.
    """
    values = (None, 1, 2)
    devices = [
        DeviceFacts(driver, {domain: {name: value for name, value in (("n", n), ("m", m)) if value is not None}}, {})
        for driver in ("d.io", "e.io")
        for domain in ("d.io", "e.io")
        for n, m in itertools.product(values, values)
    ]
    expressions = [
        f"cel.bind(d, {domain}, {test})"
        for domain in (A, OWN, "device.attributes['e.io']")
        for test in (
            "d.n == 1",
            "has(d.n) && d.n < 2",
            "d.?m.orValue(2) == 2",
            "cel.bind(e, d, e.n == 1 || d.m == 2)",
            "[1, 2].exists(n, d.n == n)",
        )
    ]

    for expression, order in itertools.product(expressions, (devices, devices[::-1])):
        selector = compile_expression(expression)
        assert isinstance(selector, CelSelector)
        assert selector.reads is not None
        for device in order:
            assert selector.matches(device) == selector.evaluate(device)[0], (expression, device)
