"""An environment that lacks what the project declares is named, with the command that mends it."""

from __future__ import annotations

from support.set_up import why_not_set_up


def test_environment_is_whole() -> None:
    """Nothing to say where `make setup` has run."""
    assert why_not_set_up() == ""


def test_missing_driver_and_package_are_named_with_the_remedy() -> None:
    """An environment from before a driver or a package came."""
    why = why_not_set_up(
        frozenset({"nvidia", "amd-gpu", "intel-gpu", "pci-netdev", "xilinx", "intel-dfl", "linux-cpu"}),
        package="no_such_package",
    )

    assert why == (
        "this virtual environment lacks driver linux-netdev, package no_such_package: it was made before "
        "they were; run `make setup`"
    )
