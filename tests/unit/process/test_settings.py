"""Settings: what wins over what, and how a mistake is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from topobus.process.config import NatsSettings, ServiceSettings, find_mistakes, load_settings
from topobus.process.environment import strange_variables
from topobus.sysfs.tree import HardwareSettings
from topobus.values.errors import ConfigError


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
    """The file is overridden by TOPOBUS_ALL, that by TOPOBUS_<SERVICE>.

    What only one says stays.
    """
    file = tmp_path / "gpu.toml"
    file.write_text('[nats]\nurl = "nats://file:1"\nreplicas = 3\ntimeout_s = 1.5\n')
    settings = load(
        {
            "TOPOBUS_ALL__NATS__URL": "nats://all:1",
            "TOPOBUS_ALL__NATS__REPLICAS": "5",
            "TOPOBUS_GPU__NATS__URL": "nats://gpu:1",
        },
        file,
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
def test_settings_read_the_environment_when_a_field_has_any_shape(
    variable: str, text: str, field: str, wanted: object
) -> None:
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
        ({"TOPOBUS_GPU__DRIVERS": '["nvidia", 1]'}, ["drivers[1]", "(from TOPOBUS_GPU__DRIVERS)"]),
        ({"TOPOBUS_GPU__LABELS": '{"a": 1}'}, ["labels[...]", "(from TOPOBUS_GPU__LABELS)"]),
    ],
)
def test_settings_name_the_variable_when_it_is_wrong(environ: dict[str, str], words: list[str]) -> None:
    """A wrong variable is refused with its own name, and what was meant
    where that can be guessed.
    """
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
    """A typing error in the file is not blamed on a variable that sets
    another key of the section.
    """
    file = tmp_path / "gpu.toml"
    file.write_text('[nats]\nurll = "nats://a:1"\n')

    with pytest.raises(ConfigError, match=r"no setting nats\.urll .*gpu\.toml.*did you mean url") as caught:
        load({"TOPOBUS_ALL__NATS__URL": "nats://all:1"}, file)
    assert "TOPOBUS_ALL" not in str(caught.value)


def test_settings_tell_all_mistakes_at_once_when_there_are_several(tmp_path: Path) -> None:
    """What is wrong in variables, in the file and in numbers is told together, each with its key.

    One wrong section hides no other.
    """
    file = tmp_path / "gpu.toml"
    file.write_text("[nats]\nurll = 'x'\nreplicas = 'many'\n[log]\nlevel = 'loud'\n")
    environ = {
        "TOPOBUS_GPU__MODDE": "x",
        "TOPOBUS_ALL__HTTP__STALLED_S": "inf",
        "TOPOBUS_ALL__NATS__URL": "ftp://x",
        "TOPOBUS_GPU__NODE": "A B",
    }

    settings, mistakes = find_mistakes(Settings, "gpu", file=file, environ=environ)

    assert settings is not None
    said = [str(mistake) for mistake in mistakes]
    keys = (
        "TOPOBUS_GPU__MODDE",
        "nats.urll",
        "nats.replicas",
        "log.level",
        "http.stalled_s",
        "nats.url: got 'ftp://x'",
        "node: got 'A B'",
    )
    assert [sum(key in text for text in said) for key in keys] == [1] * len(keys)
    assert len(said) == len(keys)


def test_settings_are_refused_with_a_line_for_each_mistake_when_there_are_several() -> None:
    """Who reads settings without wanting a list gets one error that has all of them."""
    with pytest.raises(ConfigError) as caught:
        load({"TOPOBUS_GPU__HTTP__PORT": "http", "TOPOBUS_GPU__LOG__LEVEL": "loud"})

    first, *lines = str(caught.value).splitlines()
    assert first == "2 settings are wrong:"
    assert [line.split(": ")[1] for line in lines] == ["http.port", "log.level"]


def test_checks_are_asked_again_without_what_they_refused_when_they_name_the_key() -> None:
    """A check that refuses two keys tells both.

    One that names no key, or the key of a default, ends its own search and no other's.
    """

    def refuse(*keys: str) -> Callable[[Settings], None]:
        def check(settings: Settings) -> None:
            for key in keys:
                if not key or getattr(settings, key) != getattr(Settings(), key):
                    raise ConfigError(f"{key} is refused", **({"key": key} if key else {}))

        return check

    environ = {"TOPOBUS_GPU__LABELS": '{"a": "b"}', "TOPOBUS_GPU__DRIVERS": "x"}
    checks = (refuse("labels", "drivers"), refuse(""), refuse("labels", ""))

    _, mistakes = find_mistakes(Settings, "gpu", file=None, environ=environ, checks=checks)

    assert [mistake.message for mistake in mistakes] == [
        "gpu: labels is refused (from TOPOBUS_GPU__LABELS)",
        "gpu: drivers is refused (from TOPOBUS_GPU__DRIVERS)",
        " is refused",
        " is refused",
    ]


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("TOPOBUS_TOPLOGY__NODE", "there is no service toplogy; did you mean TOPOBUS_TOPOLOGY__NODE?"),
        ("TOPOBUS_ALL_NATS_URL", "did you mean TOPOBUS_ALL__NATS__URL?"),
        ("TOPOBUS_NATS__URL", "did you mean TOPOBUS_ALL__NATS__URL?"),
        ("NATS__URL", "did you mean TOPOBUS_ALL__NATS__URL?"),
        ("topobus_gpu__is_strict", "did you mean TOPOBUS_GPU__IS_STRICT?"),
        ("TOPOBUS_NPU__MODE", "is for a class npu of your own"),
    ],
)
def test_variable_that_sets_nothing_is_told_when_it_looks_as_if_it_should(variable: str, said: str) -> None:
    """Such a variable is in nobody's way and what it should have set has its default: only a word
    of it helps.
    """
    (text,) = strange_variables(Settings, "gpu", {variable: "x"})

    assert text.startswith(variable)
    assert text.endswith(said) or said in text


@pytest.mark.parametrize(
    "variable",
    ["TOPOBUS_CONTEXT", "TOPOBUS_NIC__NONSENSE", "TOPOBUS_GPU__IS_STRICT", "TOPOBUS_ALL__NATS__URL", "URL", "HOME"],
)
def test_variable_is_not_told_when_it_is_right_or_another_program_s(variable: str) -> None:
    """Variables that set something, those of other services, and those without a section are
    nothing strange.
    """
    assert strange_variables(Settings, "gpu", {variable: "x"}) == []


def test_settings_list_the_choices_when_a_word_is_none_of_them() -> None:
    """Who gets a word wrong is told all that are right."""
    with pytest.raises(ConfigError, match=r"wanted one of debug, info, warning, error"):
        load({"TOPOBUS_GPU__LOG__LEVEL": "loud"})


def test_settings_name_the_file_when_it_is_missing(tmp_path: Path) -> None:
    """A file that is named and absent is an error, not a default."""
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load({}, tmp_path / "none.toml")
