"""The hint lists that topology made for a decision by kubelet's rules, as notices (`hints`): one
for each class.

A device service with hints of its own publishes them itself, so lists of its class are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from topobus.engine.alignment.planning.backtracking import GaveUp, Steps
from topobus.engine.alignment.planning.placement import plan
from topobus.engine.alignment.planning.refusal_reasons import Conflict
from topobus.engine.alignment.planning.resource_pools import class_of_resource
from topobus.formats.messages.messages import DecisionEvent, GivenHints, HintsEvent
from topobus.values.dra_names import CPU_CLASS
from topobus.values.outcome import HintList, Placement
from topobus.values.request import Scope
from topobus.values.view import NodeView

__all__ = ["given_hints"]

_MEMORY = "memory"
# A pod may have hundreds of containers; a list has at most 64 hints of some 40 bytes.
_MOST_LISTS = 16


def given_hints(event: DecisionEvent) -> tuple[HintsEvent, ...]:
    """Return the hints behind a decision, a notice for each class, sorted by class.

    Shapes: of a placement the lists of all containers; of a refusal those of the container that
            could not be placed. Nothing for decisions that merge no hints.
    Cost: of a refusal one plan by kubelet's order.
    """
    view = event.view
    if view is None:
        return ()
    own = {resource.rpartition("/")[0] for resource in view.custom_hints}
    by_class: dict[str, list[GivenHints]] = {}
    for container, listed in _lists(event, view):
        device_class = _class_of(view, listed.resource)
        if device_class and listed.resource not in own:
            given = GivenHints(
                resource=listed.resource, hints=listed.hints, omitted=listed.omitted, container=container
            )
            by_class.setdefault(device_class, []).append(given)
    return tuple(
        HintsEvent(
            node=event.node,
            device_class=device_class,
            op_id=event.op_id,
            by="topology",
            owner=event.owner,
            lists=tuple(lists[:_MOST_LISTS]),
            omitted_lists=len(lists[_MOST_LISTS:]),
            is_dry_run=event.is_dry_run,
            time=event.time,
        )
        for device_class, lists in sorted(by_class.items())
    )


def _lists(event: DecisionEvent, view: NodeView) -> Iterator[tuple[str, HintList]]:
    """Return each list with its container.

    Where the whole pod has one merge, the list comes once and without a name.
    """
    if event.request is None:
        return
    is_pod = (event.request.scope or view.options.scope) is Scope.POD
    if isinstance(event.outcome, Placement):
        containers = [container for container in event.outcome.containers if container.hints]
        for container in containers[:1] if is_pod else containers:
            for listed in container.hints:
                yield "" if is_pod else container.name, listed
        return
    planned = plan(view, event.request, Steps(0))
    conflict = planned.conflict if isinstance(planned, GaveUp) else planned
    if isinstance(conflict, Conflict):
        for resource_hints in conflict.lists:
            yield conflict.demand.name, resource_hints.record()


def _class_of(view: NodeView, resource: str) -> str:
    """Name the class under whose subject a resource's hints are published.

    Empty for a resource that nothing on this node has.
    """
    if resource == _MEMORY or resource.startswith("hugepages-"):
        return _MEMORY
    device_class = class_of_resource(view, resource)
    return device_class if device_class == CPU_CLASS or device_class in view.devices else ""
