"""The opaque configuration by which a claim asks an FPGA for a function, read in the same way by
all drivers.

    apiVersion: fpga.topobus.dev/v1
    kind: FunctionParameters
    function: matrix

The last configuration that names a function counts, so a claim overrides its class. Sharing is read
by the device kit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from topobus.formats.kubernetes.classic.classic_parameters import SHARING_KIND
from topobus.formats.kubernetes.shape import did_you_mean
from topobus.fpga.bitstreams.values import normal_id
from topobus.values.outcome import Reason, Refusal

__all__ = ["FUNCTION_KIND", "FUNCTION_VERSION", "read_function"]

FUNCTION_VERSION = "fpga.topobus.dev/v1"
FUNCTION_KIND = "FunctionParameters"
_FIELDS = ("apiVersion", "kind", "function")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,26}|[0-9a-f]{32}|sha256:[0-9a-f]{64}")


def read_function(config: Sequence[Mapping[str, Any]]) -> str | Refusal:
    """Find the function that a device is wanted with, or "" when none is asked for.

    Shapes: result — a name of the store, an id of 32 hexadecimal digits, or `sha256:` and a digest.
    Errors: raises nothing; returns a Refusal that names the field when the configuration is wrong.
    >>> read_function([{"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": "matrix"}])
    'matrix'
    """
    function = ""
    reasons: list[Reason] = []
    for index, entry in enumerate(config):
        where = f"config[{index}]"
        kind = entry.get("kind")
        if kind == SHARING_KIND:
            continue
        if kind != FUNCTION_KIND:
            wanted = f"{FUNCTION_KIND} or {SHARING_KIND}{did_you_mean(str(kind), (FUNCTION_KIND, SHARING_KIND))}"
            reasons.append(_wrong(f"{where}.kind", kind, wanted))
            continue
        if entry.get("apiVersion") != FUNCTION_VERSION:
            reasons.append(_wrong(f"{where}.apiVersion", entry.get("apiVersion"), FUNCTION_VERSION))
        reasons += [
            _wrong(f"{where}.{name}", entry[name], f"no such field{did_you_mean(str(name), _FIELDS)}")
            for name in entry
            if name not in _FIELDS
        ]
        word = entry.get("function")
        function = _word(word) if isinstance(word, str) else ""
        if not function:
            wanted = (
                "a name of the node's bitstream store, 32 hexadecimal digits of an AFU id or xclbin uuid, or "
                "sha256: and a digest"
            )
            reasons.append(_wrong(f"{where}.function", word, wanted))
    return Refusal(reasons=tuple(reasons)) if reasons else function


def _word(text: str) -> str:
    """Write the name of a function as the store does, or "" for text that is no such name."""
    word = text if text.startswith("sha256:") else normal_id(text)
    return word if _WORD.fullmatch(word) else ""


def _wrong(field: str, value: object, wanted: str) -> Reason:
    text = f"{field} is {str(value)[:80]!r}, wanted {wanted}"
    return Reason(code="function-config-invalid", message=text, facts={"field": field})
