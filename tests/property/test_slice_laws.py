"""Laws of slice publishing: whatever was published, wiped or cut off by a crash, the next plans
lead to exactly the wanted pool and then to silence.
"""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from topobus.formats.kubernetes.resource import SliceDevice, SliceSpec, Taint
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.rules.slices import SlicePlan, SlicePool, slice_plan

NODE = "n1"


class Server:
    """Stores slices as an API server does, one write at a time."""

    def __init__(self) -> None:
        self.slices: dict[str, ApiObject] = {}
        self.writes = 0

    def execute(self, plan: SlicePlan, limit: int | None = None) -> None:
        """Do the writes of a plan, in order; after `limit` of them the publisher is killed."""
        steps = [*plan.deletes, *plan.updates, *plan.creates]
        for step in steps if limit is None else steps[:limit]:
            self.writes += 1
            if not isinstance(step, ApiObject):
                assert self.slices.pop(step.name).metadata["resourceVersion"] == step.resource_version
                continue
            name = step.metadata.get("name") or f"{step.metadata['generateName']}{self.writes:05d}"
            before = self.slices.get(name)
            assert (before.metadata["resourceVersion"] if before else None) == step.metadata.get("resourceVersion")
            metadata = {**step.metadata, "name": name, "uid": name, "resourceVersion": str(self.writes)}
            self.slices[name] = msgspec.structs.replace(step, metadata=metadata)
            self.check_seen()

    def specs(self) -> list[SliceSpec]:
        """What is there, by name."""
        return [
            read_as(resource_slice.spec, SliceSpec, where=name) for name, resource_slice in sorted(self.slices.items())
        ]

    def seen(self) -> list[str] | None:
        """Devices as a scheduler sees them: those of the highest generation, if they are all there.

        None when the pool is incomplete.
        """
        specs = self.specs()
        newest = max((spec.pool.generation for spec in specs), default=0)
        current = [spec for spec in specs if spec.pool.generation == newest]
        if not current or any(slice_spec.pool.resource_slice_count != len(current) for slice_spec in current):
            return None
        return [device.name for slice_spec in current for device in slice_spec.devices]

    def check_seen(self) -> None:
        """No moment shows a device twice."""
        seen = self.seen() or []
        assert len(seen) == len(set(seen))


def devices(count: int, sick: frozenset[int]) -> tuple[SliceDevice, ...]:
    """A pool's devices."""
    taint = Taint(key="topobus.dev/health", value="unhealthy", effect="NoExecute", time_added="2026-01-02T03:04:05Z")
    return tuple(
        SliceDevice(name=f"gpu-{index:03d}", taints=(taint,) if index in sick else ()) for index in range(count)
    )


states = st.tuples(st.integers(0, 260), st.frozensets(st.integers(0, 260), max_size=4))
steps = st.tuples(states, st.one_of(st.none(), st.integers(0, 6)), st.sets(st.integers(0, 4)))


@given(st.lists(steps, min_size=1, max_size=6))
def test_pool_is_what_is_wanted_when_the_publisher_was_killed_at_any_write(history: list[tuple]) -> None:  # type: ignore[type-arg]  # a step
    """After any history of states, kills and foreign deletions, one whole plan brings the pool
    about, and the next one is empty.
    """
    server = Server()
    state: tuple[int, frozenset[int]] = (0, frozenset())
    for state, limit, lost in history:
        for name in [name for index, name in enumerate(sorted(server.slices)) if index in lost]:
            del server.slices[name]
        # A new process each time: nothing is remembered but what the server has.
        server.execute(slice_plan(SlicePool(NODE, "u"), devices(*state), tuple(server.slices.values())), limit)
    wanted = devices(*state)

    server.execute(slice_plan(SlicePool(NODE, "u"), wanted, tuple(server.slices.values())))

    assert server.seen() == [slice_device.name for slice_device in wanted]
    assert [device for spec in server.specs() for device in spec.devices] == list(wanted)
    assert len({spec.pool.generation for spec in server.specs()}) == 1
    assert slice_plan(SlicePool(NODE, "u"), wanted, tuple(server.slices.values())).is_empty


@given(states, states)
def test_generation_never_goes_back_when_the_pool_changes(
    before: tuple[int, frozenset[int]], after: tuple[int, frozenset[int]]
) -> None:
    """Whatever changes, no generation is lower than one that a scheduler may have seen, wiped
    slices included.
    """
    server = Server()
    first = slice_plan(SlicePool(NODE, "u"), devices(*before), ())
    server.execute(first)

    second = slice_plan(SlicePool(NODE, "u"), devices(*after), tuple(server.slices.values()))
    wiped = slice_plan(SlicePool(NODE, "u"), devices(*after), (), last_generation=first.generation)

    assert second.generation >= first.generation
    assert wiped.generation > first.generation
