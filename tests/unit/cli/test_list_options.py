"""Label selectors and JSONPath templates as kubectl's users write them; what is not understood is refused, never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.cli.exits import UsageError
from topobus.cli.listing.json_path import JsonPath, read_path
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


_PODS = {
    "kind": "List",
    "items": [
        {"metadata": {"name": "a", "labels": {"app.kubernetes.io/name": "x"}}, "count": 1, "is": True, "tags": ["p", "q", "r"]},
        {"metadata": {"name": "b"}, "count": 3, "nothing": None},
    ],
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.kind}", "List"),
        (".kind", "List"),
        ("{$.kind}", "List"),
        ("{.items[*].metadata.name}", "a b"),
        ("{.items[0].metadata.name}", "a"),
        ("{.items[-1].metadata.name}", "b"),
        ("{.items[5].metadata.name}", ""),
        ("{.items[0].tags[1:]}", "q r"),
        ("{.items[0].tags[0:2]}", "p q"),
        ("{.items[0].metadata.labels['app.kubernetes.io/name']}", "x"),
        ("{..name}", "a b"),
        ("{.items[?(@.count>1)].metadata.name}", "b"),
        ('{.items[?(@.metadata.name=="a")].count}', "1"),
        ("{.items[?(@.tags)].metadata.name}", "a"),
        ("{.items[?(@.metadata.name<1)].metadata.name}", ""),
        ("{.items[0].is} {.items[1].nothing}", "true null"),
        ("{.items[0].tags}", '["p","q","r"]'),
        ('{range .items[*]}{.metadata.name}={.count}{"\\n"}{end}', "a=1\nb=3\n"),
        ("names: {.items[*].metadata.name}!", "names: a b!"),
        ("{.absent.deeper}", ""),
        ("{.items[0].metadata.*}", 'a {"app.kubernetes.io/name":"x"}'),
    ],
)
def test_template_gives_what_kubectl_gives(template: str, text: str) -> None:
    """The common templates of kubectl's documentation, over plain values."""
    assert JsonPath.read(template).text(_PODS) == text


@pytest.mark.parametrize(
    "template",
    [
        "{.a",
        "{.items[}",
        "{.items[0:2:1]}",
        "{range .items[*]}{.a}",
        "{end}",
        "{.items[?(@.a=~'x')]}",
        "{.a b}",
        "{}",
        "{.items[?(@.a==b)]}",
    ],
)
def test_template_that_is_not_understood_is_refused(template: str) -> None:
    """What kubectl knows and we do not, and what nobody knows, is said."""
    with pytest.raises(UsageError, match="JSONPath"):
        JsonPath.read(template)


def test_path_is_read_with_and_without_braces() -> None:
    """`--sort-by` takes all forms that kubectl takes."""
    assert [read_path(form)(_PODS["items"][1]) for form in ("{.count}", ".count", "count")] == [[3], [3], [3]]  # type: ignore[index]  # a list, as written above


def _names(**options: str) -> list[str]:
    rows = [Row(name=str(number), cells=(f"node{number}", str(number)), document={"n": -number}) for number in (10, 2, 1)]
    listing = Listing(columns=(Column(title="node"), Column(title="count")), rows=tuple(rows))
    return [row.name for row in ListOptions(**options).lister().chosen(listing).rows]


@pytest.mark.parametrize("sort_by", ["node", "Count"])
def test_rows_are_sorted_by_a_column_as_people_count(sort_by: str) -> None:
    """2 comes before 10; capitals of a title do not matter."""
    assert _names(sort_by=sort_by) == ["1", "2", "10"]


def test_rows_are_sorted_by_a_path_of_what_programs_see() -> None:
    """A number is compared as a number."""
    assert _names(sort_by=".n") == ["10", "2", "1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"sort_by": "size"}, "no column 'size'"), ({"output": "csv"}, "no output 'csv'"), ({"output": "jsonpath={.a"}, "JSONPath")],
)
def test_wrong_option_is_refused(options: dict[str, str], said: str) -> None:
    """A column, a form or a template that is not there is an error with a next step."""
    with pytest.raises(UsageError, match=said):
        _names(**options)


_ROWS = (
    Row(
        name="a",
        cells=("a",),
        document={"metadata": {"name": "a", "labels": {"app.kubernetes.io/name": "x"}}, "gpus": ["g1", "g2"], "is": True},
    ),
    Row(name="long-name", cells=("long-name",), document={"metadata": {"name": "long-name"}, "gpus": [], "is": None}),
)


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        ("NAME:.metadata.name,GPUS:.gpus[*]", ["NAME        GPUS", "a           g1,g2", "long-name   <none>"]),
        ("NAME:{.metadata.name},IS:.is", ["NAME        IS", "a           true", "long-name   <none>"]),
        ("APP:.metadata.labels['app.kubernetes.io/name']", ["APP", "x", "<none>"]),
        ("ALL:.gpus", ["ALL", '["g1","g2"]', "[]"]),
        ('A:.gpus[?(@=="g1,g2")],B:.is', ["A        B", "<none>   true", "<none>   <none>"]),
    ],
)
def test_columns_of_the_user_are_printed_as_kubectl_prints_them(columns: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Absent values are `<none>`, several are joined by commas, and nothing is cut or folded."""
    lister = ListOptions(output=f"custom-columns={columns}").lister()

    lister.show([Listing(columns=(Column(title="name"),), rows=_ROWS)], lambda rows: rows, thing="row")

    assert capsys.readouterr().out.splitlines() == lines


def test_columns_are_read_from_a_file_when_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of titles and a line of paths; without headers the rows alone are printed, sorted as asked."""
    (tmp_path / "columns").write_text("NAME   IS\n.metadata.name  .is\n")
    lister = ListOptions(output=f"custom-columns-file={tmp_path / 'columns'}", no_headers=True, sort_by=".gpus[0]").lister()

    lister.show([Listing(columns=(Column(title="name"),), rows=_ROWS)], lambda rows: rows, thing="row")

    assert capsys.readouterr().out.splitlines() == ["long-name   <none>", "a           true"]


@pytest.mark.parametrize("columns", ["", "NAME", "NAME:", ":.a", "NAME:.a,", "NAME:.a b", "NAME:.a[,B:.b"])
def test_columns_that_cannot_be_read_are_refused(columns: str) -> None:
    """A column without title or path, or with a path that is not understood, is an error."""
    with pytest.raises(UsageError, match=r"cannot read|is empty"):
        ListOptions(output=f"custom-columns={columns}").lister()


@pytest.mark.parametrize("text", ["", "NAME\n", "NAME IS\n.a\n", "A\n.a\nB\n"])
def test_columns_of_a_file_are_refused_when_titles_and_paths_do_not_match(tmp_path: Path, text: str) -> None:
    """Two lines with as many words each, or an error that says what is there."""
    (tmp_path / "columns").write_text(text)

    with pytest.raises(UsageError, match="wanted a line of titles"):
        ListOptions(output=f"custom-columns-file={tmp_path / 'columns'}").lister()
