"""Migrated claims are accepted by strict reading, and get devices that the classic ones could have
got, exactly when these could.
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from support.classic_choice import Wanted, choose_on
from support.classic_selection import is_wanted
from support.classic_selectors import selectors
from support.laws import examples
from topobus.controller.state.inventory_slices import devices_of_class, slices_of_pool
from topobus.engine.allocation.pools import gather_pools
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import (
    ALL_GATES,
    Allocated,
    AllocationInput,
    ClaimToAllocate,
    Node,
)
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.lifecycle import read_claim
from topobus.formats.kubernetes.classic.classic_cel import selector_expression
from topobus.formats.kubernetes.classic.classic_migration import Severity, migrate
from topobus.formats.kubernetes.classic.classic_parameters import ClaimParameters, DeviceClassParameters
from topobus.formats.kubernetes.limits import MAX_EXPRESSION_BYTES
from topobus.formats.kubernetes.manifest import parse_manifest
from topobus.formats.kubernetes.resource import DeviceClassSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.outcome import Refusal

GROUP = "gpu.resource.topobus.dev"
COMPILER = CelCompiler()

devices = st.lists(
    st.builds(
        lambda model, uuid, index, is_mig, version, memory: (model, uuid, index, is_mig, version, memory),
        st.sampled_from(("NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "a100")),
        st.sampled_from(("GPU-1", "a100", "")),
        st.one_of(st.none(), st.integers(0, 2)),
        st.one_of(st.none(), st.booleans()),
        st.one_of(st.none(), st.sampled_from(("535.104.05", "535.104.5", "550.1.2"))),
        st.one_of(st.none(), st.sampled_from((40 << 30, 80 << 30))),
    ),
    max_size=4,
)
sharing = st.one_of(
    st.none(), st.sampled_from(({"strategy": "TimeSlicing"}, {"strategy": "MPS"}, {"strategy": "Exclusive"}))
)


def _device(number: int, facts: tuple[Any, ...]) -> Device:
    model, uuid, index, is_mig, version, memory = facts
    attributes = {"index": index, "migEnabled": is_mig, "driverVersion": version}
    return Device(
        name=f"gpu-{number}",
        device_class="gpu",
        model=model,
        uuid=uuid,
        attributes={name: value for name, value in attributes.items() if value is not None},
        capacity={"memory": memory} if memory is not None else {},
    )


def _manifest(of_class: dict[str, Any], of_claim: dict[str, Any]) -> str:
    objects = [
        {
            "apiVersion": "resource.k8s.io/v1alpha2",
            "kind": "ResourceClass",
            "metadata": {"name": "gpu"},
            "driverName": "gpu.topobus.dev",
            "parametersRef": {"apiGroup": GROUP, "kind": "DeviceClassParameters", "name": "p"},
        },
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "DeviceClassParameters",
            "metadata": {"name": "p"},
            "spec": of_class,
        },
        {
            "apiVersion": "resource.k8s.io/v1alpha2",
            "kind": "ResourceClaim",
            "metadata": {"name": "c"},
            "spec": {
                "resourceClassName": "gpu",
                "parametersRef": {"apiGroup": GROUP, "kind": "ClaimParameters", "name": "p"},
            },
        },
        {"apiVersion": f"{GROUP}/v1alpha1", "kind": "ClaimParameters", "metadata": {"name": "p"}, "spec": of_claim},
    ]
    return yaml.safe_dump_all(objects, allow_unicode=True)


@given(devices, selectors, selectors, st.integers(1, 3), sharing, sharing)
@settings(max_examples=examples(80), deadline=None)
def test_migrated_claim_gets_what_the_classic_one_could_get(
    published: list[tuple[Any, ...]],
    of_class: dict[str, Any],
    of_claim: dict[str, Any],
    count: int,
    class_sharing: dict[str, Any] | None,
    claim_sharing: dict[str, Any] | None,
) -> None:
    """Written as YAML, read strictly, allocated by the structured engine: as many devices, all of
    them wanted, and none where the classic claim gets none.

    An object whose selector is longer as CEL than Kubernetes takes is
    omitted, and the note says so.
    """
    class_spec = {"shareable": True, "selector": of_class, **({"sharing": class_sharing} if class_sharing else {})}
    claim_spec = {"count": count, "selector": of_claim, **({"sharing": claim_sharing} if claim_sharing else {})}
    done = migrate(parse_manifest(_manifest(class_spec, claim_spec), where="classic"))
    old_class, old_claim = (
        msgspec.convert(class_spec, DeviceClassParameters),
        msgspec.convert(claim_spec, ClaimParameters),
    )
    too_long = [
        parameters
        for parameters in (old_class, old_claim)
        if len(selector_expression(parameters.selector, DRIVER).encode()) > MAX_EXPRESSION_BYTES
    ]
    if too_long:
        assert len(
            [
                note
                for note in done.notes
                if note.severity is Severity.OMITTED and f"{MAX_EXPRESSION_BYTES} are the most" in note.message
            ]
        ) == len(too_long)
        return
    text = yaml.safe_dump_all(done.objects, allow_unicode=True)
    device_class, claim = parse_manifest(text, where="migrated")
    inventory = Inventory(
        node="n1",
        device_class="gpu",
        generation=1,
        devices=tuple(_device(*numbered) for numbered in enumerate(published)),
    )
    node = Node("n1", {})
    pools = gather_pools(slices_of_pool("n1", [devices_of_class(inventory)]), node, ALL_GATES)
    candidates = [candidate for pool in pools for candidate in pool.candidates]

    classic = choose_on(node, "gpu", [Wanted(count, old_class.selector, old_claim.selector)], pools)
    given_input = AllocationInput(
        node=node,
        claims=(
            ClaimToAllocate(
                "default/c", read_claim(msgspec.structs.replace(claim, metadata={**claim.metadata, "uid": "u"}))
            ),
        ),
        classes={"gpu": read_as(device_class.spec, DeviceClassSpec, where="class")},
        pools=pools,
    )
    structured = allocate(given_input, COMPILER)

    assert isinstance(structured, Allocated) is not isinstance(classic, Refusal), (structured, classic)
    if isinstance(structured, Allocated):
        names = [granted_device.device for granted_device in structured.results[0].devices.results]
        facts = {candidate.id.device: candidate.facts for candidate in candidates}
        assert len(set(names)) == count
        assert all(
            is_wanted(old_class.selector, facts[name]) and is_wanted(old_claim.selector, facts[name]) for name in names
        )
