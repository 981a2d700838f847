"""Configuration lists: what is read, and how what cannot be used is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topobus.nic.cni.rules.chain import Chain, parse_chain
from topobus.nic.cni.rules.messages import (
    CniResult,
    Target,
    check_target,
    environment,
    plugin_input,
    read_error,
    read_result,
    read_versions,
)
from topobus.values.outcome import Refusal


def conflist(**changes: Any) -> dict[str, Any]:
    """A list of two plugins, changed."""
    plugins = [
        {"type": "bridge", "ipam": {"type": "host-local", "subnet": "10.9.0.0/24"}},
        {"type": "portmap", "capabilities": {"portMappings": True, "mac": False}},
    ]
    return {"cniVersion": "1.0.0", "name": "data", "plugins": plugins} | changes


def test_chain_names_every_program_when_it_is_read() -> None:
    """The address plugin that a plugin runs by itself is among them: it runs as root, too."""
    chain = parse_chain(conflist(), "data.conflist")

    assert isinstance(chain, Chain)
    assert chain.types == (
        ("bridge", "plugins[0].type"),
        ("host-local", "plugins[0].ipam.type"),
        ("portmap", "plugins[1].type"),
    )
    assert chain.plugins[1].capabilities == ("portMappings",)


def test_chain_takes_all_versions_stated_when_a_list_has_several() -> None:
    """`cniVersions` of 1.1.0 is read beside `cniVersion`; what we do not speak is left out."""
    chain = parse_chain(conflist(cniVersion="0.4.0", cniVersions=["1.0.0", "2.0.0", "0.4.0"]), "data.conflist")

    assert isinstance(chain, Chain)
    assert chain.versions == ("1.0.0", "0.4.0")


def test_chain_takes_0_3_0_when_a_list_says_it() -> None:
    """Its results are those of 0.3.1; lists of that time are still in use."""
    chain = parse_chain(conflist(cniVersion="0.3.0"), "data.conflist")

    assert isinstance(chain, Chain)
    assert chain.versions == ("0.3.0",)


@pytest.mark.parametrize("version", [None, "", "0.2.0", "0.1.0"])
def test_chain_says_why_when_a_list_is_of_the_time_before_interfaces(version: str | None) -> None:
    """A list without cniVersion counts as 0.1.0, whose results cannot say
    which interface there is.
    """
    document = {key: value for key, value in conflist(cniVersion=version).items() if value is not None}

    refusal = parse_chain(document, "data.conflist")

    assert isinstance(refusal, Refusal)
    assert (
        "1.1.0, 1.0.0, 0.4.0, 0.3.1, 0.3.0 (a list without it is of 0.1.0, and before 0.3.0 a result names "
        "no interface)" in refusal.reasons[0].message
    )


def test_chain_takes_one_plugin_when_it_is_no_list() -> None:
    """A configuration of one plugin, as before 1.0.0, is a chain of one."""
    chain = parse_chain({"cniVersion": "0.3.1", "name": "lo", "type": "loopback"}, "lo.conf")

    assert isinstance(chain, Chain)
    assert [plugin.type for plugin in chain.plugins] == ["loopback"]


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], "the list"),
        (conflist(name="../x"), "name"),
        (conflist(name=""), "name"),
        (conflist(name=7), "name"),
        (conflist(cniVersion="0.2.0"), "cniVersion"),
        (conflist(cniVersion=None), "cniVersion"),
        (conflist(cniVersions="1.0.0"), "cniVersions"),
        (conflist(plugins=[]), "plugins"),
        (conflist(plugins=[{"type": "tuning"}] * 17), "plugins"),
        (conflist(plugins={"type": "bridge"}), "plugins"),
        (conflist(plugins=["bridge"]), "plugins[0]"),
        (conflist(plugins=[{"type": "bridge"}, {}]), "plugins[1].type"),
        (conflist(plugins=[{"type": "../../bin/sh"}]), "plugins[0].type"),
        (conflist(plugins=[{"type": ".."}]), "plugins[0].type"),
        (conflist(plugins=[{"type": "bridge", "capabilities": ["mac"]}]), "plugins[0].capabilities"),
        (conflist(plugins=[{"type": "bridge", "capabilities": {"mac": "yes"}}]), "plugins[0].capabilities"),
        (conflist(plugins=[{"type": "bridge", "ipam": "dhcp"}]), "plugins[0].ipam"),
        (conflist(plugins=[{"type": "bridge", "ipam": {"type": "a/b"}}]), "plugins[0].ipam.type"),
    ],
)
def test_chain_is_refused_with_its_field_when_it_cannot_be_used(document: object, field: str) -> None:
    """The refusal names the field, where the list stands, and what stands there."""
    refusal = parse_chain(document, "data.conflist")

    assert isinstance(refusal, Refusal)
    assert (refusal.reasons[0].code, refusal.reasons[0].facts["field"]) == ("cni-config-invalid", field)
    assert "data.conflist" in refusal.reasons[0].message


@pytest.mark.parametrize(
    ("plugin", "field"),
    [
        ({"type": "bridge", "IPAM": {"type": "host-local"}}, "plugins[0].IPAM"),
        ({"type": "bridge", "ipam": {"type": "static", "Type": "host-local"}}, "plugins[0].ipam.Type"),
        ({"type": "portmap", "RuntimeConfig": {"portMappings": []}}, "plugins[0].RuntimeConfig"),
        ({"type": "portmap", "prevReſult": {}}, "plugins[0].prevReſult"),
    ],
    ids=["ipam", "type", "values", "long-s"],
)
def test_chain_is_refused_when_a_key_of_ours_is_written_in_another_case(plugin: dict[str, Any], field: str) -> None:
    """Plugins in Go read it all the same: the program that it names was never held against the list
    of those allowed.
    """
    refusal = parse_chain({"cniVersion": "1.0.0", "name": "data", "plugins": [plugin]}, "claim")

    assert isinstance(refusal, Refusal)
    assert [(reason.code, reason.facts["field"]) for reason in refusal.reasons] == [("cni-config-invalid", field)]


def test_plugin_gets_only_what_it_declares_when_its_input_is_built() -> None:
    """The list's own keys and `capabilities` are not handed on, values for capabilities only to who
    declares them, and the result before is.
    """
    chain = parse_chain(conflist(), "data.conflist")
    assert isinstance(chain, Chain)
    target = Target(
        container_id="c1",
        interface="net1",
        runtime_values={"portMappings": [{"hostPort": 80}], "mac": "02:00:00:00:00:01"},
    )

    bridge, portmap = (plugin_input(chain, plugin, "1.0.0", target, previous={"ips": []}) for plugin in chain.plugins)

    assert bridge == {**conflist()["plugins"][0], "cniVersion": "1.0.0", "name": "data", "prevResult": {"ips": []}}
    assert portmap["runtimeConfig"] == {"portMappings": [{"hostPort": 80}]}
    assert "capabilities" not in portmap


def test_environment_has_nothing_of_ours_when_it_is_built() -> None:
    """A plugin runs as root: it gets the variables of the specification and PATH."""
    target = Target(
        container_id="c1",
        interface="net1",
        network_namespace="/run/netns/a",
        arguments=(("K8S_POD_NAME", "p"), ("A", "b")),
    )

    variables = environment("ADD", target, ("/opt/cni/bin", "/usr/lib/cni"), "/usr/sbin:/sbin")

    assert variables == {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c1",
        "CNI_IFNAME": "net1",
        "CNI_NETNS": "/run/netns/a",
        "CNI_ARGS": "K8S_POD_NAME=p;A=b",
        "CNI_PATH": "/opt/cni/bin:/usr/lib/cni",
        "PATH": "/usr/sbin:/sbin",
    }


@pytest.mark.parametrize(
    ("target", "field"),
    [
        (Target(container_id="", interface="net1"), "the container id"),
        (Target(container_id="a/b", interface="net1"), "the container id"),
        (Target(container_id="c", interface="a/b"), "the interface name"),
        (Target(container_id="c", interface=".."), "the interface name"),
        (Target(container_id="c", interface="a234567890123456"), "the interface name"),
        (Target(container_id="c", interface="net1", arguments=(("A", "b;C=d"),)), "CNI_ARGS"),
    ],
)
def test_target_is_refused_when_a_name_is_none(target: Target, field: str) -> None:
    """No plugin sees a name that the kernel or the specification does not take."""
    refusal = check_target(target, "the claim")

    assert refusal is not None
    assert refusal.reasons[0].facts["field"] == field


def test_result_is_read_when_a_plugin_of_an_older_version_answers() -> None:
    """0.3.1 writes the address family beside each address, and its result may lack cniVersion."""
    content = b'{"interfaces":[{"name":"br0"},{"name":"net1","mac":"02:AA:00:00:00:01","sandbox":"/run/netns/a"}],"ips":[{"version":"4","address":"10.9.0.2/24","interface":1}]}'  # noqa: E501

    result = read_result(content, "bridge", "ADD", "0.3.1")

    assert isinstance(result, CniResult)
    assert result.document["cniVersion"] == "0.3.1"
    assert (result.interfaces[1].mac, result.addresses[0].address, result.addresses[0].interface) == (
        "02:aa:00:00:00:01",
        "10.9.0.2/24",
        1,
    )


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "cni-plugin-nonsense"),
        (b"ok", "cni-plugin-nonsense"),
        (b"\xff\xfe", "cni-plugin-nonsense"),
        (b"[" * 100_000, "cni-plugin-nonsense"),
        (b"[]", "cni-plugin-nonsense"),
        (b'{"interfaces": 1}', "cni-plugin-nonsense"),
        (b'{"interfaces": [{}]}', "cni-plugin-nonsense"),
        (b'{"interfaces": [{"name": "a", "mtu": "big"}]}', "cni-plugin-nonsense"),
        (b'{"ips": [{"address": "10.0.0.256/24"}]}', "cni-plugin-nonsense"),
        (b'{"ips": ["10.0.0.1/24"]}', "cni-plugin-nonsense"),
        (b'{"ips": [{"address": "10.0.0.1/24", "interface": 3}]}', "cni-plugin-nonsense"),
        (b'{"cniVersion": "0.4.0"}', "cni-version-answered"),
    ],
)
def test_result_is_refused_when_it_is_none(content: bytes, code: str) -> None:
    """What a plugin prints is looked at before it is used."""
    refusal = read_result(content, "bridge", "ADD", "1.0.0")

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].code == code
    assert refusal.reasons[0].facts["plugin"] == "bridge"


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
    .map(repr)
    .map(str.encode)
)
def test_reading_raises_nothing_when_a_plugin_writes_anything(content: bytes) -> None:
    """Whatever the bytes, there is an answer or a refusal."""
    assert isinstance(read_result(content, "x", "ADD", "1.0.0"), CniResult | Refusal)
    assert isinstance(read_versions(content, "x"), tuple | Refusal)
    read_error(content)
