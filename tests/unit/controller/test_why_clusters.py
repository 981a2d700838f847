"""What `topobus why` says of small clusters: the true cause, and changes that help."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from support.why_clusters import CASES, JOB, KEPT_COUNTERS, Case, first_reasons
from support.why_edits import applied
from support.why_objects import Plain
from topobus.controller.snapshots.rules.cluster_view import ClusterView
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.snapshot import Server, Snapshot, gates_of_release
from topobus.engine.cel.selector import CelCompiler
from topobus.values.cluster_answers import Verdict

_SERVER = Server(version="v1.36.3", gates={**gates_of_release("v1.36.3"), "DRADeviceTaintRules": True})
_COMPILER = CelCompiler()

_each_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


def _explain(objects: Iterable[Plain], server: Server = _SERVER) -> Verdict:
    view = ClusterView(Snapshot(server=server, items=tuple(objects)))
    assert not view.faults, view.faults
    return explain_pod(view, JOB, _COMPILER)


@_each_case
def test_verdict_names_the_true_cause(case: Case) -> None:
    """The code of the verdict, the first reason, and a change that undoes the fault, where one can."""
    verdict = _explain(case.objects)

    assert (verdict.code, case.reason in first_reasons(verdict)) == (case.code, True), verdict
    assert ({case.change} if case.change else set()) <= {change.code for change in verdict.changes}
    assert bool(verdict.changes) == bool(case.change), verdict.changes


@_each_case
def test_pod_fits_with_each_change(case: Case) -> None:
    """What a change says is patched and deleted is enough."""
    for change in _explain(case.objects).changes:
        after = _explain(applied(case.objects, change.edits))

        assert after.code == "fits", (change, after)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.gate])
def test_what_a_gate_turns_off_keeps_no_pod_away(case: Case) -> None:
    """An API server stores objects that a scheduler does not look at."""
    off = Server(version=_SERVER.version, gates={**_SERVER.gates, case.gate: False})

    assert _explain(case.objects, off).code == "fits"


@pytest.mark.parametrize("version", ["v1.36.0", "v1.36.2", "v1.36.2-eks-1"])
def test_taint_rules_keep_no_pod_away_from_a_kube_scheduler_that_does_not_heed_them(version: str) -> None:
    """Of 1.36.0 to 1.36.2; the answer says what it does instead, and what ends that."""
    case = next(case for case in CASES if case.name == "device-taint-of-a-rule")

    verdict = _explain(case.objects, Server(version=version, gates=_SERVER.gates))

    assert verdict.code == "fits"
    assert [(reason.code, reason.facts["rules"]) for reason in verdict.remarks if "rules" in reason.facts] == [
        ("taint-rules-broken", ("repair",))
    ]
    assert not [reason for reason in _explain(case.objects).remarks if "rules" in reason.facts]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in KEPT_COUNTERS])
@pytest.mark.parametrize(("version", "keeps"), [("v1.35.6", True), ("v1.36.2", True), ("v1.36.3", False)])
def test_counters_that_kube_scheduler_keeps_are_named_where_it_keeps_them(
    case: Case, version: str, keeps: bool
) -> None:
    """Beside the cause and the changes that help there. A newer one binds the pod."""
    verdict = _explain(case.objects, Server(version=version, gates=_SERVER.gates))

    kept = [reason.facts["node"] for reason in verdict.remarks if reason.code == "counters-kept"]
    assert (verdict.code, kept) == ((case.code, ["gpu-a"]) if keeps else ("fits", []))
    assert {case.change} <= {change.code for change in verdict.changes} or not keeps


def test_explaining_a_pod_leaves_the_snapshot_as_it_was() -> None:
    """Changes are tried on the view and undone: a second answer is the same."""
    for case in CASES:
        view = ClusterView(Snapshot(server=_SERVER, items=case.objects))

        assert explain_pod(view, JOB, _COMPILER) == explain_pod(view, JOB, _COMPILER), case.name


def test_cases_are_told_apart_by_name() -> None:
    """A failure names one cluster."""
    assert len({case.name for case in CASES}) == len(CASES)
