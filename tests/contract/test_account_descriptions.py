"""The accounts of a NATS server as the catalogue gives them: nobody without streams may reach more
of them than single subjects.
"""

from __future__ import annotations

import pytest

from docpages.nats_files import render_shape
from support.account_attacks import is_granted
from topobus.bus.server_config.nats_accounts import Account, Shape, User, accounts, crossings, vendor_account
from topobus.bus.server_config.nats_accounts_config import render_passwords
from topobus.bus.server_config.nats_permissions import LEAF_PRINCIPALS, PRINCIPALS, rights
from topobus.bus.server_config.streams import wanted_streams
from topobus.formats.messages.catalogue import ASKS, EVENTS, NOTICES, REPORT, REPORTER, STATES
from topobus.formats.messages.device_classes import DEVICE_SERVICES, class_complaint
from topobus.formats.messages.nouns import PREFIX
from topobus.values.errors import ContractError

_NODES = {Shape.CENTRAL: ["n1", "node2.example"], Shape.LEAF: ["n1"], Shape.HUB: ["n1", "node2.example"]}
_DESCRIBED = [
    pytest.param(shape, nodes, id=f"{shape}-{'nodes' if nodes else 'any'}")
    for shape in Shape
    for nodes in ([], _NODES[shape])
]


def _named(described: tuple[Account, ...]) -> dict[str, Account]:
    return {account.name: account for account in described}


def _guests(described: tuple[Account, ...]) -> list[tuple[Account, User]]:
    return [(account, user) for account in described if not account.has_jetstream for user in account.users]


@pytest.mark.parametrize(("shape", "nodes"), _DESCRIBED)
def test_users_without_streams_have_no_consumers_and_no_way_to_make_any(shape: Shape, nodes: list[str]) -> None:
    """A consumer delivers to any subject, so whoever is in no account with streams can make none,
    and changes no stream.
    """
    described = accounts(shape, nodes=nodes)

    assert [account.name for account in described if account.has_jetstream] == [
        "CORE" if shape is Shape.HUB else "NODE"
    ]
    for account, user in _guests(described):
        for subject in user.rights["publish"]:
            assert not subject.startswith(("$JS.API", "$SYS", ">")), (account.name, subject)
            assert "CONSUMER" not in subject, (account.name, subject)
            assert ".STREAM." not in subject or ".STREAM.MSG.GET." in subject or ".STREAM.INFO." in subject, (
                account.name,
                subject,
            )


@pytest.mark.parametrize(("shape", "nodes"), _DESCRIBED)
def test_each_right_of_a_user_without_streams_leads_somewhere(shape: Shape, nodes: list[str]) -> None:
    """What a vendor or a subscriber may publish or hear, besides inboxes and its own asks, is an
    import of its account. One who reports verdicts may ask each class, by an import for each.

    Each import is exported to it.
    """
    described = accounts(shape, nodes=nodes)
    exported = {
        (crossing.owner, crossing.subject, crossing.importer) for account in described for crossing in account.exports
    }

    for account in described:
        for crossing in account.imports:
            assert (crossing.owner, crossing.subject, account.name) in exported
    if shape is not Shape.HUB:
        for account, user in _guests(described):
            reached = {crossing.local or crossing.subject for crossing in account.imports}
            answered = {crossing.subject for crossing in account.exports}
            for subject in (*user.rights["publish"], *user.rights["subscribe"]):
                if user.principal == REPORTER and subject == REPORT.pattern():
                    assert {each.split(".")[-1] for each in reached} == {*DEVICE_SERVICES}
                elif not subject.startswith("_INBOX."):
                    assert subject in reached | answered, (account.name, subject)


