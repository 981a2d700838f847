"""A real Prometheus beside compose.yaml, with the files of deploy/monitoring as
docs/how-to/watch-with-prometheus.md says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from testcontainers.compose import DockerCompose
from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import HttpWaitStrategy

from engine.conftest import PROJECT, RUNNING, Images, failing_without_engine
from engine.engine import ROOT, debian_program, program_image
from support.documented_images import documented_runs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

PAGE = ROOT / "docs" / "how-to" / "watch-with-prometheus.md"
PORT = 9090
SERVICES = RUNNING - {"nats"}
_ARGUMENTS = ("--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus")


@pytest.fixture(scope="module")
def prometheus(
    images: Images, system: DockerCompose, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DockerContainer]:
    """Debian's Prometheus in the place of the image that the page names, with the page's options,
    in compose's network.
    """
    with failing_without_engine():
        program = debian_program("prometheus", "own", "usr/bin/prometheus")
        folder = tmp_path_factory.mktemp("prometheus") / "image"
        image = program_image(images.base, program, folder, tag="topobus-ci/prometheus:own", command=_ARGUMENTS)
    run = documented_runs(PAGE)["prometheus"]
    container = DockerContainer(image, ports=[PORT], command=list(run.command) or None).with_tmpfs_mount("/prometheus")
    for source, place, mode in run.volumes:
        container.with_volume_mapping(source.replace("$PWD", str(ROOT)), place, mode)
    container.with_kwargs(network=run.network.replace("topobus", PROJECT))
    with container.waiting_for(HttpWaitStrategy(PORT, "/-/ready").with_poll_interval(0.2)):
        yield container


def _answer(text: str) -> Any:
    return json.loads(text)["data"]


def _ask(prometheus: DockerContainer, path: str, **query: str) -> Any:
    with urlopen(
        f"http://127.0.0.1:{prometheus.get_exposed_port(PORT)}/api/v1/{path}?{urlencode(query)}", timeout=10
    ) as reply:
        return _answer(reply.read().decode())


def _wait(prometheus: DockerContainer, path: str, is_so: Callable[[Any], bool]) -> Any:
    """Wait until what Prometheus answers is so; gives the answer."""
    HttpWaitStrategy(PORT, f"/api/v1/{path}").for_response_predicate(
        lambda text: is_so(_answer(text))
    ).wait_until_ready(prometheus)
    return _ask(prometheus, path)


def _all_up(answer: Any) -> bool:
    return [target["health"] for target in answer["activeTargets"]] == ["up"] * len(SERVICES)


def test_prometheus_reads_every_service_of_compose(prometheus: DockerContainer) -> None:
    """All targets are up, each with the labels that alerts and dashboard need, and none is left
    out.
    """
    targets = _wait(prometheus, "targets", _all_up)["activeTargets"]

    assert {target["labels"]["container"] for target in targets} == SERVICES
    assert {(target["labels"]["namespace"], target["labels"]["node"]) for target in targets} == {
        ("topobus", "demo-node")
    }


def test_prometheus_has_the_series_that_the_page_names(prometheus: DockerContainer) -> None:
    """Each query of the page has an answer from a system that is well."""
    _wait(prometheus, "targets", _all_up)
    queries = re.findall(
        r"^\| `([^`]+)` \|",
        PAGE.read_text().partition("## The first queries\n")[2].partition("\n## ")[0],
        flags=re.MULTILINE,
    )
    answers = {query: _ask(prometheus, "query", query=query)["result"] for query in queries}

    assert len(queries) >= 5
    assert [query for query, result in answers.items() if not result] == []


def test_prometheus_knows_what_the_alerts_ask_for(prometheus: DockerContainer) -> None:
    """All rules of alerts.yaml are loaded and evaluated, each metric in them is one that a service
    has, and none fires for a system that is well.
    """
    rules = [
        rule
        for group in yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    _wait(prometheus, "targets", _all_up)
    groups = _wait(
        prometheus,
        "rules",
        lambda answer: {rule["health"] for group in answer["groups"] for rule in group["rules"]} == {"ok"},
    )["groups"]
    metadata = _ask(prometheus, "metadata")
    # A counter's metadata have its name without the ending, a
    # histogram's without that of its parts.
    asked = {name for rule in rules for name in re.findall(r"topobus_\w+", rule["expr"])}
    unknown = [
        name for name in sorted(asked) if not {name, re.sub("_(count|bucket|sum|total)$", "", name)} & set(metadata)
    ]

    assert {
        rule["name"]: rule["state"] for group in groups for rule in group["rules"] if rule["type"] == "alerting"
    } == dict.fromkeys((rule["alert"] for rule in rules if "alert" in rule), "inactive")
    assert unknown == []
