"""The reason codes of claims that ask an FPGA for a function."""

from __future__ import annotations

from topobus.formats.reasons.reason_values import ReasonGroup, ReasonSection

__all__ = ["FUNCTION_SECTION"]

FUNCTION_SECTION = ReasonSection(
    title="Functions of FPGAs",
    before="By the fpga service, when a claim asks for a function; [what becomes of the "
    "card](../how-to/fpga-functions.md#what-is-refused-and-what-becomes-of-the-card).",
    groups=(
        ReasonGroup(
            ("function-config-invalid",),
            "a claim's or class's FunctionParameters cannot be read; the message names the field",
            ("field",),
        ),
        ReasonGroup(
            ("function-unknown",),
            "an FPGA has not the function that is asked for, and the node's store has none of that name or id",
            ("device", "function"),
        ),
        ReasonGroup(
            ("function-forbidden",),
            "the function is not for claims of this namespace",
            ("device", "function", "namespace"),
        ),
        ReasonGroup(
            ("function-misfit",),
            "the function is for another interface id or shell than the region's; the message has both",
            ("device", "function"),
        ),
        ReasonGroup(
            ("function-ambiguous",),
            "several bitstreams of the store are what is asked for, and fit: ask by name or by digest",
            ("device", "function"),
        ),
        ReasonGroup(
            ("region-in-use",),
            "the region has another function, and somebody else has it: nothing is programmed under a user",
            ("device", "function"),
        ),
        ReasonGroup(
            ("programming-off", "region-not-programmable"),
            "the region has another function, and cannot be programmed: by the operator's setting, or for "
            "the reason in the message",
            ("device", "function"),
        ),
        ReasonGroup(
            ("bitstream-missing", "bitstream-changed", "bitstream-unreadable", "bitstream-refused"),
            "the store's file cannot be read, has another sha256 than when it was added, or is no bitstream; "
            "or it is not taken into the store. Nothing was programmed",
            ("digest", "function"),
        ),
        ReasonGroup(
            ("programming-failed",),
            "the card has refused the bitstream, or does not show the function; it is out of use until it is "
            "programmed or found well",
            ("device", "function", "digest"),
        ),
        ReasonGroup(
            ("port-reset-failed", "blanking-failed", "region-unreadable"),
            "an FPGA could not be cleaned after its last user; the device's health has it, and it is tried again",
            ("device", "error", "digest"),
        ),
    ),
)
