"""A headless Chromium for tests, spoken to by its DevTools protocol over a pair of pipes: no port,
and no library.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["Page", "chromium_path", "open_page"]


def chromium_path() -> str:
    """Find the program; empty where none is installed."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )


class Page:
    """One tab."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 0
        self._session = ""

    async def attach(self) -> None:
        """Open a tab, and send all further commands to it."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and give its result; events in between are dropped."""
        answer = await self._answer(method, **parameters)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def _answer(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | (
            {"sessionId": self._session} if self._session else {}
        )
        self._writer.write(json.dumps(message).encode() + b"\0")
        await self._writer.drain()
        async with asyncio.timeout(60):
            while True:
                answer: dict[str, Any] = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if answer.get("id") == self._number:
                    return answer

    async def run(self, code: str) -> Any:
        """Evaluate an expression in the page; a promise is waited for."""
        result = await self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true of what the page shows.

        A form may lead to another page meanwhile.
        """
        look = f"document.body && ({condition}) ? done(true) : requestAnimationFrame(look)"
        code = f"new Promise((done) => {{ const look = () => {look}; look(); }})"
        async with asyncio.timeout(60):
            while True:
                answer = await self._answer("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
                if "error" not in answer:
                    assert "exceptionDetails" not in answer["result"], answer
                    return
                # The page that was asked is gone: the next one is asked.
                assert "navigated" in answer["error"]["message"] or "context" in answer["error"]["message"], answer

    async def key(self, name: str) -> None:
        """Press and release one key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38}
        event = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        await self.send(
            "Input.dispatchKeyEvent", type="keyDown", **event, **({"text": "\r"} if name == "Enter" else {})
        )
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    async def show(self, url: str, *, width: int = 1440, height: int = 900, scheme: str = "light") -> None:
        """Go to a page in a window of this size."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.send("Page.navigate", url=url)


@asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """Run a browser with one tab, in a profile that is gone afterwards."""
    to_child, from_parent = os.pipe()
    from_child, to_parent = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            "--disable-extensions --remote-debugging-pipe"
        )
        # The protocol's pipes are the descriptors 3 and 4.
        command = f'exec "$0" {flags} --user-data-dir="$1" 3<&{to_child} 4>&{to_parent} >/dev/null 2>&1'
        process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", command, chromium_path(), profile, pass_fds=(to_child, to_parent), start_new_session=True
        )
        os.close(to_child)
        os.close(to_parent)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**26)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_child, "rb"))
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(from_parent, "wb")
        )
        page = Page(reader, asyncio.StreamWriter(transport, protocol, None, loop))
        try:
            await page.attach()
            yield page
        finally:
            transport.close()
            process.kill()
            await process.wait()
