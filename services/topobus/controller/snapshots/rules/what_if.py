"""What would change for the pods of a snapshot with other objects: nodes, classes, slices or claims
more, less, or different.

The pods that wait are placed one after the other in the order in which kube-scheduler takes them, as
the cluster is and as it would be. So are the pods of nodes that would be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from topobus.controller.snapshots.rules.cluster_view import ClusterView, Edits, Key, Place, Plain, key_of, shown
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.pod_trial import PodTrial
from topobus.controller.snapshots.rules.snapshot import has_ended, importance, is_waiting, node_of
from topobus.engine.cel.seam import SelectorCompiler
from topobus.formats.kubernetes.merge_patch import merged
from topobus.formats.kubernetes.objects import is_of_cluster
from topobus.values.cluster_answers import PodChange, PodState
from topobus.values.errors import ContractError

__all__ = ["edits_of", "what_if"]

_WAITS = ("not-ready", "invalid", "no-nodes", "no-node-fits", "gated")


def edits_of(view: ClusterView, put: Sequence[Plain], without: Sequence[Place], *, namespace: str = "default") -> Edits:
    """Return the edits that put objects and drop others. The slices of a node go with it.

    Shapes: namespace — of objects that name none.
    Errors: raises ContractError for an object that cannot be read, and for one to be dropped that is
    not there.
    """
    edits: dict[Place, Plain | None] = {}
    for each in put:
        kind, (inside, name) = str(each.get("kind")), key_of(each)
        if not inside and not is_of_cluster(kind):
            each = merged(each, {"metadata": {"namespace": namespace}})
        edits[kind, key_of(each)] = each
    nameless = next((kind for kind, key in edits if not key[1]), None)
    if nameless is not None:
        raise ContractError(f"a {nameless} has no metadata.name", next_step="give it one: it is known by its name")
    with view.changed(edits):
        unread = next((place for place in edits if place in view.faults), None)
        if unread is not None:
            raise ContractError(
                f"{shown(*unread)} cannot be read: {view.faults[unread]}",
                next_step="mend it: an API server would not take it, so nothing follows from it",
            )
    for place in without:
        if place not in view.objects:
            kind, (namespace, name) = place
            raise ContractError(
                f"there is no {kind} {f'{namespace}/{name}' if namespace else name} to do without",
                next_step="name one that is there: --without node/NAME",
            )
        if place[0] == "Pod":
            edits |= view.released(place[1])
        edits[place] = None
        if place[0] == "Node":
            edits |= {
                ("ResourceSlice", ("", name)): None
                for name, each in view.slices.items()
                if each.spec.node_name == place[1][1]
            }
    return edits


def what_if(view: ClusterView, edits: Edits, compiler: SelectorCompiler) -> tuple[PodChange, ...]:
    """List the pods that would be otherwise after some edits, by namespace and name.

    Cost: for each pod that waits a search on each node, twice.
    """
    gone = {key[1] for (kind, key), plain in edits.items() if kind == "Node" and plain is None}
    homeless = {key for key, plain in view.of_kind("Pod") if node_of(plain) in gone and not has_ended(plain)}
    waiting = {key for key, plain in view.of_kind("Pod") if is_waiting(plain)}
    put = {key for (kind, key), plain in edits.items() if kind == "Pod" and plain is not None and not node_of(plain)}
    before = _states(view, waiting, compiler)
    before |= {key: PodState(code="absent", message="not there") for key in put if ("Pod", key) not in view.objects}
    before |= {
        key: PodState(code="scheduled", node=node_of(view.objects["Pod", key]))
        for key in (put | homeless) - before.keys()
    }
    dropped = {key for (kind, key), plain in edits.items() if kind == "Pod" and plain is None}
    released: dict[Place, Plain | None] = {}
    for key in homeless:
        released |= view.released(key)
    with view.changed({**released, **edits}):
        after = _states(view, (waiting | homeless | put) - dropped, compiler)
    return tuple(
        PodChange(namespace=key[0], name=key[1], before=before[key], after=after[key])
        for key in sorted(after)
        if (before[key].code in _WAITS) != (after[key].code in _WAITS) or key in homeless | (put - waiting)
    )


def _states(view: ClusterView, keys: set[Key], compiler: SelectorCompiler) -> dict[Key, PodState]:
    """Place pods one after the other, and return how each is then. Nothing stays placed."""
    states = {}
    with ExitStack() as placed:
        for key in sorted(keys, key=lambda key: (importance(view.objects["Pod", key]), key)):
            verdict = explain_pod(view, key, compiler, is_brief=True)
            if verdict.code == "fits":
                edits = PodTrial(view, key, compiler).placed(verdict.node)
                placed.enter_context(view.changed(edits or {}))
            states[key] = PodState(code=verdict.code, node=verdict.node, message=verdict.message)
    return states
