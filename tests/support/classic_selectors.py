"""Strategies for selectors of the classic API: few different values, so that equality, order and
patterns meet often.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from topobus.formats.kubernetes.classic.classic_parameters import OPERATORS

PRODUCTS = ("NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "a100", "", "K.elvin", "Ünicode (x)", 'quo"te\\')
PATTERNS = ("*a100*", "nvidia*", "*", "?100", "a100", "*.e*", "*(x)", '*"te\\', "K.elvin", "*ü*", "H100", "**80??*")
AMOUNTS = ("0", "40Gi", "42949672960", "80Gi", "1.5", "-1", "1e3", "500m")
VERSIONS = ("535.104.05", "535.104.5", "v535", "8.0", "12.2.0", "0.0.1", "550")

versions = st.fixed_dictionaries({"value": st.sampled_from(VERSIONS), "operator": st.sampled_from(OPERATORS)})

amounts = st.fixed_dictionaries({"value": st.sampled_from(AMOUNTS), "operator": st.sampled_from(OPERATORS)})

names = st.sampled_from(("speed", "label", "flag", "resource.kubernetes.io/numaNode", "other.example.com/label"))

attributes = st.one_of(
    st.fixed_dictionaries({"name": names, "value": st.integers(-2, 2), "operator": st.sampled_from(OPERATORS)}),
    st.fixed_dictionaries({"name": names, "value": st.booleans(), "operator": st.sampled_from(OPERATORS[:2])}),
    st.fixed_dictionaries(
        {"name": names, "value": st.sampled_from(PATTERNS), "operator": st.sampled_from(OPERATORS[:2])}
    ),
)

capacities = st.fixed_dictionaries(
    {
        "name": st.sampled_from(("memory", "x.example.com/slots")),
        "value": st.sampled_from(AMOUNTS),
        "operator": st.sampled_from(OPERATORS),
    }
)

CONDITIONS: dict[str, st.SearchStrategy[Any]] = {
    "productName": st.sampled_from(PATTERNS),
    "brand": st.sampled_from(PATTERNS),
    "architecture": st.sampled_from(PATTERNS),
    "uuid": st.sampled_from(PATTERNS),
    "index": st.integers(-1, 2),
    "migEnabled": st.booleans(),
    "memory": amounts,
    "driverVersion": versions,
    "cudaRuntimeVersion": versions,
    "cudaComputeCapability": versions,
    "attribute": attributes,
    "capacity": capacities,
}

conditions = st.one_of(*(st.fixed_dictionaries({name: value}) for name, value in CONDITIONS.items()))

selectors = st.recursive(
    st.one_of(conditions, st.fixed_dictionaries({}, optional=CONDITIONS)),
    lambda inner: st.builds(
        lambda own, both, either: {
            **own,
            **({"andExpression": both} if both else {}),
            **({"orExpression": either} if either else {}),
        },
        st.one_of(st.just({}), conditions),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3),
    ),
    max_leaves=8,
)
