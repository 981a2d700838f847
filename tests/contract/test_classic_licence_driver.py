"""A third party's classic driver keeps the contract, and is found by its entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from support.classic_scenes import classic_scene
from support.licence_driver import GROUP, LicenceDriver, LicenceServer
from topobus.devicekit.classic.classic import ClassicContext, ClassicDriver
from topobus.devicekit.classic.classic_registry import GROUP as ENTRY_POINTS
from topobus.devicekit.classic.classic_registry import load_classic_drivers
from topobus.testing.drivers.classic_contract import ClassicDriverContract, ClassicScene, SceneContext
from topobus.values.errors import ConfigError

SCENE = classic_scene(
    "licence", GROUP, kind="LicenceParameters", version=f"{GROUP}/v1", pair={"seats": 2}, many={"seats": 99}
)


class TestLicenceDriver(ClassicDriverContract):
    """Seats that are the same on every node."""

    @pytest.fixture(autouse=True)
    def server(self) -> LicenceServer:
        """Give a server of each test's own."""
        self._server = LicenceServer(4)
        return self._server

    def make_driver(self, context: ClassicContext) -> ClassicDriver:
        """Make one, by the same server."""
        return LicenceDriver(context, self._server)

    def make_scene(self) -> ClassicScene:
        """Four seats."""
        return SCENE


def _line(value: str, name: str = "licence") -> EntryPoint:
    return EntryPoint(name=name, value=value, group=ENTRY_POINTS)


def test_registry_makes_drivers_and_skips_what_is_none() -> None:
    """One package that cannot be used never takes the others down, and it is told why."""
    lines = [
        _line("support.licence_driver:LicenceDriver"),
        _line("support.licence_driver:broken", "broken"),
        _line("support.licence_driver:Half", "half"),
        _line("support.licence_driver:OursByName", "ours"),
        _line("support.nowhere:Driver", "nowhere"),
    ]

    classic_drivers = load_classic_drivers(SceneContext(SCENE), entry_points=lines)

    assert [driver.name for driver in classic_drivers.drivers] == [GROUP]
    why = {skipped_plugin.name: skipped_plugin.why for skipped_plugin in classic_drivers.skipped}
    assert "no licence file" in why["broken"]
    assert "it lacks get_class_parameters" in why["half"]
    assert "drivers of topobus.dev are Topobus' own" in why["ours"]
    assert "nowhere" in why["nowhere"]


def test_registry_refuses_two_drivers_of_one_name() -> None:
    """Nobody could say whose a class's driverName is."""
    lines = [_line("support.licence_driver:LicenceDriver"), _line("support.licence_driver:LicenceDriver", "again")]

    with pytest.raises(ConfigError, match=r"two classic drivers are named 'licence\.example\.com'"):
        load_classic_drivers(SceneContext(SCENE), entry_points=lines)
