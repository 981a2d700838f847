"""The API server simulator counts what it was asked, by who asked for what, and lists and watches
in no time that grows with other kinds.
"""

from __future__ import annotations

from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from topobus.testing.apiserver import ApiRequest, ApiServerSimulator
from topobus.testing.apiserver.request_counts import RequestKind, count_requests
from topobus.testing.apiserver.store import Change, History

PODS = "/api/v1/namespaces/default/pods"


async def test_metrics_count_requests_by_user_when_a_master_and_others_ask(tmp_path: Path) -> None:
    """/metrics shows what count_requests gives: user, verb, resource with its part, and code.

    Pages of one list count one by one.
    """
    async with ApiServerSimulator(token="admin") as server:
        server.write_kubeconfig(tmp_path / "loader", user="loader", is_master=True)
        headers = {"authorization": "Bearer token-of-loader"}
        async with httpx2.AsyncClient(base_url=server.url, headers=headers, trust_env=False) as client:
            for name in ("a", "b"):
                await client.post(
                    PODS, json={"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
                )
            await client.post(PODS, json={"metadata": {"name": "a"}})
            first = (await client.get(PODS, params={"limit": "1"})).json()
            await client.get(PODS, params={"limit": "1", "continue": first["metadata"]["continue"]})
            await client.patch(
                f"{PODS}/a/status",
                json={"status": {"phase": "Running"}},
                headers={"content-type": "application/merge-patch+json"},
            )
            page = (await client.get("/metrics")).text

    counts = {
        (kind.user, kind.verb, kind.resource, kind.code): count
        for kind, count in count_requests(server.requests).items()
    }
    (family,) = text_string_to_metric_families(page)
    assert counts == {
        ("loader", "create", "pods", 201): 2,
        ("loader", "create", "pods", 409): 1,
        ("loader", "list", "pods", 200): 2,
        ("loader", "patch", "pods/status", 200): 1,
    }
    assert family.name == "apiserver_request"
    assert sum(sample.value for sample in family.samples) == 6
    assert {sample.labels["subresource"] for sample in family.samples} == {"", "status"}


def test_counts_tell_watches_from_lists_when_both_ask_for_a_kind() -> None:
    """A watch has the list's path and is none."""
    asked = [
        ApiRequest(method="GET", path=PODS, query=query, code=200) for query in ({}, {"watch": "1"}, {"watch": "true"})
    ]

    counts = count_requests([*asked, ApiRequest(method="GET", path="/api/v1", code=200)])

    assert counts == {
        RequestKind(user="", verb="list", resource="pods", code=200): 1,
        RequestKind(user="", verb="watch", resource="pods", code=200): 2,
    }


async def test_history_wakes_only_watchers_of_the_kind_that_changed() -> None:
    """Who watches pods is not woken by a claim, and what came after a version is given in order."""
    history = History()
    pods, claims = history.grown("", "pods"), history.grown("resource.k8s.io", "resourceclaims")
    for version in (2, 5):
        history.add(Change(version=version, key=("", "pods", "default", "a"), before=None, after={}, last={}))

    assert (pods.is_set(), claims.is_set()) == (True, False)
    assert [change.version for change in history.since(2)] == [5]
    assert [change.version for change in history.since(1)] == [2, 5]
