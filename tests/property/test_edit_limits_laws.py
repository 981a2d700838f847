"""Laws of the last door: whatever a device service answers, what is written for a container runtime
is within the rights of its class.
"""

from __future__ import annotations

import json
import posixpath
import re
import unicodedata
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from topobus.formats.containers.cdi import render
from topobus.formats.messages.messages import Prepared
from topobus.gateway.claims.rules.claim_cdi import cdi_spec
from topobus.gateway.containers.rules.edit_limits import EditRights, refuse_forbidden
from topobus.values.edits import ContainerEdits, DeviceNode, Mount
from topobus.values.errors import ContractError

RIGHTS = EditRights(device_nodes=("/dev/acme",), mounts=("/opt/acme",), writable_mounts=("/run/acme",))
UID = "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"

# Parts that are good alone, and what makes them bad: the interesting answers are nearly right ones.
PARTS = st.sampled_from(
    [
        "/dev/acme",
        "/dev/sda",
        "/dev/mem",
        "/opt/acme",
        "/run/acme",
        "/",
        "..",
        ".",
        "//",
        "0",
        "lib",
        "\n",
        "\0",
        "\x7f",
        "\u2028",
        "etc",
        "-",
        " ",
        "ä",
    ]
)
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("".join)
NODE_PATHS = st.sampled_from(["/dev/acme0", "/dev/acme/1"]) | PATHS
MOUNT_PATHS = st.sampled_from(["/opt/acme", "/opt/acme/lib", "/run/acme"]) | PATHS
INSIDE = st.sampled_from(["/opt/inside", "/acme", "/etc/ld.so.preload", "/proc", "/usr"]) | PATHS
NAMES = st.sampled_from(
    ["A", "TOPOBUS_A", "LD_PRELOAD", "ld_preload", "PATH", "PYTHONHOME", "ENV", "IFS", "1A", "", "A=B", "A\nB"]
) | st.text(max_size=3)
VALUES = st.sampled_from(["1", "a,b", "1\nB=2", "\0"]) | st.text(max_size=5)
PERMISSIONS = st.sampled_from(["rw", "r", "w", "rwm", "", "x", "rr"])
OPTIONS = st.lists(st.sampled_from(["ro", "rw", "rbind", "bind", "nosuid", "rshared", "suid"]), max_size=3).map(tuple)
NODES = st.builds(DeviceNode, path=NODE_PATHS, host_path=st.just("") | NODE_PATHS, permissions=PERMISSIONS)
MOUNTS = st.builds(Mount, host_path=MOUNT_PATHS, container_path=INSIDE, options=st.just(("ro", "bind")) | OPTIONS)
# One thing at a time, so that many answers are good.
EDITS = st.one_of(
    st.builds(ContainerEdits, env=st.dictionaries(NAMES, VALUES, min_size=1, max_size=1)),
    st.builds(ContainerEdits, device_nodes=st.tuples(NODES)),
    st.builds(ContainerEdits, mounts=st.tuples(MOUNTS)),
    st.builds(ContainerEdits, annotations=st.dictionaries(NAMES, VALUES, max_size=1)),
)
ANSWERS = st.builds(
    Prepared, edits=st.dictionaries(st.just("acme-0"), EDITS, min_size=1), common=st.just(ContainerEdits()) | EDITS
)


def texts_of(value: Any) -> list[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        return [value]
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in items for text in texts_of(item)]


def is_below(path: str, folder: str) -> bool:
    """Say it by the parts of the path, another way than the code does."""
    return path.split("/")[: len(folder.split("/"))] == folder.split("/")


def check_edits(edits: dict[str, Any]) -> None:
    """Assert that a CDI file's edits are within RIGHTS, read as a runtime reads them."""
    assert edits.keys() <= {"env", "deviceNodes", "mounts"}
    for entry in edits.get("env", []):
        name, _, value = entry.partition("=")
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        assert not re.match(r"(?i)(LD_|PYTHON|PATH$|ENV$|IFS$|BASH_ENV$)", name)
        assert len(entry.encode()) < 131_072, value
    for node in edits.get("deviceNodes", []):
        host = node.get("hostPath") or node["path"]
        assert posixpath.normpath(host) == host
        assert host.startswith("/dev/acme")
        assert node["path"].startswith("/dev/")
        assert posixpath.normpath(node["path"]) == node["path"]
        assert node["permissions"] in ("r", "w", "rw", "wr")
    for mount in edits.get("mounts", []):
        host = mount["hostPath"]
        assert posixpath.normpath(host) == host
        assert is_below(host, "/run/acme") or (
            is_below(host, "/opt/acme") and "ro" in mount["options"] and "rw" not in mount["options"]
        )
        assert mount["containerPath"] not in ("/", "/etc/ld.so.preload", "/proc", "/usr")
        assert set(mount["options"]) <= {"ro", "rw", "rbind", "bind", "nosuid"}


@given(answer=ANSWERS)
def test_rendered_file_is_within_the_rights_when_any_answer_comes(answer: Prepared) -> None:
    """Refused, or a CDI file with nothing outside the allow-list and no
    character that nobody sees.
    """
    if refuse_forbidden("acme", answer, RIGHTS) is not None:
        event("refused")
        return
    spec = cdi_spec(UID, "acme", answer)
    if spec is None:
        event("nothing to edit")
        return
    event("written")
    try:
        file = json.loads(render(spec))
    except ContractError:
        raise AssertionError("what is allowed can be written") from None

    assert not [
        text for text in texts_of(file) if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in text)
    ]
    for edits in (file.get("containerEdits", {}), *(device["containerEdits"] for device in file["devices"])):
        check_edits(edits)
