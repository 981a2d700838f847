"""Label selectors, and options of listings, as kubectl's users write them.

What is not understood is refused, never guessed.
"""

from __future__ import annotations

import pytest

from topobus.cli.exits import UsageError
from topobus.cli.listing.label_selector import LabelSelector
from topobus.cli.listing.list_options import ListOptions
from topobus.cli.render.listing import Column, Listing, Row

_GPU = {"class": "gpu", "numa": "0", "model": "NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(
    ("selector", "is_meant"),
    [
        ("", True),
        ("class=gpu", True),
        ("class==gpu,numa=0", True),
        ("class=nic", False),
        ("class!=nic", True),
        ("absent!=x", True),
        ("class in (nic, gpu)", True),
        ("class in (nic)", False),
        ("class notin (nic)", True),
        ("absent notin (x)", True),
        ("class notin (gpu,nic)", False),
        ("numa", True),
        ("absent", False),
        ("!absent", True),
        ("! numa", False),
        ("model=NVIDIA H100 80GB HBM3", True),
        ("class in (gpu,nic),numa=1", False),
    ],
)
def test_selector_means_what_it_means_in_kubernetes(selector: str, is_meant: bool) -> None:
    """Equality, sets and presence; what has no such label meets != and notin."""
    assert LabelSelector.read(selector).selects(_GPU) is is_meant


@pytest.mark.parametrize("selector", ["a in b", "a in (b", "a=b,", "=b", "a=b=c", "a in (b) c", "!", "a>1", ",a"])
def test_selector_that_cannot_be_read_is_refused(selector: str) -> None:
    """No selector is read as something else than was meant."""
    with pytest.raises(UsageError, match="cannot read the label selector"):
        LabelSelector.read(selector)


def _names(**options: str) -> list[str]:
    rows = [
        Row(name=str(number), cells=(f"node{number}", str(number)), document={"n": -number, "tags": [-number]})
        for number in (10, 2, 1)
    ]
    listing = Listing(columns=(Column(title="node"), Column(title="count")), rows=tuple(rows))
    return [row.name for row in ListOptions(**options).lister().chosen(listing).rows]


@pytest.mark.parametrize("sort_by", ["node", "Count"])
def test_rows_are_sorted_by_a_column_as_people_count(sort_by: str) -> None:
    """2 comes before 10; capitals of a title do not matter."""
    assert _names(sort_by=sort_by) == ["1", "2", "10"]


@pytest.mark.parametrize("sort_by", [".n", "{.n}", "{['n']}", ".tags[0]", ".tags[-1]"])
def test_rows_are_sorted_by_a_path_of_what_programs_see(sort_by: str) -> None:
    """A number is compared as a number, wherever it stands in the document."""
    assert _names(sort_by=sort_by) == ["10", "2", "1"]


@pytest.mark.parametrize("sort_by", [".absent", ".n.deeper", ".tags[5]", ".n[0]", ".tags.name"])
def test_rows_keep_their_order_when_the_path_leads_nowhere(sort_by: str) -> None:
    """What has no such value is equal to all that has none."""
    assert _names(sort_by=sort_by) == ["10", "2", "1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sort_by": "size"}, "no column 'size'"),
        ({"output": "csv"}, "no output 'csv'"),
        ({"sort_by": ".items[*]"}, "cannot read the path"),
    ],
)
def test_wrong_option_is_refused(options: dict[str, str], said: str) -> None:
    """A column or a form that is not there, or a path that is not understood, is an error with a
    next step.
    """
    with pytest.raises(UsageError, match=said):
        _names(**options)
