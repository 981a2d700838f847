"""Runs the controller's engine once, in a child process that needs neither NATS nor a running
controller: for dry runs, and to explain why a pod of a cluster has no node.

The child is the controller's program: the command line loads neither the allocator nor CEL.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from topobus.formats.messages.codec import encode
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable, TopobusError

__all__ = ["ask_dry_run", "ask_snapshot"]

_ERRORS: dict[int, type[TopobusError]] = {65: ContractError, 69: PeerUnavailable, 78: ConfigError}
Progress = Callable[[str, int], None]
"""Called with the plural of a kind and how many of its objects were read."""


async def ask_dry_run(situation: Mapping[str, Any], arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run a dry run, and return its `answers` and `faults`.

    Errors: raises the child's error as the same error, or ConfigError when the controller is not
    installed here.
    """
    return await _ask("topobus.controller.dry_run.main", arguments, encode(dict(situation)), lambda *_: None)


async def ask_snapshot(arguments: Sequence[str], progress: Progress, given: object = None) -> dict[str, Any]:
    """Ask a question about a cluster, or save a snapshot of it.

    Shapes: arguments — of topobus.controller.snapshots.main; given — for its standard input; result — a
            Verdict, or what is free, or what was saved.
    Errors: as `ask_dry_run`.
    """
    return await _ask("topobus.controller.snapshots.main", arguments, encode(given), progress)


async def _ask(module: str, arguments: Sequence[str], given: bytes, progress: Progress) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(given)
    process.stdin.close()
    output, complaint = await asyncio.gather(process.stdout.read(), _followed(process.stderr, progress))
    if await process.wait() == 0:
        answers: dict[str, Any] = msgspec.json.decode(output)
        return answers
    if b"ModuleNotFoundError" in complaint:
        raise ConfigError(
            "this command needs the controller's packages, which are not installed",
            next_step="pip install '.[why]' from the checkout",
        )
    try:
        document = msgspec.json.decode(complaint.strip().splitlines()[-1])
        error = _ERRORS.get(process.returncode or 0, TopobusError)(document["error"], next_step=document["next_step"])
    except (msgspec.DecodeError, IndexError, KeyError, TypeError) as err:
        raise TopobusError(
            f"the engine ended with {process.returncode}: {complaint.decode(errors='replace')[-2000:]}"
        ) from err
    raise error


async def _followed(stream: asyncio.StreamReader, progress: Progress) -> bytes:
    """Pass on what the child says of its progress, and return all else that it writes."""
    rest = b""
    async for line in stream:
        try:
            document = msgspec.json.decode(line)
            progress(document["reading"], document["count"])
        except (msgspec.DecodeError, KeyError, TypeError):
            rest += line
    return rest
