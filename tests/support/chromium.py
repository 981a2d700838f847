"""A headless Chromium for tests, spoken to by its DevTools protocol over a pair of pipes: no port,
and no library.

One browser serves the tests of a file; each has a tab with cookies and storage of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

__all__ = ["Browser", "Page", "chromium_path", "open_browser", "open_page"]


def chromium_path() -> str:
    """Find the program; empty where none is installed."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )


class Browser:
    """Its ends of the two pipes, which outlive the event loop of a test."""

    def __init__(self, answers: int, commands: int) -> None:
        self._answers = answers
        self._commands = commands
        self._received = b""
        self._numbers = itertools.count(1)

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one command and give its answer; events in between are dropped."""
        number = next(self._numbers)
        os.write(self._commands, json.dumps({"id": number, **message}).encode() + b"\0")
        async with asyncio.timeout(60):
            while True:
                answer: dict[str, Any] = json.loads(await self._next())
                if answer.get("id") == number:
                    return answer

    async def _next(self) -> bytes:
        while b"\0" not in self._received:
            is_readable = asyncio.Event()
            asyncio.get_running_loop().add_reader(self._answers, is_readable.set)
            try:
                await is_readable.wait()
            finally:
                asyncio.get_running_loop().remove_reader(self._answers)
            received = os.read(self._answers, 1 << 20)
            assert received, "the browser ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return message


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and give its result."""
        return _result(await self._answer(method, **parameters))

    async def _answer(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.ask({"method": method, "params": parameters, "sessionId": self._session})

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


def _result(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer
    return dict(answer["result"])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Run a browser in a profile that is gone afterwards."""
    to_child, commands = os.pipe()
    answers, to_parent = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            "--disable-extensions --remote-debugging-pipe"
        )
        # The protocol's pipes are the descriptors 3 and 4.
        command = f'exec "$0" {flags} --user-data-dir="$1" 3<&{to_child} 4>&{to_parent} >/dev/null 2>&1'
        process = subprocess.Popen(
            ["/bin/bash", "-c", command, chromium_path(), profile],
            pass_fds=(to_child, to_parent),
            start_new_session=True,
        )
        os.close(to_child)
        os.close(to_parent)
        try:
            yield Browser(answers, commands)
        finally:
            process.kill()
            process.wait()
            os.close(answers)
            os.close(commands)


@asynccontextmanager
async def open_page(browser: Browser) -> AsyncIterator[Page]:
    """Open a tab that shares nothing with others, and close it at the end."""

    async def send(method: str, **parameters: Any) -> dict[str, Any]:
        return _result(await browser.ask({"method": method, "params": parameters}))

    context = (await send("Target.createBrowserContext"))["browserContextId"]
    try:
        target = (await send("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        yield Page(browser, (await send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"])
    finally:
        await send("Target.disposeBrowserContext", browserContextId=context)
