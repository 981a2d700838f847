"""The three kinds of errors of an expression."""

from __future__ import annotations

__all__ = ["CompileError", "CostExceeded", "EvaluationError"]


class CompileError(Exception):
    """The expression is wrong, whatever the device. Line and column count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column


class EvaluationError(Exception):
    """The expression fails on this device.

    `&&`, `||` and the macros made of them absorb it where the other side decides.
    """


class CostExceeded(Exception):  # not an error of the expression's own: nothing absorbs it
    """The evaluation costs more than it may."""