@pytest.mark.parametrize("device_class", DEVICE_SERVICES)
def test_vendor_speaks_for_its_class_alone_when_it_writes(device_class: str) -> None:
    """The class stands fixed in each subject that a vendor's account can write, and on a leaf the
    node, too.
    """
    for shape, nodes, node in ((Shape.CENTRAL, [], "*"), (Shape.LEAF, ["n1"], "n1")):
        account = _named(accounts(shape, nodes=nodes))[vendor_account(device_class)]
        written = [
            crossing.subject for crossing in account.imports if crossing.kind == "service" and not crossing.local
        ]

        assert written == [
            f"$KV.topobus_inventories_{device_class}.{node}.{device_class}",
            f"$KV.topobus_maintenances_{device_class}.{node}.{device_class}",
            f"topobus.v1.health.{node}.{device_class}.*",
        ]


@pytest.mark.parametrize(
    ("shape", "nodes"), [(Shape.CENTRAL, ()), (Shape.CENTRAL, ("n1", "n2")), (Shape.LEAF, ("n1",))]
)
def test_class_of_ones_own_has_the_rights_of_ours_for_itself_alone(shape: Shape, nodes: tuple[str, ...]) -> None:
    """Its account is that of a gpu service with the other name in each subject, but for the common
    buckets.

    Nothing else changes.
    """
    described, before = accounts(shape, nodes=nodes, classes=("npu",)), accounts(shape, nodes=nodes)
    named = _named(described)

    assert {account.name for account in described} - {account.name for account in before} == {
        vendor_account("npu", node) for node in (nodes if shape is Shape.CENTRAL and nodes else ("",))
    }
    for account in described:
        for user in account.users:
            if user.principal == "npu":
                twin = next(other for other in named[account.name.replace("NPU", "GPU")].users)
                for verb, subjects in user.rights.items():
                    ours = {
                        subject.replace("inventories_gpu", "inventories")
                        .replace("maintenances_gpu", "maintenances")
                        .replace("gpu", "npu")
                        for subject in twin.rights[verb]
                    }
                    assert set(subjects) == ours
            else:
                assert user == next(other for other in _named(before)[account.name].users if other.name == user.name)


@pytest.mark.parametrize("shape", list(Shape))
def test_every_ask_for_a_class_of_ones_own_reaches_its_service(shape: Shape) -> None:
    """What crosses for ours crosses for it; a hub asks nodes, whatever classes they have."""
    ours = {
        crossing for crossing in crossings(shape, classes=("npu",)) if "V_GPU" in (crossing.owner, crossing.importer)
    }
    own = {
        crossing for crossing in crossings(shape, classes=("npu",)) if "V_NPU" in (crossing.owner, crossing.importer)
    }

    # A notice goes to each account that may hear it, by the same subject.
    assert len(own) == len(
        {(crossing.subject.replace("_gpu", ""), crossing.owner, crossing.importer) for crossing in ours}
    )
    assert bool(own) is (shape is not Shape.HUB)


def test_no_class_can_have_the_name_of_another_principal() -> None:
    """Who connects as `gateway` is the gateway."""
    others = {*LEAF_PRINCIPALS, "leaf"} - {*DEVICE_SERVICES}

    assert [name for name in sorted(others) if not class_complaint(name)] == []
    with pytest.raises(ValueError, match="unknown principal"):
        rights("smart-card")


def test_hub_maps_what_a_node_says_and_nothing_else_when_it_comes_from_a_leaf() -> None:
    """Each state and event of a node has one subject at the hub; the stand-alone objects have none.

    A leaf's user says its own node's alone.
    """
    described = _named(accounts(Shape.HUB, nodes=["node1.example"]))
    said = {crossing.local: crossing.subject for crossing in described["NODES-node1_example"].imports}

    assert len([subject for subject in said.values() if "$JS" not in subject]) == len(
        [noun for noun in (*STATES, *EVENTS) if "node" in noun.parts]
    )
    assert not any("objects" in subject for subject in said.values())
    (user,) = described["NODES-node1_example"].users
    assert (user.name, user.variable) == ("leaf-node1_example", "TOPOBUS_LEAF_NODE1_dot_EXAMPLE_PASSWORD")
    assert user.rights["publish"] == ["_R_.>", "topobus.v1.up.node1_example.>"]
    assert not any("*" in subject.split(".")[3] for subject in said)


