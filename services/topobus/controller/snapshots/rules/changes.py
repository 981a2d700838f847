"""The smallest changes with which a pod fits: each one is made on the snapshot, the pod is tried
again, and only what fits then is told.

Order: names that are written wrong; then the claims' requests, the pod, and the nodes; then pods and
claims that would have to go, the fewest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import product
from typing import Any

from topobus.controller.snapshots.rules.cluster_view import ClusterView, Edits, Key, Place, Plain, names_of
from topobus.controller.snapshots.rules.pod_trial import PodTrial
from topobus.controller.snapshots.rules.snapshot import has_ended, importance, node_of
from topobus.engine.cel.seam import SelectorCompiler, SelectorError
from topobus.engine.claims.objects import Claim
from topobus.engine.scheduling.decisions import PodPlan
from topobus.engine.scheduling.node_fit import NodeFacts, Placing, is_wanted, untolerated
from topobus.engine.scheduling.node_resources import needs_of
from topobus.formats.kubernetes.limits import MAX_LIST
from topobus.formats.kubernetes.merge_patch import merged
from topobus.values.cluster_answers import Change, Edit, NodeGroup
from topobus.values.node_text import counted
from topobus.values.outcome import Reason

__all__ = ["find_changes"]

# Changes that a person reads; groups of nodes that lack devices, and of others, that are looked at, and
# nodes of each from which pods are taken away; nodes on which a change is tried.
_MOST = 4
_GROUPS = 3
_NODES = 200
# Holders that are taken away and given back one by one.
_HOLDERS = 128
_CONDITIONS = "node.kubernetes.io/"
_CORDONED = f"{_CONDITIONS}unschedulable"
_QUALIFIED = "%s/%s"


@dataclass(frozen=True)
class _Way:
    """A change that has not been tried yet."""

    code: str
    text: str
    edits: tuple[Edit, ...]
    cost: float = 0
    """Of ways of one code the cheapest is told."""


def find_changes(
    view: ClusterView,
    trial: PodTrial,
    reasons: Sequence[Reason],
    groups: Sequence[NodeGroup],
    compiler: SelectorCompiler,
) -> tuple[Change, ...]:
    """Find changes with which a pod fits.

    Shapes: reasons — what keeps it off every node; groups — what keeps it off each of them.
    Cost: a search for each way on each node that is tried, some hundreds at most.
    """
    search = _Changes(view, trial, compiler)
    everywhere = view.node_names[:_NODES]
    changes = list(search.tried(search.spellings(reasons), everywhere))
    if any(reason.code == "claim-too-large" for reason in reasons):
        changes += search.tried(search.relaxations(), everywhere)
    lacking = [group for group in groups if group.lacks_devices][:_GROUPS]
    excluded = [group for group in groups if not group.lacks_devices][:_GROUPS]
    for group in lacking:
        changes += search.tried(search.relaxations(), group.nodes)
    for node in (node for group in excluded for node in group.nodes):
        changes += search.tried(search.placements(node), (node,))
    for node in (node for group in (*lacking, *excluded) for node in group.nodes[:_GROUPS]):
        changes += search.removals(node)
    # Neither the pod alone nor its claims alone: both.
    for node in (node for group in excluded for node in group.nodes if not changes):
        changes += search.tried(map(_together, product(search.placements(node), search.relaxations())), (node,))
    # Of a kind the smallest; of equals the first, on the nearest node.
    smallest: dict[str, tuple[float, Change]] = {}
    for cost, change in changes:
        if change.code not in smallest or cost < smallest[change.code][0]:
            smallest[change.code] = cost, change
    return tuple(change for _, change in smallest.values())[:_MOST]


class _Changes:
    """Ways for one pod, and the trial of each."""

    def __init__(self, view: ClusterView, trial: PodTrial, compiler: SelectorCompiler) -> None:
        self._view, self._trial, self._compiler = view, trial, compiler

    def tried(self, ways: Iterable[_Way], nodes: Sequence[str]) -> Iterator[tuple[float, Change]]:
        """Yield the changes with their costs with which the pod fits on one of the nodes."""
        for way in ways:
            node = self._fits(self._edited(way.edits), nodes)
            if node is not None:
                message = f"it fits on node {node} {way.text}"
                yield way.cost, Change(code=way.code, message=message, node=node, edits=way.edits)

    def _fits(self, edits: Edits, nodes: Sequence[str]) -> str | None:
        """Name the first node on which the pod fits after some edits."""
        view, key = self._view, self._trial.key
        with view.changed(edits):
            again = PodTrial(view, key, self._compiler)
            return next((node for node in nodes if again.fits(node)), None)

    def _edited(self, edits: Sequence[Edit]) -> dict[Place, Plain | None]:
        """Apply patches to the objects of the snapshot. What is changed in a template is changed in
        the pod's claim of it.
        """
        edited: dict[Place, Plain | None] = {}
        for edit in edits:
            place = (edit.kind, (edit.namespace, edit.name))
            before = edited.get(place, self._view.objects.get(place)) or {}
            edited[place] = merged(before, edit.patch, named=["containers"]) if edit.patch is not None else None
            if edit.kind == "ResourceClaimTemplate" and edit.patch is not None:
                for use in self._trial.pod.uses:
                    claim = ("ResourceClaim", (edit.namespace, use.claim))
                    if use.template == edit.name and claim in self._view.objects:
                        patch = {"spec": edit.patch["spec"]["spec"]}
                        edited[claim] = merged(edited.get(claim) or self._view.objects[claim], patch)
        return edited

    # Names

    def spellings(self, reasons: Sequence[Reason]) -> Iterator[_Way]:
        """Yield names that are near to those which do not exist."""
        for reason in reasons:
            if reason.code == "claim-missing":
                yield from self._other_claim(str(reason.facts["entry"]), str(reason.facts["claim"]))
        for claim in self._pending():
            devices = _devices(claim)
            for number, place, option in _options_of(devices):
                name = option.get("deviceClassName", "")
                if name and name not in self._view.classes:
                    for near in get_close_matches(name, list(self._view.classes), n=1):
                        changed = _with_option(devices, number, place, {"deviceClassName": near})
                        text = f"with class {near} instead of {name}, which does not exist"
                        yield _Way("class-name", text, self._claim_edits(claim, changed))
            yield from self._attributes(claim)

    def _other_claim(self, entry: str, name: str) -> Iterator[_Way]:
        namespace = self._trial.key[0]
        for near in get_close_matches(name, names_of(self._view, "ResourceClaim", namespace), n=1):
            entries = [
                {**use, "resourceClaimName": near} if use.get("name") == entry else use
                for use in self._trial.pod.object.spec.get("resourceClaims") or ()
            ]
            yield _Way(
                "claim-name",
                f"with ResourceClaim {near} instead of {name}, which does not exist",
                (self._pod_edit({"resourceClaims": entries}),),
            )

    def _attributes(self, claim: Claim) -> Iterator[_Way]:
        """Yield near names of attributes that a selector or a constraint reads and no device has."""
        devices = _devices(claim)
        for number, place, option in _options_of(devices):
            selectors = option.get("selectors") or []
            for index, selector in enumerate(selectors):
                for wrong, near in self._misspelt((selector.get("cel") or {}).get("expression", "")):
                    expression = selector["cel"]["expression"].replace(wrong, near)
                    kept = [*selectors[:index], {"cel": {"expression": expression}}, *selectors[index + 1 :]]
                    edits = self._claim_edits(claim, _with_option(devices, number, place, {"selectors": kept}))
                    yield _Way(
                        "attribute-name", f"with attribute {near} instead of {wrong}, which no device has", edits
                    )
        names = [_QUALIFIED % each for each in self._attribute_names]
        for place, constraint in enumerate(devices.get("constraints") or ()):
            for kind in ("matchAttribute", "distinctAttribute"):
                name = constraint.get(kind, "")
                if name and name not in names:
                    for near in get_close_matches(name, names, n=1):
                        constraints = [*devices["constraints"]]
                        constraints[place] = {**constraint, kind: near}
                        text = f"with attribute {near} instead of {name}, which no device has"
                        edits = self._claim_edits(claim, {**devices, "constraints": constraints})
                        yield _Way("attribute-name", text, edits)

    def _misspelt(self, expression: str) -> Iterator[tuple[str, str]]:
        """Yield names of attributes that an expression reads and no device has, with the nearest."""
        selector = self._compiler.compile(expression)
        if isinstance(selector, SelectorError) or selector.reads is None:
            return
        names = self._attribute_names
        for reads in selector.reads:
            if reads.part != "attributes" or reads.domain is None or reads.name is None:
                continue
            if (reads.domain, reads.name) in names:
                continue
            for near in get_close_matches(reads.name, [name for domain, name in names if domain == reads.domain], n=1):
                yield reads.name, near
            domains = sorted({domain for domain, name in names if name == reads.name})
            for near in get_close_matches(reads.domain, domains, n=1):
                yield reads.domain, near

    @cached_property
    def _attribute_names(self) -> frozenset[tuple[str, str]]:
        """All attributes of all devices, by domain and name."""
        return frozenset(
            (domain, identifier) if identifier else (each.spec.driver, domain)
            for each in self._view.slices.values()
            for device in each.spec.devices
            for domain, _, identifier in (name.partition("/") for name in device.attributes)
        )

    # The claims' requests

    def relaxations(self) -> Iterator[_Way]:
        """Yield claims that ask for less: a device less and fewer, a selector less, a constraint less,
        taints of devices tolerated.
        """
        for claim in self._pending():
            devices = _devices(claim)
            for number, place, option in _options_of(devices):
                name = _shown_name(devices["requests"][number], option)
                for count in range(min((option.get("count") or 1) - 1, MAX_LIST), 0, -1):
                    yield _Way(
                        "count",
                        f"with {counted(count, 'device')} instead of {option['count']} for request {name}",
                        self._claim_edits(claim, _with_option(devices, number, place, {"count": count})),
                        option["count"] - count,
                    )
                selectors: list[dict[str, Any]] = option.get("selectors") or []
                for index, selector in enumerate(selectors):
                    kept = [*selectors[:index], *selectors[index + 1 :]]
                    expression = (selector.get("cel") or {}).get("expression", "")
                    yield self._relaxed(
                        "selector",
                        f"without selector #{index} of request {name}: {expression}",
                        claim,
                        _with_option(devices, number, place, {"selectors": kept}),
                    )
                tolerated: list[dict[str, Any]] = option.get("tolerations") or []
                tolerations = [*tolerated, {"operator": "Exists"}]
                yield self._relaxed(
                    "device-toleration",
                    f"if request {name} tolerated the taints of devices there",
                    claim,
                    _with_option(devices, number, place, {"tolerations": tolerations}),
                )
            constraints = devices.get("constraints") or []
            for place, constraint in enumerate(constraints):
                kept = [*constraints[:place], *constraints[place + 1 :]]
                attribute = constraint.get("matchAttribute") or constraint.get("distinctAttribute")
                yield self._relaxed(
                    "constraint",
                    f"without constraint #{place} ({attribute})",
                    claim,
                    {**devices, "constraints": kept},
                )
        yield from self._fewer_served()

    def _relaxed(self, code: str, text: str, claim: Claim, devices: Mapping[str, Any]) -> _Way:
        return _Way(code, text, self._claim_edits(claim, devices))

    def _claim_edits(self, claim: Claim, devices: Mapping[str, Any]) -> tuple[Edit, ...]:
        """Edit a claim, or the template that it is made of."""
        namespace = claim.owner.namespace
        use = next(use for use in self._trial.pod.uses if use.claim == claim.owner.name)
        changed = {key: devices.get(key) for key in ("requests", "constraints") if key in devices}
        if use.template:
            patch = {"spec": {"spec": {"devices": changed}}}
            return (Edit(kind="ResourceClaimTemplate", namespace=namespace, name=use.template, patch=patch),)
        spec = {"spec": {"devices": changed}}
        return (Edit(kind="ResourceClaim", namespace=namespace, name=claim.owner.name, patch=spec),)

    def _pending(self) -> Iterator[Claim]:
        """List the claims that are to be allocated for the pod and that somebody wrote."""
        plan = self._trial.plan
        names = {use.claim for use in self._trial.pod.uses if use.entry}
        if isinstance(plan, PodPlan):
            yield from (each.claim for each in plan.pending if each.name in names)

    # The pod and the nodes

    def placements(self, node: str) -> Iterator[_Way]:
        """Yield what would let the pod onto one node by its rules, all of it together."""
        at = self._view.node_facts[node]
        ways = [*self._tolerating(at), *self._labelled(at), *self._fewer_requests(at)]
        if ways:
            # A node that excludes a pod by several rules needs all of these at once.
            yield _together(ways)

    def _tolerating(self, at: NodeFacts) -> Iterator[_Way]:
        taints = untolerated(self._trial.placing, at)
        if any(taint.key == _CORDONED for taint in taints):
            kept = [
                taint
                for taint in (self._view.objects["Node", ("", at.node.name)].get("spec") or {}).get("taints") or ()
                if taint.get("key") != _CORDONED
            ]
            patch = {"spec": {"unschedulable": None, "taints": kept}}
            yield _Way(
                "node-uncordon",
                f"once the node is schedulable again (kubectl uncordon {at.node.name})",
                (Edit(kind="Node", name=at.node.name, patch=patch),),
            )
        others = [taint for taint in taints if taint.key != _CORDONED]
        # A pod that tolerates that a node is not ready, or has no memory left, would not run there.
        if others and not any(taint.key.startswith(_CONDITIONS) for taint in others):
            wanted = [
                {"key": taint.key, "operator": "Exists", **({"effect": taint.effect} if taint.effect else {})}
                for taint in others
            ]
            tolerations = [*(self._trial.pod.object.spec.get("tolerations") or ()), *wanted]
            yield _Way(
                "toleration",
                f"if the pod tolerated {', '.join(taint.key for taint in others)}",
                (self._pod_edit({"tolerations": tolerations}),),
            )

    def _labelled(self, at: NodeFacts) -> Iterator[_Way]:
        placing = self._trial.placing
        lacking = {key: value for key, value in placing.node_selector.items() if at.node.labels.get(key) != value}
        if any(_is_of_the_node(key) for key in lacking):
            yield _Way(
                "node-label",
                f"without {', '.join(sorted(lacking))} in the pod's nodeSelector",
                (self._pod_edit({"nodeSelector": dict.fromkeys(lacking)}),),
            )
        elif lacking:
            text = ", ".join(f"{key}={value}" for key, value in sorted(lacking.items()))
            patch = {"metadata": {"labels": lacking}}
            yield _Way(
                "node-label",
                f"with label {text} on the node, which the pod's nodeSelector wants",
                (Edit(kind="Node", name=at.node.name, patch=patch),),
            )
        if not is_wanted(Placing(affinity=placing.affinity), at.node):
            affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": None}}
            yield _Way(
                "node-affinity",
                "without the pod's required node affinity",
                (self._pod_edit({"affinity": affinity}),),
            )

    def _fewer_requests(self, at: NodeFacts) -> Iterator[_Way]:
        """Yield requests that the node has room for, taken from the container that asks for most."""
        needs = needs_of(self._trial.pod.object.spec)
        short = [
            each
            for each in self._view.room.shortages(at.node.name, needs)
            if each.resource in ("cpu", "memory", "ephemeral-storage") and each.free.nano > 0
        ]
        less = {each.resource: str(each.free) for each in short}
        text = ", ".join(f"{each.resource} {each.free} instead of {each.wanted}" for each in short)
        less_by = sum(1 - each.free.nano / each.wanted.nano for each in short)
        yield from self._with_requests(less, f"if the pod asked for {text}", less_by)

    def _fewer_served(self) -> Iterator[_Way]:
        """Yield fewer of one extended resource that device classes serve, the most first."""
        needs = needs_of(self._trial.pod.object.spec)
        for name in self._trial.served_resources:
            wanted = needs.amounts[name]
            # The claim that is made for them can have no more.
            for count in range(min(wanted.units - 1, MAX_LIST), 0, -1):
                text = f"if the pod asked for {name} {count} instead of {wanted}"
                yield from self._with_requests({name: str(count)}, text, 1 - count / wanted.units)

    def _with_requests(self, less: Mapping[str, str], text: str, less_by: float) -> Iterator[_Way]:
        """Yield a pod of one container that asks for less."""
        containers = self._trial.pod.object.spec.get("containers") or []
        if not less or len(containers) != 1:
            return
        resources = containers[0].get("resources") or {}
        asked = {part: set(less) & set(resources.get(part) or ()) for part in ("requests", "limits")}
        patch = {part: {key: less[key] for key in sorted(keys)} for part, keys in asked.items() if keys}
        container = {"name": containers[0]["name"], "resources": patch}
        yield _Way("requests", text, (self._pod_edit({"containers": [container]}),), less_by)

    def _pod_edit(self, spec: dict[str, Any]) -> Edit:
        namespace, name = self._trial.key
        return Edit(kind="Pod", namespace=namespace, name=name, patch={"spec": spec})

    # Who would have to go

    def removals(self, node: str) -> Iterator[tuple[float, Change]]:
        """Yield the pods and claims that would have to go: all of them are taken away, and each that
        is not in the way is given back, the most important first, as kube-scheduler's preemption
        does. What costs least has the lowest priorities, then the fewest pods.
        """
        holders = self._holders(node)
        gone: Edits = {place: plain for edits in holders.values() for place, plain in edits.items()}
        if not holders or self._fits(gone, (node,)) is None:
            return
        needed = dict(holders)
        for name in holders:
            fewer = {other: edits for other, edits in needed.items() if other != name}
            left: Edits = {place: plain for edits in fewer.values() for place, plain in edits.items()}
            if fewer and self._fits(left, (node,)) is not None:
                needed = fewer
        edits = tuple(
            Edit(kind=kind, namespace=key[0], name=key[1])
            for each in needed.values()
            for kind, key in each
            if kind == "Pod" or len(each) == 1
        )
        names = ", ".join(needed)
        text = f"once {names} is gone" if len(needed) == 1 else f"once these are gone: {names}"
        priorities = [importance(self._view.objects[place])[0] for each in needed.values() for place in each]
        # Priorities are whole numbers, and no node has a thousand pods.
        cost = max(0, *(-priority for priority in priorities)) + len(needed) / 1000
        yield cost, Change(code="remove-holders", message=f"it fits on node {node} {text}", node=node, edits=edits)

    def _holders(self, node: str) -> dict[str, dict[Place, Plain | None]]:
        """Map who could go from a node to what goes with it: pods with the claims that only they
        have, and claims that no pod has. The most important first.
        """
        view = self._view
        pods = {key for key, plain in view.of_kind("Pod") if _can_go(plain) and node_of(plain) == node}
        claims: dict[Key, Claim] = {}
        for key in view.holders_on(node):
            claim = view.claim(key)
            if claim is not None:
                claims[key] = claim
                pods |= {user for user in view.users_of(claim) if _can_go(view.objects.get(("Pod", user), {}))}
        holders: dict[str, dict[Place, Plain | None]] = {}
        for pod in sorted(pods, key=lambda pod: (importance(view.objects["Pod", pod]), pod))[:_HOLDERS]:
            holders[f"pod {pod[0]}/{pod[1]}"] = view.released(pod)
        for key, claim in claims.items():
            if not view.users_of(claim) and claim.is_allocated:
                holders[f"claim {key[0]}/{key[1]}"] = {("ResourceClaim", key): None}
        return holders


def _together(ways: Sequence[_Way]) -> _Way:
    """Make one change of several."""
    edits: dict[tuple[str, str, str], Edit] = {}
    for edit in (edit for way in ways for edit in way.edits):
        place = (edit.kind, edit.namespace, edit.name)
        before = edits[place].patch if place in edits else {}
        patch = _both(before or {}, edit.patch or {})
        edits[place] = Edit(kind=edit.kind, namespace=edit.namespace, name=edit.name, patch=patch)
    text = " and ".join(way.text for way in ways)
    return _Way(ways[0].code, text, tuple(edits.values()), sum(way.cost for way in ways))


def _devices(claim: Claim) -> dict[str, Any]:
    devices = claim.object.spec.get("devices")
    return dict(devices) if isinstance(devices, dict) else {}


def _is_of_the_node(label: str) -> bool:
    """Say whether a label tells what a node is: its name, zone, kind of machine. A pod's wish must not
    be written there.
    """
    return label.partition("/")[0].endswith(("kubernetes.io", "k8s.io"))


def _options(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what a request asks for: itself, or its alternatives."""
    return [request["exactly"]] if request.get("exactly") else list(request.get("firstAvailable") or ())


