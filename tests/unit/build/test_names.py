"""Names in the code: a variable says what it holds."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# They say how many things there are, never which.
_VAGUE = frozenset({"one", "two"})
# Files from before the rule, to be renamed; a line leaves this list with its file's last such name, and none comes in.
_NOT_YET_RENAMED = frozenset(
    {
        "services/topobus/controller/allocation/bitset_allocator.py",
        "services/topobus/controller/allocation/capacity.py",
        "services/topobus/controller/allocation/constraints.py",
        "services/topobus/controller/allocation/suggestions.py",
        "services/topobus/controller/bench/drawing.py",
        "services/topobus/controller/bench/main.py",
        "services/topobus/controller/claims/extended_resources.py",
        "services/topobus/controller/claims/gated_claims.py",
        "services/topobus/controller/claims/reservations.py",
        "services/topobus/controller/claims/templates.py",
        "services/topobus/controller/classic/core/device_choice.py",
        "services/topobus/controller/classic/core/negotiation.py",
        "services/topobus/controller/classic/core/selection.py",
        "services/topobus/controller/classic/reconciler.py",
        "services/topobus/controller/conformance.py",
        "services/topobus/controller/reconcilers/schedule_pods.py",
        "services/topobus/controller/scheduling/aligned_allocation.py",
        "services/topobus/controller/scheduling/node_resources.py",
        "services/topobus/controller/scheduling/rank.py",
        "services/topobus/controller/state/cluster_objects.py",
        "services/topobus/controller/state/gated_pods_index.py",
        "services/topobus/controller/state/holdings.py",
        "services/topobus/controller/state/refusal_backoff.py",
        "services/topobus/controller/state/slice_index.py",
        "services/topobus/controller/store/api.py",
        "services/topobus/controller/store/kubernetes_api.py",
    }
)
_FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for room in ("services", "shared")
    for path in (ROOT / room / "topobus").rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)


def _vague_names(source: str) -> list[str]:
    """Give each binding of a vague name as `name at line N`: variables, parameters, functions within functions, imports, captures of `match`."""
    places: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                places.append((node.lineno, name))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ExceptHandler(name=str(name)):
                places.append((node.lineno, name))
            case ast.alias(name=name, asname=alias):
                places.append((node.lineno, alias or name))
            case _:
                pass
    return [f"{name} at line {line}" for line, name in sorted(places) if name in _VAGUE]


def test_files_have_no_vague_name_when_they_are_not_on_the_list() -> None:
    """A loop variable, local or parameter is called claim, device or node: not `one`."""
    names = {file: _vague_names((ROOT / file).read_text(encoding="utf-8")) for file in _FILES if file not in _NOT_YET_RENAMED}

    vague = {file: places for file, places in names.items() if places}

    assert vague == {}


def test_list_of_files_to_be_renamed_has_none_that_is_done_or_gone() -> None:
    """A file that was cleaned or moved away is held to the rule like all others."""
    done = [
        file
        for file in sorted(_NOT_YET_RENAMED)
        if not (ROOT / file).is_file() or not _vague_names((ROOT / file).read_text(encoding="utf-8"))
    ]

    assert done == []


def test_vague_names_finds_each_kind_of_binding_when_a_source_has_them() -> None:
    """The check sees comprehensions, lambdas, parameters, inner functions and captures of `match`, and ignores what is only read or called."""
    source = "a = [one for one in b]\nc = lambda two: two\ndef d(one): ...\ndef one(): ...\nmatch e:\n    case [1, two]: ...\nf(one=1)"

    names = _vague_names(source)

    assert names == ["one at line 1", "two at line 2", "one at line 3", "one at line 4", "two at line 6"]
