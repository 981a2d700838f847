"""Why a pod or a claim of a snapshot has no node: what keeps the pod off every node, else what keeps
it off each of them, and the smallest changes with which it fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import islice

from topobus.controller.snapshots.rules.changes import find_changes
from topobus.controller.snapshots.rules.cluster_view import ClusterView, Key, names_of
from topobus.controller.snapshots.rules.pod_trial import PodTrial, is_global, reasons_of
from topobus.controller.snapshots.rules.snapshot import has_broken_taint_rules, keeps_counters
from topobus.engine.allocation.miss_reasons import lacking
from topobus.engine.allocation.values import Allocated, Outcome
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.claims.objects import Pod
from topobus.engine.scheduling.decisions import Blocked
from topobus.values.cluster_answers import Change, Holder, NodeGroup, Verdict
from topobus.values.errors import ContractError
from topobus.values.node_text import counted
from topobus.values.outcome import Reason

__all__ = ["explain_claim", "explain_pod"]

# Nodes that a group names; the count tells of all.
_SHOWN_NODES = 8
# Nodes, the nearest first, that are searched again as a newer kube-scheduler would.
_SEARCHED_AGAIN = 24
_OUR_GATE = "topobus.dev/allocation"
_IN_USE = ("device-in-use", "device-counters", "device-capacity")
_COUNTED_CLAIMS = "count/resourceclaims.resource.k8s.io"
_WORDS = {
    "device-in-use": "in use",
    "device-counters": "of a card whose counters are used up",
    "device-capacity": "with too little left",
    "device-excluded": "withheld",
}


def explain_claim(view: ClusterView, key: Key, compiler: SelectorCompiler) -> Verdict:
    """Explain why a claim is not allocated, by the pod that waits for it."""
    claim = view.claim(key)
    if claim is None:
        return _absent(view, "ResourceClaim", key)
    if claim.is_allocated:
        users = ", ".join(f"{namespace}/{name}" for namespace, name in view.users_of(claim)) or "no pod"
        return Verdict(
            subject=claim.shown, code="allocated", message=f"{claim.shown} is allocated, and reserved for {users}"
        )
    for pod_key, plain in sorted(view.of_kind("Pod")):
        if pod_key[0] != key[0] or (plain.get("spec") or {}).get("nodeName"):
            continue
        pod = view.pod(pod_key)
        if pod is not None and any(use.claim == key[1] for use in pod.uses):
            return explain_pod(view, pod_key, compiler)
    return Verdict(
        subject=claim.shown,
        code="unused",
        message=f"no pod that waits uses {claim.shown}: kube-scheduler allocates a claim when it places a pod that "
        "uses it",
    )


def explain_pod(view: ClusterView, key: Key, compiler: SelectorCompiler, *, is_brief: bool = False) -> Verdict:
    """Explain why a pod has no node.

    Shapes: is_brief — no changes are looked for, which cost more than the rest.
    """
    pod = view.pod(key)
    if pod is None:
        return _absent(view, "Pod", key)
    settled = _settled(pod)
    if settled is not None:
        return settled
    try:
        trial = PodTrial(view, key, compiler)
        return _tried(view, trial, compiler, is_brief=is_brief)
    except ContractError as err:
        reason = Reason(code="malformed", message=err.message)
        return Verdict(subject=pod.shown, code="invalid", message=err.message, reasons=(reason,))


def _settled(pod: Pod) -> Verdict | None:
    """Return the verdict of a pod that kube-scheduler does not look at. None for one that waits."""
    phase = str(pod.object.status.get("phase") or "")
    if pod.node:
        started = (
            "it runs" if phase == "Running" else "its containers have not started: kubelet's events of the pod say why"
        )
        code, text = (
            ("ended", f"it has ended ({phase})") if phase in ("Succeeded", "Failed") else ("scheduled", started)
        )
        return Verdict(
            subject=pod.shown, code=code, message=f"{pod.shown} is on node {pod.node}: {text}", node=pod.node
        )
    if phase in ("Succeeded", "Failed"):
        return Verdict(subject=pod.shown, code="ended", message=f"{pod.shown} has ended ({phase})")
    if pod.is_deleting:
        return Verdict(subject=pod.shown, code="deleting", message=f"{pod.shown} is being deleted")
    gates = [str(gate.get("name")) for gate in pod.object.spec.get("schedulingGates") or ()]
    if gates:
        ours = _condition(pod, "topobus.dev/Allocated") if _OUR_GATE in gates else ""
        message = f"{pod.shown} waits behind the scheduling gate{'s' if len(gates) > 1 else ''} {', '.join(gates)}"
        reason = Reason(code="gated", message=ours or message, facts={"gates": tuple(gates)})
        return Verdict(subject=pod.shown, code="gated", message=message, reasons=(reason,))
    return None


def _tried(view: ClusterView, trial: PodTrial, compiler: SelectorCompiler, *, is_brief: bool) -> Verdict:
    def helping(reasons: Sequence[Reason], groups: Sequence[NodeGroup] = ()) -> tuple[Change, ...]:
        return () if is_brief else find_changes(view, trial, reasons, groups, compiler)

    pod = trial.pod
    remarks = tuple(_remarks(view, pod))
    blockers = [*(_blockers(view, trial)), *trial.volume_blockers]
    if blockers:
        return Verdict(
            subject=pod.shown,
            code="not-ready",
            message=f"{pod.shown} cannot be placed on any node yet: {blockers[0].message}",
            reasons=tuple(blockers),
            changes=helping(blockers),
            remarks=remarks,
        )
    objection = trial.objection
    if objection is not None:
        return _invalid(trial, objection, helping((objection,)), remarks)
    if not view.node_facts:
        is_unread = any(unseen.kind == "Node" for unseen in view.unseen) or any(
            kind == "Node" for kind, _ in view.faults
        )
        message = "no node of the cluster can be read" if is_unread else "the cluster has no node"
        return Verdict(subject=pod.shown, code="no-nodes", message=message, remarks=remarks)
    misses: list[tuple[str, tuple[Reason, ...]]] = []
    fits: list[str] = []
    for node in view.node_names:
        rules = tuple(trial.rule_reasons(view.node_facts[node]))
        outcome: Outcome = Allocated((), 0) if rules else trial.search(node)
        if is_global(outcome):
            fault = reasons_of(node, outcome)[0]
            return _invalid(trial, fault, helping((fault,)), remarks)
        reasons = rules or reasons_of(node, outcome)
        if reasons:
            misses.append((node, reasons))
        else:
            fits.append(node)
    groups = _grouped(view, misses)
    if fits:
        where = f"node {fits[0]}" + (f" and {len(fits) - 1} more" if len(fits) > 1 else "")
        return Verdict(
            subject=pod.shown,
            code="fits",
            message=f"{pod.shown} fits on {where}: nothing that can be read keeps it off. kube-scheduler may not have "
            "tried it since the last change, or a rule that is not checked here keeps it off",
            node=fits[0],
            groups=groups,
            remarks=remarks,
        )
    return Verdict(
        subject=pod.shown,
        code="no-node-fits",
        message=f"{pod.shown} fits on none of {counted(len(view.node_facts), 'node')}: {groups[0].message}",
        groups=groups,
        changes=helping((), groups),
        remarks=remarks if is_brief else (*_kept_counters(view, trial, groups), *remarks),
    )


def _kept_counters(view: ClusterView, trial: PodTrial, groups: Sequence[NodeGroup]) -> Iterator[Reason]:
    """Name a node that would take the pod if kube-scheduler gave back the counters of devices that a
    taint or a constraint refuses.
    """
    if not keeps_counters(view.server):
        return
    nodes = (node for group in groups if _is_of_devices(group.reasons) for node in group.nodes)
    for node in islice(nodes, _SEARCHED_AGAIN):
        if isinstance(trial.search(node, is_brief=True, is_newer=True), Allocated):
            yield Reason(
                code="counters-kept",
                message=f"node {node} has the devices, and kube-scheduler of {view.server.version} does not find them: "
                "it counts what a taint or a constraint has refused as taken. Update Kubernetes to 1.36.3, ask for one "
                "device of that size, or let a selector name the place in place of the constraint",
                facts={"node": node, "server": view.server.version},
            )
            return


def _invalid(trial: PodTrial, reason: Reason, changes: tuple[Change, ...], remarks: tuple[Reason, ...]) -> Verdict:
    """Return the verdict of a pod whose claims are wrong whatever the node."""
    return Verdict(
        subject=trial.pod.shown,
        code="invalid",
        message=f"{trial.pod.shown}: {reason.message}",
        reasons=(reason,),
        changes=changes,
        remarks=remarks,
    )


def _absent(view: ClusterView, kind: str, key: Key) -> Verdict:
    """Return the verdict of an object that is not there, with the nearest names."""
    near = get_close_matches(key[1], names_of(view, kind, key[0]), n=3)
    elsewhere = sorted(other[0] for other, _ in view.of_kind(kind) if other[1] == key[1])
    hint = (
        f"; near that name are {', '.join(near)}"
        if near
        else f"; namespace {elsewhere[0]} has one of that name"
        if elsewhere
        else ""
    )
    subject = f"{kind} {key[0]}/{key[1]}"
    return Verdict(subject=subject, code="absent", message=f"there is no {subject}{hint}")


def _blockers(view: ClusterView, trial: PodTrial) -> Iterator[Reason]:
    """Return what the pod's claims lack before any node can be tried."""
    if not isinstance(trial.plan, Blocked):
        return
    for reason in trial.plan.reasons:
        template = str(reason.facts.get("template", ""))
        if reason.code != "claim-not-made" or not template:
            yield reason
        elif view.template((trial.key[0], template)) is None:
            yield Reason(
                code="template-missing",
                message=f"{trial.pod.shown}: there is no ResourceClaimTemplate {trial.key[0]}/{template}",
                facts=reason.facts,
            )
        else:
            yield _over_quota(view, trial.key[0], template) or reason


