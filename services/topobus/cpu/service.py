"""The cpu service: the device host, run for class `cpu`."""

from __future__ import annotations

from topobus.cpu.config import CpuSettings
from topobus.devicekit.driver import HostServices
from topobus.devicekit.host.host import check_devices, serve_devices
from topobus.process.service import Runtime
from topobus.values.errors import ConfigError

__all__ = ["check", "serve"]


def check(settings: CpuSettings) -> None:
    """Refuse plugins that are not installed, invalid pools, and passthrough, which no CPU has.

    Errors: raises ConfigError that names the key.
    """
    check_devices("cpu", settings)
    if settings.passthrough.allow:
        raise ConfigError(
            "cpu: passthrough.allow: a CPU is no PCI function, so there is nothing to switch", key="passthrough.allow"
        )


async def serve(settings: CpuSettings, runtime: Runtime) -> None:
    """Serve this node's CPUs until cancelled."""
    await serve_devices(settings, runtime, "cpu", host_services=HostServices(cpus=settings.cpus))
