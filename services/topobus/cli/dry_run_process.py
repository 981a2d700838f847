"""Runs the controller's engine once for a dry run, in a child process that needs neither NATS nor a
running controller.

The child is the controller's program: the command line loads neither the allocator nor CEL.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from topobus.formats.messages.codec import encode
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable, TopobusError

__all__ = ["ask_dry_run"]

_ERRORS: dict[int, type[TopobusError]] = {65: ContractError, 69: PeerUnavailable, 78: ConfigError}


async def ask_dry_run(situation: Mapping[str, Any], arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the controller's engine once, and return its `answers` and `faults`.

    Errors: raises the child's error as the same error, or ConfigError when the controller is not
    installed here.
    """
    command = (sys.executable, "-m", "topobus.controller.dry_run.main", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, complaint = await process.communicate(encode(dict(situation)))
    if process.returncode == 0:
        answers: dict[str, Any] = msgspec.json.decode(output)
        return answers
    if b"ModuleNotFoundError" in complaint:
        raise ConfigError(
            "a dry run needs the controller's packages, which are not installed",
            next_step="pip install '.[controller]' from the checkout",
        )
    try:
        document = msgspec.json.decode(complaint.strip().splitlines()[-1])
        error = _ERRORS.get(process.returncode or 0, TopobusError)(document["error"], next_step=document["next_step"])
    except (msgspec.DecodeError, IndexError, KeyError, TypeError) as err:
        raise TopobusError(
            f"the dry run ended with {process.returncode}: {complaint.decode(errors='replace')[-2000:]}"
        ) from err
    raise error
