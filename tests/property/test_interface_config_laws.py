"""Laws of an interface's configuration: reading answers with a value whatever it is given, and what
it accepts it writes back equal.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.interface_model import render_interface_config
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig
from topobus.nic.interfaces.rules.interface_reading import read_interface_config
from topobus.values.outcome import Refusal

HEAD = {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface"}
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
ANYTHING = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.sampled_from(
    [
        "10.0.0.3/24",
        "fd00::3/64",
        "10.0.0.1",
        "fe80::1",
        "default",
        "10.9.0.0/16",
        "::/0",
        "net1",
        "a/b",
        "02:00:00:00:00:01",
        "",
        "802.1q",
    ]
) | st.text(max_size=18)
NUMBERS = st.integers(-1, 10) | st.integers(60, 5000) | st.integers()
FIELD = TEXTS | NUMBERS | st.booleans() | ANYTHING


def _object(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), FIELD, max_size=len(names))


_INTERFACE = st.fixed_dictionaries(
    {},
    optional={
        "name": TEXTS,
        "mtu": NUMBERS,
        "mac": TEXTS,
        "addresses": st.lists(TEXTS, max_size=3),
        "up": st.booleans() | FIELD,
        "duplicateAddressDetection": st.sampled_from(["wait", "off", "no"]),
    },
)
_ROUTE = st.fixed_dictionaries(
    {"destination": TEXTS},
    optional={
        "gateway": TEXTS,
        "source": TEXTS,
        "metric": NUMBERS,
        "table": NUMBERS,
        "scope": TEXTS,
        "onlink": st.booleans(),
    },
)
_RULE = st.fixed_dictionaries(
    {"table": NUMBERS, "priority": NUMBERS},
    optional={"from": TEXTS, "to": TEXTS, "family": st.sampled_from(["ipv4", "ipv6", "x"])},
)
NEARLY_RIGHT = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(["pod", "host", "Host"]) | FIELD,
        "interface": _INTERFACE | FIELD,
        "routes": st.lists(_ROUTE, max_size=3),
        "rules": st.lists(_RULE, max_size=3),
        "neighbours": st.lists(_object("address", "mac"), max_size=2),
        "sysctls": st.dictionaries(st.sampled_from(["net.ipv4.conf.IFNAME.rp_filter", "net.ipv4.ip_forward"]), NUMBERS),
        "vf": _object(
            "mac", "vlan", "qos", "vlanProtocol", "trust", "spoofCheck", "linkState", "minTxRate", "maxTxRate"
        ),
        "share": _object("mode", "submode"),
        "rdma": _object("mode"),
        "cni": ANYTHING,
    },
)
RIGHT = st.fixed_dictionaries(
    {},
    optional={
        "interface": st.fixed_dictionaries(
            {},
            optional={
                "name": st.from_regex(r"[a-z][a-z0-9._-]{0,13}", fullmatch=True).filter(
                    lambda name: name not in ("lo", "all", "default")
                ),
                "mtu": st.integers(68, 65535),
                "mac": st.from_regex(r"[0-9a-fA-F][02468aceACE](:[0-9a-f]{2}){4}:01", fullmatch=True),
                "addresses": st.lists(
                    st.integers(1, 254).map(lambda host: f"10.0.0.{host}/24"), max_size=3, unique=True
                ),
                "up": st.booleans(),
            },
        ),
        "routes": st.lists(
            st.integers(0, 255).map(lambda net: {"destination": f"10.{net}.0.0/16"}), max_size=3, unique_by=str
        ),
        "vf": st.fixed_dictionaries(
            {"vlan": st.integers(1, 4094)}, optional={"qos": st.integers(0, 7), "trust": st.booleans()}
        ),
    },
)


@given(st.lists(ANYTHING | NEARLY_RIGHT.map(lambda fields: {**HEAD, **fields}), max_size=3))
def test_reading_answers_with_a_value_when_it_is_given_anything(entries: list[Any]) -> None:
    """No document raises an exception, and a refusal names a field for each reason."""
    answer = read_interface_config(entries)

    assert isinstance(answer, InterfaceConfig) or all(reason.facts["field"] for reason in answer.reasons)


@given(st.lists((NEARLY_RIGHT | RIGHT).map(lambda fields: {**HEAD, **fields}), max_size=2))
def test_reading_gives_an_equal_value_when_it_reads_what_was_rendered(entries: list[dict[str, Any]]) -> None:
    """What was accepted is written back in a form that means the same."""
    answer = read_interface_config(entries)

    assert isinstance(answer, Refusal) or read_interface_config([render_interface_config(answer)]) == answer


@given(RIGHT)
def test_reading_accepts_a_configuration_when_all_fields_are_right(fields: dict[str, Any]) -> None:
    """The law above is not empty: right documents are accepted, each field as it was written."""
    answer = read_interface_config([{**HEAD, **fields}])

    assert isinstance(answer, InterfaceConfig), answer
    written = fields.get("interface", {})
    assert (answer.interface.mtu, answer.interface.addresses) == (
        written.get("mtu"),
        tuple(written["addresses"]) if "addresses" in written else None,
    )


@given(RIGHT, RIGHT)
def test_reading_gives_the_claims_word_when_class_and_claim_write_one_field(
    of_class: dict[str, Any], of_claim: dict[str, Any]
) -> None:
    """A claim refines: whatever of the interface it writes stands, and
    the class's word elsewhere.
    """
    answer = read_interface_config([{**HEAD, **of_class, "vf": None}, {**HEAD, **of_claim, "vf": None}])

    assert isinstance(answer, InterfaceConfig), answer
    wanted = {**of_class.get("interface", {}), **of_claim.get("interface", {})}
    assert (answer.interface.name, answer.interface.mtu, answer.interface.up) == (
        wanted.get("name"),
        wanted.get("mtu"),
        wanted.get("up"),
    )
