"""Run recorded answers of Kubernetes' own code against ours: `python -m topobus.testing.conformance FILE...`.

The kind of a file is recognised by the beginning of its name (`topology-merge…`, `device-hints…`, `cpu-static-policy…`, `memory-hints…`, and whatever
an installed package registers under the entry point group `topobus.conformance`); it is JSON Lines, plain or gzip. A kind may want a first line that is no case (the device
of `cel-selectors…`). One line a file tells what passed; what the kind remarks besides and the first differing cases follow. Exit status: 0 all passed, 1 something differs, 2 a file cannot be used.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from topobus.domain.alignment.cpus.cpu_assignment import assign_cpus
from topobus.domain.alignment.cpus.cpu_hints import cpu_hints
from topobus.domain.alignment.cpus.cpu_topology import CpuPlace, CpuTopology
from topobus.domain.alignment.devices.device_choice import split_by_affinity
from topobus.domain.alignment.devices.device_hints import device_hints
from topobus.domain.alignment.memory.memory_allocation import MemoryAmount, MemoryNode, memory_hints
from topobus.domain.alignment.merge.dispatch import merge_hints
from topobus.domain.device import Device
from topobus.domain.hint import Hint
from topobus.domain.idset import CpuSet, NodeSet
from topobus.domain.request import Policy
from topobus.domain.view import CpuOptions

__all__ = ["Check", "HeadedCheck", "kinds", "main", "run_file"]

Check = Callable[[dict[str, Any]], tuple[Any, Any]]
"""Turns a case into (expected, got) in the shape of the file; equal means passed."""


@runtime_checkable
class HeadedCheck(Protocol):
    """A check of files whose first line is no case; an entry point names its class, so that each run has its own."""

    def begin(self, header: dict[str, Any]) -> None:
        """Read the first line."""
        ...

    def __call__(self, case: dict[str, Any]) -> tuple[Any, Any]:
        """Turn a case into (expected, got)."""
        ...

    def remarks(self) -> list[str]:
        """Tell what was compared besides, once all cases were checked."""
        ...


_SHOWN = 3
"""Differing cases printed a file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the files named on the command line; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m topobus.testing.conformance", description="Check recorded answers against ours.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON Lines, plain or gzip; the name begins with the kind")
    known_kinds = kinds()
    status = 0
    for file in parser.parse_args(argv).files:
        kind = next((key for key in sorted(known_kinds, key=len, reverse=True) if file.name.startswith(key)), None)
        if kind is None:
            print(f"{file.name}: unknown kind, wanted a name that begins with one of {', '.join(sorted(known_kinds))}", file=sys.stderr)  # noqa: T201
            status = 2
            continue
        try:
            failed = _report(file, known_kinds[kind])
        except (OSError, EOFError, ValueError, KeyError, TypeError) as err:
            print(f"{file.name}: cannot be used: {type(err).__name__}: {err}", file=sys.stderr)  # noqa: T201
            status = 2
            continue
        status = max(status, 1 if failed else 0)
    return status


def kinds() -> dict[str, Check]:
    """All kinds: those of alignment, and those that installed packages register."""
    checks: dict[str, Check] = {
        "topology-merge": check_merge,
        "device-hints": check_device_hints,
        "cpu-static-policy": check_cpus,
        "memory-hints": check_memory,
    }
    for entry in importlib.metadata.entry_points(group="topobus.conformance"):
        loaded = entry.load()
        checks.setdefault(entry.name, loaded() if isinstance(loaded, type) else loaded)
    return checks


def run_file(file: Path, check: Check) -> Iterator[tuple[str, Any, Any]]:
    """Give (case id, expected, got) for each case of a file.

    Errors: raises ValueError with the number of a line that is no case, or where a first line is wanted and missing.
    """
    wants_header = isinstance(check, HeadedCheck)
    with gzip.open(file, "rt", encoding="utf-8") if _is_gzip(file) else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                case = json.loads(line)
            except json.JSONDecodeError as err:
                raise ValueError(f"line {number} is not JSON: {err}") from err
            if wants_header and isinstance(check, HeadedCheck):
                if not isinstance(case, dict) or "expect" in case:
                    raise ValueError(f"line {number} is a case: wanted the line that all cases share first")
                check.begin(case)
                wants_header = False
                continue
            if not isinstance(case, dict) or "expect" not in case:
                raise ValueError(f"line {number} is not a case: wanted an object with `expect`")
            expected, got = check(case)
            yield str(case.get("id", number)), expected, got


def _is_gzip(file: Path) -> bool:
    with file.open("rb") as raw:
        return raw.read(2) == b"\x1f\x8b"


