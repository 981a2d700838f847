"""Console script `topobus-fpga-store`: shows a bitstream's header, adds it to a node's store, lists
and removes.

It changes only the folder of the store. Services that use the store see the change at their next
look.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from topobus.fpga.bitstreams.byte_window import ByteWindow
from topobus.fpga.bitstreams.formats import read_bitstream
from topobus.fpga.bitstreams.store import DEFAULT_STORE, BitstreamStore, StoreEntry, add_bitstream, remove_bitstream
from topobus.fpga.bitstreams.values import Bitstream
from topobus.values.outcome import Refusal

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit with 1 and a line with the reason when it fails."""
    options = _parser().parse_args(arguments)
    try:
        why = _run(options)
    except OSError as err:
        why = f"{err.filename or options.store}: {err.strerror or err}"
    if why:
        sys.exit(f"topobus-fpga-store: {why}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topobus-fpga-store", description="Keep the bitstreams that a node's FPGAs may be programmed with."
    )
    parser.add_argument("--store", default=DEFAULT_STORE, help=f"the store's folder (default: {DEFAULT_STORE})")
    verbs = parser.add_subparsers(dest="verb", required=True)
    show = verbs.add_parser("show", help="show what a file is, and change nothing")
    show.add_argument("file", type=Path)
    add = verbs.add_parser("add", help="add a file: a GBS, an .aocx or an xclbin")
    add.add_argument("file", type=Path)
    add.add_argument("--name", required=True, help="what claims call the function: small letters, digits, underscores")
    add.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="whose claims may have it; may be given again; '*': everybody's",
    )
    add.add_argument(
        "--blank",
        action="store_true",
        help="load it into regions that their last user has left; no claim can ask for it",
    )
    add.add_argument("--signer", default="", help="who vouches for it; only shown to people")
    add.add_argument("--notes", default="")
    verbs.add_parser("list", help="list what is in the store, and what cannot be used")
    remove = verbs.add_parser("remove", help="take a bitstream out; cards that have it keep it")
    remove.add_argument("digest", help="its sha256, as list shows it")
    return parser


def _run(options: argparse.Namespace) -> str:
    """Run one verb, and return why it cannot be done, or ""."""
    folder = Path(options.store)
    match options.verb:
        case "show":
            descriptor = os.open(options.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                bitstream = read_bitstream(ByteWindow.of_file(descriptor))
            finally:
                os.close(descriptor)
            if isinstance(bitstream, Refusal):
                return f"{options.file}: {bitstream.why}"
            sys.stdout.write(f"{_described(bitstream)}\n")
        case "add":
            added = add_bitstream(
                folder,
                options.file,
                name=options.name,
                namespaces=tuple(options.namespace),
                is_blank=options.blank,
                signer=options.signer,
                notes=options.notes,
            )
            if isinstance(added, Refusal):
                return f"{options.file}: {added.why}"
            sys.stdout.write(f"{_line(added)}\n")
        case "list":
            content = BitstreamStore(str(folder)).look()
            for entry in content.entries:
                sys.stdout.write(f"{_line(entry)}\n")
            return "; ".join(content.left_out)
        case _:
            if not remove_bitstream(folder, options.digest):
                return f"{folder} has no bitstream {options.digest}"
    return ""


def _described(bitstream: Bitstream) -> str:
    fits = f"interface {bitstream.interface}" if bitstream.interface else ""
    platform = f"platform {bitstream.platform}" if bitstream.platform else ""
    return ", ".join(text for text in (f"{bitstream.form} of function {bitstream.function}", fits, platform) if text)


def _line(entry: StoreEntry) -> str:
    whose = "blank" if entry.is_blank else f"for {', '.join(entry.namespaces)}"
    return f"{entry.name}  {entry.digest}  {_described(entry.bitstream)}, {whose}"


if __name__ == "__main__":
    main()
