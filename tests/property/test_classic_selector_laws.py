"""Classic selectors and the CEL that migration makes of them want the same devices, by the real CEL
engine.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from support.classic_choice import CLASSIC_COMPILER
from support.classic_selection import is_wanted
from support.classic_selectors import AMOUNTS, PRODUCTS, VERSIONS, selectors
from support.laws import examples
from topobus.engine.cel.seam import DeviceFacts, SelectorError, Version
from topobus.formats.kubernetes.classic.classic_cel import selector_expression
from topobus.formats.kubernetes.classic.classic_parameters import (
    ClaimParameters,
    DeviceSelector,
    check_claim_parameters,
)
from topobus.formats.kubernetes.limits import MAX_EXPRESSION_BYTES
from topobus.values.dra_names import DRIVER
from topobus.values.quantity import Quantity

PUBLISHED_VERSIONS = (*VERSIONS, "535.104.05.01", "garbage", "", "1.2.3-rc.1")


texts = st.one_of(st.none(), st.sampled_from(PRODUCTS))
anything = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from(PRODUCTS), st.just((0, 1)))


version_values = st.one_of(
    st.none(),
    st.sampled_from(PUBLISHED_VERSIONS),
    st.sampled_from((Version("535.104.5"), Version("8.0.0"), Version("1.2.3-rc.1"))),
)
quantities = st.one_of(st.none(), st.sampled_from(AMOUNTS).map(Quantity.parse))


@st.composite
def devices(draw: st.DrawFn) -> DeviceFacts:
    """A device that publishes any of it, and some of it with other types."""
    own = {
        "model": draw(texts),
        "brand": draw(texts),
        "architecture": draw(texts),
        "uuid": draw(texts),
        "index": draw(st.one_of(st.none(), st.integers(-1, 2))),
        "migEnabled": draw(st.one_of(st.none(), st.booleans())),
        "driverVersion": draw(version_values),
        "cudaDriverVersion": draw(version_values),
        "cudaComputeCapability": draw(version_values),
        "speed": draw(anything),
        "label": draw(anything),
        "flag": draw(anything),
    }
    attributes: dict[str, dict[str, Any]] = {DRIVER: {name: value for name, value in own.items() if value is not None}}
    for domain, name in (("resource.kubernetes.io", "numaNode"), ("other.example.com", "label")):
        value = draw(anything)
        if value is not None:
            attributes[domain] = {name: value}
    capacity: dict[str, dict[str, Quantity]] = {}
    for domain, name in ((DRIVER, "memory"), ("x.example.com", "slots")):
        amount = draw(quantities)
        if amount is not None:
            capacity[domain] = {name: amount}
    return DeviceFacts(DRIVER, attributes, capacity)


@given(selectors, st.lists(devices(), min_size=1, max_size=4))
@settings(max_examples=examples(150), deadline=None)
def test_migrated_cel_wants_what_the_classic_selector_wants(
    written: dict[str, Any], published: list[DeviceFacts]
) -> None:
    """Whatever is asked and whatever devices publish, both give the same verdict, and CEL never
    ends in an error.

    An API server takes all but what is longer than it allows, and migration omits such an object.
    """
    selector = msgspec.convert(written, DeviceSelector)
    assert check_claim_parameters(ClaimParameters(selector=selector)) == []
    expression = selector_expression(selector, DRIVER)
    compiled = CLASSIC_COMPILER.compile(expression or "true")
    assert not isinstance(compiled, SelectorError), f"{compiled}: {expression}"
    if len(expression.encode()) <= MAX_EXPRESSION_BYTES:
        assert compiled.objection is None, expression

    verdicts = [compiled.matches(device_facts) for device_facts in published]

    assert verdicts == [is_wanted(selector, device_facts) for device_facts in published], expression
