"""What the contract of classic drivers plays with: a class, two kinds of parameters, and claims."""

from __future__ import annotations

from typing import Any

from topobus.formats.kubernetes.classic import classic
from topobus.formats.messages.messages import ApiObject
from topobus.testing.drivers.classic_contract import ClassicScene

__all__ = ["classic_scene"]


def classic_scene(
    class_name: str, driver: str, *, kind: str, version: str, pair: dict[str, Any], many: dict[str, Any]
) -> ClassicScene:
    """Make a scene of two nodes that have room for its claims, and no room for one with `many`.

    Shapes: kind, version — of the parameters; pair, many — their specs.
    """

    def made(kind: str, name: str, spec: dict[str, Any], version: str = classic.API_VERSION) -> ApiObject:
        metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
        return ApiObject(api_version=version, kind=kind, metadata=metadata, spec=spec)

    def claim(name: str, parameters: str = "") -> ApiObject:
        reference = {"apiGroup": version.partition("/")[0], "kind": kind, "name": parameters}
        more = {"parametersRef": reference} if parameters else {}
        return made("ResourceClaim", name, {"resourceClassName": class_name, **more})

    return ClassicScene(
        resource_class=made("ResourceClass", class_name, {"driverName": driver}),
        parameters=(made(kind, "two", pair, version), made(kind, "many", many, version)),
        claims=(claim("a"), claim("b", "two"), claim("c")),
        too_big=claim("d", "many"),
        nodes=("n1", "n2"),
    )
