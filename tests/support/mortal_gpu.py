"""The whole gpu service, with NVIDIA's driver alone, in a process of its own that kills itself
(SIGKILL) at the n-th step of a verb: see `support.mortal_hands`.

    python -m support.mortal_gpu SETTINGS.json NATS-URL ORDER-FILE LOG-FILE

Steps are also the files of MPS daemons and the programs of the driver
root that are started for them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from support.mortal_hands import Death, tell_when_ready, watch_verbs
from topobus.bus.bus import Bus
from topobus.gpu.config import GpuSettings
from topobus.gpu.service import serve
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime


async def _run(settings: GpuSettings, url: str) -> None:
    async with Bus.session(NatsSettings(url=url), name="gpu") as bus:
        runtime = Runtime(
            name="gpu",
            node=settings.node,
            bus=bus,
            clock=SystemClock(),
            readiness=Readiness(),
            registry=CollectorRegistry(),
        )
        await serve(settings, runtime)


def main(arguments: list[str]) -> None:
    """Run until killed."""
    settings_file, url, order, log = arguments
    settings = msgspec.json.decode(Path(settings_file).read_bytes(), type=GpuSettings)
    roots = (settings.hardware.driver_files.root, settings.mps.state_dir, settings.journal.dir)
    death = Death(Path(order), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), roots)
    watch_verbs(death)
    tell_when_ready()
    sys.addaudithook(death.look)
    death.begin("start")
    asyncio.run(_run(settings, url))


if __name__ == "__main__":
    main(sys.argv[1:])
