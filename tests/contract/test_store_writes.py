"""Everything that the controller writes goes through `controller/store`: past it, a write would
miss the revision, the copy, or both.
"""

from __future__ import annotations

import ast
from pathlib import Path

CONTROLLER = Path(__file__).parents[2] / "services" / "topobus" / "controller"
# The benchmark plays the user and the nodes as well; what removes the keys of a node that is gone
# removes all kinds of keys, each at the revision that was read. The document of repairs is no object
# of the store: one key, written over the revision that was read.
OUTSIDE = ("store", "bench", "node_removal.py", "repairs.py")
WRITES_OF_THE_BUS = {"put", "delete", "compare_and_set", "compare_and_delete"}
WRITES_OF_THE_API = {"create", "patch", "delete"}


def writes_past_the_store(source: str) -> list[int]:
    """List the lines that write a state of the bus, or ask an API server for a change."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        is_bus = owner.endswith("bus") and node.func.attr in WRITES_OF_THE_BUS
        is_api = owner.endswith("api") and node.func.attr in WRITES_OF_THE_API
        if is_bus or is_api or node.func.attr in ("compare_and_set", "compare_and_delete"):
            lines.append(node.lineno)
    return lines


def test_controller_writes_objects_by_its_store_only() -> None:
    """No module beside `store` writes to the bus's states or to an API server."""
    writes = {
        str(path.relative_to(CONTROLLER)): lines
        for path in sorted(CONTROLLER.rglob("*.py"))
        if path.relative_to(CONTROLLER).parts[0] not in OUTSIDE and (lines := writes_past_the_store(path.read_text()))
    }

    assert writes == {}


def test_check_finds_a_write_when_one_goes_past_the_store() -> None:
    """The check itself sees each kind of write, whatever the bus is called."""
    source = """
await self._bus.put(catalogue.OBJECT, value, kind="pod")
await runtime.bus.delete(catalogue.OBJECT, kind="pod")
await other.compare_and_set(catalogue.OBJECT, value, 1)
await self._api.create(PODS, pod)
await self._store.put(key, 1, value)
"""

    assert writes_past_the_store(source) == [2, 3, 4, 5]
