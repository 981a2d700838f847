"""Generated pages and configuration say what the code says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from docpages.asyncapi import render_asyncapi
from docpages.nats_files import render_server
from topobus.bus.server_config.inboxes import connection_name
from topobus.bus.server_config.nats_permissions import PRINCIPALS, rights
from topobus.formats.messages.catalogue import ALL, ASKS, PROVISIONER
from topobus.formats.messages.device_classes import DEVICE_SERVICES

ROOT = Path(__file__).resolve().parents[2]


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [reference for inner in value.values() for reference in _references(inner)]
    return [reference for inner in value for reference in _references(inner)] if isinstance(value, list) else []


def test_asyncapi_references_exist_when_the_document_is_rendered() -> None:
    """Each $ref leads somewhere in the document, and every noun is a channel."""
    document = render_asyncapi("1")
    for reference in _references(document):
        here: Any = document
        for step in reference.removeprefix("#/").split("/"):
            here = here[step]

        assert here, reference
    assert {noun.name for noun in ALL} <= document["channels"].keys()
    assert yaml.safe_load((ROOT / "docs/reference/asyncapi.yaml").read_text(encoding="utf-8"))["asyncapi"] == "3.0.0"


@pytest.mark.parametrize("principal", PRINCIPALS)
def test_rights_never_reach_everything_when_they_are_rendered(principal: str) -> None:
    """Nobody may publish or hear all subjects, all inboxes, or delete streams.

    Nobody but the provisioner may make or change any.
    """
    granted = rights(principal)
    for subject in (*granted["publish"], *granted["subscribe"]):
        assert subject not in (">", "_INBOX.>", "$JS.API.>", "$KV.>", "topobus.v1.>")
    for verb in ("STREAM.DELETE", "STREAM.PURGE", "STREAM.RESTORE", "STREAM.MSG.DELETE"):
        assert not any(verb in subject for subject in granted["publish"])
    # One principal makes the catalogue's streams; an operator edits them by its login.
    may_make = [
        verb for verb in ("STREAM.CREATE", "STREAM.UPDATE") if any(verb in subject for subject in granted["publish"])
    ]
    assert may_make == (["STREAM.CREATE", "STREAM.UPDATE"] if principal == PROVISIONER else [])


def test_rights_are_one_nodes_and_one_classs_when_a_node_is_given() -> None:
    """A device service of one node writes its own class's inventory and what is kept back of it
    there, and nobody else's.
    """
    for device_service in DEVICE_SERVICES:
        written = [
            subject
            for subject in rights(device_service, node="n1.example.com")["publish"]
            if subject.startswith(("$KV.", "topobus.v1.health"))
        ]

        assert written == [
            f"$KV.topobus_inventories_{device_service}.n1_example_com.{device_service}",
            f"$KV.topobus_maintenances_{device_service}.n1_example_com.{device_service}",
            f"topobus.v1.health.n1_example_com.{device_service}.*",
        ]


def test_rights_let_askers_ask_and_answerers_answer_when_the_catalogue_says_so() -> None:
    """Each ask's readers may publish its subject, its writers may hear it."""
    for ask in ASKS:
        subject = ".".join(("topobus.v1", ask.name, *(["*"] * len(ask.parts))))
        for reader in ask.readers:
            assert subject in rights(reader)["publish"], (ask.name, reader)
        for writer in ask.writer:
            assert any(subject.startswith(f"topobus.v1.{ask.name}.") for subject in rights(writer)["subscribe"]), (
                ask.name,
                writer,
            )


def test_rights_let_nobody_answer_in_anothers_place() -> None:
    """In an asker's inboxes each principal may publish at its own branch only.

    Where the server answers, and at all of them, nobody may.
    """
    for principal in PRINCIPALS:
        published = rights(principal)["publish"]
        branches = [subject.split(".") for subject in published if subject.startswith("_INBOX.")]
        own = connection_name(principal)

        # A subscriber's clients put a random token after its name; nobody asks in its place.
        assert all(
            branch[1:] in ([own, ">"],) if principal == "user" else branch[2:] == [own, ">"] for branch in branches
        ), principal


@pytest.mark.parametrize(
    ("version", "has_sync", "has_flag"), [((2, 9), False, False), ((2, 10), True, False), ((2, 14), True, True)]
)
def test_server_configuration_has_only_options_that_the_version_knows(
    version: tuple[int, int], has_sync: bool, has_flag: bool
) -> None:
    """An option from the future keeps a server from starting."""
    text = render_server(version)

    assert ("sync_interval" in text) is has_sync
    assert ("feature_flags" in text) is has_flag
