"""How a container's loader finds the driver: facts of libraries, glibc's cache, a container's root
from outside, and the hook that joins them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.driver_roots import library, require_compiler
from topobus.gpu.driver_root import oci_hook
from topobus.gpu.driver_root.container_root import ContainerRoot
from topobus.gpu.driver_root.elf import X86_64, Elf, read_elf
from topobus.gpu.driver_root.loader_cache import Entry, LoaderCache, extend, parse, render

_X86 = 0x0303
_NOTE = '"{\\"Format\\":1,\\"CUDA Version\\":\\"13.1\\",\\"Driver\\":[535,580],\\"Device\\":[1]}"'


def _read(data: bytes) -> Elf | None:
    return read_elf(lambda offset, size: data[offset : offset + size])


def test_facts_of_a_library_are_those_that_readelf_tells(tmp_path: Path) -> None:
    """SONAME, machine and NVIDIA's note of a library that a compiler made."""
    require_compiler()
    data = library(tmp_path / "libcuda.so.590.44.01", "libcuda.so.1", _NOTE).read_bytes()

    assert _read(data) == Elf(machine=X86_64, soname="libcuda.so.1", serves_drivers=(535, 580))
    assert _read(library(tmp_path / "libnone.so").read_bytes()) == Elf(machine=X86_64)


def test_facts_are_read_or_there_are_none_when_a_library_is_cut_or_changed(tmp_path: Path) -> None:
    """Whatever an image has under a library's name: facts or nothing, no error and no endless
    reading.
    """
    require_compiler()
    data = library(tmp_path / "libcuda.so.590.44.01", "libcuda.so.1", _NOTE).read_bytes()

    for length in range(0, len(data), 97):
        assert _read(data[:length]) is None or length >= 64
    for at in range(900):
        for value in (0x00, 0x7F, 0xFF):
            changed = bytearray(data)
            changed[at] = value
            facts = _read(bytes(changed))
            assert facts is None or "/" not in facts.soname


@given(st.binary(max_size=400))
def test_nothing_is_read_of_what_is_no_library(data: bytes) -> None:
    """Random bytes, also behind an ELF's first ones, raise nothing."""
    _read(data)
    _read(b"\x7fELF\x02\x01" + data)


_NAMES = st.from_regex(rb"\Alib[a-z0-9+_-]{1,12}\.so(\.[0-9]{1,3}){0,3}\Z")


@given(
    st.lists(st.tuples(_NAMES, _NAMES), max_size=40),
    st.lists(st.sampled_from([b"x86-64-v2", b"x86-64-v3"]), max_size=2, unique=True),
)
def test_cache_is_read_as_it_was_written(pairs: list[tuple[bytes, bytes]], hwcaps: list[bytes]) -> None:
    """Every entry comes back, those of one name in their order, and processor levels with their
    numbers.
    """
    entries = tuple(
        Entry(_X86, soname, b"/lib/" + path, 0, (1 << 62) + index if hwcaps else 0)
        for index, (soname, path) in enumerate(pairs)
    )

    cache = parse(render(LoaderCache(entries, tuple(hwcaps))))

    assert cache is not None
    assert cache.hwcaps == tuple(hwcaps)
    assert sorted(cache.entries, key=repr) == sorted(entries, key=repr)
    for name in {entry.soname for entry in entries}:
        assert [entry for entry in cache.entries if entry.soname == name] == [
            entry for entry in entries if entry.soname == name
        ]


@given(st.binary(max_size=300))
def test_cache_of_no_known_form_is_none(data: bytes) -> None:
    """What an image has under that name raises nothing, whatever it is."""
    parse(data)
    parse(b"glibc-ld.so.cache1.1" + data)


def test_cache_is_refused_when_an_entry_s_text_is_longer_than_any_path() -> None:
    """An image's cache of many entries with one text of megabytes costs nobody the memory."""
    good = LoaderCache((Entry(_X86, b"liba.so", b"/" + b"a" * 4000),))
    long = LoaderCache((Entry(_X86, b"liba.so", b"/" + b"a" * 5000),))

    assert parse(render(good)) == good
    assert parse(render(long)) is None


def test_ldconfig_reads_the_extended_cache_as_the_one_before(tmp_path: Path) -> None:
    """Glibc's own program lists all that the host's cache had, in its order, and what was added
    once, in place of another one of its name.
    """
    program = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin")
    if program is None or not Path("/etc/ld.so.cache").exists():
        pytest.skip("NOT TESTED: this machine has no ldconfig, so that no other reader of the cache was asked")

    def listed(file: Path) -> list[str]:
        text = subprocess.run([program, "-p", "-C", str(file)], capture_output=True, text=True, check=True).stdout
        return [line.strip() for line in text.splitlines() if "=>" in line]

    before = parse(Path("/etc/ld.so.cache").read_bytes())
    assert before is not None
    taken = next(entry for entry in before.entries if entry.flags == _X86)
    after = extend(before, {taken.soname.decode(): "/opt/x/a.so", "libcuda.so.999": "/opt/x/b.so"}, X86_64)
    assert after is not None
    (tmp_path / "cache").write_bytes(render(after))

    lines = listed(tmp_path / "cache")

    ours = [line for line in lines if "/opt/x/" in line]
    assert sorted(line.partition(" ")[0] for line in ours) == sorted(["libcuda.so.999", taken.soname.decode()])
    others = [
        line
        for line in listed(Path("/etc/ld.so.cache"))
        if not line.startswith(f"{taken.soname.decode()} ") or "x86-64" not in line
    ]
    assert [line for line in lines if "/opt/x/" not in line] == others


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A container's root beside files of the host."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host/secret").write_bytes(b"secret")
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/secret").write_bytes(b"own")
    return tmp_path / "root"


