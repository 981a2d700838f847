"""`topobus oci` as a process, on a gateway's CDI folder."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from support.gateway_rig import Rig

__all__ = ["oci"]


async def oci(rig: Rig, *arguments: str) -> tuple[int | None, dict[str, Any], str]:
    """Run the command; exit code, document, notes."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "topobus.cli.main",
            "oci",
            *arguments,
            "--cdi-dir",
            str(rig.cdi_dir),
            "--json",
            "--nats",
            rig.url,
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )
    out, notes = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, json.loads(out) if out else {}, notes.decode()
