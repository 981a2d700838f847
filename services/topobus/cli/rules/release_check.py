"""Decides whether the files of a release belong together: the sums, the lock, the SBOMs and the
provenance.

Contents flow in, faults flow out; nothing is read here. Whether the sums are signed is the
command's part. Formats: sha256sum(1), pip's requirements with hashes, CycloneDX 1.6, and SLSA
provenance 1.0 in a statement of in-toto.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

__all__ = ["SIGNATURE", "SUMS", "Fault", "check_release", "commit_of", "plain", "read_lock"]

SUMS = "SHA256SUMS"
SIGNATURE = f"{SUMS}.sig"

_AGAIN = "download the release again, from where its authors publish it; do not install this one"
_DEFECT = "do not install this release, and report it to its authors: its own files contradict each other"
# Two spaces, or ` *` of binary mode. A name with a slash would be looked up outside the folder.
_SUM = re.compile(r"([0-9a-f]{64}) [ *]([A-Za-z0-9][A-Za-z0-9._+-]*)")
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)( *;)?")


class Fault(Struct, frozen=True):
    """Something that does not fit."""

    code: str
    where: str
    got: str
    wanted: str
    next_step: str = _DEFECT


class _Component(Struct, frozen=True):
    name: str
    version: str = ""
    hashes: tuple[dict[str, str], ...] = ()


class _About(Struct, frozen=True):
    component: _Component


class _Bill(Struct, frozen=True):
    components: tuple[_Component, ...]
    metadata: _About


class _Artifact(Struct, frozen=True):
    digest: dict[str, str]
    name: str = ""


class _Definition(Struct, frozen=True, rename="camel"):
    resolved_dependencies: tuple[_Artifact, ...]


class _Predicate(Struct, frozen=True, rename="camel"):
    build_definition: _Definition


class _Statement(Struct, frozen=True):
    subject: tuple[_Artifact, ...]
    predicate: _Predicate


def check_release(files: Mapping[str, bytes], wheel: str = "") -> tuple[Fault, ...]:
    """Check each file by the list of sums, and once they are as listed, what they say of each other.

    Shapes: files — the content of `SHA256SUMS` and of each other file, by name. wheel — the one that
    the release must have; empty: any.
    """
    sums: dict[str, str] = {}
    faults: list[Fault] = []
    for number, line in enumerate(files[SUMS].decode(errors="replace").splitlines(), 1):
        match = _SUM.fullmatch(line)
        if match is None or match[2] in sums:
            faults.append(Fault("unreadable", f"{SUMS}, line {number}", line[:100], "a sum and a new name", _AGAIN))
        else:
            sums[match[2]] = match[1]
    for name in sorted({*sums, *files} - {SUMS, SIGNATURE}):
        got = hashlib.sha256(files[name]).hexdigest() if name in files else "no such file"
        if got != sums.get(name):
            faults.append(Fault("other-sum", name, got, sums.get(name, f"no such file, by {SUMS}"), _AGAIN))
    wheels = [name for name in sums if name.endswith(".whl")]
    stem = "-".join(wheels[0].split("-")[:2]) if wheels else ""
    if len(wheels) != 1 or wheel not in ("", *wheels):
        faults.append(Fault("other-wheel", SUMS, ", ".join(wheels) or "no wheel", wheel or "exactly one wheel", _AGAIN))
    parts = [f"{stem}{end}" for end in (".cdx.json", "-requirements.txt", ".provenance.json") if stem]
    faults += [Fault("absent-file", SUMS, f"no {name}", "it") for name in parts if name not in sums]
    if faults:
        return tuple(faults)
    return (*_check_bills(files, stem, sums[wheels[0]]), *_check_provenance(files, f"{stem}.provenance.json", sums))


def commit_of(files: Mapping[str, bytes]) -> str:
    """Give the commit that the provenance of a release without faults names; empty: none."""
    (content,) = (content for name, content in files.items() if name.endswith(".provenance.json"))
    inputs = msgspec.json.decode(content, type=_Statement).predicate.build_definition.resolved_dependencies
    return next((each.digest["gitCommit"] for each in inputs if "gitCommit" in each.digest), "")


def read_lock(text: str) -> dict[str, tuple[str, bool]]:
    r"""Read the pins of a lock: name to version, and whether it has a marker and so may be absent.

    >>> read_lock("PyYAML==6.0.3 \\\n    --hash=sha256:00\nh2==4 ; sys_platform == 'emscripten'")
    {'pyyaml': ('6.0.3', False), 'h2': ('4', True)}
    """
    return {plain(match[1]): (match[2], bool(match[3])) for match in map(_PIN.match, text.splitlines()) if match}


def plain(name: str) -> str:
    """Write a distribution's name as the index has it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_bills(files: Mapping[str, bytes], stem: str, digest: str) -> Iterator[Fault]:
    """Compare each SBOM with the lock. That of the wheel has all that is required everywhere, those
    of images a part.
    """
    lock = f"{stem}-requirements.txt"
    locked = read_lock(files[lock].decode(errors="replace"))
    for name in sorted(name for name in files if name.endswith(".cdx.json")):
        try:
            bill = msgspec.json.decode(files[name], type=_Bill)
        except msgspec.DecodeError as err:
            yield Fault("unreadable", name, str(err), "a CycloneDX SBOM as JSON")
            continue
        listed = {plain(each.name): each.version for each in bill.components if each.name != "topobus"}
        is_of_wheel = name == f"{stem}.cdx.json"
        required = {package for package, (_, may_be_absent) in locked.items() if is_of_wheel and not may_be_absent}
        for package in sorted({*listed, *required}):
            got, wanted = listed.get(package, "none"), locked.get(package, ("none", False))[0]
            if got != wanted:
                yield Fault("other-version", name, f"{package} {got}", f"{wanted}, by {lock}")
        digests = [each.get("content", "") for each in bill.metadata.component.hashes]
        if is_of_wheel and digests != [digest]:
            yield Fault("other-wheel", name, f"the sum {', '.join(digests) or 'none'}", f"{digest}, of the wheel")


def _check_provenance(files: Mapping[str, bytes], name: str, sums: Mapping[str, str]) -> Iterator[Fault]:
    """Compare the files that the provenance is about with the sums: both name the same."""
    try:
        statement = msgspec.json.decode(files[name], type=_Statement)
    except msgspec.DecodeError as err:
        yield Fault("unreadable", name, str(err), "a statement of in-toto with SLSA provenance as JSON")
        return
    subjects = {subject.name: subject.digest.get("sha256", "none") for subject in statement.subject}
    for file in sorted({*subjects, *sums} - {name}):
        got, wanted = subjects.get(file, "none"), sums.get(file, "none")
        if got != wanted:
            yield Fault("other-provenance", name, f"the sum {got} of {file}", f"{wanted}, by {SUMS}")