@pytest.mark.parametrize("target", ["../../../../host/secret", "/secret", "../../../secret", "/proc/self/root/secret"])
def test_read_stays_in_the_root_when_a_link_leads_out(root: Path, target: str) -> None:
    """Links mean the container's root, as they do for its programs.

    What is not there is not found outside.
    """
    (root / "etc/link").symlink_to(target)
    (root / "host").symlink_to("/host")

    with ContainerRoot(str(root)) as container:
        if target in ("/secret", "../../../secret"):
            assert container.read("/etc/link", 10) == b"own"
        else:
            with pytest.raises(OSError, match=r"."):
                container.read("/etc/link", 10)


def test_read_of_the_host_s_file_is_refused_when_the_image_s_proc_is_a_link(root: Path) -> None:
    """A magic link's text is followed from the container's root, never by the kernel."""
    (root / "etc/proc").symlink_to(f"/proc/{os.getpid()}/root")

    with ContainerRoot(str(root)) as container:
        assert not container.exists("/etc/proc/etc/passwd")


def test_write_replaces_a_link_and_not_what_it_leads_to(root: Path, tmp_path: Path) -> None:
    """An image whose cache is a link to a file of the host does not get that file written."""
    outside = tmp_path / "host/secret"
    (root / "etc/ld.so.cache").symlink_to(outside)

    with ContainerRoot(str(root)) as container:
        container.write("/etc", "ld.so.cache", b"new")

    assert outside.read_bytes() == b"secret"
    assert not (root / "etc/ld.so.cache").is_symlink()
    assert (root / "etc/ld.so.cache").read_bytes() == b"new"


def test_write_goes_into_the_root_when_the_folder_is_a_link(root: Path, tmp_path: Path) -> None:
    """`/etc` that leads to the host's folder means one of the container's own name."""
    (root / "etc").rmdir()
    (root / "etc").symlink_to(tmp_path / "host")

    with ContainerRoot(str(root)) as container, pytest.raises(OSError, match=r"."):
        container.write("/etc", "secret", b"new")

    assert (tmp_path / "host/secret").read_bytes() == b"secret"


def test_pipe_in_a_file_s_place_makes_nobody_wait(root: Path) -> None:
    """What is no regular file is not read."""
    os.mkfifo(root / "etc/ld.so.cache")

    with ContainerRoot(str(root)) as container, pytest.raises(OSError, match="no regular file"):
        container.read("/etc/ld.so.cache", 10)


def _loader(root: Path, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"")


def test_hook_writes_musls_path_file_when_the_image_has_musls_loader(root: Path) -> None:
    """Musl has no cache: its path file gets the folder after those where it looks anyway, and once
    only.
    """
    require_compiler()
    library(root / "opt/driver/libcuda.so.1", "libcuda.so.1")
    _loader(root, "lib/ld-musl-x86_64.so.1")

    for _ in range(2):
        oci_hook.update_loader(str(root), "/opt/driver", "580.95.05")

    assert (root / "etc/ld-musl-x86_64.path").read_text() == "/lib:/usr/local/lib:/usr/lib:/opt/driver\n"
    assert not (root / "etc/ld.so.cache").exists()


def test_hook_keeps_musls_path_file_when_the_image_has_one(root: Path) -> None:
    """What the image's own file says comes first."""
    require_compiler()
    library(root / "opt/driver/libcuda.so.1", "libcuda.so.1")
    _loader(root, "lib/ld-musl-x86_64.so.1")
    (root / "etc/ld-musl-x86_64.path").write_text("/lib\n/opt/app\n")

    oci_hook.update_loader(str(root), "/opt/driver", "580.95.05")

    assert (root / "etc/ld-musl-x86_64.path").read_text() == "/lib\n/opt/app:/opt/driver\n"


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/opt/none", "no libraries"),
        ("opt/driver", "--folder"),
        ("/opt/../etc", "--folder"),
        ("/opt/a b", "--folder"),
        ("/opt/a:b", "--folder"),
    ],
)
def test_hook_says_why_when_its_folder_is_none(root: Path, folder: str, message: str) -> None:
    """A container without what it was promised does not start, and the words name what is wrong."""
    with pytest.raises(oci_hook.HookError, match=message):
        oci_hook.update_loader(str(root), folder, "580.95.05")


def _state(tmp_path: Path, config: object, bundle: str = "") -> bytes:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return json.dumps({"ociVersion": "1.0.2", "id": "c", "bundle": bundle or str(tmp_path)}).encode()


class _Standard:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize(
    ("state", "config"),
    [
        pytest.param(b"", {}, id="no state"),
        pytest.param(b"[]", {}, id="no object"),
        pytest.param(None, {}, id="no root"),
        pytest.param(None, {"root": {"path": 7}}, id="no text"),
        pytest.param(None, {"root": {"path": "/"}}, id="the host's root"),
        pytest.param(None, {"root": {"path": "none"}}, id="no folder"),
    ],
)
def test_hook_ends_with_one_line_when_the_state_is_not_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: bytes | None, config: object
) -> None:
    """A runtime shows it as it is, so it is a sentence and no traceback."""
    monkeypatch.setattr("sys.stdin", _Standard(_state(tmp_path, config) if state is None else state))

    with pytest.raises(SystemExit) as ended:
        oci_hook.main(["--folder", "/opt/driver", "--driver-version", "580.95.05"])

    assert str(ended.value.code).startswith("topobus-gpu-hook: ")
    assert "\n" not in str(ended.value.code)
