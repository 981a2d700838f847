"""The nic service in a process of its own that kills itself (SIGKILL) at the n-th change of its
journal since a verb began.

    python -m support.mortal_nic attach 3

Nothing of the service is replaced: before the change is written, the process ends. What the driver
did since the previous change is done, and no record has it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from topobus.devicekit.journal import durable_file
from topobus.devicekit.verbs.attach import Attacher


def main() -> None:
    """Run the service."""
    verb, deadly = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:]
    has_begun = threading.Event()
    lock, count = threading.Lock(), [0]

    def mortal(change: Callable[..., Any]) -> Callable[..., Any]:
        def change_or_die(*words: Any, **more: Any) -> Any:
            if has_begun.is_set():
                with lock:
                    count[0] += 1
                    if count[0] == deadly:
                        os.kill(os.getpid(), signal.SIGKILL)
            return change(*words, **more)

        return change_or_die

    answer = getattr(Attacher, verb)

    async def begin(attacher: Attacher, request: Any) -> Any:
        # What is left of the life before is undone first, by another verb: it is not counted.
        has_begun.set()
        return await answer(attacher, request)

    setattr(Attacher, verb, begin)
    durable_file.write, durable_file.delete = mortal(durable_file.write), mortal(durable_file.delete)
    from topobus.nic.main import main as serve

    serve()


if __name__ == "__main__":
    main()