def _over_quota(view: ClusterView, namespace: str, template: str) -> Reason | None:
    """Find the quota that keeps a claim from being made. None when none does."""
    made = view.template((namespace, template))
    assert made is not None
    spec = made.spec.get("spec") or {}
    wanted = Counter({_COUNTED_CLAIMS: 1})
    for request in (spec.get("devices") or {}).get("requests") or ():
        exact = request.get("exactly") or request
        if exact.get("deviceClassName"):
            wanted[f"{exact['deviceClassName']}.deviceclass.resource.k8s.io/devices"] += int(exact.get("count") or 1)
    for key, plain in sorted(view.of_kind("ResourceQuota")):
        status = plain.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        for resource, amount in wanted.items():
            limit, taken = str(hard.get(resource, "")), str(used.get(resource, "0"))
            if key[0] == namespace and limit.isdecimal() and taken.isdecimal() and int(taken) + amount > int(limit):
                return Reason(
                    code="quota-exceeded",
                    message=f"ResourceQuota {namespace}/{key[1]} allows {limit} of {resource}, {taken} are used, the "
                    f"claim wants {amount} more: it is not made",
                    facts={"quota": key[1], "resource": resource, "hard": int(limit), "used": int(taken)},
                )
    return None


def _grouped(view: ClusterView, misses: Sequence[tuple[str, tuple[Reason, ...]]]) -> tuple[NodeGroup, ...]:
    """Put nodes with like reasons together: nodes that lack devices first, the nearest miss first of
    them, then those that the fewest rules exclude.
    """
    groups: dict[str, list[tuple[str, tuple[Reason, ...]]]] = {}
    for node, reasons in misses:
        groups.setdefault(_summary(node, reasons), []).append((node, reasons))
    order = sorted(groups.items(), key=lambda item: _nearness(item[1][0][1]))
    return tuple(
        NodeGroup(
            message=text,
            count=len(members),
            nodes=tuple(node for node, _ in members[:_SHOWN_NODES]),
            reasons=members[0][1],
            holders=_holders(view, *members[0]),
        )
        for text, members in order
    )


