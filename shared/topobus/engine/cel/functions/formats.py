"""Named formats of texts: `format.dns1123Label().validate("x")` returns what is wrong, or nothing.

Source: k8s.io/apiserver/pkg/cel/library/format.go, k8s.io/apimachinery/pkg/util/validation, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime

from topobus.engine.cel.functions.network import problem_of_url
from topobus.engine.cel.registry import Library, overload
from topobus.engine.cel.values import OptionalValue, register_kind, some

__all__ = ["FORMATS", "NAMED"]

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_OLD_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_UUID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", re.IGNORECASE)
_BASE64 = re.compile(r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{4})")
_DATE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(\.\d+)?([Zz]|[+-]\d\d:?\d\d)?", re.ASCII)

Check = Callable[[str], list[str]]


@dataclass(frozen=True)
class NamedFormat:
    """A format and its check, which lists what is wrong."""

    name: str
    check: Check


register_kind(NamedFormat, "kubernetes.NamedFormat")


def _shaped(pattern: str, limit: int, what: str, *, is_prefix: bool = False) -> Check:
    compiled = re.compile(pattern)

    def check(text: str) -> list[str]:
        # A prefix may end in a dash, for something follows it.
        seen = text[:-1] + "a" if is_prefix and len(text) > 1 and text.endswith("-") else text
        problems = [f"must be no more than {limit} bytes"] if len(seen.encode()) > limit else []
        return problems if compiled.fullmatch(seen) else [*problems, f"{what}, got {text[:64]!r}"]

    return check


def _qualified(text: str) -> list[str]:
    prefix, slash, name = text.rpartition("/")
    problems = []
    if slash and (not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", prefix) or len(prefix) > 253):
        problems.append("prefix part must be a lowercase RFC 1123 subdomain")
    if not name:
        return [*problems, "name part must be non-empty"]
    if len(name) > 63:
        problems.append("name part must be no more than 63 bytes")
    if not re.fullmatch(_NAME, name):
        problems.append(
            "name part must consist of alphanumeric characters, '-', '_' or '.', and begin and end with an "
            "alphanumeric one"
        )
    return problems


def _label_value(text: str) -> list[str]:
    problems = ["must be no more than 63 bytes"] if len(text.encode()) > 63 else []
    return (
        problems
        if re.fullmatch(rf"({_NAME})?", text)
        else [*problems, "a valid label must be empty or consist of alphanumeric characters, '-', '_' or '.'"]
    )


def _is_date(text: str) -> bool:
    try:
        return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII)) and date.fromisoformat(text) is not None
    except ValueError:
        return False


def _is_date_time(text: str) -> bool:
    match = _DATE_TIME.fullmatch(text)
    try:
        return match is not None and datetime.fromisoformat(f"{match[1]}T{match[2]}") is not None
    except ValueError:
        return False


def _uri(text: str) -> list[str]:
    problem = problem_of_url(text)
    return [problem] if problem else []


def _when(test: Callable[[str], object], message: str) -> Check:
    return lambda text: [] if test(text) else [message]


_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and begin and end "
    "with an alphanumeric one"
)
_DOMAIN_RULE = "a lowercase RFC 1123 subdomain must consist of labels joined by '.'"
_OLD_RULE = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', and begin with a letter"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"

NAMED: dict[str, NamedFormat] = {
    named_format.name: named_format
    for named_format in (
        NamedFormat("dns1123Label", _shaped(_LABEL, 63, _LABEL_RULE)),
        NamedFormat("dns1123LabelPrefix", _shaped(_LABEL, 63, _LABEL_RULE, is_prefix=True)),
        NamedFormat("dns1123Subdomain", _shaped(_DOMAIN, 253, _DOMAIN_RULE)),
        NamedFormat("dns1123SubdomainPrefix", _shaped(_DOMAIN, 253, _DOMAIN_RULE, is_prefix=True)),
        NamedFormat("dns1035Label", _shaped(_OLD_LABEL, 63, _OLD_RULE)),
        NamedFormat("dns1035LabelPrefix", _shaped(_OLD_LABEL, 63, _OLD_RULE, is_prefix=True)),
        NamedFormat("qualifiedName", _qualified),
        NamedFormat("labelValue", _label_value),
        NamedFormat("uri", _uri),
        NamedFormat("uuid", _when(_UUID.fullmatch, "does not match the UUID format")),
        NamedFormat("byte", _when(_BASE64.fullmatch, "invalid base64")),
        NamedFormat("date", _when(_is_date, "invalid date")),
        NamedFormat("datetime", _when(_is_date_time, "invalid datetime")),
    )
}


def _named(name: str) -> OptionalValue:
    named_format = NAMED.get(name)
    return some(named_format) if named_format is not None else OptionalValue()


def _validate(named_format: NamedFormat, text: str) -> OptionalValue:
    problems = named_format.check(text)
    return some(problems) if problems else OptionalValue()


FORMATS: Library = (
    overload("format.named(string) -> optional<Format>", _named),
    *(
        overload(f"format.{named_format.name}() -> Format", (lambda kept: lambda: kept)(named_format))
        for named_format in NAMED.values()
    ),
    overload("Format.validate(string) -> optional<list<string>>", _validate),
)
