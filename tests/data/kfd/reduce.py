"""Reduces a captured KFD topology to what `topobus.sysfs.kfd` reads of it: `reduce.py
TOPOLOGY-FOLDER > NAME.json`.

Shapes: result — by node: the properties that we read, `memory` as "heap_type size_in_bytes" a bank,
`links` as "type max_bandwidth" to the list of nodes that they lead to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_PROPERTIES = (
    "simd_count",
    "simd_per_cu",
    "gfx_target_version",
    "vendor_id",
    "location_id",
    "domain",
    "drm_render_minor",
    "unique_id",
    "num_xcc",
)


def reduce_topology(folder: Path) -> dict[str, dict[str, object]]:
    """Read all nodes of a topology."""
    nodes: dict[str, dict[str, object]] = {}
    for node in sorted((folder / "nodes").iterdir(), key=lambda path: int(path.name)):
        facts = _read(node / "properties")
        links: dict[str, list[int]] = {}
        for link in node.glob("io_links/*/properties"):
            link_facts = _read(link)
            links.setdefault(f"{link_facts['type']} {link_facts['max_bandwidth']}", []).append(
                int(link_facts["node_to"])
            )
        banks = [_read(bank) for bank in sorted(node.glob("mem_banks/*/properties"))]
        nodes[node.name] = {
            "properties": {name: int(facts[name]) for name in _PROPERTIES if name in facts},
            "memory": [f"{bank['heap_type']} {bank['size_in_bytes']}" for bank in banks],
            "links": {kind: sorted(peers) for kind, peers in sorted(links.items())},
        }
    return nodes


def _read(path: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)


if __name__ == "__main__":
    lines = (
        f'"{number}": {json.dumps(node, separators=(",", ":"))}'
        for number, node in reduce_topology(Path(sys.argv[1])).items()
    )
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
