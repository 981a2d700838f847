"""How deep an expression may be: 250 levels as in Kubernetes, whatever Python's own limit is, and
deeper ones are refused at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from topobus.engine.cel.depth import room
from topobus.engine.cel.seam import DeviceFacts, SelectorError
from topobus.engine.cel.selector import CelSelector, compile_expression

DEVICE = DeviceFacts("d.io", {"d.io": {"n": 1}}, {})

# Each form with the deepest that Kubernetes 1.36.2 takes (asked of its own compiler).
FORMS: dict[str, tuple[Callable[[int], str], int]] = {
    "sum": (lambda n: "+".join(["1"] * n) + " > 0", 250),
    "product": (lambda n: "*".join(["1"] * n) + " > 0", 250),
    "comparisons": (lambda n: "1 == 1" + " == true" * n, 249),
    "parentheses": (lambda n: "(" * n + "true" + ")" * n, 249),
    "negations": (lambda n: "!(" * n + "false" + ")" * n, 249),
    "calls": (lambda n: "dyn(" * n + "true" + ")" * n, 249),
    "lists": (lambda n: "size(" + "[" * n + "]" * n + ") >= 0", 249),
    "indices": (lambda n: "{true: true}[" * n + "true" + "]" * n, 249),
    "choices": (lambda n: "true ? true : " * n + "true", 249),
    "compared-parentheses": (lambda n: "true == (" * n + "true" + ")" * n, 124),
    "macros": (lambda n: "[1].all(x, " * n + "true" + ")" * n, 249),
    "lists-of-lists": (lambda n: "[1].map(x, " * n + "x" + ")" * n + ".size() == 1", 248),
    "bindings": (lambda n: "cel.bind(a, true, " * n + "a" + ")" * n, 249),
    "chained-macros": (lambda n: "[1]" + ".map(x, x)" * n + ".size() == 1", 248),
}


@pytest.mark.parametrize(("form", "deepest"), FORMS.values(), ids=FORMS)
def test_expression_is_evaluated_when_it_is_as_deep_as_kubernetes_takes(
    form: Callable[[int], str], deepest: int
) -> None:
    """The deepest that an API server takes compiles and is evaluated.

    One level more is refused for its depth.
    """
    selector = compile_expression(form(deepest))
    deeper = compile_expression(form(deepest + 1))

    assert isinstance(selector, CelSelector), selector
    assert selector.matches(DEVICE) is True
    assert isinstance(deeper, SelectorError)
    assert "nests deeper than 250 levels" in deeper.message


def test_logic_may_have_as_many_terms_as_the_text_holds() -> None:
    """A chain of `&&` is one level."""
    selector = compile_expression(" && ".join(["true"] * 1200))

    assert isinstance(selector, CelSelector)
    assert selector.matches(DEVICE) is True


@pytest.mark.parametrize(
    "piece", ["(", "[", "{1:", "!(", "-(", "dyn(", "a.b(", "a[", "true?true:", "1+", "1==", "a.", "{", "a.?b[?"]
)
def test_expression_is_refused_when_it_is_nothing_but_depth(piece: str) -> None:
    """10 KiB of openings are told as an error of the expression, not as one of ours."""
    selector = compile_expression(piece * (10_000 // len(piece)))

    assert isinstance(selector, SelectorError)


def test_deep_expression_leaves_the_limit_of_the_interpreter_as_it_was() -> None:
    """Other code relies on Python's limit of nested calls: it is back after compiling, evaluating
    and failing.
    """
    before = sys.getrecursionlimit()

    selector = compile_expression(FORMS["macros"][0](249))
    assert isinstance(selector, CelSelector)
    selector.matches(DEVICE)
    compile_expression("(" * 5000)

    assert sys.getrecursionlimit() == before


def test_room_is_kept_while_another_thread_still_needs_it() -> None:
    """The limit falls back when the last one has left, not the first."""
    before = sys.getrecursionlimit()
    is_in, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with room():
            is_in.set()
            may_leave.wait(30)

    thread = threading.Thread(target=stay)
    thread.start()
    is_in.wait(30)
    with room():
        pass
    during = sys.getrecursionlimit()
    may_leave.set()
    thread.join()

    assert during > before
    assert sys.getrecursionlimit() == before
