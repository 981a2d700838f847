"""Label selectors as the API server stores them: which labels they select.

Pure. Source: k8s.io/apimachinery/pkg/apis/meta/v1 (LabelSelectorAsSelector) and pkg/labels, 1.36:
no selector selects nothing, an empty one everything.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["LabelRequirement", "LabelSelector", "selects", "with_labels"]


class LabelRequirement(Struct, frozen=True, kw_only=True, rename="camel"):
    """One of `matchExpressions`."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class LabelSelector(Struct, frozen=True, kw_only=True, rename="camel"):
    """A selector whose requirements must all hold."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[LabelRequirement, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Say whether it selects everything."""
        return not self.match_labels and not self.match_expressions


def selects(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """Say whether a selector selects labels. An unknown operator never holds.

    >>> selects(None, {}), selects(LabelSelector(), {}), selects(LabelSelector(match_labels={"a": "1"}), {"a": "1", "b": "2"})
    (False, True, True)
    """  # noqa: E501
    return (
        selector is not None
        and all(labels.get(key) == value for key, value in selector.match_labels.items())
        and all(_holds(requirement, labels) for requirement in selector.match_expressions)
    )


def with_labels(selector: LabelSelector | None, labels: Mapping[str, str]) -> LabelSelector | None:
    """Narrow a selector to objects that have these labels as well.

    A selector that selects nothing stays so.
    """
    if selector is None or not labels:
        return selector
    more = tuple(LabelRequirement(key=key, operator="In", values=(value,)) for key, value in sorted(labels.items()))
    return LabelSelector(match_labels=selector.match_labels, match_expressions=(*selector.match_expressions, *more))


def _holds(requirement: LabelRequirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return False
