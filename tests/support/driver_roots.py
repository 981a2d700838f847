"""Driver roots of real ELF libraries, made by gcc: what NVIDIA's packages install, as far as names,
SONAMEs and links go.
"""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.debian_packages import fetch_packages

__all__ = [
    "FIRMWARE",
    "LIBRARIES",
    "VERSION",
    "driver_root",
    "library",
    "listening_socket",
    "musl_probe",
    "probe_program",
    "require_compiler",
]

VERSION = "580.95.05"
FIRMWARE = ("gsp_ga10x.bin", "gsp_tu10x.bin")

_ROOT = Path(__file__).resolve().parents[2]
_DATA = _ROOT / "tests" / "data" / "driver_files"
# What a driver of the 580 branch installs for computing and video: name
# before the version, and SONAME.
LIBRARIES = {
    "libcuda": "libcuda.so.1",
    "libcudadebugger": "libcudadebugger.so.1",
    "libnvidia-ml": "libnvidia-ml.so.1",
    "libnvidia-ptxjitcompiler": "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm": "libnvidia-nvvm.so.4",
    "libnvidia-opencl": "libnvidia-opencl.so.1",
    "libnvcuvid": "libnvcuvid.so.1",
    "libnvidia-encode": "libnvidia-encode.so.1",
    "libnvidia-gpucomp": "",
}
_PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)


def require_compiler() -> None:
    """Skip, visibly, where no library can be made."""
    if shutil.which("gcc") is None or platform.machine() != "x86_64":
        pytest.skip("NOT TESTED: gcc for x86-64 is missing, so that no driver root of real libraries was made")


@cache
def _kept() -> TemporaryDirectory[str]:
    """Make a folder that goes with this process."""
    return TemporaryDirectory(prefix="topobus-libraries-")


def _scratch() -> Path:
    return Path(_kept().name)


@cache
def _compiled(soname: str, notes: str) -> Path:
    """Compile the library once for each SONAME and note."""
    target = _scratch() / f"{soname or 'none'}-{abs(hash(notes))}.so"
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-O1", "-o", str(target), str(_DATA / "fake_cuda.c")]
    command += [f"-Wl,-soname,{soname}"] if soname else []
    if notes:
        source = target.with_suffix(".s")
        source.write_text(
            '.section .note.cuda.fwd_compatibility,"a",@note\n.align 4\n.long 2f-1f\n.long 4f-3f\n.long 1\n'
            f'1: .asciz "NVIDIA Corporation"\n2: .align 4\n3: .asciz {notes}\n4: .align 4\n.section '
            '.note.GNU-stack,"",@progbits\n'
        )
        command.append(str(source))
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return target


def library(file: Path, soname: str = "", notes: str = "") -> Path:
    """Put a real library in place; `notes`: the text of NVIDIA's note, as an assembler's string."""
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_compiled(soname, notes), file)
    return file


def driver_root(
    root: Path, *, folder: str = "usr/lib/x86_64-linux-gnu", version: str = VERSION, programs: str = "usr/bin"
) -> Path:
    """Install a driver below a folder, with links for SONAMEs and for linking, programs, firmware,
    OpenCL's file and the daemon's socket.
    """
    require_compiler()
    for base, soname in LIBRARIES.items():
        library(root / folder / f"{base}.so.{version}", soname)
        if soname:
            (root / folder / soname).symlink_to(f"{base}.so.{version}")
            (root / folder / f"{base}.so").symlink_to(soname)
    # Of another driver, and of the distribution: none of this one's.
    library(root / folder / "libcuda.so.570.86.10", "libcuda.so.1")
    library(root / folder / "libz.so.1.2.13", "libz.so.1")
    for name in _PROGRAMS:
        (root / programs).mkdir(parents=True, exist_ok=True)
        (root / programs / name).write_text("#!/bin/sh\necho a program\n")
        (root / programs / name).chmod(0o755)
    for name in FIRMWARE:
        firmware = root / "lib/firmware/nvidia" / version / name
        firmware.parent.mkdir(parents=True, exist_ok=True)
        firmware.write_bytes(b"firmware")
    vendor = root / "etc/OpenCL/vendors/nvidia.icd"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("libnvidia-opencl.so.1\n")
    return root


def listening_socket(path: Path) -> socket.socket:
    """Give a daemon's socket; close it when done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


@cache
def probe_program() -> Path:
    """Compile the program that a container runs."""
    target = _scratch() / "cuda-probe"
    subprocess.run(
        ["gcc", "-O1", "-o", str(target), str(_DATA / "cuda_probe.c"), "-ldl"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return target


@cache
def musl_probe() -> tuple[Path, Path]:
    """Compile the same program for musl; gives musl's loader and the program.

    Skips where Debian's musl cannot be had.
    """
    folders = fetch_packages("musl", "musl-dev")
    if isinstance(folders, str):
        pytest.skip(f"NOT TESTED: musl cannot be had, so that no image with musl was run: {folders}")
    loader, headers = folders[0] / "lib/ld-musl-x86_64.so.1", folders[1] / "usr/include/x86_64-linux-musl"
    objects, target = folders[1] / "usr/lib/x86_64-linux-musl", _scratch() / "cuda-probe-musl"
    command = [
        "gcc",
        "-O1",
        "-fno-pie",
        "-no-pie",
        "-nostdlib",
        "-nostdinc",
        "-isystem",
        str(headers),
        "-o",
        str(target),
    ]
    command += [
        str(objects / "crt1.o"),
        str(objects / "crti.o"),
        str(_DATA / "cuda_probe.c"),
        f"-L{folders[0]}/lib/x86_64-linux-musl",
        "-lc",
        str(objects / "crtn.o"),
    ]
    command += ["-Wl,-dynamic-linker,/lib/ld-musl-x86_64.so.1"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return loader, target
