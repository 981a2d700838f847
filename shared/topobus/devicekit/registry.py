"""Finds the vendor plugins of one class by entry point.

A plugin is a line in the group `topobus.drivers`: `<name> = "<module>:<driver class>"`. One that
cannot be imported is skipped and reported. Two with the same name are refused, because a setting
could not name one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata

from topobus.devicekit.driver import DeviceDriver, missing_verbs
from topobus.devicekit.settings import DriverSettings
from topobus.formats.messages.device_classes import DEVICE_SERVICES, class_complaint
from topobus.values.errors import ConfigError
from topobus.values.names import is_dns_label

__all__ = [
    "GROUP",
    "DriverRegistry",
    "IgnoredDriver",
    "SkippedPlugin",
    "installed_lines",
    "load_drivers",
    "unserved_drivers",
]

GROUP = "topobus.drivers"


@dataclass(frozen=True, kw_only=True)
class SkippedPlugin:
    """A plugin that does not run: its entry point and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class IgnoredDriver:
    """A driver that none of our own services runs: its class is a third party's, or no class name
    at all.
    """

    name: str
    device_class: str
    why: str
    """The service that runs it, or why none can."""
    is_served_elsewhere: bool
    """True: `topobus-device --class …` runs it."""

    @property
    def next_step(self) -> str:
        """The step that makes its class served, or the reason why it cannot be."""
        serving = (
            f"topobus up --class {self.device_class}; in a cluster topobus-device --class {self.device_class} on "
            "its nodes"
        )
        return serving if self.is_served_elsewhere else self.why


@dataclass(frozen=True, kw_only=True)
class DriverRegistry:
    """The drivers of one class, sorted by name, and the plugins that could not be used."""

    drivers: tuple[DeviceDriver, ...]
    skipped: tuple[SkippedPlugin, ...] = ()
    ignored: tuple[IgnoredDriver, ...] = ()


def installed_lines(group: str, entry_points: Iterable[metadata.EntryPoint] | None) -> list[metadata.EntryPoint]:
    """List the entry points of a group, those given or all that are installed, by name and value.

    One distribution may be twice on the path (editable and installed): the same line twice is one
    plugin.
    """
    points = metadata.entry_points(group=group) if entry_points is None else entry_points
    by_text = {(line.name, line.value): line for line in points}
    return [by_text[text] for text in sorted(by_text)]


def load_drivers(
    device_class: str,
    settings: DriverSettings | None = None,
    *,
    entry_points: Iterable[metadata.EntryPoint] | None = None,
) -> DriverRegistry:
    """Import, make and filter the drivers of a class.

    Errors: raises ConfigError when two plugins have one name, and when `allow` or `deny` names
    a plugin that is not installed.
    """
    settings = settings or DriverSettings()
    lines = installed_lines(GROUP, entry_points)
    drivers: dict[str, tuple[DeviceDriver, str]] = {}
    skipped: list[SkippedPlugin] = []
    denied: list[str] = []
    ignored: list[IgnoredDriver] = []
    for line in lines:
        if _is_of_another_service(line.module, device_class):
            continue
        if line.name in settings.deny:
            denied.append(line.name)
            continue
        driver, why = _make(line)
        if driver is None:
            skipped.append(SkippedPlugin(name=line.name, value=line.value, why=why))
            continue
        if driver.device_class != device_class:
            if driver.device_class not in DEVICE_SERVICES:
                ignored.append(_ignored(driver.name, str(driver.device_class)))
            continue
        if driver.name in drivers:
            raise ConfigError(
                f"two plugins of class {device_class} are named {driver.name!r}: {drivers[driver.name][1]} "
                f"and {line.value}",
                next_step="uninstall one of them, or deny one by its entry point's name in drivers.deny (here "
                f"{line.name!r})",
                name=driver.name,
            )
        drivers[driver.name] = (driver, line.value)
    _check_names(device_class, settings, {*drivers, *denied, *(skipped_plugin.name for skipped_plugin in skipped)})
    chosen = sorted(
        name for name in drivers if name not in settings.deny and (not settings.allow or name in settings.allow)
    )
    return DriverRegistry(
        drivers=tuple(drivers[name][0] for name in chosen), skipped=tuple(skipped), ignored=tuple(ignored)
    )


def unserved_drivers(
    served: Iterable[str], *, entry_points: Iterable[metadata.EntryPoint] | None = None
) -> tuple[IgnoredDriver, ...]:
    """Name the installed drivers of classes that have no service: none of ours, and none of
    `served`.

    Sorted by name.
    """
    lines = [line for line in installed_lines(GROUP, entry_points) if not line.module.startswith("topobus.")]
    drivers = {driver.name: driver for line in lines if (driver := _make(line)[0]) is not None}
    served_classes = {*DEVICE_SERVICES, *served}
    return tuple(
        _ignored(driver.name, str(driver.device_class))
        for _, driver in sorted(drivers.items())
        if driver.device_class not in served_classes
    )


def _check_names(device_class: str, settings: DriverSettings, names: Collection[str]) -> None:
    for key, wanted in (("drivers.allow", settings.allow), ("drivers.deny", settings.deny)):
        for name in wanted:
            if name not in names:
                raise ConfigError(
                    f"{key} names {name!r}, and no plugin of class {device_class} has that name; installed "
                    f"are {sorted(names) or 'none'}",
                    next_step=f"correct {key}, or install the package that brings {name!r}",
                    key=key,
                )


def _is_of_another_service(module: str, device_class: str) -> bool:
    """Say whether a plugin of our own belongs to another service, whose dependencies may not be
    installed here.
    """
    parts = module.split(".")
    return len(parts) > 2 and parts[0] == "topobus" and parts[2] == "plugins" and parts[1] != device_class


def _ignored(name: str, device_class: str) -> IgnoredDriver:
    complaint = class_complaint(device_class)
    why = complaint or f"class {device_class} has a service of its own: topobus-device --class {device_class}"
    return IgnoredDriver(name=name, device_class=device_class, why=why, is_served_elsewhere=not complaint)


def _make(line: metadata.EntryPoint) -> tuple[DeviceDriver | None, str]:
    try:
        driver = line.load()()
    except Exception as err:  # noqa: BLE001 - boundary: a vendor's module may fail in any way; its neighbours must run
        return None, f"{type(err).__name__}: {err}"
    if not isinstance(driver, DeviceDriver):
        return None, f"{line.value} is no DeviceDriver: derive the class from topobus.devicekit.driver.DeviceDriver"
    missing: Sequence[str] = [part for part in ("name", "device_class") if not hasattr(driver, part)]
    if missing:
        return None, f"{line.value} lacks {' and '.join(missing)}"
    if missing := missing_verbs(type(driver)):
        return None, f"{line.value} lacks the methods {', '.join(missing)}: to_attach, attach and detach come together"
    if not is_dns_label(str(driver.name)):
        return None, f"{line.value} is named {driver.name!r}: wanted a DNS label"
    return driver, ""
