"""Decides whether the licences of dependencies are among those that a release may have.

`python -m releasing.licences SBOM LOCK…` prints the licence of each package of the locks, and ends
with 1 when one is not allowed or not known. The SBOM is that of an environment with these packages,
as cyclonedx-py writes it from their metadata.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topobus.cli.rules.release_check import plain, read_lock

__all__ = ["is_allowed", "licence_of", "main"]

# Identifiers of SPDX. All let an image with Topobus be passed on; MPL-2.0 is about changes to its
# own files, of which there are none.
_ALLOWED = frozenset({"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT", "MPL-2.0", "PSF-2.0"})
# Read in the package's own LICENSE file or source, where its metadata has no identifier. With its
# version: the next one is read again.
_READ = {
    "google-re2==1.1.20251105": "BSD-3-Clause",
    "nvidia-ml-py==13.615.71": "BSD-3-Clause",
    "protobuf==7.36.2": "BSD-3-Clause",
}


def licence_of(component: Mapping[str, Any]) -> str:
    """Give the SPDX expression of a component; empty: its metadata names none, and none was read.

    >>> licence_of({"name": "h2", "version": "4", "licenses": [{"license": {"id": "MIT"}}]})
    'MIT'
    """
    entries = component.get("licenses", ())
    expressions = [entry["expression"] for entry in entries if "expression" in entry]
    expressions += sorted({each["license"]["id"] for each in entries if "id" in each.get("license", {})})
    read = _READ.get(f"{plain(component['name'])}=={component['version']}", "")
    return " AND ".join(expressions) if expressions else read


def is_allowed(expression: str) -> bool:
    """Say whether an expression of SPDX can be kept by licences of the list alone.

    Brackets and exceptions are read by no rule here, and so are refused.

    >>> is_allowed("GPL-2.0-or-later OR Apache-2.0"), is_allowed("MIT AND GPL-2.0-only"), is_allowed("")
    (True, False, False)
    """
    return any(set(choice.split(" AND ")) <= _ALLOWED for choice in expression.split(" OR "))


def main(bill: str, *locks: str) -> int:
    """Print the list, and on standard error what is not allowed."""
    components = {plain(each["name"]): each for each in json.loads(Path(bill).read_bytes())["components"]}
    pins = {name: pin for lock in locks for name, pin in read_lock(Path(lock).read_text(encoding="utf-8")).items()}
    is_refused = False
    for name, (version, may_be_absent) in sorted(pins.items()):
        component = components.get(name, {"name": name, "version": "absent"})
        if may_be_absent and name not in components:
            continue
        licence = licence_of(component) if component["version"] == version else ""
        print(f"{name} {version} {licence or 'unknown'}")
        if not is_allowed(licence):
            is_refused = True
            got = f"{licence or 'no identifier'}, of version {component['version']}"
            print(
                f"licences: {name} {version}: got {got}, wanted one of {', '.join(sorted(_ALLOWED))}", file=sys.stderr
            )
    if is_refused:
        print("licences: next: read the package's licence; tools/releasing/licences.py has the lists", file=sys.stderr)
    return 1 if is_refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
