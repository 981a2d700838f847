"""The operator's test of a device: what its program gets, and what its end means."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from topobus.devicekit.settings import BurnInSettings, DeviceServiceSettings
from topobus.devicekit.verbs.burn_in import run_burn_in
from topobus.process.clock import SystemClock
from topobus.process.config import load_settings
from topobus.values.device import Device
from topobus.values.errors import ConfigError
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress

GPU = Device(name="gpu-0", device_class="gpu", driver="toy", pci=PciAddress.parse("0000:18:00.0"))
NODES = ("dri/renderD128", "nvidia0")


async def run(*command: str, timeout_s: float = 60.0) -> Refusal | None:
    """Test the GPU by a program."""
    settings = BurnInSettings(command=command, timeout_s=timeout_s)
    return await run_burn_in(settings, GPU, NODES, clock=SystemClock())


def message(refusal: Refusal | None) -> str:
    """Give the words of a device that has not passed."""
    assert refusal is not None
    (reason,) = refusal.reasons
    assert reason.code == "burn-in-failed"
    assert reason.message.startswith("gpu-0 has not passed its burn-in: ")
    return reason.message.removeprefix("gpu-0 has not passed its burn-in: ")


async def test_program_gets_the_device_and_nothing_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables are the device's and PATH; a password of the service is not among them."""
    monkeypatch.setenv("TOPOBUS_NATS__PASSWORD", "secret")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    seen = tmp_path / "seen"

    program = f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))"

    refusal = await run(sys.executable, "-c", program)

    assert refusal is None
    variables = json.loads(seen.read_text(encoding="utf-8"))
    variables.pop("LC_CTYPE", None)  # the interpreter's own
    assert variables == {
        "DEVICE_CLASS": "gpu",
        "DEVICE_NAME": "gpu-0",
        "DEVICE_NODES": "/dev/dri/renderD128 /dev/nvidia0",
        "DEVICE_PCI": "0000:18:00.0",
        "PATH": "/usr/bin:/bin",
    }


async def test_device_does_not_pass_and_the_last_lines_say_why_when_the_program_fails() -> None:
    """The last five lines, of both outputs, without what a terminal would obey."""
    script = r"for i in 1 2 3 4 5 6; do echo line $i; done; printf 'bad \033[31mblock\n\n' >&2; exit 3"

    refusal = await run("/bin/sh", "-c", script)

    said = "line 3 | line 4 | line 5 | line 6 | bad [31mblock"
    assert message(refusal) == f"/bin/sh ended with 3: {said}"
    assert refusal is not None
    assert refusal.reasons[0].facts["exit"] == 3


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (("/does/not/exist",), "/does/not/exist cannot be started: No such file or directory"),
        (("/bin/sh", "-c", "kill -9 $$"), "/bin/sh ended with -9"),
        (("/bin/sh", "-c", "; rm -rf $HOME"), "ended with 2"),
    ],
)
async def test_device_does_not_pass_when_the_program_does_not_run_to_its_end(
    command: tuple[str, ...], text: str
) -> None:
    """Each is a reason with the program's name."""
    assert text in message(await run(*command))


async def test_program_is_ended_with_what_it_has_started_when_its_time_is_over(tmp_path: Path) -> None:
    """The device has not passed, and no process of the test is left on it."""
    pids = tmp_path / "pids"

    refusal = await run("/bin/sh", "-c", f"sleep 600 & echo $! $$ > {pids}; echo begun; wait", timeout_s=1.0)

    assert message(refusal) == "/bin/sh has not ended after 1 s: begun"
    assert [_is_running(pid) for pid in pids.read_text(encoding="utf-8").split()] == [False, False]


async def test_words_of_the_program_are_no_shells(tmp_path: Path) -> None:
    """An argument with a shell's letters reaches the program as it is."""
    target = tmp_path / "target"

    refusal = await run("/bin/echo", f"; touch {target}", "$(id)")

    assert refusal is None
    assert not target.exists()


def _is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    # Killed, and not yet taken off the list by its parent.
    return state != "Z"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("memtest --quick", "burn_in: command begins with 'memtest --quick', wanted the absolute path of a program"),
        ('["/opt/memtest", "a\\u0000b"]', "burn_in: command has a NUL character"),
    ],
)
def test_settings_refuse_a_command_that_cannot_be_started(command: str, text: str) -> None:
    """Before a device is withheld for a test that cannot run."""
    with pytest.raises(ConfigError, match=text):
        load_settings(DeviceServiceSettings, "gpu", file=None, environ={"TOPOBUS_GPU__BURN_IN__COMMAND": command})
