"""Makes the files that a release has beside its wheel: lock, SBOMs, provenance and sums.

`python -m releasing.release_files DIR SBOM COMMIT`, in the sources of a commit, adds them to DIR,
which has the wheel and the licences. SBOM is that of an environment with the extra `all`, as
cyclonedx-py writes it. Equal inputs give equal bytes: no clock, no name of a machine or path.

Sources: CycloneDX 1.6; SLSA provenance 1.0 in a statement of in-toto 1.0.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topobus.cli.rules.release_check import SUMS, check_release, plain, read_lock

__all__ = ["main", "release_files"]

# Every lock of an image: those of services, and of the command line.
_NO_IMAGES = {"all", "audit", "build", "constraints", "nats", "otlp", "proto"}
_ROOT = "root-component"
_NAMESPACE = "https://topobus.dev/release"


def main(folder: str, bill: str, commit: str) -> int:
    """Write the files, or say what of the environment is not as locked."""
    present = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    locks = {f"requirements/{path.name}": path.read_bytes() for path in sorted(Path("requirements").glob("*.txt"))}
    made = release_files(present, json.loads(Path(bill).read_bytes()), locks, commit)
    for name, content in made.items():
        (Path(folder) / name).write_bytes(content)
    faults = check_release({**present, **made})
    for fault in faults:
        print(f"release: {fault.where}: got {fault.got}, wanted {fault.wanted}", file=sys.stderr)
    return 1 if faults else 0


def release_files(
    present: Mapping[str, bytes], bill: Mapping[str, Any], locks: Mapping[str, bytes], commit: str
) -> dict[str, bytes]:
    """Make each file that is not there yet.

    Shapes: present — the wheel and what else is published, by name. bill — of the environment.
    locks — every file of requirements, by path.
    """
    (wheel,) = (name for name in present if name.endswith(".whl"))
    stem, version = "-".join(wheel.split("-")[:2]), wheel.split("-")[1]
    every = _part(bill, locks["requirements/all.txt"])
    root = bill["metadata"]["component"]
    own_hash = {"alg": "SHA-256", "content": _sum(present[wheel])}
    files = {
        f"{stem}-requirements.txt": locks["requirements/all.txt"],
        f"{stem}.cdx.json": _json(_about(every, {**root, "hashes": [own_hash]})),
    }
    for image in sorted({Path(lock).stem for lock in locks} - _NO_IMAGES):
        # Its Python packages. Those of the base image are the base's to describe.
        part = _part(every, locks[f"requirements/{image}.txt"])
        part["components"].append(root)
        part["dependencies"].append({"ref": "image", "dependsOn": [_ROOT]})
        component = {"type": "container", "bom-ref": "image", "name": f"topobus/{image}", "version": version}
        files[f"{stem}-image-{image}.cdx.json"] = _json(_about(part, component))
    inputs = [{"name": name, "digest": {"sha256": _sum(content)}} for name, content in sorted(locks.items())]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": n, "digest": {"sha256": _sum(c)}} for n, c in sorted({**present, **files}.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{_NAMESPACE}/tools-release/v1",
                "externalParameters": {"version": version},
                # Dependencies and so the SBOMs are those of this one; the wheel is the same for all.
                "internalParameters": {"python": f"{sys.version_info.major}.{sys.version_info.minor}"},
                "resolvedDependencies": [{"name": "source", "digest": {"gitCommit": commit}}, *inputs],
            },
            # A person's machine: nothing but the signature of the sums says that this is true.
            "runDetails": {"builder": {"id": f"{_NAMESPACE}/by-hand"}},
        },
    }
    files[f"{stem}.provenance.json"] = _json(statement)
    files[SUMS] = "".join(f"{_sum(c)}  {n}\n" for n, c in sorted({**present, **files}.items())).encode()
    return files


def _part(bill: Mapping[str, Any], lock: bytes) -> dict[str, Any]:
    """Take the components that a lock has, with what they depend on of each other."""
    locked = read_lock(lock.decode())
    every = sorted(bill["components"], key=lambda component: str(component["bom-ref"]))
    components = [component for component in every if plain(component["name"]) in locked]
    refs = {_ROOT, *(component["bom-ref"] for component in components)}
    dependencies = [
        {"ref": each["ref"], "dependsOn": [ref for ref in each.get("dependsOn", ()) if ref in refs]}
        for each in sorted(bill["dependencies"], key=lambda each: str(each["ref"]))
        if each["ref"] in refs
    ]
    return {**bill, "components": components, "dependencies": dependencies}


def _about(bill: Mapping[str, Any], component: Mapping[str, Any]) -> dict[str, Any]:
    return {**bill, "metadata": {**bill["metadata"], "component": component}}


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
