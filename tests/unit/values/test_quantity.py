"""Quantities: exact reading and canonical writing."""

from __future__ import annotations

import pytest

from topobus.values.quantity import Quantity


@pytest.mark.parametrize(
    ("text", "units", "canonical"),
    [
        ("0", 0, "0"),
        ("1024", 1024, "1024"),
        ("1Ki", 1024, "1Ki"),
        ("1536Mi", 1536 * 2**20, "1536Mi"),
        ("1.5Gi", 3 * 2**29, "1536Mi"),
        ("0.5Ki", 512, "512"),
        ("2048Mi", 2**31, "2Gi"),
        ("2048Pi", 2**61, "2Ei"),
        ("1000m", 1, "1"),
        ("1500m", 2, "1500m"),
        ("100M", 10**8, "100M"),
        ("1000k", 10**6, "1M"),
        ("2e3", 2000, "2e3"),
        ("2E3", 2000, "2e3"),
        ("1E", 10**18, "1E"),
        ("-3Ki", -3072, "-3Ki"),
        (".5", 1, "500m"),
        ("1n", 1, "1n"),
        ("0.1n", 1, "1n"),
        ("99E", 99 * 10**18, "99E"),
        ("99Ei", 2**63 - 1, "9223372036854775807"),
        ("-99Ei", -(2**63) + 1, "-9223372036854775807"),
        ("G", 0, "0"),
        ("+.Ki", 0, "0"),
        ("00012", 12, "12"),
        (7, 7, "7"),
        (0.5, 1, "500m"),
    ],
)
def test_quantity_is_read_exactly_and_written_canonically_when_legal(
    text: str | float, units: int, canonical: str
) -> None:
    """Every notation of Kubernetes gives the exact amount, and the text that Kubernetes would
    write.
    """
    quantity = Quantity.parse(text)

    assert (quantity.units, str(quantity)) == (units, canonical)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Pi",
        "Ei",
        ".Pi",
        "e-10",
        "１Gi",
        "1e１",
        "1.５",
        "1GiB",
        "1 Gi",
        "1,5",
        "0x10",
        "1e",
        "--1",
        "nan",
        "1e999999999",
        "9" * 100,
        True,
    ],
)
def test_quantity_shows_the_text_when_it_is_none(text: str | bool) -> None:
    """What is no quantity is refused with the text, in no time."""
    with pytest.raises(ValueError, match="not a quantity"):
        Quantity.parse(text)


@pytest.mark.parametrize(
    "suffix", ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
)
@pytest.mark.parametrize("digits", ["0", "7", "-7", "+12345678901234567890"])
def test_quantity_reads_whole_numbers_as_it_reads_fractions(digits: str, suffix: str) -> None:
    """The short way for whole numbers gives what the exact arithmetic gives."""
    short, exact = Quantity.parse(f"{digits}{suffix}"), Quantity.parse(f"{digits}.{suffix}")

    assert (short.nano, short.form) == (exact.nano, exact.form)