def _report(file: Path, check: Check) -> int:
    passed, differing = 0, []
    for case_id, expected, got in run_file(file, check):
        if expected == got:
            passed += 1
        else:
            differing.append((case_id, expected, got))
    print(f"{file.name}: {passed} passed, {len(differing)} failed")  # noqa: T201
    for remark in check.remarks() if isinstance(check, HeadedCheck) else ():
        print(f"  {remark}")  # noqa: T201
    for case_id, expected, got in differing[:_SHOWN]:
        print(f"  {case_id}\n    expected {json.dumps(expected)}\n    got      {json.dumps(got)}")  # noqa: T201
    return len(differing)


def check_merge(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `topology-merge`: the merged hint and the admission."""
    lists: list[list[Hint] | None] = []
    for provider in case["providers"]:
        if not provider:
            # A nil map and an empty map are both "don't care".
            lists.append(None)
            continue
        lists += [None if hints is None else [_hint(each_hint) for each_hint in hints] for hints in provider.values()]
    nodes = NodeSet.of(case["nodes"])
    merged = merge_hints(
        lists,
        nodes,
        Policy(case["policy"]),
        distances=[case["distances"][str(node)] for node in nodes],
        prefer_closest=case["preferClosest"],
    )
    hint = merged.hint
    got = {"nodes": None if hint.nodes is None else list(hint.nodes), "preferred": hint.preferred, "admit": merged.is_admitted}
    return case["expect"], got


def check_device_hints(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `device-hints`: the hints and the three buckets; a nil list reads as an empty one in these files."""
    devices = [
        Device(name=device["id"], device_class="device", numa_nodes=None if device["numa"] is None else NodeSet.of(device["numa"]))
        for device in case["devices"]
    ]
    hints = device_hints(devices, case["available"], case["request"], NodeSet.of(case["nodes"]), reusable=case["reusable"])
    free = [device for device in devices if device.name in set(case["available"])]
    split = split_by_affinity(free, None if case["affinity"] is None else NodeSet.of(case["affinity"]))
    expected = {key: case["expect"][key] or [] for key in ("hints", "aligned", "unaligned", "noAffinity")}
    got = {
        "hints": [_plain(hint) for hint in hints or ()],
        "aligned": list(split.aligned),
        "unaligned": list(split.unaligned),
        "noAffinity": list(split.no_affinity),
    }
    return {key: value if key == "hints" else sorted(value) for key, value in expected.items()}, got


def check_cpus(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `cpu-static-policy`: the hints, and the very CPUs taken (None where kubelet fails; its words are not compared)."""
    topology = CpuTopology(CpuPlace(cpu["cpu"], cpu["core"], cpu["socket"], cpu["numa"], cpu["l3"]) for cpu in case["cpus"])
    options = CpuOptions(**{name.replace("-", "_"): True for name, value in case["options"].items() if value == "true"})
    available, reusable = CpuSet.parse(case["available"]), CpuSet.parse(case["reusable"])
    hints = cpu_hints(
        topology.cpus_by_node(),
        available,
        case["request"],
        reusable=reusable,
        sockets=topology.sockets_by_node() if options.align_by_socket else None,
    )
    affinity = None if case["affinity"] is None else NodeSet.of(case["affinity"])
    assigned = assign_cpus(topology, available | reusable, case["request"], affinity, options)
    expected = {"hints": case["expect"]["hints"] or [], "assigned": case["expect"]["assigned"]}
    return expected, {"hints": [_plain(hint) for hint in hints or ()], "assigned": None if assigned is None else str(assigned)}


def check_memory(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `memory-hints`: resource to hints, empty when nothing survives."""
    nodes = [
        MemoryNode(
            id=node["id"],
            assignments=node["assignments"],
            group=NodeSet.of(node["cells"]),
            amounts={name: MemoryAmount(allocatable=amount["allocatable"], free=amount["free"]) for name, amount in node["memory"].items()},
        )
        for node in case["nodes"]
    ]
    hints = memory_hints(nodes, case["request"])
    return case["expect"]["hints"], {resource: [_plain(hint) for hint in found_hints] for resource, found_hints in hints.items()}


def _hint(raw: Mapping[str, Any]) -> Hint:
    return Hint(None if raw["nodes"] is None else NodeSet.of(raw["nodes"]), raw["preferred"])


def _plain(hint: Hint) -> dict[str, Any]:
    return {"nodes": None if hint.nodes is None else list(hint.nodes), "preferred": hint.preferred}


if __name__ == "__main__":
    sys.exit(main())
