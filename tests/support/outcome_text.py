"""Write an outcome for people: one block a container for a Placement, reasons and what to free for a Refusal."""

from __future__ import annotations

from collections.abc import Iterable

from topobus.domain.outcome import ContainerPlacement, Placement, Reason, Refusal

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
    return "\n".join(["placed:", *(line for one in outcome.containers for line in _container(one))])


def _container(one: ContainerPlacement) -> Iterable[str]:
    yield f"  container {one.name}: NUMA node {one.numa_nodes}" if one.numa_nodes else f"  container {one.name}:"
    if one.cpus:
        yield f"    cpu: {one.cpus} ({len(one.cpus)})"
    for device_class, names in sorted(one.devices.items()):
        yield f"    {device_class}: {', '.join(names)}"
    for line in _bullets(one.reasons):
        yield f"  {line}"


def _bullets(reasons: Iterable[Reason]) -> Iterable[str]:
    for one in reasons:
        yield f"  - {one.message} [{one.code}]"
