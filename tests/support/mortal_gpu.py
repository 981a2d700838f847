"""The whole gpu service, with NVIDIA's driver alone, in a process of its own that kills itself
(SIGKILL) at the n-th step of a verb: see `support.mortal_hands`.

    python -m support.mortal_gpu SETTINGS.json NATS-URL ORDER-FILE LOG-FILE

Steps are also the files of MPS daemons and the programs of the driver
root that are started for them.
"""

from __future__ import annotations

from support.mortal_hands import live
from topobus.gpu.config import GpuSettings
from topobus.gpu.service import serve


def _roots(settings: GpuSettings) -> tuple[str, ...]:
    return settings.hardware.driver_files.root, settings.mps.state_dir, settings.journal.dir


if __name__ == "__main__":
    live("gpu", GpuSettings, _roots, serve)
