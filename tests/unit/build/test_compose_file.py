"""Promises of compose.yaml that need no container engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[3] / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_container_has_no_more_rights_than_it_needs(name: str) -> None:
    """A read-only image, no capability, no way to more rights, and no port of the host's but on the loopback interface."""
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & service.keys()
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_answer_keys_reach_who_proves_and_who_asks() -> None:
    """All who have the setting see the keys and cannot change them; the maker's group is that of the images' user."""
    for name in ("gpu", "nic", "fpga", "cpu", "topology", "gateway"):
        service = SERVICES[name]

        assert "answer-keys:/keys:ro" in service["volumes"]
        assert service["environment"]["TOPOBUS_ALL__ANSWERS__KEY_DIR"] == SERVICES["answer-keys"]["command"][1]
    image = (FILE.parent / "deploy" / "images" / "Dockerfile").read_text(encoding="utf-8")
    assert f"USER 65532:{SERVICES['answer-keys']['user'].rpartition(':')[2]}" in image