def _nearness(reasons: Sequence[Reason]) -> tuple[bool, int, int, int]:
    """Order misses: nodes that lack devices first, of these the fewest, then where most of the class
    are; then nodes that the fewest rules exclude.
    """
    there = reasons[0].facts.get("devices")
    return not _is_of_devices(reasons), lacking(reasons), -there if isinstance(there, int) else 0, len(reasons)


def _is_of_devices(reasons: Sequence[Reason]) -> bool:
    return "device_class" in reasons[0].facts


def _summary(node: str, reasons: Sequence[Reason]) -> str:
    """Say what nodes with these reasons have in common, without names of nodes, devices and holders."""
    if not _is_of_devices(reasons):
        return "; ".join(reason.message.removeprefix(f"node {node}: ") for reason in reasons)
    counts: Counter[str] = Counter()
    others: list[str] = []
    for reason in reasons[1:]:
        count, detail = reason.facts.get("count"), str(reason.facts.get("detail", ""))
        if isinstance(count, int):
            # A device that another request of the same pod takes is held by no one yet.
            is_word = reason.code in _WORDS and not detail.startswith("taken by")
            counts[f" {_WORDS[reason.code]}" if is_word else f": {detail}"] += count
        else:
            others.append(reason.message)
    head = reasons[0].message.removeprefix(f"node {node}: ")
    rest = "; ".join([f"{count}{text}" for text, count in counts.items()] + others)
    return f"{head} ({rest})" if rest else head


