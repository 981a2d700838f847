"""A pod fits in a snapshot exactly where its devices can be chosen by trying all choices, and with
each change that is named it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from support.laws import examples
from support.why_clusters import JOB
from support.why_edits import applied
from support.why_objects import NVIDIA, Plain, allocated, asks, claim, class_of, node, nvidia_gpus, pod, slice_of
from topobus.controller.snapshots.rules.cluster_view import ClusterView
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.snapshot import Snapshot
from topobus.engine.cel.selector import CelCompiler
from topobus.values.cluster_answers import Verdict

_COMPILER = CelCompiler()
_ROOT = "resource.kubernetes.io/pcieRoot"
_TAINT = {"key": "example.com/gpu", "effect": "NoSchedule"}
_PRODUCTS = ("NVIDIA L4", "NVIDIA H100")


class _Gpu(Struct, frozen=True, kw_only=True):
    product: str
    root: int
    is_held: bool


class _Machine(Struct, frozen=True, kw_only=True):
    gpus: tuple[_Gpu, ...]
    is_tainted: bool


class _Wish(Struct, frozen=True, kw_only=True):
    count: int
    product: str
    """Empty for any."""
    below_one_root: bool


_GPUS = st.builds(_Gpu, product=st.sampled_from(_PRODUCTS), root=st.integers(0, 1), is_held=st.booleans())
_MACHINES = st.lists(
    st.builds(_Machine, gpus=st.lists(_GPUS, max_size=4).map(tuple), is_tainted=st.booleans()), min_size=1, max_size=3
)
_WISHES = st.builds(
    _Wish, count=st.integers(1, 4), product=st.sampled_from(("", *_PRODUCTS)), below_one_root=st.booleans()
)


def _fits(machines: Sequence[_Machine], wish: _Wish) -> bool:
    """Say whether any choice of free devices of one machine is what is asked for."""
    return any(
        not machine.is_tainted
        and any(
            all(wish.product in ("", gpu.product) for gpu in chosen)
            and (not wish.below_one_root or len({gpu.root for gpu in chosen}) == 1)
            for chosen in combinations([gpu for gpu in machine.gpus if not gpu.is_held], wish.count)
        )
        for machine in machines
    )


def _objects(machines: Sequence[_Machine], wish: _Wish) -> list[Plain]:
    objects = [class_of(NVIDIA)]
    for number, machine in enumerate(machines):
        name = f"node-{number}"
        devices = nvidia_gpus(len(machine.gpus))
        for device, gpu in zip(devices, machine.gpus, strict=True):
            device["attributes"]["productName"] = {"string": gpu.product}
            device["attributes"][_ROOT] = {"string": f"pci0000:{gpu.root:02x}"}
        held = [f"gpu-{index}" for index, gpu in enumerate(machine.gpus) if gpu.is_held]
        objects += [node(name, taints=[_TAINT] if machine.is_tainted else ()), slice_of(NVIDIA, name, devices)]
        if held:
            holder = f"holder-{number}"
            taken = claim(f"{holder}-claim", asks(NVIDIA, len(held)))
            objects += [
                allocated(taken, NVIDIA, name, *held, by=(holder,)),
                pod(holder, f"{holder}-claim", on=name),
            ]
    where = [f'device.attributes["gpu.nvidia.com"].productName == "{wish.product}"'] if wish.product else []
    constraints = [{"matchAttribute": _ROOT}] if wish.below_one_root else []
    return [*objects, claim("want", asks(NVIDIA, wish.count, *where), constraints=constraints), pod("job", "want")]


def _explain(objects: Sequence[Plain]) -> Verdict:
    return explain_pod(ClusterView(Snapshot(items=tuple(objects))), JOB, _COMPILER)


@settings(max_examples=examples(300), deadline=None)
@given(machines=_MACHINES, wish=_WISHES)
def test_pod_fits_exactly_where_a_choice_of_devices_exists(machines: list[_Machine], wish: _Wish) -> None:
    """Also with each change that is named: it is made on the objects, and the pod explained again."""
    objects = _objects(machines, wish)
    verdict = _explain(objects)

    assert verdict.code == ("fits" if _fits(machines, wish) else "no-node-fits")
    assert all(_explain(applied(objects, change.edits)).code == "fits" for change in verdict.changes)
