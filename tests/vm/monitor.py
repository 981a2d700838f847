"""QEMU's monitor, from within the guest by a serial port: what hands do at a real machine.

It takes cards out, puts them in, pulls cables and breaks functions.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def _port() -> Path:
    for entry in Path("/sys/class/virtio-ports").iterdir():
        if (entry / "name").read_text().strip() == "monitor":
            return Path("/dev") / entry.name
    raise AssertionError("this machine has no port to QEMU's monitor")


class Monitor:
    """A conversation with QEMU, from first to last."""

    def __init__(self) -> None:
        # QEMU's end is open since before the guest's kernel began, so a read
        # waits until there is something.
        self._stream = _port().open("r+b", buffering=0)
        self._rest = b""
        self._gone: set[str] = set()
        self._ask("qmp_capabilities")

    def _lines(self) -> list[bytes]:
        self._rest += self._stream.read(65536) or b""
        *whole, self._rest = self._rest.split(b"\n")
        return [line for line in whole if line.strip()]

    def _ask(self, command: str, **arguments: Any) -> Any:
        self._stream.write(json.dumps({"execute": command, "arguments": arguments, "id": command}).encode() + b"\n")
        while True:
            for line in self._lines():
                answer = json.loads(line)
                # Between them come the greeting and events.
                if answer.get("event") == "DEVICE_DELETED":
                    self._gone.add(answer["data"].get("device", ""))
                if answer.get("id") == command:
                    assert "error" not in answer, f"QEMU refuses {command} {arguments}: {answer['error']['desc']}"
                    return answer["return"]

    def unplug(self, name: str) -> None:
        """Press the button of a card's slot, and wait until the kernel has let it go, which is five
        seconds later.
        """
        self._gone.discard(name)
        self._ask("device_del", id=name)
        while name not in self._gone:
            time.sleep(0.2)
            self._ask("query-status")

    def plug(self, card: str) -> None:
        """Put a card in: `igb,bus=down31,id=nic3`."""
        self._human(f"device_add {card}")

    def link(self, name: str, *, is_up: bool) -> None:
        """Pull the cable of a card's interface, or put it in."""
        self._ask("set_link", name=name, up=is_up)

    def fail(self, name: str, error: str) -> None:
        """Make a function report an error by PCIe's Advanced Error Reporting: BAD_TLP
        (correctable), COMP_TIME (non-fatal), DLP (fatal).
        """
        self._human(f"pcie_aer_inject_error {name} {error}")

    def _human(self, line: str) -> str:
        answer = str(self._ask("human-monitor-command", **{"command-line": line}))
        assert not answer.startswith("Error"), f"QEMU: {line}: {answer}"
        return answer
