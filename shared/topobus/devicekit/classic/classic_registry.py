"""Classic drivers of third parties, found by entry point.

A driver is a line in the group `topobus.classic_drivers`: `<name> = "<module>:<factory>"`. The
factory takes a ClassicContext and returns a ClassicDriver. One that cannot be imported or made is
skipped and reported. Two with one `name`, or one with the name of a driver of ours, are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from topobus.devicekit.classic.classic import ClassicContext, ClassicDriver
from topobus.devicekit.registry import SkippedPlugin, installed_lines
from topobus.values.dra_names import class_of_group
from topobus.values.errors import ConfigError
from topobus.values.names import is_dns_subdomain

__all__ = ["GROUP", "ClassicDrivers", "load_classic_drivers"]

GROUP = "topobus.classic_drivers"
_METHODS = ("name", "get_class_parameters", "get_claim_parameters", "unsuitable_nodes", "allocate", "deallocate")
_MAX_NAME = 63


@dataclass(frozen=True, kw_only=True)
class ClassicDrivers:
    """The drivers by name, and the plugins that could not be used."""

    drivers: tuple[ClassicDriver, ...] = ()
    skipped: tuple[SkippedPlugin, ...] = ()


def load_classic_drivers(
    context: ClassicContext, *, entry_points: Iterable[metadata.EntryPoint] | None = None
) -> ClassicDrivers:
    """Import and make all drivers.

    Errors: raises ConfigError when two have one name.
    """
    drivers: dict[str, tuple[ClassicDriver, str]] = {}
    skipped: list[SkippedPlugin] = []
    for line in installed_lines(GROUP, entry_points):
        driver, why = _make(line, context)
        if driver is None:
            skipped.append(SkippedPlugin(name=line.name, value=line.value, why=why))
            continue
        if driver.name in drivers:
            raise ConfigError(
                f"two classic drivers are named {driver.name!r}: {drivers[driver.name][1]} and {line.value}",
                next_step="uninstall one of them",
                name=driver.name,
            )
        drivers[driver.name] = (driver, line.value)
    return ClassicDrivers(drivers=tuple(drivers[name][0] for name in sorted(drivers)), skipped=tuple(skipped))


def _make(line: metadata.EntryPoint, context: ClassicContext) -> tuple[ClassicDriver | None, str]:
    try:
        driver = line.load()(context)
    except Exception as err:  # noqa: BLE001 - boundary: a vendor's module may fail in any way; its neighbours must run
        return None, f"{type(err).__name__}: {err}"
    missing = [part for part in _METHODS if not hasattr(driver, part)]
    if missing or not isinstance(driver, ClassicDriver):
        return None, f"{line.value} is no ClassicDriver: it lacks {', '.join(missing)}"
    name = str(driver.name)
    if not is_dns_subdomain(name) or len(name) > _MAX_NAME:
        return None, f"{line.value} is named {driver.name!r}: wanted a DNS name of at most {_MAX_NAME} characters"
    if class_of_group(name) is not None:
        return None, f"{line.value} is named {name!r}: drivers of topobus.dev are Topobus' own"
    return driver, ""