def _holders(view: ClusterView, node: str, reasons: Sequence[Reason]) -> tuple[Holder, ...]:
    """Name who holds devices of a node that lacks some."""
    if not any(reason.code in _IN_USE for reason in reasons):
        return ()
    holders = []
    for key, devices in view.holders_on(node).items():
        claim = view.claim(key)
        pods = tuple("/".join(user) for user in view.users_of(claim)) if claim is not None else ()
        names = tuple(device.device for device in devices)
        holders.append(Holder(claim="/".join(key), pods=pods, node=node, devices=names))
    return tuple(holders)


def _remarks(view: ClusterView, pod: Pod) -> Iterator[Reason]:
    """Return what the answer rests on."""
    scheduler = str(pod.object.spec.get("schedulerName") or "default-scheduler")
    if scheduler != "default-scheduler":
        yield Reason(
            code="other-scheduler",
            message=f"scheduler {scheduler} places this pod: it is taken to follow kube-scheduler's default rules",
            facts={"scheduler": scheduler},
        )
    said = _condition(pod, "PodScheduled")
    if said:
        yield Reason(code="scheduler-says", message=f"{scheduler} says: {said}")
    nominated = str(pod.object.status.get("nominatedNodeName") or "")
    if nominated:
        yield Reason(
            code="preempting",
            message=f"kube-scheduler makes room for it on node {nominated} by evicting pods of lower priority",
            facts={"node": nominated},
        )
    for unseen in view.unseen:
        yield Reason(
            code="unseen",
            message=f"{unseen.kind} objects could not be read ({unseen.why}): what depends on them is not checked",
            facts={"kind": unseen.kind},
        )
    for (kind, key), why in sorted(view.faults.items()):
        yield Reason(code="unreadable", message=f"left out: {why}", facts={"kind": kind, "name": key[1]})
    rules = sorted(names_of(view, "DeviceTaintRule", ""))
    if rules and has_broken_taint_rules(view.server):
        yield Reason(
            code="taint-rules-broken",
            message=f"kube-scheduler of {view.server.version} does not heed DeviceTaintRules ({', '.join(rules)}), and "
            "panics when a ResourceSlice changes beside one: update Kubernetes to 1.36.3, or delete them",
            facts={"rules": tuple(rules), "server": view.server.version},
        )
    off = sorted(gate for gate, is_on in view.server.gates.items() if not is_on)
    if off:
        yield Reason(
            code="gates-off",
            message=f"{view.server.version or 'the server'}: feature gates that are off: {', '.join(off)}"
            + (f" (by {view.server.gates_from})" if view.server.gates_from else ""),
            facts={"gates": tuple(off)},
        )


def _condition(pod: Pod, kind: str) -> str:
    """Return the message of a condition that is not true. Empty when there is none."""
    return next(
        (
            str(condition.get("message") or "")
            for condition in pod.object.status.get("conditions") or ()
            if condition.get("type") == kind and condition.get("status") != "True"
        ),
        "",
    )
