"""What a claim says of its CPUs."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.cpu.plugins.cpu_parameters import CpuParameters, read_cpu_parameters
from topobus.formats.kubernetes.classic.classic_parameters import SHARING_KIND
from topobus.values.outcome import Refusal

_OURS = {"apiVersion": "topobus.dev/v1"}


def test_later_entry_counts_when_several_say_something_and_sharing_is_anothers() -> None:
    """Claims come after classes; a sharing configuration is read elsewhere."""
    config = [
        {**_OURS, "kind": "CpuParameters", "withShared": True},
        {**_OURS, "kind": SHARING_KIND},
        {**_OURS, "kind": "CpuParameters", "withShared": False},
    ]

    assert read_cpu_parameters(config) == CpuParameters(with_shared=False)


def test_parameters_of_the_class_are_read_as_well() -> None:
    """Of a shape they concern its CPUs alone."""
    entry = {"apiVersion": "cpu.topobus.dev/v1", "kind": "CpuParameters", "withShared": True}

    assert read_cpu_parameters([entry]) == CpuParameters(with_shared=True)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        pytest.param(
            {**_OURS, "kind": "CpuParameter", "withShared": True},
            f"CpuParameters.kind is 'CpuParameter', wanted CpuParameters or {SHARING_KIND}, did you mean "
            '"CpuParameters"?',
            id="misspelt kind",
        ),
        pytest.param(
            {**_OURS, "withShared": True},
            f"CpuParameters.kind is None, wanted CpuParameters or {SHARING_KIND}",
            id="no kind",
        ),
        pytest.param(
            {"kind": "CpuParameters"},
            "CpuParameters.apiVersion is None, wanted topobus.dev/v1 or cpu.topobus.dev/v1",
            id="no version",
        ),
        pytest.param(
            {**_OURS, "kind": "CpuParameters", "withShared": 1},
            "CpuParameters.withShared is 1, wanted true or false",
            id="number",
        ),
    ],
)
def test_entry_without_effect_is_refused(entry: dict[str, Any], message: str) -> None:
    """Nobody believes that a claim says what it does not."""
    refusal = read_cpu_parameters([entry])

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].message == message
