"""The how-to page on NICs shows settings and configurations that the service takes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from topobus.nic.config import InterfaceSettings
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig
from topobus.nic.interfaces.rules.interface_reading import read_interface_config

PAGE = Path(__file__).parents[3] / "docs/how-to/put-a-nic-into-a-pod.md"


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def parameters(value: Any) -> Iterator[dict[str, Any]]:
    """Find opaque parameters, in order."""
    if isinstance(value, dict):
        if value.get("driver") == "topobus.dev":
            yield value["parameters"]
        for inner in value.values():
            yield from parameters(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from parameters(inner)


def test_page_shows_a_configuration_that_is_right() -> None:
    """Class and claim together are what a driver takes, and give what the page says."""
    entries = [
        entry for block in blocks("yaml") for document in yaml.safe_load_all(block) for entry in parameters(document)
    ]

    config = read_interface_config(entries)

    assert len(entries) == 2
    assert isinstance(config, InterfaceConfig), config
    assert (config.interface.name, config.interface.mtu, config.interface.addresses) == (
        "net1",
        1450,
        ("10.20.0.3/24",),
    )


def test_page_shows_settings_that_are_right() -> None:
    """The service would start with them."""
    (block,) = blocks("toml")

    settings = msgspec.convert(tomllib.loads(block)["interfaces"], type=InterfaceSettings)

    assert [rule.name for rule in settings.offer] == ["tenant-*", "bond1"]
    assert [(shared.name, shared.shares) for shared in settings.share] == [("ens2f0", 16)]
