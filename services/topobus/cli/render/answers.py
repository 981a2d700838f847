"""Renders answers for people: a Placement with its devices and reasons, a Refusal with its reasons
and the devices that would have to be released.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from topobus.cli.render.grids import facts_grid, marked_line
from topobus.values.hint import Hint
from topobus.values.outcome import ContainerPlacement, HintList, Placement, Reason, Refusal

__all__ = [
    "answer_view",
    "facts_text",
    "hint_table",
    "hints_text",
    "reason_lines",
    "with_parts",
]

# States of a device that is not allocated to new owners now.
_COMES_BACK = ("wait", "return", "repair")
# With this reason no other owner is in the way.
_HELD = "already-placed"
_UNITS = {"_gbps": "Gbit/s", "_bytes": "bytes", "_ms": "ms", "_s": "s"}
# Drivers that do not know a link's speed report 0.
_ZERO_IS_UNKNOWN = ("bandwidth_gbps",)
# A hint list of a big machine has hundreds of entries. The narrow ones decide, and JSON has all of
# them.
_SHOWN_HINTS = 12


def answer_view(result: Placement | Refusal, *, has_facts: bool = False, could_be_freed: bool = True) -> RenderableType:
    """Show an answer in full. With `has_facts` each reason shows its facts as well.

    With `could_be_freed` false, no other owner may hold what the answer is about.
    """
    if isinstance(result, Placement):
        return Group(*(_container_view(container, has_facts=has_facts) for container in result.containers))
    lines: list[RenderableType] = [Text("why not", "title"), *reason_lines(result.reasons, has_facts=has_facts)]
    held = [reason for reason in result.to_free if reason.code not in _COMES_BACK]
    out = [reason for reason in result.to_free if reason.code in _COMES_BACK]
    if held:
        lines += [Text("what would have to be freed", "title"), *reason_lines(held, has_facts=has_facts)]
    if out:
        lines += [Text("what would have to come back", "title"), *reason_lines(out, has_facts=has_facts)]
    if result.to_free:
        return Group(*lines)
    if any(reason.code == "gave-up" for reason in result.reasons):
        lines.append(Text("it is not known whether a release would help", "faint"))
    elif any(reason.code == _HELD for reason in result.reasons):
        lines.append(Text("`topobus release` releases what it holds, or `topobus delete` where it is stored", "faint"))
    elif could_be_freed:
        lines.append(Text("releasing what other pods and claims hold would not help", "faint"))
    return Group(*lines)


def reason_lines(reasons: Iterable[Reason], *, has_facts: bool = False) -> list[RenderableType]:
    """List reasons: the sentence for people, and the code (and the facts, when wanted) for looking
    it up.
    """
    lines: list[RenderableType] = []
    for reason in reasons:
        text = Text(reason.message or reason.code)
        facts = facts_text(reason) if has_facts else ""
        text.append(f"  [{reason.code}{': ' + facts if facts else ''}]", "faint")
        lines.append(marked_line("-", text, width=2))
    return lines


def facts_text(reason: Reason) -> str:
    """Write the facts in words, sorted by key.

    Empty facts, and those with 0 for unknown, are left out.

    >>> facts_text(Reason(code="devices-chosen", message="", facts={"tied": 0, "is_exact": True, "bandwidth_gbps": 0.0, "devices": ("a", "b")}))
    'devices a, b; exact: yes; tied 0'
    """  # noqa: E501
    return "; ".join(
        _fact_text(key, value)
        for key, value in sorted(reason.facts.items())
        if value not in ("", ()) and key not in _untold(reason)
    )


def _untold(reason: Reason) -> frozenset[str]:
    return frozenset(key for key in _ZERO_IS_UNKNOWN if not reason.facts.get(key))


def _fact_text(key: str, value: str | float | tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return f"{key.removeprefix('is_').removeprefix('has_').replace('_', ' ')}: {'yes' if value else 'no'}"
    words, unit = next(
        ((key.removesuffix(ending), f" {unit}") for ending, unit in _UNITS.items() if key.endswith(ending)),
        (key, ""),
    )
    shown = (
        ", ".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    return f"{words.replace('_', ' ')} {shown}{unit}"


def hint_table(hints: Iterable[HintList]) -> Table:
    """Show the hints of each resource. A star marks a preferred one."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    table.add_column("resource")
    table.add_column("hints (* preferred)", overflow="fold")
    for hint in hints:
        table.add_row(Text(hint.resource, "name"), hints_text(hint.hints))
    return table


def hints_text(hints: tuple[Hint, ...] | None) -> str:
    """Write a list of hints, the preferred and narrow ones first, and how many more there are."""
    if hints is None:
        return "no opinion"
    if not hints:
        return "none: cannot be satisfied"
    ordered = sorted(hints, key=lambda hint: (not hint.preferred, len(hint.nodes) if hint.nodes is not None else 0))
    more = f" and {len(ordered) - _SHOWN_HINTS} more" if len(ordered) > _SHOWN_HINTS else ""
    return " ".join(hint.text for hint in ordered[:_SHOWN_HINTS]) + more


def with_parts(device: str, parts: Mapping[str, tuple[str, ...]]) -> str:
    """Name a device, of a shape also its parts.

    >>> with_parts("shape-half-0", {"shape-half-0": ("gpu-0", "nic-0")}), with_parts("gpu-0", {})
    ('shape-half-0: gpu-0, nic-0', 'gpu-0')
    """
    return f"{device}: {', '.join(parts[device])}" if device in parts else device


def _where(container: ContainerPlacement) -> str:
    if container.numa_nodes:
        return f"NUMA {container.numa_nodes}"
    return (
        "NUMA unknown"
        if container.cpus or any(container.devices.values())
        else "no NUMA node: it holds no device and no exclusive CPU"
    )


def _container_view(container: ContainerPlacement, *, has_facts: bool) -> RenderableType:
    grid = facts_grid()
    grid.add_row("container", Text(container.name or "(claim)", "name"))
    aligned = Text(
        _where(container),
        "ok" if len(container.numa_nodes) <= 1 else "warn",
    )
    if container.has_alignment:
        aligned.append(f"   merged hint {container.alignment.text}", "faint")
    grid.add_row("where", aligned)
    if container.cpus:
        grid.add_row("cpus", f"{len(container.cpus)}: {container.cpus}")
    for device_class, names in sorted(container.devices.items()):
        grid.add_row(device_class, ", ".join(names))
    reasons = container.shown_reasons
    return Group(grid, *([Text("why", "title"), *reason_lines(reasons, has_facts=has_facts)] if reasons else []))