def _options_of(devices: Mapping[str, Any]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """List what the requests of a claim ask for, with the number of the request and of its
    alternative.
    """
    for number, request in enumerate(devices.get("requests") or ()):
        for place, option in enumerate(_options(request)):
            yield number, place, option


def _shown_name(request: Mapping[str, Any], option: Mapping[str, Any]) -> str:
    """Name a request, or one alternative of it, as results do: `gpu`, `gpu/big`."""
    return str(request.get("name")) if request.get("exactly") else f"{request.get('name')}/{option.get('name')}"


def _with_option(devices: Mapping[str, Any], number: int, place: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Change what one request asks for, or one alternative of it."""
    requests = [dict(request) for request in devices["requests"]]
    request = requests[number]
    options = _options(request)
    options[place] = {**options[place], **fields}
    requests[number] = {
        **request,
        **({"exactly": options[0]} if request.get("exactly") else {"firstAvailable": options}),
    }
    return {**devices, "requests": requests}


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Put two merge patches together. What one of them removes stays removed."""
    both = dict(first)
    for key, value in second.items():
        inner = both.get(key)
        both[key] = _both(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return both


def _can_go(plain: Plain) -> bool:
    """Say whether a pod takes something and is no part of its node, as those of DaemonSets are."""
    owners = (plain.get("metadata") or {}).get("ownerReferences") or ()
    return (
        bool(plain) and not has_ended(plain) and not any(owner.get("kind") in ("DaemonSet", "Node") for owner in owners)
    )
