"""Reads how the CPUs of a recorded machine are offered (`--cpus`), and which are never given out
(`--reserved-cpus`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from cyclopts import Parameter

from topobus.cli.exits import UsageError
from topobus.devicekit.settings import CpuGroupSettings
from topobus.values.idset import CpuSet

__all__ = ["CpusOffered", "ReservedCpus", "read_cpus", "read_reserved_cpus"]

CpusOffered = Annotated[
    str,
    Parameter(
        name="--cpus",
        help="How the machine's CPUs are offered, as JSON: the setting `cpus` of the cpu service, such as "
        '\'{"groups": "numa"}\'.',
    ),
]
ReservedCpus = Annotated[str, Parameter(help="CPUs that are never given out, as a cpulist.")]


def read_cpus(text: str) -> CpuGroupSettings:
    """Read the option's value.

    Errors: raises UsageError for what the setting refuses.

    >>> read_cpus('{"groups": "numa"}').groups
    'numa'
    """
    try:
        return msgspec.json.decode(text or "{}", type=CpuGroupSettings)
    except msgspec.DecodeError as err:
        raise UsageError(f"--cpus: {err}", next_step='write \'{"groups": "numa", "whole_cores": false}\'') from err


def read_reserved_cpus(text: str) -> CpuSet:
    """Read `--reserved-cpus`.

    Errors: raises UsageError.

    >>> read_reserved_cpus("0-1")
    CpuSet(0, 1)
    """
    try:
        return CpuSet.parse(text)
    except ValueError as err:
        raise UsageError(f"--reserved-cpus is {err}", next_step="write a cpulist such as 0-1,112-113") from err
