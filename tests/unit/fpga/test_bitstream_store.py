"""The store of bitstreams: what is added is found, what was changed programs nothing, and one bad
entry leaves the others alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from support.bitstream_files import FUNCTION, aocx, gbs, xclbin
from topobus.fpga.bitstreams.store import (
    BitstreamStore,
    StoreEntry,
    add_bitstream,
    load_image,
    manifest_name,
    remove_bitstream,
)
from topobus.fpga.store_command import main
from topobus.values.outcome import Refusal


def add(
    folder: Path, content: bytes, name: str = "matrix", namespaces: tuple[str, ...] = ("team-a",), **more: bool | str
) -> StoreEntry:
    """Add a file of this content."""
    source = folder.parent / f"{name}.bin"
    source.write_bytes(content)
    added = add_bitstream(folder, source, name=name, namespaces=namespaces, **more)  # type: ignore[arg-type]  # the test's own words
    assert isinstance(added, StoreEntry), added
    return added


def code(answer: object) -> str:
    """Give a refusal's code."""
    assert isinstance(answer, Refusal), answer
    return answer.reasons[0].code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store that is not there yet."""
    return tmp_path / "store"


def test_store_is_empty_when_its_folder_is_not_there(folder: Path) -> None:
    """A node without a store has no function to offer, and that is no fault."""
    content = BitstreamStore(str(folder)).look()

    assert (content.entries, content.left_out) == ((), ())


def test_store_shows_what_is_added_and_removed_while_it_is_watched(folder: Path) -> None:
    """Each look sees the folder as it is."""
    store = BitstreamStore(str(folder))
    assert store.look().entries == ()

    first = add(folder, gbs())
    assert store.look().entries == (first,)
    second = add(folder, xclbin(), "filter", ("*",))
    assert store.look().entries == (second, first)
    assert remove_bitstream(folder, first.digest)

    assert store.look().entries == (second,)
    assert sorted(path.name for path in folder.iterdir()) == sorted((second.file, manifest_name(second.digest)))


def test_store_says_nothing_new_when_the_same_file_is_added_again(folder: Path) -> None:
    """A digest is one entry; its manifest is the newest."""
    add(folder, gbs())
    again = add(folder, gbs(), namespaces=("team-b", "team-b"))

    assert BitstreamStore(str(folder)).look().entries == (again,)
    assert again.namespaces == ("team-b",)


@pytest.mark.parametrize("content", [gbs(), aocx(), xclbin()], ids=["gbs", "aocx", "xclbin"])
def test_image_is_given_when_its_hash_is_right(folder: Path, content: bytes) -> None:
    """What is hashed is what is given."""
    entry = add(folder, content)

    assert isinstance(load_image(folder, entry), bytes)


def test_image_is_refused_when_the_file_was_changed(folder: Path) -> None:
    """One other byte in the image, behind a header that is as before."""
    entry = add(folder, gbs())
    content = bytearray((folder / entry.file).read_bytes())
    content[-1] ^= 1
    (folder / entry.file).write_bytes(content)

    assert BitstreamStore(str(folder)).look().entries == (entry,)
    assert code(load_image(folder, entry)) == "bitstream-changed"


def test_image_is_refused_when_the_file_is_gone_or_a_link(folder: Path) -> None:
    """A link would lead to what nobody has added."""
    entry = add(folder, gbs())
    other = folder.parent / "other"
    (folder / entry.file).rename(other)

    assert code(load_image(folder, entry)) == "bitstream-missing"
    (folder / entry.file).symlink_to(other)
    assert code(load_image(folder, entry)) == "bitstream-missing"


def test_store_leaves_bad_entries_out_and_keeps_the_others(folder: Path) -> None:
    """Each bad one is named with its fault."""
    good = add(folder, gbs())
    lying = add(folder, xclbin(), "lying")
    (folder / manifest_name(lying.digest)).write_bytes(
        msgspec.json.encode(
            msgspec.structs.replace(lying, bitstream=msgspec.structs.replace(lying.bitstream, function=FUNCTION))
        )
    )
    (folder / "broken.json").write_text("[" * 100_000, encoding="ascii")
    (folder / "long.json").write_bytes(b" " * 100_000)
    os.mkfifo(folder / "pipe.json")
    (folder / "renamed.json").write_bytes(msgspec.json.encode(good))

    content = BitstreamStore(str(folder)).look()

    assert content.entries == (good,)
    wanted = (
        f"{lying.file} does not match its manifest",
        "broken.json",
        "long.json",
        "pipe.json",
        "wanted the one of its own name",
    )
    assert [[text for text in content.left_out if part in text] != [] for part in wanted] == [True] * len(wanted)
    assert len(content.left_out) == len(wanted)


@pytest.mark.parametrize(
    ("name", "namespaces", "message"),
    [
        ("Matrix", ("a",), "name is 'Matrix'"),
        ("m" * 28, ("a",), "small letter"),
        ("matrix", (), "namespaces is empty"),
        ("matrix", ("Team A",), "no name of a namespace"),
    ],
)
def test_add_refuses_words_that_cannot_be(
    folder: Path, tmp_path: Path, name: str, namespaces: tuple[str, ...], message: str
) -> None:
    """Nothing is written then."""
    source = tmp_path / "a.gbs"
    source.write_bytes(gbs())

    answer = add_bitstream(folder, source, name=name, namespaces=namespaces)

    assert isinstance(answer, Refusal)
    assert message in answer.reasons[0].message
    assert not folder.exists()


def test_add_refuses_a_file_when_only_its_header_is_whole(folder: Path, tmp_path: Path) -> None:
    """A cut download is refused when it is added, not when a card is to be programmed."""
    source = tmp_path / "a.gbs"
    source.write_bytes(gbs(image=b""))

    answer = add_bitstream(folder, source, name="matrix", namespaces=("*",))

    assert code(answer) == "bitstream-unreadable"


def test_command_adds_lists_and_removes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line an entry, with what a claim needs to name it."""
    source = tmp_path / "a.gbs"
    source.write_bytes(gbs())
    main(["--store", str(folder), "add", str(source), "--name", "matrix", "--namespace", "team-a"])
    line = capsys.readouterr().out
    digest = line.split()[1]

    main(["--store", str(folder), "list"])
    listed = capsys.readouterr().out
    main(["--store", str(folder), "remove", digest])
    main(["--store", str(folder), "list"])

    assert listed == line
    assert f"gbs of function {FUNCTION}" in line
    assert capsys.readouterr().out == ""


def test_command_ends_with_a_line_when_a_file_is_no_bitstream(tmp_path: Path) -> None:
    """No traceback for somebody's wrong file, nor for one that is not there."""
    source = tmp_path / "a.txt"
    source.write_text("hello", encoding="ascii")

    with pytest.raises(SystemExit) as unknown:
        main(["show", str(source)])
    with pytest.raises(SystemExit) as missing:
        main(["show", str(tmp_path / "nothing")])

    assert "no known format" in str(unknown.value)
    assert "No such file" in str(missing.value)
