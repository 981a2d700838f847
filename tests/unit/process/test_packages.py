"""What a process imports: nothing of a package that is hidden, and no library that only another
process or another installation needs.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from topobus.process.packages import hiding

SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")
# The CLI's (terminal, configuration files) and the API server's client, which a node or a
# controller without a cluster does without.
_OF_OTHERS = ("rich", "pygments", "cyclopts", "watchfiles", "lightkube", "httpx2", "yaml")


def test_hiding_makes_an_import_fail_when_the_package_is_installed() -> None:
    """A library inside sees a machine without the package, its submodules included.

    Afterwards all is as before, the very same modules.
    """
    before = (json, json.decoder)

    with hiding("json"):
        for name in ("json", "json.decoder"):
            with pytest.raises(ImportError):
                __import__(name)

    after = __import__("json.decoder")
    assert (after, after.decoder) == before


def test_hiding_leaves_nothing_behind_when_the_import_fails() -> None:
    """A hidden package that was not imported before can be imported after."""
    with pytest.raises(ZeroDivisionError), hiding("this"):
        _ = 1 / 0

    assert "this" not in sys.modules


def test_services_import_no_library_of_others_when_all_is_installed() -> None:
    """The eight services together import nothing of the CLI, and no client of an API server that
    nobody configured: megabytes in each process.
    """
    modules = (
        *(f"{service}.service" for service in SERVICES if service != "controller"),
        "controller.standalone.service",
    )
    imports = "; ".join(f"import topobus.{module}" for module in modules)
    script = (
        f"import sys; import topobus.process.service; {imports}; print(*sorted({{name.partition('.')[0] for name "
        "in sys.modules}))"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert set(_OF_OTHERS) & set(done.stdout.split()) == set()
