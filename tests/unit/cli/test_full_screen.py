"""The terminal of `topobus top`, while it is there and when it is gone."""

from __future__ import annotations

import os

from topobus.cli.top.terminal import FullScreen


def test_screen_asks_for_the_end_when_its_terminal_is_gone() -> None:
    """Neither writing nor asking for the size fails, and what was not written is not tried again
    when the stream is closed.
    """
    master, slave = os.openpty()
    keys = os.dup(slave)
    asked: list[str] = []
    with os.fdopen(slave, "w", encoding="utf-8") as out:
        screen = FullScreen(keys, out, lambda: asked.append("end"))
        screen.enter()
        before = list(asked)

        os.close(master)
        screen.write("more")
        after_write = list(asked)
        screen.size()
        screen.leave()
    os.close(keys)

    assert before == []
    assert after_write == ["end"]
    assert asked == ["end", "end"]
