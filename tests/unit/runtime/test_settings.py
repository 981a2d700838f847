"""Settings: what wins over what, and how a mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.domain.errors import ConfigError
from topobus.runtime.config import NatsSettings, ServiceSettings, load_settings
from topobus.sysfs.tree import HardwareSettings


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service's settings with every shape of field."""

    hardware: HardwareSettings = HardwareSettings()
    drivers: tuple[str, ...] = ()
    labels: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    limit_s: float | None = None
    is_strict: bool = False


class Plain(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service that reads no hardware."""


def load(environ: dict[str, str], file: Path | None = None) -> Settings:
    """Load with a node, so that the host's own name does not matter."""
    return load_settings(Settings, "gpu", file=file, environ={"TOPOBUS_GPU__NODE": "n1", **environ})


def test_settings_are_defaults_when_nothing_is_said() -> None:
    """Nothing said means the documented defaults."""
    assert load({}) == Settings(node="n1")


def test_settings_of_the_service_win_when_file_and_all_speak_too(tmp_path: Path) -> None:
    """The file is overridden by TOPOBUS_ALL, that by TOPOBUS_<SERVICE>; what only one says stays."""
    file = tmp_path / "gpu.toml"
    file.write_text('[nats]\nurl = "nats://file:1"\nreplicas = 3\ntimeout_s = 1.5\n')
    settings = load(
        {"TOPOBUS_ALL__NATS__URL": "nats://all:1", "TOPOBUS_ALL__NATS__REPLICAS": "5", "TOPOBUS_GPU__NATS__URL": "nats://gpu:1"}, file
    )

    assert settings.nats == NatsSettings(url="nats://gpu:1", replicas=5, timeout_s=1.5)


@pytest.mark.parametrize(
    ("variable", "text", "field", "wanted"),
    [
        ("DRIVERS", "nvidia, amd", "drivers", ("nvidia", "amd")),
        ("DRIVERS", '["nvidia"]', "drivers", ("nvidia",)),
        ("LABELS", '{"a": "b"}', "labels", {"a": "b"}),
        ("LABELS__ZONE", "east", "labels", {"zone": "east"}),
        ("LIMIT_S", "2.5", "limit_s", 2.5),
        ("IS_STRICT", "true", "is_strict", True),
        ("HARDWARE__ROOT", "/tmp/x", "hardware", HardwareSettings(root="/tmp/x")),
    ],
)
def test_settings_read_the_environment_when_a_field_has_any_shape(variable: str, text: str, field: str, wanted: object) -> None:
    """Text from the environment becomes what the field wants."""
    assert getattr(load({f"TOPOBUS_GPU__{variable}": text}), field) == wanted


def test_settings_ignore_a_shared_section_when_the_service_lacks_it() -> None:
    """TOPOBUS_ALL__HARDWARE speaks to those that read hardware; the others go on."""
    environ = {"TOPOBUS_ALL__NODE": "n1", "TOPOBUS_ALL__HARDWARE__ROOT": "/tmp/x"}

    assert load_settings(Plain, "gateway", file=None, environ=environ) == Plain(node="n1")


def test_settings_ignore_other_services_when_their_variables_are_set() -> None:
    """One environment may serve all processes: what speaks to another is not read."""
    assert load({"TOPOBUS_NIC__NONSENSE": "1"}) == Settings(node="n1")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TOPOBUS_GPU__NATS__URLL": "x"}, ["TOPOBUS_GPU__NATS__URLL", "did you mean URL"]),
        ({"TOPOBUS_ALL__NATZ__URL": "x"}, ["TOPOBUS_ALL__NATZ__URL", "did you mean NATS"]),
        ({"TOPOBUS_ALL__DRIVERS": "x"}, ["TOPOBUS_ALL__DRIVERS"]),
        ({"TOPOBUS_ALL__HARDWARE__ROOTT": "x"}, ["TOPOBUS_ALL__HARDWARE__ROOTT", "did you mean ROOT"]),
        ({"TOPOBUS_GPU__NATS": "x"}, ["TOPOBUS_GPU__NATS", "section"]),
        ({"TOPOBUS_GPU__HTTP__PORT": "http"}, ["http.port", "'http'", "TOPOBUS_GPU__HTTP__PORT"]),
        ({"TOPOBUS_ALL__HTTP__PORT": "70000"}, ["http.port", "65535", "TOPOBUS_ALL__HTTP__PORT"]),
        ({"TOPOBUS_GPU__LOG__LEVEL": "loud"}, ["log.level", "'loud'"]),
        ({"TOPOBUS_GPU__NODE": "Not A Name"}, ["node", "'Not A Name'", "TOPOBUS_GPU__NODE"]),
        ({"TOPOBUS_GPU__LABELS": "{not json"}, ["TOPOBUS_GPU__LABELS", "JSON"]),
    ],
)
def test_settings_name_the_variable_when_it_is_wrong(environ: dict[str, str], words: list[str]) -> None:
    """A wrong variable is refused with its own name, and what was meant where that can be guessed."""
    with pytest.raises(ConfigError) as caught:
        load(environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[nats\n", ["not TOML"]),
        ("[nats]\nurll = 'x'\n", ["urll", "gpu.toml"]),
        ("[nats]\nreplicas = 'many'\n", ["nats.replicas", "'many'", "gpu.toml"]),
        ("drivers = 7\n", ["drivers", "7", "gpu.toml"]),
    ],
)
def test_settings_name_the_file_when_it_is_wrong(tmp_path: Path, text: str, words: list[str]) -> None:
    """A wrong file is refused with its name and the key."""
    file = tmp_path / "gpu.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({}, file)
    for word in words:
        assert word in str(caught.value)


def test_settings_name_the_file_when_a_variable_speaks_of_the_same_section(tmp_path: Path) -> None:
    """A typing error in the file is not blamed on a variable that sets another key of the section."""
    file = tmp_path / "gpu.toml"
    file.write_text('[nats]\nurll = "nats://a:1"\n')

    with pytest.raises(ConfigError, match=r"no setting nats\.urll .*gpu\.toml.*did you mean url") as caught:
        load({"TOPOBUS_ALL__NATS__URL": "nats://all:1"}, file)
    assert "TOPOBUS_ALL" not in str(caught.value)


def test_settings_list_the_choices_when_a_word_is_none_of_them() -> None:
    """Who gets a word wrong is told all that are right."""
    with pytest.raises(ConfigError, match=r"wanted one of debug, info, warning, error"):
        load({"TOPOBUS_GPU__LOG__LEVEL": "loud"})


def test_settings_name_the_file_when_it_is_missing(tmp_path: Path) -> None:
    """A file that is named and absent is an error, not a default."""
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load({}, tmp_path / "none.toml")
