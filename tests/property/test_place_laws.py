"""Laws of `place` on the demo machine: wider policies admit no less, no order matters, nothing
depends on the process, and a release gives all back.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, pod
from support.laws import examples
from support.outcome_text import explain_text
from support.placement_checker import mistakes
from topobus.engine.alignment.planning.node_view import with_ledger
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger import transitions
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerKind, Locality, LocalityLevel, PodRequest, Policy, Scope
from topobus.values.view import AlignmentOptions, NodeView, PlanMode

WIDENING = (Policy.SINGLE_NUMA_NODE, Policy.RESTRICTED, Policy.BEST_EFFORT, Policy.NONE)
TESTS = Path(__file__).parents[1]


@st.composite
def nodes(draw: st.DrawFn) -> NodeView:
    """The demo machine in either mode with some of it held."""
    view = dgx()
    gpus = draw(st.permutations([f"gpu-{index}" for index in range(8)]))
    cut, end = draw(st.integers(0, 2)), draw(st.integers(2, 5))
    first = draw(st.integers(0, 80))
    view = holding(view, "one", cpus=f"{first}-{first + 15}", gpu=tuple(gpus[:cut]))
    view = holding(
        view, "two", gpu=tuple(gpus[cut:end]), nic=draw(st.sampled_from([(), ("nic-0",), ("nic-3", "nic-5")]))
    )
    # A short search: a law must hold with `gave-up` among the answers, and quickly.
    return structs.replace(view, options=AlignmentOptions(mode=draw(st.sampled_from(list(PlanMode))), search_steps=100))


@st.composite
def pods(draw: st.DrawFn, *, has_locality: bool = True) -> PodRequest:
    """One to three containers of all kinds."""
    kinds = st.sampled_from([ContainerKind.APP, ContainerKind.APP, ContainerKind.INIT, ContainerKind.SIDECAR])
    containers = [
        container(
            f"c{place_}",
            kind=draw(kinds),
            cpus=draw(st.sampled_from([0, 2, 8, 40, 60])),
            **{
                name: count
                for name, most in (("gpu", 3), ("nic", 2), ("fpga", 1))
                if (count := draw(st.integers(0, most)))
            },
        )
        for place_ in range(draw(st.integers(1, 3)))
    ]
    request = pod(
        "asked", *containers, policy=draw(st.sampled_from(list(Policy))), scope=draw(st.sampled_from(list(Scope)))
    )
    wishes = st.lists(
        st.builds(Locality, level=st.sampled_from(LocalityLevel), is_hard=st.booleans()),
        max_size=2,
        unique_by=lambda locality: locality.level,
    )
    return structs.replace(request, locality=tuple(draw(wishes))) if has_locality else request


@settings(max_examples=examples(80), deadline=None)
@given(nodes(), pods(has_locality=False))
def test_place_admits_no_less_when_the_policy_is_wider(view: NodeView, request: PodRequest) -> None:
    """What single-numa-node admits, restricted admits, then best-effort, then none.

    A search that gave up has refused nothing.
    """
    outcomes = [place(view, structs.replace(request, policy=policy)) for policy in WIDENING]

    for narrow, wide in pairwise(outcomes):
        gave_up = isinstance(wide, Refusal) and wide.reasons[0].code == "gave-up"
        assert gave_up or not isinstance(narrow, Placement) or isinstance(wide, Placement), explain_text(wide)


@settings(max_examples=examples(80), deadline=None)
@given(nodes(), pods(), st.randoms(use_true_random=False))
def test_place_gives_the_same_answer_in_whatever_order_things_stand(
    view: NodeView, request: PodRequest, drawn: random.Random
) -> None:
    """Neither the order of classes, devices, cores and owners in the view nor that of a container's
    wants changes the answer.
    """

    def shuffled(things: object) -> list[object]:
        listed = list(things)  # type: ignore[call-overload]
        return drawn.sample(listed, k=len(listed))

    other = structs.replace(
        view,
        devices={name: tuple(shuffled(view.devices[name])) for name in shuffled(view.devices)},
        cores=tuple(shuffled(view.cores)),
        held_devices={name: dict(shuffled(view.held_devices[name].items())) for name in shuffled(view.held_devices)},
        held_cpus=dict(shuffled(view.held_cpus.items())),
    )
    again = structs.replace(
        request,
        containers=tuple(
            structs.replace(container_request, devices=tuple(shuffled(container_request.devices)))
            for container_request in request.containers
        ),
    )

    assert place(other, again) == place(view, request)


@settings(max_examples=examples(80), deadline=None)
@given(nodes(), pods())
def test_place_keeps_what_is_promised_whatever_is_asked(view: NodeView, request: PodRequest) -> None:
    """A placement has every amount, within policy and hard localities; the same comes out again."""
    outcome = place(view, request)

    assert place(view, request) == outcome
    if isinstance(outcome, Placement):
        judged = structs.replace(
            request,
            locality=tuple(
                locality
                for locality in request.locality
                if locality.level in (LocalityLevel.NUMA, LocalityLevel.SWITCH)
            ),
        )
        policy = Policy.BEST_EFFORT if view.options.mode is PlanMode.COMPATIBLE else request.policy
        assert mistakes(view, structs.replace(judged, policy=policy), outcome) == []
    else:
        assert outcome.reasons


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(pods(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_release_restores_exactly_what_was_before(requests: list[PodRequest], drawn: random.Random) -> None:
    """After any placements, released in any order, the node is as it was: the same pods get the
    same again.
    """
    empty = Ledger(node="demo-node")
    ledger = empty
    first = []
    for number, request in enumerate(requests):
        pod_request = structs.replace(request, owner=structs.replace(request.owner, uid=f"u{number}"))
        outcome = place(with_ledger(dgx(), ledger), pod_request)
        first.append(outcome)
        if isinstance(outcome, Placement):
            ledger = transitions.reserve(
                ledger, op_id=f"p{number}", request=pod_request, placement=outcome, decision_id="d"
            ).ledger
    for number, allocation in enumerate(drawn.sample(list(ledger.allocations.values()), k=len(ledger.allocations))):
        step = transitions.release(ledger, op_id=f"r{number}", owner=allocation.owner, decision_id="d")
        assert not isinstance(step, Refusal)
        ledger = step.ledger

    restored = with_ledger(dgx(), ledger)
    assert structs.replace(restored, ledger_sequence=0) == with_ledger(dgx(), empty)
    assert place(restored, structs.replace(requests[0], owner=structs.replace(requests[0].owner, uid="u0"))) == first[0]


_SCRIPT = """
import sys
from msgspec import structs
from support.alignment_nodes import container, dgx, holding, pod
from topobus.formats.messages.codec import encode
from topobus.engine.alignment.planning.placement import place
from topobus.values.request import Locality, LocalityLevel, Policy, Scope
from topobus.values.view import AlignmentOptions, PlanMode

view = holding(dgx(), "busy", gpu=("gpu-1", "gpu-6"), nic=("nic-2",), cpus="0-9")
view = structs.replace(view, options=AlignmentOptions(mode=PlanMode.CORRECTED, policy=Policy.RESTRICTED))
soft = (Locality(level=LocalityLevel.SWITCH, is_hard=False),)
for request in (
    pod("a", container(cpus=16, gpu=2, nic=2)),
    pod("b", container("x", cpus=80), container("y", cpus=60, fpga=1)),
    pod("c", container("x", gpu=2), container("y", gpu=1, nic=3), scope=Scope.POD),
    pod("d", container(gpu=5, fpga=2), policy=Policy.SINGLE_NUMA_NODE),
    structs.replace(pod("e", container(gpu=2, nic=1)), locality=soft),
):
    sys.stdout.buffer.write(encode(place(view, request)) + b"\\n")
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_place_gives_the_same_bytes_when_another_process_hashes_otherwise(seed: str) -> None:
    """Python shuffles its sets anew in every process; no answer may depend on that."""
    answers = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
            },
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("0", seed)
    ]

    assert answers[0] == answers[1]
    assert answers[0].count(b"placement") >= 3
