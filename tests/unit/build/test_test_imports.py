"""What tests share stands in `tests/support` or a conftest: no test module is a library of another
one.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
_IMPORTS = re.compile(r"\bimport\b.*\btest_|\bfrom\b.*\btest_.*\bimport\b")


def _imported_test_modules(source: str) -> list[str]:
    """List the test modules that a source imports, or imports from."""
    modules: list[str] = []
    # Few files have it in any line, and parsing all takes seconds.
    for node in ast.walk(ast.parse(source)) if _IMPORTS.search(source) else ():
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                modules += [module, *(f"{module}.{name.name}" for name in names)]
            case ast.Import(names=names):
                modules += [name.name for name in names]
            case _:
                pass
    return [module for module in modules if module.rpartition(".")[2].startswith("test_")]


def test_no_test_imports_from_a_test_module() -> None:
    """An imported test module runs a second time beside the one that pytest loads, and its fixtures
    come in by their names alone.
    """
    imports = {
        file.relative_to(TESTS).as_posix(): modules
        for file in sorted(TESTS.rglob("*.py"))
        if (modules := _imported_test_modules(file.read_text(encoding="utf-8")))
    }

    assert imports == {}


def test_imported_test_modules_are_seen_when_a_source_has_them() -> None:
    """The check sees both forms of import, and no name that only sounds alike."""
    source = (
        "from integration.test_controller import home\nimport unit.test_x\nfrom unit import test_y\nfrom testing "
        "import contest\n"
    )

    modules = _imported_test_modules(source)

    assert modules == ["integration.test_controller", "unit.test_x", "unit.test_y"]