def test_node_is_alone_in_its_account_when_the_hub_names_it() -> None:
    """In a common account it could name another node's subjects as the reply of what it says, and
    hear what is answered to others.
    """
    described = _named(accounts(Shape.HUB, nodes=["n1", "n2"]))

    assert [
        (name, [user.name for user in account.users]) for name, account in described.items() if name.startswith("NODES")
    ] == [
        ("NODES-n1", ["leaf-n1"]),
        ("NODES-n2", ["leaf-n2"]),
    ]
    assert not any(
        "n2" in f"{crossing.subject} {crossing.local}"
        for crossing in (*described["NODES-n1"].imports, *described["NODES-n1"].exports)
    )


@pytest.mark.parametrize("shape", list(Shape))
def test_every_ask_of_a_node_reaches_its_answerer_when_accounts_are_apart(shape: Shape) -> None:
    """No ask of the catalogue is forgotten: who answers is in the asker's account, or exports the
    ask to it.
    """
    described = _named(accounts(shape))
    for ask in ASKS:
        for principal in ask.writer:
            if principal in DEVICE_SERVICES and shape is not Shape.HUB:
                assert any(
                    crossing.subject.startswith(f"topobus.v1.{ask.name}.") and crossing.importer == "NODE"
                    for crossing in described[vendor_account(principal)].exports
                )
    if shape is Shape.HUB:
        exported = {crossing.subject.split(".")[2] for crossing in described["NODES"].exports}
        assert exported == {ask.name for ask in ASKS if set(ask.writer) - {"controller", "cli"}}


def test_subscribers_hear_what_streams_say_again() -> None:
    """The subjects that an account without streams imports are those at which the streams of the
    catalogue republish.
    """
    republished = {config["republish"]["dest"] for config in wanted_streams(1)}
    imported = {
        crossing.subject
        for account in accounts(Shape.CENTRAL)
        for crossing in account.imports
        if crossing.kind == "stream"
    }
    # Notices are in no stream: each account that may hear them has them
    # from their writers themselves.
    notices = [f"{PREFIX}.{notice.name}." for notice in NOTICES]
    heard = {subject for subject in imported if not subject.startswith(tuple(notices))}

    assert all(
        any(is_granted([dest], subject.replace("*", "x").replace(">", "x")) for dest in republished)
        for subject in heard
    )
    assert {f"topobus.v1.stored.{event.name}.>" for event in EVENTS} <= heard


def test_every_principal_is_a_user_when_there_is_one_server() -> None:
    """Nobody of the catalogue is left out."""
    assert {user.name for account in accounts(Shape.CENTRAL) for user in account.users} == set(PRINCIPALS)


def test_nodes_have_passwords_of_their_own_when_their_names_differ_in_a_dot() -> None:
    """Otherwise one of them comes in as the other."""
    nodes = ["a-b", "a.b", "a--b", "a-dot-b"]
    users = [user for account in accounts(Shape.HUB, nodes=nodes) for user in account.users]

    assert len({user.variable for user in users}) == len(users) == len(nodes) + 5


def test_accounts_are_refused_when_a_leaf_has_several_nodes() -> None:
    """A leaf is one node's; and a name that no subject can hold gets into none."""
    with pytest.raises(ValueError, match="a leaf server has one node, got"):
        accounts(Shape.LEAF, nodes=["n1", "n2"])
    with pytest.raises(ContractError):
        accounts(Shape.HUB, nodes=["n1.>"])


def test_passwords_are_no_part_of_the_configuration_when_it_is_rendered() -> None:
    """Each user's password is a variable; a file with all of them is another text."""
    text = render_shape(Shape.CENTRAL)
    users = [user for account in accounts(Shape.CENTRAL) for user in account.users]

    assert all(f"password: ${user.variable}," in text for user in users)
    assert render_passwords({"TOPOBUS_GPU_PASSWORD": 'a"b'}) == 'TOPOBUS_GPU_PASSWORD: "a\\"b"\n'
