"""The OCI hooks of an interface: `topobus-nic-hook`, which the container runtime runs, moves it
into the container and back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from topobus.values.edits import Hook

__all__ = ["interface_hooks"]

# Moving an interface takes a tenth of a second, and waiting for duplicate address detection four
# seconds more.
_TIMEOUT_S = 30


def interface_hooks(
    interface: str, parameters: list[dict[str, Any]], *, state_dir: Path | None = None
) -> tuple[Hook, ...]:
    """Make the two hooks of one interface: they run the nic service's program with the present
    interpreter.
    """
    shared = ["--interface", interface, *(["--state-dir", str(state_dir)] if state_dir is not None else [])]
    begin = (sys.executable, "-m", "topobus.nic.oci_hook")
    given = json.dumps(parameters, separators=(",", ":"), sort_keys=True)
    return (
        Hook(
            name="createRuntime",
            path=sys.executable,
            args=(*begin, "attach", *shared, "--parameters", given),
            timeout_s=_TIMEOUT_S,
        ),
        Hook(name="poststop", path=sys.executable, args=(*begin, "detach", *shared), timeout_s=_TIMEOUT_S),
    )
