"""When claims serve a resource, and what else stands in the way."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from topobus.engine.cel.selector import CelCompiler
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.rules.served_resources import class_of_resource, obstacle
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing

GPU = "topobus.dev/gpu"
OURS = Device(name="gpu-0", device_class="gpu", model="T4")
POOLED = Device(name="gpu-1", device_class="gpu", model="H100")
ALL = 'device.driver == "topobus.dev" && device.attributes["topobus.dev"].class == "gpu"'


def made(
    expression: str = ALL, *, name: str = "gpu.topobus.dev", created: str = "2026-01-01T00:00:00Z", **spec: Any
) -> ApiObject:
    """A DeviceClass of the API server."""
    selectors = [{"cel": {"expression": expression}}]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="DeviceClass",
        metadata={"name": name, "creationTimestamp": created},
        spec={"extendedResourceName": GPU, "selectors": selectors, **spec},
    )


def test_class_of_resource_is_the_newest_then_the_first_by_name() -> None:
    """As kube-scheduler chooses among classes that name one resource."""
    old, b, a = (
        made(name="x"),
        made(name="b", created="2026-02-01T00:00:00Z"),
        made(name="a", created="2026-02-01T00:00:00Z"),
    )

    assert class_of_resource(GPU, [old, b, a]) is a
    assert class_of_resource("topobus.dev/nic", [old, b, a]) is None


@pytest.mark.parametrize(
    ("api_object", "offered", "others", "expected"),
    [
        pytest.param(made(), {"gpu-0": OURS}, [], "", id="all"),
        pytest.param(
            made(f'{ALL} && device.attributes["topobus.dev"].model == "T4"'),
            {"gpu-0": OURS},
            [POOLED],
            "",
            id="narrow",
        ),
        pytest.param(made(selectors=[]), {"gpu-0": OURS}, [], "", id="no-selector"),
        pytest.param(made(extendedResourceName=None), {"gpu-0": OURS}, [], "no DeviceClass", id="dropped"),
        pytest.param(made('device.driver == "x"'), {"gpu-0": OURS}, [], "does not select gpu-0", id="others"),
        pytest.param(made("1 +"), {"gpu-0": OURS}, [], "does not select gpu-0", id="no-expression"),
        pytest.param(made(selectors=[{}]), {"gpu-0": OURS}, [], "does not select gpu-0", id="unknown-selector"),
        pytest.param(made(selectors="x"), {"gpu-0": OURS}, [], "does not select gpu-0", id="no-list"),
        pytest.param(made(), {"gpu-0": OURS}, [POOLED], "also selects gpu-1", id="more"),
        pytest.param(made(), {"gpu-0": None}, [], "not offered to claims", id="not-shown"),
        pytest.param(
            made(), {"gpu-0": structs.replace(OURS, sharing=DeviceSharing(replicas=2))}, [], "is shared", id="shared"
        ),
    ],
)
def test_obstacle_names_what_keeps_claims_from_serving(
    api_object: ApiObject, offered: dict[str, Device | None], others: list[Device], expected: str
) -> None:
    """A class serves a resource when it selects its devices and none besides."""
    why = obstacle(GPU, offered, others, [api_object], CelCompiler())

    assert expected in why
    assert bool(why) == bool(expected)
