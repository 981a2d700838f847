"""Digits of other scripts are no digits of Kubernetes, wherever a text is read as a number."""

from __future__ import annotations

import pytest

from topobus.engine.cel.seam import DeviceFacts, SelectorError
from topobus.engine.cel.selector import compile_expression
from topobus.engine.cel.semantic_version import SemanticVersion
from topobus.formats.kubernetes.slice_limits import is_version
from topobus.values.idset import CpuSet
from topobus.values.quantity import Quantity

FULL_WIDTH = "\uff11"
ARABIC = "\u0661"


@pytest.mark.parametrize("digit", [FULL_WIDTH, ARABIC])
def test_number_is_refused_when_its_digits_are_of_another_script(digit: str) -> None:
    """Quantities, versions and lists of ids take the digits 0 to 9 alone."""
    for read in (
        Quantity.parse,
        CpuSet.parse,
        lambda text: SemanticVersion.parse(f"1.0.{text}"),
        lambda text: SemanticVersion.parse(text, is_loose=True),
    ):
        with pytest.raises(ValueError, match="not a"):
            read(digit)
    assert not is_version(f"1.0.{digit}")


@pytest.mark.parametrize(
    "expression",
    [
        "isQuantity('{}Gi')",
        "isSemver('1.0.{}')",
        "isSemver('{}', true)",
        "isIP('{}.1.1.1')",
        "isCIDR('10.0.0.0/{}')",
        "isURL('https://a.io:{}/')",
        "!format.date().validate('202{}-01-01').hasValue()",
        "!format.datetime().validate('202{}-01-01T00:00:00Z').hasValue()",
        "!format.dns1123Label().validate('a{}').hasValue()",
    ],
)
@pytest.mark.parametrize("digit", [FULL_WIDTH, ARABIC])
def test_selector_takes_no_digits_of_another_script(expression: str, digit: str) -> None:
    """As an API server: such a text is no quantity, version, address, port or date."""
    selector = compile_expression(expression.format(digit))

    assert not isinstance(selector, SelectorError), selector
    assert selector.matches(DeviceFacts("d.io", {}, {})) is False
