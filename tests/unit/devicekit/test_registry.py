"""Plugins found by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from support.toy_driver import ToyDriver
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.registry import GROUP, load_drivers, unserved_drivers
from topobus.devicekit.settings import DriverSettings
from topobus.formats.messages.device_classes import class_complaint
from topobus.testing.drivers.driver_contract import DriverContract
from topobus.values.errors import ConfigError


class FirstToy(ToyDriver):
    """A plugin named `first`."""

    def __init__(self) -> None:
        super().__init__("first")


class SecondToy(ToyDriver):
    """A plugin named `second`."""

    def __init__(self) -> None:
        super().__init__("second")


class NicToy(ToyDriver):
    """A plugin of another class."""

    def __init__(self) -> None:
        super().__init__("nic-toy", "nic")


class OwnToy(ToyDriver):
    """A plugin of a class that has no service."""

    def __init__(self) -> None:
        super().__init__("own-toy", "npu")


class NoDriver:
    """Lacks everything but a name."""

    name = "none"


class Nameless(ToyDriver):
    """It has no class."""

    def __init__(self) -> None:
        super().__init__("nameless")
        del self.device_class


class Unfinished(DeviceDriver):
    """It has none of the methods that every driver has."""

    name, device_class = "unfinished", "gpu"


class NeverDetaches(ToyDriver):
    """It could not undo what it does."""

    def attach(self, *_request: object) -> None:
        """Attach nothing."""


class BadName(ToyDriver):
    """Its name is no DNS label."""

    def __init__(self) -> None:
        super().__init__("Bad Name")


def fails() -> ToyDriver:
    """Stand for a plugin whose constructor fails."""
    raise OSError("no library")


def _line(name: str, what: str, module: str = __name__) -> EntryPoint:
    return EntryPoint(name=name, value=f"{module}:{what}", group=GROUP)


FIRST, SECOND = _line("first", "FirstToy"), _line("second", "SecondToy")


def test_registry_gives_the_drivers_of_the_class_by_name_when_plugins_are_installed() -> None:
    """Only drivers of the class come, sorted by name, whatever the order of the lines."""
    registry = load_drivers("gpu", entry_points=[SECOND, _line("nic-toy", "NicToy"), FIRST])

    assert [driver.name for driver in registry.drivers] == ["first", "second"]
    assert registry.skipped == ()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param(
            _line("broken", "FirstToy", "no_such_module_anywhere"), "ModuleNotFoundError", id="module is missing"
        ),
        pytest.param(_line("broken", "Missing"), "AttributeError", id="class is missing"),
        pytest.param(_line("broken", "fails"), "no library", id="constructor fails"),
        pytest.param(
            _line("broken", "NoDriver"),
            "derive the class from topobus.devicekit.driver.DeviceDriver",
            id="no driver at all",
        ),
        pytest.param(_line("broken", "Nameless"), "lacks device_class", id="no class"),
        pytest.param(_line("broken", "Unfinished"), "abstract method", id="a method is missing"),
        pytest.param(
            _line("broken", "NeverDetaches"), "lacks the methods to_attach, detach", id="attaches and never detaches"
        ),
        pytest.param(_line("broken", "BadName"), "DNS label", id="bad name"),
    ],
)
def test_registry_skips_a_plugin_when_it_cannot_be_used(line: EntryPoint, why: str) -> None:
    """A broken plugin is told of and skipped; its neighbour loads."""
    registry = load_drivers("gpu", entry_points=[line, FIRST])

    assert [driver.name for driver in registry.drivers] == ["first"]
    assert [skipped_plugin.name for skipped_plugin in registry.skipped] == ["broken"]
    assert why in registry.skipped[0].why


def test_registry_refuses_when_two_plugins_have_one_name() -> None:
    """Two drivers of one name are an operator's mistake: nobody could say which one a setting
    means.
    """
    with pytest.raises(ConfigError, match="two plugins of class gpu are named 'first'"):
        load_drivers("gpu", entry_points=[FIRST, _line("copy", "FirstToy")])


def test_registry_loads_once_when_one_line_stands_twice() -> None:
    """The same line seen twice on the path is one plugin."""
    assert len(load_drivers("gpu", entry_points=[FIRST, _line("first", "FirstToy")]).drivers) == 1


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        pytest.param(DriverSettings(allow=("first",)), ["first"], id="allow"),
        pytest.param(DriverSettings(deny=("first",)), ["second"], id="deny"),
        pytest.param(DriverSettings(allow=("first", "second"), deny=("first",)), ["second"], id="deny wins"),
    ],
)
def test_registry_filters_when_settings_say_so(settings: DriverSettings, names: list[str]) -> None:
    """`allow` and `deny` choose among the installed plugins."""
    assert [driver.name for driver in load_drivers("gpu", settings, entry_points=[FIRST, SECOND]).drivers] == names


@pytest.mark.parametrize("settings", [DriverSettings(allow=("frist",)), DriverSettings(deny=("frist",))])
def test_registry_refuses_a_setting_when_it_names_no_plugin(settings: DriverSettings) -> None:
    """A typo in a setting is an error that lists what is installed, never silently nothing."""
    with pytest.raises(ConfigError, match=r"'frist'.*\['first'\]"):
        load_drivers("gpu", settings, entry_points=[FIRST])


def test_registry_never_imports_another_service_of_ours_when_loading() -> None:
    """Our own plugins of other classes are not imported: their dependencies may be absent in this
    process's image.
    """
    line = _line("other", "Driver", "topobus.no_such_class.plugins.no_such_module")

    assert load_drivers("gpu", entry_points=[line]).skipped == ()


class NpuToy(ToyDriver):
    """A plugin of a class of its own."""

    def __init__(self) -> None:
        super().__init__("npu-toy", "npu")


class BadClassToy(ToyDriver):
    """A driver whose class can have no service."""

    def __init__(self) -> None:
        super().__init__("card-toy", "smart-card")


def test_driver_of_a_class_of_ones_own_is_told_and_not_run() -> None:
    """Whoever brings a class of their own hears of it from each of our services, with what serves
    it.
    """
    lines = [EntryPoint("npu", f"{__name__}:NpuToy", GROUP), EntryPoint("first", f"{__name__}:FirstToy", GROUP)]

    registry = load_drivers("gpu", entry_points=lines)

    assert [driver.name for driver in registry.drivers] == ["first"]
    assert [(ignored_driver.name, ignored_driver.device_class) for ignored_driver in registry.ignored] == [
        ("npu-toy", "npu")
    ]
    assert [ignored_driver.why for ignored_driver in registry.ignored] == [
        "class npu has a service of its own: topobus-device --class npu"
    ]
    assert [ignored_driver.is_served_elsewhere for ignored_driver in registry.ignored] == [True]
    assert [driver.name for driver in load_drivers("npu", entry_points=lines).drivers] == ["npu-toy"]
    assert load_drivers("gpu", entry_points=lines[1:]).ignored == ()


def test_driver_is_told_with_the_reason_when_no_service_can_have_its_class() -> None:
    """A hyphen marks classes of other vendors' device plugins."""
    (ignored_driver,) = load_drivers("gpu", entry_points=[EntryPoint("card", f"{__name__}:BadClassToy", GROUP)]).ignored

    assert ignored_driver.why == class_complaint("smart-card")
    assert not ignored_driver.is_served_elsewhere


def test_contract_suite_fails_for_a_class_that_no_service_can_have() -> None:
    """The suite that vendors run takes our classes and their own, and says what a class's name may
    be.
    """
    suite = DriverContract()

    suite.test_driver_is_one_when_the_service_loads_it(FirstToy())
    suite.test_driver_is_one_when_the_service_loads_it(NpuToy())
    with pytest.raises(
        AssertionError,
        match=r"device class 'smart-card': wanted 1 to 20 lowercase letters and digits.*no service would load",
    ):
        suite.test_driver_is_one_when_the_service_loads_it(BadClassToy())


@pytest.mark.parametrize(("served", "named"), [((), ["own-toy"]), (("npu",), [])], ids=["by-nobody", "by-class"])
def test_driver_is_named_when_nobody_serves_its_class(served: tuple[str, ...], named: list[str]) -> None:
    """Drivers of our own classes, and what is no driver, are not."""
    lines = [
        EntryPoint(name=kind.__name__, value=f"{__name__}:{kind.__name__}", group=GROUP)
        for kind in (OwnToy, NicToy, NoDriver)
    ]

    assert [driver.name for driver in unserved_drivers(served, entry_points=lines)] == named
