"""The alignment that a pod or a claim requests: policy, scope and locality, as annotations or as a
claim's opaque configuration.

Grammar of a locality, in any order, each level once, blanks allowed:

    locality = wish *( "," wish )
    wish     = ( "hard" / "soft" ) ":" ( "link" / "switch" / "l3" / "numa" / "socket" )
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import Struct

from topobus.formats.kubernetes.shape import check_names, did_you_mean
from topobus.values.errors import ContractError
from topobus.values.request import Locality, LocalityLevel, Policy, Scope

__all__ = [
    "LOCALITY_ANNOTATION",
    "PARAMETERS_KIND",
    "PARAMETERS_VERSION",
    "POLICY_ANNOTATION",
    "RESULT_KIND",
    "SCOPE_ANNOTATION",
    "AlignmentParameters",
    "AlignmentRequest",
    "read_annotations",
    "read_locality",
    "read_parameters",
]

POLICY_ANNOTATION = "topobus.dev/policy"
SCOPE_ANNOTATION = "topobus.dev/scope"
LOCALITY_ANNOTATION = "topobus.dev/locality"
PARAMETERS_VERSION = "topobus.dev/v1"
PARAMETERS_KIND = "AlignmentParameters"
RESULT_KIND = "AlignmentResult"
"""The kind of the parameters that give an allocation's place (`numaNodes`, `pcieRoots`,
`pcieSwitches`) to the node's prepare."""

_PREFIX = "topobus.dev/"
_ANNOTATIONS = (POLICY_ANNOTATION, SCOPE_ANNOTATION, LOCALITY_ANNOTATION)
_STRENGTHS = ("hard", "soft")
_EXAMPLE = "write it as hard:switch or soft:numa, several with commas"

C = TypeVar("C", bound=StrEnum)


class AlignmentRequest(Struct, frozen=True, kw_only=True):
    """The alignment that was requested. The node decides whatever was not."""

    policy: Policy | None = None
    scope: Scope | None = None
    locality: tuple[Locality, ...] = ()


class AlignmentParameters(Struct, frozen=True, kw_only=True, rename="camel"):
    """The same in a claim: `config[].opaque.parameters` for driver `topobus.dev`, with apiVersion and
    kind as above.
    """

    api_version: str
    kind: str
    policy: str | None = None
    scope: str | None = None
    locality: str | None = None


def read_annotations(annotations: Mapping[str, Any], where: str) -> AlignmentRequest:
    """Read a pod's annotations, ignoring those of other programs.

    Errors: raises ContractError that names the annotation, its value and the legal values. Also for
            a misspelt annotation of ours.
    """
    for key in annotations:
        if key.startswith(_PREFIX) and key not in _ANNOTATIONS and did_you_mean(key, _ANNOTATIONS):
            raise ContractError(f"{where}: metadata.annotations: {key} is unknown{did_you_mean(key, _ANNOTATIONS)}")
    place = f"{where}: metadata.annotations: "
    return _read(
        {key.removeprefix(_PREFIX): annotations[key] for key in _ANNOTATIONS if key in annotations}, f"{place}{_PREFIX}"
    )


def read_parameters(parameters: Mapping[str, Any], where: str) -> AlignmentRequest:
    """Read a claim's opaque parameters of kind AlignmentParameters.

    >>> read_parameters({"apiVersion": "topobus.dev/v1", "kind": "AlignmentParameters", "locality": "hard:numa"}, "claim c").locality[0].level.value
    'numa'

    Errors: raises ContractError that names the field, also for another kind or
    version and for an unknown field.
    """  # noqa: E501
    for key, wanted in (("apiVersion", PARAMETERS_VERSION), ("kind", PARAMETERS_KIND)):
        if parameters.get(key) != wanted:
            raise ContractError(f"{where}: parameters.{key} is {parameters.get(key)!r}, wanted {wanted!r}")
    problems: list[Any] = []
    check_names(parameters, AlignmentParameters, "parameters", {}, problems)
    if problems:
        raise ContractError(f"{where}: {'; '.join(str(problem) for problem in problems)}")
    asked = {key: parameters[key] for key in ("policy", "scope", "locality") if parameters.get(key) is not None}
    return _read(asked, f"{where}: parameters.")


def read_locality(text: str, where: str) -> tuple[Locality, ...]:
    """Read a locality by the grammar above.

    Errors: raises ContractError that quotes the text and names what was wanted.

    >>> [str(wish) for wish in read_locality("hard:numa, soft:switch", "topobus.dev/locality")]
    ['hard:numa', 'soft:switch']
    """
    localities: list[Locality] = []
    levels = [locality_level.value for locality_level in LocalityLevel]
    for wish in text.split(","):
        strength, colon, level = (part.strip() for part in wish.partition(":"))
        if not colon and strength in levels:
            raise ContractError(
                f'{where} is {text!r}: {strength!r} lacks its strength, did you mean "hard:{strength}"?',
                next_step=_EXAMPLE,
            )
        if not colon or strength not in _STRENGTHS:
            meant = did_you_mean(strength, _STRENGTHS)
            raise ContractError(
                f"{where} is {text!r}: {wish.strip()!r} begins with {strength!r}, wanted hard: or soft:{meant}",
                next_step=_EXAMPLE,
            )
        if level not in levels:
            meant = did_you_mean(level, levels)
            raise ContractError(
                f"{where} is {text!r}: {level!r} is no level, wanted one of {', '.join(levels)}{meant}",
                next_step=_EXAMPLE,
            )
        if any(locality.level.value == level for locality in localities):
            raise ContractError(
                f"{where} is {text!r}: {level!r} is there twice, wanted each level once", next_step=_EXAMPLE
            )
        localities.append(Locality(level=LocalityLevel(level), is_hard=strength == "hard"))
    return tuple(localities)


def _read(asked: Mapping[str, Any], where: str) -> AlignmentRequest:
    for key, value in asked.items():
        if not isinstance(value, str):
            raise ContractError(f"{where}{key} is {value!r}, wanted text")
    return AlignmentRequest(
        policy=_choice(asked.get("policy"), Policy, f"{where}policy"),
        scope=_choice(asked.get("scope"), Scope, f"{where}scope"),
        locality=read_locality(asked["locality"], f"{where}locality") if "locality" in asked else (),
    )


def _choice(written: str | None, options: type[C], where: str) -> C | None:
    if written is None:
        return None
    legal = [option.value for option in options]
    if written not in legal:
        raise ContractError(
            f"{where} is {written!r}{did_you_mean(written, legal)}", next_step=f"use one of {', '.join(legal)}"
        )
    return options(written)
