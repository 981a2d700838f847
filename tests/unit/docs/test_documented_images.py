"""The lines by which a page runs images: one for each service, so that `make engine` can hold the
images to them.
"""

from __future__ import annotations

from support.documented_images import SERVICES, SERVICES_PAGE, documented_runs


def test_page_says_for_every_service_how_its_image_is_run() -> None:
    """No service is without a line, every line is for a service or for NATS, and each has the
    settings that the page shows.
    """
    runs = documented_runs(SERVICES_PAGE)

    assert sorted(runs) == sorted([*SERVICES, "nats"])
    assert {runs[service].environment["TOPOBUS_ALL__NATS__URL"] for service in SERVICES} == {"nats://nats:4222"}
