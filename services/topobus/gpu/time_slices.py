"""Sets the time slice of NVIDIA GPUs by `nvidia-smi compute-policy`, and restores the previous one
when the last owner that asked for it leaves.

The journal's step `time-slice` has the previous slice, and is written before the act. Owners of one
GPU that ask for the same slice each have a step with the same `before`, and the last of them undoes
it.
Source: kubernetes-sigs/dra-driver-nvidia-gpu, nvlib.go, setTimeSlice
(`nvidia-smi compute-policy -i UUID --set-timeslice N`, libnvidia-ml.so.1 by LD_PRELOAD where the
driver root is another); numbers of the slices: api/nvidia.com/resource, TimeSliceInterval.Int.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence

from msgspec import Struct

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import PrepareContext
from topobus.formats.kubernetes.classic.classic_parameters import TIME_SLICES, TIME_SLICING, Sharing
from topobus.gpu.driver_root.programs import SEARCH_PATH, failure, run_program, search_programs
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse

__all__ = ["STEP", "TimeSlicePlan", "TimeSlices", "slice_of"]

STEP = "time-slice"
"""The journal's name for it."""

_DEFAULT = "Default"
_PROGRAM = "nvidia-smi"
_NVML = "libnvidia-ml.so.1"
# All calls for one owner: below the 5 s that a driver's method has by default.
_LIMIT_S = 4.0
# What is between the name and the value is columns of a table in some releases, a colon in others.
_SLICE = re.compile(r"time-?\s?slice\W+(default|short|medium|long)\b", re.IGNORECASE)


class _Program(Struct, frozen=True, kw_only=True):
    path: str
    preload: str = ""


class TimeSlicePlan(Struct, frozen=True, kw_only=True):
    """The slice that an owner gets, and for which GPUs."""

    interval: str
    devices: tuple[Device, ...]
    program: _Program


class TimeSlices:
    """The time slices of a driver's GPUs, as their owners need them.

    The journal has what was done.
    """

    def __init__(self) -> None:
        """Begin with nothing set by this process: after a reboot, or a restart of this service, a
        slice is set again.
        """
        self._set: set[str] = set()

    def plan(
        self,
        devices: Sequence[Device],
        context: PrepareContext,
        sharing: Sharing,
        settings: DriverFilesSettings,
        *,
        version: str,
        partitions: Sequence[str] = (),
    ) -> TimeSlicePlan | Refusal | None:
        """Decide what an owner needs, or return None when the GPUs' slices stay as they are.
        Nothing is begun.

        Shapes: version — of the loaded driver; partitions — those of the devices that are parts of
        GPUs, or GPUs that are cut into parts.
        """
        config = sharing.time_slicing_config
        interval = config.interval if sharing.strategy == TIME_SLICING and config is not None else _DEFAULT
        if interval == _DEFAULT:
            return None
        if partitions:
            text = (
                f"a time slice of {interval} is a setting of a whole GPU: {', '.join(partitions)} are parts, or "
                "are cut into parts"
            )
            return refuse("time-slice-unsupported", text, interval=interval)
        for device in devices:
            for other in context.others.get(device.name, ()):
                present = next(
                    (str(step.before.get("wanted", "")) for step in other.steps if step.name == STEP), interval
                )
                if present != interval:
                    text = (
                        f"{device.name} has a time slice of {present} for {other.owner}, and a GPU has one: ask "
                        f"for {present}, or for Default, which takes what is there"
                    )
                    return refuse("time-slice-differs", text, device=device.name, interval=interval, present=present)
        program = _find_program(settings, version)
        if isinstance(program, Refusal):
            return program
        return TimeSlicePlan(interval=interval, devices=tuple(devices), program=program)

    def begin(self, plan: TimeSlicePlan, context: PrepareContext) -> Refusal | None:
        """Set the slices, and return None when they are set. A repeated call changes nothing that
        is set.

        Errors: raises HardwareError when a program does not end in time. The slice may then be set
        or not, and is undone.
        """
        until = time.monotonic() + _LIMIT_S
        for device in plan.devices:
            record = context.records.get(device.name, DeviceRecord())
            step = record.step(STEP)
            if (
                step is not None
                and step.is_done
                and step.before.get("wanted") == plan.interval
                and device.name in self._set
            ):
                continue
            others = [
                other_step
                for other in context.others.get(device.name, ())
                for other_step in other.steps
                if other_step.name == STEP
            ]
            # The slice before the first of them is the slice before all of them.
            if step is None:
                before = str(others[0].before.get("slice", _DEFAULT)) if others else _read(plan.program, device, until)
                record.intend(STEP, {"slice": before, "wanted": plan.interval})
            if device.name not in self._set or not any(other_step.is_done for other_step in others):
                failure = _set(plan.program, device, plan.interval, until)
                if failure:
                    if step is None:
                        # The program failed and set nothing, so there is nothing to undo.
                        record.undone(STEP)
                    return refuse(
                        "time-slice-failed", f"{device.name}: {failure}", device=device.name, interval=plan.interval
                    )
            self._set.add(device.name)
            record.done(STEP)
        return None

    def undo(
        self, devices: Sequence[Device], context: PrepareContext, settings: DriverFilesSettings, version: str
    ) -> None:
        """Restore the previous slice, unless other owners use the present one.

        Errors: raises HardwareError for what cannot be restored now; the caller tries again.
        """
        until = time.monotonic() + _LIMIT_S
        for device in devices:
            record = context.records.get(device.name)
            step = record.step(STEP) if record is not None else None
            if record is None or step is None:
                continue
            if not any(
                other_step.name == STEP for other in context.others.get(device.name, ()) for other_step in other.steps
            ):
                program = _find_program(settings, version)
                if isinstance(program, Refusal):
                    raise HardwareError(
                        f"{device.name}: its time slice cannot be set back: {program.reasons[0].message}",
                        device=device.name,
                    )
                failure = _set(program, device, str(step.before.get("slice", _DEFAULT)), until)
                if failure:
                    raise HardwareError(
                        f"{device.name}: its time slice cannot be set back: {failure}", device=device.name
                    )
                self._set.discard(device.name)
            record.undone(STEP)


