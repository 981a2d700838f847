"""The event loop on which tests run (support.event_loops)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from support.event_loops import RealTimeLoop


async def _call_nobody(socket: Path) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/nobody/Asks")(b"")
    return refused.value


async def _leave_call_under_way(socket: Path) -> tuple[grpc.aio.Channel, object]:
    channel = grpc.aio.insecure_channel(f"unix:{socket}")
    call = channel.unary_unary("/nobody/Asks")(b"", wait_for_ready=True, timeout=0.01)
    # The call's own task hands it over to the library.
    await asyncio.sleep(0)
    # It never ends: garbage collection would complain of it in yet another test.
    call._invocation_task._log_destroy_pending = False
    return channel, call


def test_loop_is_told_nothing_of_the_calls_of_a_closed_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A call that outlived its test comes to its end in the next one: dropped, and no traceback in
    the next one's log.
    """
    earlier, later = RealTimeLoop(), RealTimeLoop()
    asyncio.set_event_loop(earlier)
    kept = earlier.run_until_complete(_leave_call_under_way(tmp_path / "nobody"))
    earlier.close()
    asyncio.set_event_loop(later)

    async def until_it_came() -> None:
        async with asyncio.timeout(60):
            while not earlier.late_completions:
                await _call_nobody(tmp_path / "nobody")

    try:
        later.run_until_complete(until_it_came())
    finally:
        later.close()
        asyncio.set_event_loop(None)

    assert (earlier.late_completions, later.late_completions) == (1, 0)
    assert caplog.text == ""
    assert kept


def test_loop_that_is_closed_takes_nothing_else() -> None:
    """What is not gRPC's raises as on asyncio's own loop: a thread that outlives its test is a
    defect.
    """
    loop = RealTimeLoop()
    loop.close()

    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(print)
