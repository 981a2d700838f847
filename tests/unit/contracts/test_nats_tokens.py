"""The operator's form of accounts: keys and tokens as NATS documents them, and the same text from the same seeds."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from nacl.signing import VerifyKey

from topobus.contracts.nats_accounts import Account, Shape, accounts
from topobus.contracts.nats_keys import KeyKind, parse_credentials, parse_seed, read_claims, render_credentials, seed_text
from topobus.contracts.nats_tokens import CONTROL_LINE_BYTES, account_token, operator_configuration, operator_token, user_token
from topobus.domain.errors import ContractError
from topobus.runtime.signing import KeyPair

ISSUED_AT = 1_800_000_000
_SHAPES = [(Shape.CENTRAL, ()), (Shape.CENTRAL, ("n1", "n2.example")), (Shape.LEAF, ("n1",)), (Shape.HUB, ("n1", "n2"))]


def _keys(described: tuple[Account, ...]) -> dict[str, KeyPair]:
    return {account.name: KeyPair(KeyKind.ACCOUNT, bytes([number]) * 32) for number, account in enumerate(described)}


def _operator() -> KeyPair:
    return KeyPair(KeyKind.OPERATOR, b"o" * 32)


def _account(described: tuple[Account, ...], name: str) -> dict[str, Any]:
    account = next(account for account in described if account.name == name)
    return read_claims(account_token(account, _operator(), _keys(described), issued_at=ISSUED_AT, revoked={}))["nats"]


def _has_in_it(wider: str, subject: str) -> bool:
    pattern = re.escape(wider).replace(r"\*", r"[^.>]+")
    return re.fullmatch(pattern.removesuffix(">") + ".+" if wider.endswith(">") else pattern, subject) is not None


def _is_signed(token: str, public: str) -> bool:
    signed, _, signature = token.rpartition(".")
    raw = base64.b32decode(public + "=" * (-len(public) % 8))[1:-2]
    VerifyKey(raw).verify(signed.encode(), base64.urlsafe_b64decode(signature + "=="))
    return True


def test_seed_and_public_key_are_what_nats_own_library_makes() -> None:
    """The pair that NATS' documentation of nkeys shows: its seed gives its public key."""
    pair = KeyPair.read("SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY")

    assert pair.public == "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
    assert pair.seed == "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"


@pytest.mark.parametrize(("shape", "nodes"), _SHAPES)
def test_tokens_are_the_same_when_seeds_and_moment_are(shape: Shape, nodes: tuple[str, ...]) -> None:
    """Nothing in a token is chance, and each is signed by who issues it."""
    described = accounts(shape, nodes=nodes)

    for account in described:
        keys = _keys(described)
        token = account_token(account, _operator(), keys, issued_at=ISSUED_AT, revoked={})
        assert token == account_token(account, _operator(), _keys(described), issued_at=ISSUED_AT, revoked={})
        assert _is_signed(token, _operator().public)
        for user in account.users:
            public = KeyPair(KeyKind.USER, b"u" * 32).public
            signed = user_token(user, public, keys[account.name], issued_at=ISSUED_AT, expires_at=None)
            assert _is_signed(signed, keys[account.name].public)


@pytest.mark.parametrize(("shape", "nodes"), _SHAPES)
def test_account_shares_what_the_configuration_form_shares(shape: Shape, nodes: tuple[str, ...]) -> None:
    """What crosses is in one export, for those who have its permission, and each import has one, made out to it by the account that exports."""
    described = accounts(shape, nodes=nodes)
    keys = _keys(described)
    for account in described:
        claims = _account(described, account.name)

        exported = {(each["type"], each["subject"]) for each in claims["exports"]}
        assert exported <= {(str(crossing.kind), crossing.subject) for crossing in account.exports}
        assert len(exported) == len(claims["exports"])
        assert all(each["token_req"] for each in claims["exports"])
        for crossing in account.exports:
            # A server takes no account in which one export has another one in it.
            assert len([subject for kind, subject in exported if kind == crossing.kind and _has_in_it(subject, crossing.subject)]) == 1
        assert [(each["type"], each["subject"], each["account"], each.get("local_subject", "")) for each in claims["imports"]] == [
            (str(crossing.kind), crossing.subject, keys[crossing.owner].public, crossing.local) for crossing in account.imports
        ]
        for each in claims["imports"]:
            permission = read_claims(each["token"])
            assert (permission["iss"], permission["sub"]) == (each["account"], keys[account.name].public)
            assert (permission["nats"]["subject"], permission["nats"]["kind"]) == (each["subject"], each["type"])
            assert _is_signed(each["token"], each["account"])


@pytest.mark.parametrize(("shape", "owner"), [(Shape.CENTRAL, "NODE"), (Shape.LEAF, "NODE"), (Shape.HUB, "CORE")])
def test_one_account_alone_stores(shape: Shape, owner: str) -> None:
    """As in the configuration form: the others have no JetStream, and no account is limited otherwise."""
    described = accounts(shape)
    limits = {account.name: _account(described, account.name)["limits"] for account in described}

    assert {name for name, limit in limits.items() if "disk_storage" in limit} == {owner}
    assert {value for limit in limits.values() for name, value in limit.items() if name != "wildcards"} == {-1}


