"""Debian's CNI plugins with the programs that they and their tests need, unpacked aside below
.cache: nothing is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.debian_packages import UNPACKED, fetch_packages
from support.nic_rig import NicRig
from topobus.nic.cni.attachment import CniAttachment
from topobus.nic.cni.settings import CniSettings
from topobus.nic.config import InterfaceRule, InterfaceSettings
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver

__all__ = ["Bundle", "driver_of", "provide_bundle"]

_LIBRARIES = (
    "libip4tc2",
    "libip6tc2",
    "libxtables12",
    "libnftnl11",
    "libmnl0",
    "libnfnetlink0",
    "libnetfilter-conntrack3",
)
_PACKAGES = ("containernetworking-plugins", "iptables", *_LIBRARIES, "busybox")
_PROGRAMS = ("iptables", "ip6tables", "iptables-save", "ip6tables-save", "iptables-restore", "ip6tables-restore")
_WRAPPER = """#!/bin/sh
LD_LIBRARY_PATH={libraries} XTABLES_LIBDIR={extensions} exec {program} {name} "$@"
"""


@dataclass(frozen=True)
class Bundle:
    """Where the plugins are, and where they find iptables."""

    bin_dir: str
    program_path: str
    busybox: str


def provide_bundle() -> Bundle:
    """Give the bundle, fetched once; skip the test where it cannot be had or used."""
    if os.geteuid() != 0:
        pytest.skip("NOT CHECKED: only root can make network namespaces, so that no CNI plugin was run")
    fetched = fetch_packages(*_PACKAGES)
    if isinstance(fetched, str):
        pytest.skip(
            f"NOT CHECKED: Debian's containernetworking-plugins are not to be had here, so that none was run: {fetched}"
        )
    folders = dict(zip(_PACKAGES, fetched, strict=True))
    programs = _wrap(folders)
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("NOT CHECKED: `ip netns` does not work here, so that no CNI plugin was run")
    return Bundle(
        bin_dir=str(folders["containernetworking-plugins"] / "usr" / "lib" / "cni"),
        program_path=f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
        busybox=str(folders["busybox"] / "bin" / "busybox"),
    )


def driver_of(rig: NicRig, bundle: Bundle, folder: Path, plugins: list[dict[str, Any]]) -> LinuxNetdevDriver:
    """A driver of a service that has just started, with one network."""
    path = folder / "data.conflist"
    path.write_text(json.dumps({"cniVersion": "1.0.0", "name": "data", "plugins": plugins}), encoding="utf-8")
    settings = CniSettings(
        networks={"data": str(path)},
        bin_dirs=(bundle.bin_dir,),
        program_path=bundle.program_path,
        state_dir=str(folder / "state"),
        timeout_s=30.0,
    )
    driver = LinuxNetdevDriver()
    driver.configure(
        NicServices(
            interfaces=InterfaceSettings(offer=(InterfaceRule(name=rig.name),)),
            hands=InterfaceHands(cni=CniAttachment(settings)),
        )
    )
    return driver


def _wrap(folders: dict[str, Path]) -> Path:
    """Write the programs of the package iptables as scripts that find their own libraries."""
    programs = UNPACKED / "cni-programs"
    programs.mkdir(exist_ok=True)
    libraries = [next(folders[name].glob("usr/lib/*-linux-*")) for name in _LIBRARIES]
    extensions = next(folders["iptables"].glob("usr/lib/*-linux-*/xtables"), folders["libxtables12"])
    for name in _PROGRAMS:
        text = _WRAPPER.format(
            libraries=":".join(map(str, libraries)),
            extensions=extensions,
            program=folders["iptables"] / "usr" / "sbin" / "xtables-nft-multi",
            name=name,
        )
        path = programs / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            path.chmod(0o755)
    return programs
