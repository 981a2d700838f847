"""Keys of objects in order of age, kept while objects come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topobus.controller.state.age_order import AgeOrder
from topobus.engine.claims.stored import ObjectKey

KEYS = st.builds(ObjectKey, st.just("resourceclaim"), st.sampled_from(["a", "b"]), st.sampled_from(["x", "y", "z"]))
TIMES = st.sampled_from(["", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"])
STEPS = st.lists(st.tuples(KEYS, st.none() | TIMES), max_size=30)


@given(steps=STEPS)
def test_order_is_that_of_sorting_when_keys_came_changed_and_went(steps: list[tuple[ObjectKey, str | None]]) -> None:
    """Oldest first, of one age by key; what was dropped is not there."""
    order, expected = AgeOrder(), dict[ObjectKey, str]()
    for key, created in steps:
        if created is None:
            order.drop(key)
            expected.pop(key, None)
        else:
            order.put(key, created)
            expected[key] = created

    assert list(order) == sorted(expected, key=lambda key: (expected[key], key))
    assert len(order) == len(expected)
    assert [key in order for key, _ in steps] == [key in expected for key, _ in steps]


def test_walk_goes_on_when_keys_are_dropped_meanwhile() -> None:
    """Who walks over the keys may drop each of them."""
    order = AgeOrder()
    keys = [ObjectKey("pod", "default", name) for name in ("a", "b", "c")]
    for key in keys:
        order.put(key, "")

    for key in order:
        order.drop(key)

    assert len(order) == 0
