"""When a gateway may be called ready."""

from __future__ import annotations

from typing import Any, cast

import pytest

from topobus.gateway.config import GatewaySettings
from topobus.gateway.service import serve
from topobus.process.readiness import Readiness
from topobus.values.errors import ConfigError


async def test_gateway_is_not_ready_before_it_has_begun() -> None:
    """NATS is ready first: a gateway that counted as ready then would let a roll-over end the other
    one before this one stands by.
    """

    class Runtime:
        readiness = Readiness()

    Runtime.readiness.set("nats", is_ready=True)
    with pytest.raises(ConfigError):
        await serve(GatewaySettings(node="n", instance="no/name"), cast(Any, Runtime()))

    assert not Runtime.readiness.is_ready
    assert Runtime.readiness.report()["inventories"] == "starting"
