"""What is free in a snapshot: devices by what they are and where, how many of them lie together, and
how many more pods like one would fit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from msgspec import Struct

from topobus.controller.snapshots.rules.cluster_view import ClusterView, Key, Place, Plain
from topobus.controller.snapshots.rules.pod_trial import PodTrial
from topobus.engine.allocation.device_checks import DeviceChecks
from topobus.engine.allocation.pools import Candidate, PoolState
from topobus.engine.allocation.requests import PreparedRequest
from topobus.engine.allocation.values import AllocationInput, ClaimToAllocate, DeviceId
from topobus.engine.cel.seam import SelectorCompiler
from topobus.formats.kubernetes.resource import ClaimSpec, DeviceClassSpec
from topobus.formats.kubernetes.slices import SPARE_TAINT
from topobus.values.cluster_answers import FitCount, FreeRow
from topobus.values.errors import ContractError
from topobus.values.quantity import Quantity

__all__ = ["GROUPINGS", "DeviceState", "add_pod", "count_fits", "device_states", "free_rows"]

GROUPINGS = ("driver", "kind", "model", "class", "node", "numa")
"""What rows may be told apart by."""
# Attributes by their name without a domain, as drivers publish them: the first that is there counts.
_KINDS = ("type", "level", "class")
_MODELS = ("productName", "model", "modelName", "deviceModel")
_NUMA = ("numaNode", "numaNodeID", "numa")
_ROOTS = ("pcieRoot",)
_SIGNS = {"free": "□", "held": "■", "tainted": "▨"}
# Nodes that a row or a count names.
_SHOWN = 8
_MADE_UP = "topobus-free-for"
# More pods of one kind does no node take.
_MOST_PODS = 1000


class DeviceState(Struct, frozen=True, kw_only=True):
    """One device on a node, and whether it can be had now."""

    node: str
    driver: str
    pool: str
    device: str
    kind: str
    """What the driver calls it: `gpu`, `mig`, `half`. Empty when it says nothing."""
    model: str
    numa: str
    root: str
    """Its PCIe root. Empty when it has none."""
    classes: tuple[str, ...]
    """DeviceClasses that select it."""
    state: str
    """`free`, `held`, `spare`, `tainted`, `used-up` (counters or capacity), or `withheld` for
    another reason."""
    why: str = ""
    capacity: dict[str, tuple[str, str]] = {}
    """Of a device that is shared: what is left and what there is, by name."""


def device_states(view: ClusterView, compiler: SelectorCompiler) -> Iterator[DeviceState]:
    """List the devices of all nodes, by node and in the order in which a search tries them.

    A device that several nodes reach is listed for the first of them.
    """
    listed: set[DeviceId] = set()
    for node in view.node_names:
        table = view.stock.table_of(node)
        candidates = [each for pool in table.pools if pool.state is PoolState.READY for each in pool.candidates]
        given = replace(view.input_for(node, ()), claims=(ClaimToAllocate("", ClaimSpec()),))
        checks = DeviceChecks(given, table.pools, compiler)
        for candidate in candidates:
            if candidate.id in listed or not candidate.reaches(given.node):
                continue
            listed.add(candidate.id)
            yield _state(view, node, candidate, checks, given, compiler)


def free_rows(states: Sequence[DeviceState], by: Sequence[str]) -> tuple[FreeRow, ...]:
    """Put devices together by groupings.

    Order: by the groupings' values. A device of several classes is in the row of each.
    """
    groups: dict[tuple[str, ...], list[DeviceState]] = defaultdict(list)
    for state in states:
        for device_class in (state.classes or ("",)) if "class" in by else ("",):
            values = {
                **{name: str(getattr(state, name)) for name in GROUPINGS if name != "class"},
                "class": device_class,
            }
            groups[tuple(values[name] for name in by)].append(state)
    return tuple(_row(dict(zip(by, key, strict=True)), groups[key]) for key in sorted(groups))


def add_pod(view: ClusterView, wanted: Sequence[Plain], namespace: str) -> Key:
    """Put the first pod of a manifest into a view, with claims of its own: of those that it names, and
    of its templates. A claim or a template without a pod gets a pod that asks for nothing else.

    Returns the pod's key.
    Errors: raises ContractError for a manifest with neither, or a pod whose claim is nowhere.
    """
    objects = {(str(each.get("kind")), str((each.get("metadata") or {}).get("name"))): each for each in wanted}
    pod = next((each for (kind, _), each in objects.items() if kind == "Pod"), None)
    named = next(((kind, name) for kind, name in objects if kind.startswith("ResourceClaim")), None)
    if pod is None and named is None:
        raise ContractError(
            "no Pod, ResourceClaim or ResourceClaimTemplate in the manifest",
            next_step="name a manifest with one of them: topobus free --for FILE",
        )
    spec = dict((pod or {}).get("spec") or {})
    uses = spec.get("resourceClaims") or ()
    if pod is None and named is not None:
        field = "resourceClaimName" if named[0] == "ResourceClaim" else "resourceClaimTemplateName"
        uses = [{"name": "claim", field: named[1]}]
    entries = []
    for number, use in enumerate(uses):
        is_named = bool(use.get("resourceClaimName"))
        kind = "ResourceClaim" if is_named else "ResourceClaimTemplate"
        source = str(use.get("resourceClaimName") or use.get("resourceClaimTemplateName"))
        plain = objects.get((kind, source)) or view.objects.get((kind, (namespace, source)))
        if plain is None:
            raise ContractError(
                f"there is no {kind} {namespace}/{source} in the manifest or the cluster",
                next_step="put it into the same manifest",
            )
        inner = plain.get("spec") if is_named else (plain.get("spec") or {}).get("spec")
        name = f"{_MADE_UP}-{number}"
        entries.append({"name": use.get("name"), "resourceClaimName": name})
        metadata = {"namespace": namespace, "name": name, "uid": name}
        version = str(plain.get("apiVersion"))
        view.put({"apiVersion": version, "kind": "ResourceClaim", "metadata": metadata, "spec": inner})
    spec = {"containers": [], **spec, "resourceClaims": entries}
    spec.pop("schedulingGates", None)
    metadata = {**((pod or {}).get("metadata") or {}), "namespace": namespace, "name": _MADE_UP, "uid": _MADE_UP}
    view.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return namespace, _MADE_UP


def count_fits(view: ClusterView, key: Key, compiler: SelectorCompiler) -> tuple[FitCount, ...]:
    """Count how many pods like one of the snapshot fit on each node, one after the other.

    Shapes: key — a pod that has no node, with its claims; every further pod has claims like these.
    Order: the most first.
    Errors: raises ContractError for a pod that cannot be read.
    """
    counts: dict[int, list[str]] = defaultdict(list)
    for node in view.node_names:
        counts[_fits_on(view, key, node, compiler)].append(node)
    return tuple(
        FitCount(count=count, nodes=len(counts[count]), such_as=tuple(counts[count][:_SHOWN]))
        for count in sorted(counts, reverse=True)
    )


def _fits_on(view: ClusterView, key: Key, node: str, compiler: SelectorCompiler) -> int:
    with ExitStack() as placed:
        for number in range(_MOST_PODS):
            edits = PodTrial(view, key, compiler).placed(node)
            if edits is None:
                return number
            copies: dict[Place, Plain | None] = {}
            for (kind, place), plain in edits.items():
                name = f"{place[1]}-{number}"
                copy = {**plain, "metadata": {**plain["metadata"], "name": name, "uid": name}}
                # The copy has its devices by the copies of the claims.
                copies[kind, (place[0], name)] = (
                    {**copy, "spec": {**copy["spec"], "resourceClaims": []}} if kind == "Pod" else copy
                )
            placed.enter_context(view.changed(copies))
    return _MOST_PODS


def _state(
    view: ClusterView,
    node: str,
    candidate: Candidate,
    checks: DeviceChecks,
    given: AllocationInput,
    compiler: SelectorCompiler,
) -> DeviceState:
    # A request that any device answers: what keeps it off this one is the device's own state.
    request = PreparedRequest(0, "", "", "", "", "", DeviceClassSpec(), (), (), None, 1)
    blocker = checks.explain(request, candidate)
    consumed = given.usage.consumed.get(candidate.id, {})
    # By their names, of whatever domain.
    attributes = {name: value for of_domain in candidate.facts.attributes.values() for name, value in of_domain.items()}
    taints = {taint.key for taint in candidate.device.taints}
    is_spare = blocker is not None and blocker.code == "tainted" and taints == {SPARE_TAINT.key}
    words = {"in-use": "held", "tainted": "tainted", "counters": "used-up", "capacity": "used-up"}
    return DeviceState(
        node=node,
        driver=candidate.id.driver,
        pool=candidate.id.pool,
        device=candidate.id.device,
        kind=_first(attributes, _KINDS),
        model=_first(attributes, _MODELS),
        numa=_first(attributes, _NUMA),
        root=_first(attributes, _ROOTS),
        classes=tuple(
            name
            for name, spec in sorted(view.classes.items())
            if spec.selectors and _selects(spec, candidate, compiler)
        ),
        state="free" if blocker is None else "spare" if is_spare else words.get(blocker.code, "withheld"),
        why="" if blocker is None else blocker.detail,
        capacity={
            name: (str(amount - consumed.get(name, Quantity(0))), str(amount))
            for name, amount in (candidate.capacity.items() if candidate.device.allow_multiple_allocations else ())
        },
    )


def _selects(spec: DeviceClassSpec, candidate: Candidate, compiler: SelectorCompiler) -> bool:
    selectors = [compiler.compile(each.cel.expression) for each in spec.selectors if each.cel is not None]
    return all(getattr(selector, "matches", lambda _: False)(candidate.facts) is True for selector in selectors)


def _first(attributes: Mapping[str, object], names: Sequence[str]) -> str:
    """Return the first of some attributes. Empty when there is none."""
    return next((str(attributes[name]) for name in names if isinstance(attributes.get(name), str | int)), "")


def _row(group: dict[str, str], states: Sequence[DeviceState]) -> FreeRow:
    counts = Counter(state.state for state in states)
    free = [state for state in states if state.state == "free"]
    nodes = sorted({state.node for state in states})
    return FreeRow(
        group=group,
        nodes=len(nodes),
        such_as=tuple(nodes[:_SHOWN]),
        devices=len(states),
        free=counts["free"],
        held=counts["held"],
        tainted=counts["tainted"],
        other=counts["used-up"] + counts["withheld"],
        spares=counts["spare"],
        on_one_node=_most(state.node for state in free),
        on_one_numa_node=_most((state.node, state.numa) for state in free if state.numa),
        under_one_root=_most((state.node, state.root) for state in free if state.root),
        capacity=_sum(states),
        drawing=_drawn(states) if len(nodes) == 1 else "",
    )


def _drawn(states: Sequence[DeviceState]) -> str:
    """Draw the devices of one node."""
    parts: dict[str, dict[str, str]] = {}
    for state in states:
        of_numa = parts.setdefault(state.numa, {})
        of_numa[state.root] = of_numa.get(state.root, "") + _SIGNS.get(state.state, "·")
    return " | ".join(
        "".join(f"[{signs}]" if root else signs for root, signs in sorted(of_numa.items()))
        for _, of_numa in sorted(parts.items())
    )


def _most(places: Iterator[object]) -> int:
    return max(Counter(places).values(), default=0)


def _sum(states: Sequence[DeviceState]) -> dict[str, tuple[str, str]]:
    left: dict[str, Quantity] = {}
    total: dict[str, Quantity] = {}
    for state in states:
        for name, (part, whole) in state.capacity.items():
            left[name] = left.get(name, Quantity(0)) + Quantity.parse(part)
            total[name] = total.get(name, Quantity(0)) + Quantity.parse(whole)
    return {name: (str(left[name]), str(total[name])) for name in sorted(total)}