def test_user_has_the_rights_of_the_configuration_form() -> None:
    """Subjects as described; who answers asks of other accounts may do so once for each, for five minutes."""
    described = accounts(Shape.CENTRAL)
    account = next(account for account in described if account.name == "V_GPU")
    (user,) = account.users
    key = KeyPair(KeyKind.USER, b"u" * 32)

    claims = read_claims(user_token(user, key.public, _keys(described)["V_GPU"], issued_at=ISSUED_AT, expires_at=ISSUED_AT + 60))

    assert (claims["sub"], claims["name"], claims["iat"], claims["exp"]) == (key.public, "gpu", ISSUED_AT, ISSUED_AT + 60)
    assert (claims["nats"]["pub"], claims["nats"]["sub"]) == ({"allow": user.rights["publish"]}, {"allow": user.rights["subscribe"]})
    assert claims["nats"]["resp"] == {"max": 1, "ttl": 300_000_000_000}
    assert (claims["nats"]["type"], claims["nats"]["version"]) == ("user", 2)
    assert claims["nats"]["allowed_connection_types"] == ["STANDARD", "WEBSOCKET"]


def test_nodes_server_alone_may_come_as_one() -> None:
    """Its token says nothing of how it connects; every other one does."""
    described = accounts(Shape.HUB, nodes=["n1"])
    keys = _keys(described)
    kinds = {
        user.name: read_claims(user_token(user, keys["OBS"].public, keys[account.name], issued_at=ISSUED_AT, expires_at=None))["nats"]
        for account in described
        for user in account.users
    }

    assert {name for name, claims in kinds.items() if "allowed_connection_types" not in claims} == {"leaf-n1"}


@pytest.mark.parametrize("shape", Shape)
def test_token_fits_the_line_that_the_server_takes(shape: Shape) -> None:
    """Also of the node with the longest name, and with a quarter of the line left for what a later release may do."""
    described = accounts(shape, nodes=["n" * 253])
    public = KeyPair(KeyKind.USER, b"u" * 32).public
    users = [(user, _keys(described)[account.name]) for account in described for user in account.users]
    longest = max(len(user_token(user, public, key, issued_at=ISSUED_AT, expires_at=ISSUED_AT)) for user, key in users)

    assert longest < CONTROL_LINE_BYTES * 3 / 4


def test_configuration_holds_no_secret() -> None:
    """A server is told public keys and tokens: whoever reads its file can be nobody."""
    described = accounts(Shape.CENTRAL)
    keys = _keys(described)
    tokens = {keys[each.name].public: account_token(each, _operator(), keys, issued_at=ISSUED_AT, revoked={}) for each in described}
    signed = operator_token(_operator(), keys["SYS"].public, issued_at=ISSUED_AT)

    text = operator_configuration(signed, keys["SYS"].public, tokens, {key.public: name for name, key in keys.items()})

    assert read_claims(signed)["nats"] == {"system_account": keys["SYS"].public, "type": "operator", "version": 2}
    assert f"system_account: {keys['SYS'].public}\n" in text
    assert not [key.seed for key in (*keys.values(), _operator()) if key.seed in text]


def test_revocation_stands_in_the_account() -> None:
    """The account says whose tokens count for nothing, and since when."""
    described = accounts(Shape.CENTRAL)
    account = next(account for account in described if account.name == "OBS")

    claims = read_claims(account_token(account, _operator(), _keys(described), issued_at=ISSUED_AT, revoked={"UB": 2, "UA": 1}))

    assert claims["nats"]["revocations"] == {"UA": 1, "UB": 2}


def test_credentials_are_read_as_they_were_written() -> None:
    """Token and seed come back, and so does the moment at which they expire."""
    seed = seed_text(KeyKind.USER, b"u" * 32)
    described = accounts(Shape.CENTRAL)
    (user,) = next(account for account in described if account.name == "OBS").users
    token = user_token(user, KeyPair.read(seed).public, _keys(described)["OBS"], issued_at=ISSUED_AT, expires_at=ISSUED_AT + 5)

    credentials = parse_credentials(render_credentials(token, seed).replace("\n", "\r\n"))

    assert (credentials.token, credentials.seed, credentials.expires_at) == (token, seed, ISSUED_AT + 5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no credentials",
        "-----BEGIN NATS USER JWT-----",
        render_credentials("a.b", seed_text(KeyKind.USER, bytes(32))),
        render_credentials("a.b.c", seed_text(KeyKind.USER, bytes(32))),
        render_credentials("e30.e30.e30", "SUAAAA"),
        render_credentials("e30.eyJleHAiOiAieCJ9.e30", seed_text(KeyKind.USER, bytes(32))),
        render_credentials("e30.W10.e30", seed_text(KeyKind.USER, bytes(32))),
    ],
    ids=["empty", "text", "cut", "two-parts", "no-json", "short-seed", "expiry-no-number", "no-object"],
)
def test_credentials_are_refused_when_they_are_none(text: str) -> None:
    """One error for each, which does not repeat what may be secret."""
    with pytest.raises(ContractError) as raised:
        parse_credentials(text)

    assert "SUAAAA" not in str(raised.value)


def test_seed_is_refused_when_a_letter_changed() -> None:
    """The check sum finds a text that was copied wrongly."""
    seed = seed_text(KeyKind.USER, b"u" * 32)

    with pytest.raises(ContractError, match="no seed"):
        parse_seed(f"{seed[:20]}{'A' if seed[20] != 'A' else 'B'}{seed[21:]}")
