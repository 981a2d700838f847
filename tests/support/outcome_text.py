"""Writes an outcome for people: for a Placement a block for each container, for a Refusal the
reasons and what to free.
"""

from __future__ import annotations

from collections.abc import Iterable

from topobus.values.outcome import ContainerPlacement, Placement, Reason, Refusal

__all__ = ["explain_text"]


def explain_text(outcome: Placement | Refusal) -> str:
    r"""Explain an outcome in lines of text, without colour.

    >>> print(explain_text(Refusal(reasons=(Reason(code="unknown-class", message="no class 'tpu' here"),))))
    refused:
      - no class 'tpu' here [unknown-class]
    """
    if isinstance(outcome, Refusal):
        lines = ["refused:", *_bullets(outcome.reasons)]
        if outcome.to_free:
            lines += ["it would fit if these were freed:", *_bullets(outcome.to_free)]
        return "\n".join(lines)
    return "\n".join(["placed:", *(line for container in outcome.containers for line in _container(container))])


def _container(container_placement: ContainerPlacement) -> Iterable[str]:
    yield (
        f"  container {container_placement.name}: NUMA node {container_placement.numa_nodes}"
        if container_placement.numa_nodes
        else f"  container {container_placement.name}:"
    )
    if container_placement.cpus:
        yield f"    cpu: {container_placement.cpus} ({len(container_placement.cpus)})"
    for device_class, names in sorted(container_placement.devices.items()):
        yield f"    {device_class}: {', '.join(names)}"
    for line in _bullets(container_placement.reasons):
        yield f"  {line}"


def _bullets(reasons: Iterable[Reason]) -> Iterable[str]:
    for reason in reasons:
        yield f"  - {reason.message} [{reason.code}]"
