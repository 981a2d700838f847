"""Options that every listing has, and the printing by them: table, wide table, YAML, JSON or names.

Rows are selected, sorted, and followed. A wrong option is refused before anything is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.listing.label_selector import LabelSelector
from topobus.cli.options import cancel_at
from topobus.cli.render.listing import Listing, Row
from topobus.cli.render.output import Output
from topobus.formats.messages.codec import to_builtins
from topobus.formats.messages.nouns import State
from topobus.sysfs.tree import natural_key
from topobus.values.names import meant_name

__all__ = ["LIST_DEFAULTS", "AllNamespaces", "ListOptions", "Lister", "Namespace", "NamespaceFilter", "Source"]

_FORMS = ("table", "wide", "yaml", "json", "name")
# A step of a path to sort by: a name, a name in quotes, or a position in a list.
_STEP = re.compile(r"""\.(?P<name>[\w-]+)|\[(?P<quote>['"])(?P<quoted>[^'"]*)(?P=quote)\]|\[(?P<index>-?\d+)\]""")
# Devices have a dozen labels, and their attributes.
_SHOWN_LABELS = 16

Namespace = Annotated[str, Parameter(name=("--namespace", "-n"), help="The namespace.")]
NamespaceFilter = Annotated[str, Parameter(name=("--namespace", "-n"), help="Only of this namespace. Default: all.")]
AllNamespaces = Annotated[bool, Parameter(name=("--all-namespaces", "-A"), help="Of all namespaces.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """What of a listing is printed, and how."""

    output: Annotated[
        str, Parameter(name=("--output", "-o"), help="How to print: table, wide, yaml, json or name.")
    ] = "table"
    selector: Annotated[
        str,
        Parameter(
            name=("--selector", "-l"),
            help="Only what has these labels: of devices such as 'class in (gpu,nic),numa=0', of objects their own.",
        ),
    ] = ""
    sort_by: Annotated[str, Parameter(help="Sort by this column, or by a path such as .metadata.name.")] = ""
    no_headers: Annotated[bool, Parameter(help="Rows alone.")] = False
    watch: Annotated[bool, Parameter(name=("--watch", "-w"), help="Then print each change, until Ctrl-C.")] = False

    def lister(self, *, is_json: bool = False) -> Lister:
        """Read the options.

        Errors: raises UsageError.
        """
        form = "json" if is_json and self.output == "table" else self.output
        if form not in _FORMS:
            raise UsageError(f"there is no output {form!r}", next_step=f"use one of {', '.join(_FORMS)}")
        if is_json and form != "json":
            raise UsageError(f"--json and --output {form} are two forms", next_step="leave one of them out")
        if self.sort_by.startswith((".", "{")):
            _read_path(self.sort_by)
        return Lister(form=form, selector=LabelSelector.read(self.selector), options=self)


LIST_DEFAULTS = ListOptions()
Source = tuple[State[Any], dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Lister:
    """Prints listings by the options."""

    form: str
    selector: LabelSelector
    options: ListOptions

    @property
    def is_text(self) -> bool:
        """Say whether the form is for people."""
        return self.form in ("table", "wide")

    def without_selector(self) -> Lister:
        """Return a lister of all rows, for a command that has selected already."""
        return replace(self, selector=LabelSelector())

    def output(self) -> Output:
        """Open the output for the form."""
        return Output(is_json=not self.is_text)

    def chosen(self, listing: Listing) -> Listing:
        """Select and sort the rows, and set the form.

        Errors: raises UsageError for an unknown column to sort by.
        """
        rows = [row for row in listing.rows if self.selector.selects(row.labels)]
        if self.options.sort_by:
            rows = sorted(rows, key=self._sort_key(listing))
        return replace(listing, rows=tuple(rows), is_wide=self.form == "wide", has_headers=not self.options.no_headers)

    def show(
        self, listings: Sequence[Listing], document: Callable[[list[Row]], Any], *, thing: str, empty: str = ""
    ) -> None:
        """Print listings. `document` makes the document for programs from the selected rows.

        Shapes: thing — what a row is, for a selector that selects none; empty — the text for an
        empty listing.
        """
        output = self.output()
        chosen = [self.chosen(listing) for listing in listings]
        rows = [row for listing in chosen for row in listing.rows]
        if self.form == "name":
            # A pod has a row for each of its devices, and one name.
            for name in dict.fromkeys(row.name for row in rows):
                print(name, flush=True)
        elif not self.is_text:
            self._show_document(output, to_builtins(document(rows)))
        elif not rows and self.selector.requirements:
            output.note(self.no_match(thing, (row.labels for listing in listings for row in listing.rows)))
        elif not rows and empty:
            output.note(empty)
        else:
            with_rows = [listing for listing in chosen if listing.rows]
            for number, listing in enumerate(with_rows):
                output.show(*([Text()] if number and listing.title and listing.has_headers else []), listing)

    def no_match(self, thing: str, labels: Iterable[Mapping[str, str]]) -> str:
        """Return that the selector selects nothing with these labels.

        A label that no row has is usually misspelt.
        """
        label_names = sorted({name for each in labels for name in each})
        strange = [
            need.key for need in self.selector.requirements if need.key not in label_names and not need.is_negated
        ]
        text = f"no {thing} matches {self.options.selector}"
        if not label_names or not strange:
            return text
        meant = meant_name(strange[0], label_names)
        shown = f"{', '.join(label_names[:_SHOWN_LABELS])}{', …' if len(label_names) > _SHOWN_LABELS else ''}"
        return f"{text}: none has a label {strange[0]}{f', did you mean {meant}?' if meant else ''}; there are {shown}"

    async def follow(
        self, bus: Bus, sources: Sequence[Source], collect: Callable[[], Awaitable[Sequence[Listing]]]
    ) -> ExitCode:
        """Print all rows, then those that changed whenever one of the sources did, until Ctrl-C or
        SIGTERM. A row that disappears is printed as gone.
        """
        cancel_at(signal.SIGTERM)
        changed = asyncio.Event()

        async def listen(state: State[Any], parts: dict[str, str]) -> None:
            async with contextlib.aclosing(bus.watch(state, **parts)) as changes:
                async for _ in changes:
                    changed.set()

        def note_connection() -> None:
            # As a note: each row is a document for programs, and changes in between are shown when
            # NATS is back.
            self.output().note(
                "NATS is back" if bus.is_connected else "NATS went away: nothing changes here until it is back"
            )

        forget = bus.on_change(note_connection)
        with contextlib.suppress(asyncio.CancelledError), contextlib.ExitStack() as stack:
            stack.callback(forget)
            async with asyncio.TaskGroup() as group:
                for state, parts in sources:
                    group.create_task(listen(state, parts))
                shown: dict[str, tuple[Any, ...]] | None = None
                while True:
                    # Cleared before the read: changes made meanwhile are read once more.
                    changed.clear()
                    shown = self._show_changes(await collect(), shown)
                    await changed.wait()
        return ExitCode.OK

    def _show_changes(
        self, listings: Sequence[Listing], shown: dict[str, tuple[Any, ...]] | None
    ) -> dict[str, tuple[Any, ...]]:
        output = self.output()
        seen: dict[str, tuple[Any, ...]] = {}
        for listing in listings:
            chosen = self.chosen(listing)
            new: list[Row] = []
            for row in chosen.rows:
                key = f"{listing.title}/{row.name}"
                # Rows of one name, such as the devices of a pod, are distinguished by their order.
                while key in seen:
                    key += "'"
                facts = (repr(to_builtins(row.document)),) if row.document is not None else tuple(map(str, row.cells))
                seen[key] = facts
                if shown is None or shown.get(key) != facts:
                    new.append(row)
            if not new:
                continue
            if self.is_text:
                output.show(
                    replace(
                        chosen,
                        rows=tuple(new),
                        totals=chosen.totals if shown is None else (),
                        has_headers=chosen.has_headers and shown is None,
                    )
                )
            else:
                for row in new:
                    self.show_row(output, row)
        for key in sorted((shown or {}).keys() - seen.keys()):
            if self.is_text:
                output.show(Text(f"{key.rpartition('/')[2].rstrip(chr(39))}  gone", "warn"))
        return seen

    def show_row(self, output: Output, row: Row) -> None:
        """Print one row of a stream for programs."""
        if self.form == "name":
            print(row.name, flush=True)
        elif self.form == "json":
            output.line(row.document)
        else:
            self._show_document(output, to_builtins(row.document), is_stream=True)

    def _show_document(self, output: Output, document: Any, *, is_stream: bool = False) -> None:
        if self.form == "yaml":
            import yaml

            print(
                ("---\n" if is_stream else "")
                + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120),
                end="",
                flush=True,
            )
        else:
            output.document(document)

    def _sort_key(self, listing: Listing) -> Callable[[Row], Any]:
        wanted = self.options.sort_by
        if wanted.startswith((".", "{")):
            steps = _read_path(wanted)
            return lambda row: [_sortable(value) for value in _found(steps, to_builtins(row.document))]
        titles = [column.title for column in listing.columns]
        if wanted.lower() not in map(str.lower, titles):
            raise UsageError(
                f"there is no column {wanted!r} to sort by",
                next_step=f"use one of {', '.join(titles)}, or a path such as .metadata.name",
            )
        place = [title.lower() for title in titles].index(wanted.lower())
        return lambda row: natural_key(row.sort_keys.get(titles[place]) or str(row.cells[place]))


def _read_path(text: str) -> list[str | int]:
    """Read a path, with or without braces.

    >>> _read_path("{.metadata.labels['app.kubernetes.io/name']}"), _read_path(".gpus[0]")
    (['metadata', 'labels', 'app.kubernetes.io/name'], ['gpus', 0])

    Errors: raises UsageError for what is not understood.
    """
    path = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    steps: list[str | int] = []
    place = 0
    while place < len(path):
        match = _STEP.match(path, place)
        if match is None:
            raise UsageError(
                f"cannot read the path {text!r} to sort by: it is not understood at {path[place:]!r}",
                next_step="write names with dots, such as .metadata.name, and places in lists, such as .items[0]",
            )
        steps.append(int(match["index"]) if match["index"] is not None else match["name"] or match["quoted"] or "")
        place = match.end()
    return steps


def _found(steps: Sequence[str | int], value: Any) -> list[Any]:
    """Return the values at a path in a document."""
    for step in steps:
        # A text has positions as well, but no values there.
        if isinstance(value, str):
            return []
        try:
            value = value[step]
        except (LookupError, TypeError):
            return []
    return [value]


def _sortable(value: Any) -> tuple[int, float, Any]:
    """Order numbers before texts, each among themselves."""
    if isinstance(value, (int, float)):
        return 0, float(value), []
    return 1, 0.0, natural_key(str(value))