def slice_of(output: str) -> str:
    """Read a slice out of the output of `compute-policy --list`, or return Default where it has
    none.

    >>> slice_of("GPU  0: Timeslice: Short"), slice_of("| 0    Timeslice      Long |"), slice_of("nothing")
    ('Short', 'Long', 'Default')
    """
    match = _SLICE.search(output)
    return match.group(1).capitalize() if match is not None else _DEFAULT


def _read(program: _Program, device: Device, until: float) -> str:
    """Ask for the present slice.

    A program that cannot list it leaves the default, which every GPU has after a start.
    """
    done = _run(program, ["compute-policy", "-i", _id(device), "--list"], until)
    return slice_of(_output(done)) if done.returncode == 0 else _DEFAULT


def _set(program: _Program, device: Device, interval: str, until: float) -> str:
    """Set a slice, and return why it was not set, or ""."""
    arguments = ["compute-policy", "-i", _id(device), "--set-timeslice", str(TIME_SLICES.index(interval))]
    done = _run(program, arguments, until)
    return failure([program.path, *arguments], done.returncode, _output(done)) if done.returncode != 0 else ""


def _run(program: _Program, arguments: Sequence[str], until: float) -> subprocess.CompletedProcess[bytes]:
    variables = {"PATH": SEARCH_PATH} | ({"LD_PRELOAD": program.preload} if program.preload else {})
    return run_program([program.path, *arguments], variables, max(0.1, until - time.monotonic()))


def _output(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stdout.decode("utf-8", "replace")


def _id(device: Device) -> str:
    return device.uuid or str(device.pci or "")


def _find_program(settings: DriverFilesSettings, version: str) -> _Program | Refusal:
    programs = search_programs(settings, version, (_PROGRAM,), "time-slice-unsupported")
    if isinstance(programs, Refusal):
        return programs
    return _Program(path=programs.paths[_PROGRAM], preload=programs.libraries.get(_NVML, ""))
