"""Makes and keeps the keys of an operator, of its accounts and of their users in files, and the tokens signed with them (`topobus keys operator`).

Flows in: a folder, and the accounts that the catalogue describes. Flows out, below the folder: `operator/seed`; `accounts/<name>/seed`, `jwt` and `revoked.json`;
`users/<name>/user.creds` and `issued.json`; `server.conf`, which holds nothing secret. The files are the truth: what is there is kept, what is missing is made, and what
says anything else than the catalogue now says is made anew with the same key. A call that was killed has nothing to repair: the next one finishes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from topobus.contracts.nats_accounts import Account, User
from topobus.contracts.nats_keys import Credentials, KeyKind, parse_credentials, read_claims, render_credentials
from topobus.contracts.nats_tokens import account_token, operator_configuration, operator_token, user_token
from topobus.domain.errors import ConfigError, ContractError
from topobus.runtime.signing import KeyPair, need_signing
from topobus.runtime.user_keys import locked, make_folder, remove_unready, write_whole

__all__ = ["CREDENTIALS_FILE", "SERVER_FILE", "IssuedUser", "OperatorFolder", "credentials_file"]

CREDENTIALS_FILE = "user.creds"
SERVER_FILE = "server.conf"
_SEED, _TOKEN, _REVOKED, _ISSUED = "seed", "jwt", "revoked.json", "issued.json"


class IssuedUser(Struct, frozen=True, kw_only=True):
    """What stands in a user's file now."""

    name: str
    account: str
    """The account's public key."""
    file: str
    """Empty: revoked."""
    expires_at: int | None


class _Record(Struct, frozen=True, kw_only=True):
    """What was issued to a user so far."""

    account: str
    keys: dict[str, int]
    """Public keys, each with the moment from which it counts for nothing by itself; 0: never."""
    is_revoked: bool = False


def credentials_file(folder: Path, user: str) -> Path:
    """Name the file with a user's credentials."""
    return folder / "users" / user / CREDENTIALS_FILE


class OperatorFolder:
    """One operator's files. Each method holds the folder's lock, so that two calls at the same time follow one another."""

    def __init__(self, folder: Path, described: Sequence[Account], *, now: int, is_for_group: bool = False) -> None:
        """Prepare; `now`: Unix seconds; `is_for_group`: let the group of this process read what its users read.

        Errors: raises ConfigError without PyNaCl.
        """
        need_signing("topobus keys operator")
        self.folder = folder
        self._described = described
        self._homes = {user.name: account for account in described for user in account.users}
        self._users = {user.name: user for account in described for user in account.users}
        self._now = now
        self._is_for_group = is_for_group

    @property
    def names(self) -> tuple[str, ...]:
        """The users' names, sorted."""
        return tuple(sorted(self._users))

    def make(self, *, valid_s: int | None = None) -> list[IssuedUser]:
        """Make what is missing, has expired, or says anything else than the catalogue; `valid_s`: how long what is made counts, None: for ever.

        A user that is not described any more is revoked.
        Errors: raises ConfigError for files that cannot be read or written, and for one that holds no key.
        """
        with self._locked():
            return self._finish(lambda name: self._keep_or_make(name, valid_s))

    def rotate(self, users: Iterable[str], *, valid_s: int | None = None) -> list[IssuedUser]:
        """Give users new keys and tokens. Those of before count until they expire, so that nobody is cut off; `revoke` ends them.

        Errors: as `make`.
        """
        chosen = set(users)
        with self._locked():
            return self._finish(
                lambda name: self._issue(name, KeyPair.new(KeyKind.USER), valid_s) if name in chosen else self._keep_or_make(name, valid_s)
            )

    def revoke(self, users: Iterable[str], *, is_older_only: bool = False) -> list[IssuedUser]:
        """Let what was issued to users count for nothing, once the server has read its file again.

        Shapes: is_older_only — what stands in the file now goes on counting; otherwise the file is removed, and only `rotate` makes another.
        Errors: as `make`.
        """
        with self._locked():
            for name in set(users):
                self._revoke(name, is_older_only=is_older_only)
            return self._finish(lambda name: self._keep_or_make(name, None))

    def _finish(self, settle: Callable[[str], IssuedUser]) -> list[IssuedUser]:
        """Settle each user, then write what the server reads: it knows revocations before, and users after, they are anybody's."""
        operator = self._key(self.folder / "operator", KeyKind.OPERATOR)
        keys = {account.name: self._key(self.folder / "accounts" / account.name, KeyKind.ACCOUNT) for account in self._described}
        issued = [settle(name) for name in self.names]
        for gone in self._gone():
            self._revoke(gone)
        tokens = {}
        for account in self._described:
            folder = self.folder / "accounts" / account.name
            revoked = _read_json(folder / _REVOKED, dict[str, int], {})

            def sign(issued_at: int, account: Account = account, revoked: Mapping[str, int] = revoked) -> str:
                return account_token(account, operator, keys, issued_at=issued_at, revoked=revoked)

            tokens[keys[account.name].public] = self._token(folder / _TOKEN, sign)
        system = next(keys[account.name].public for account in self._described if account.is_system)
        signed = self._token(self.folder / "operator" / _TOKEN, lambda issued_at: operator_token(operator, system, issued_at=issued_at))
        names = {key.public: name for name, key in keys.items()}
        self._write(self.folder / SERVER_FILE, operator_configuration(signed, system, tokens, names))
        return issued

    def _keep_or_make(self, name: str, valid_s: int | None) -> IssuedUser:
        file = credentials_file(self.folder, name)
        if self._record(name).is_revoked:
            return self._issued(name, "", None)
        if not os.path.lexists(file):
            return self._issue(name, KeyPair.new(KeyKind.USER), valid_s)
        present = _parsed(file, _read(file))
        try:
            claims = read_claims(present.token)
            expires_at = None if present.expires_at is None else int(present.expires_at)
            key = KeyPair.read(present.seed)
            again = self._sign(name, key, int(claims["iat"]), expires_at)
        except (ContractError, KeyError, TypeError, ValueError) as err:
            raise ConfigError(f"{file} holds no credentials of ours: {err}", next_step="remove it: the next `make` makes another") from err
        if expires_at is not None and expires_at <= self._now:
            return self._issue(name, KeyPair.new(KeyKind.USER), valid_s)
        if again != present.token:
            # Other rights, or another account's key. How long it counts was decided when it was issued.
            return self._issue(name, key, None if expires_at is None else expires_at - self._now)
        return self._issued(name, str(file), expires_at)

    def _issue(self, name: str, key: KeyPair, valid_s: int | None) -> IssuedUser:
        file = credentials_file(self.folder, name)
        make_folder(file.parent, self._is_for_group)
        expires_at = None if valid_s is None else self._now + valid_s
        record = self._record(name)
        # Noted first: what was handed out and not noted could not be revoked.
        keys = {public: until for public, until in record.keys.items() if not 0 < until <= self._now} | {key.public: expires_at or 0}
        self._note(name, _Record(account=self._homes[name].name, keys=keys))
        self._write(file, render_credentials(self._sign(name, key, self._now, expires_at), key.seed))
        return self._issued(name, str(file), expires_at)

    def _issued(self, name: str, file: str, expires_at: int | None) -> IssuedUser:
        account = self._key(self.folder / "accounts" / self._homes[name].name, KeyKind.ACCOUNT)
        return IssuedUser(name=name, account=account.public, file=file, expires_at=expires_at)

    def _sign(self, name: str, key: KeyPair, issued_at: int, expires_at: int | None) -> str:
        user: User = self._users[name]
        account = self._key(self.folder / "accounts" / self._homes[name].name, KeyKind.ACCOUNT)
        return user_token(user, key.public, account, issued_at=issued_at, expires_at=expires_at)

    def _revoke(self, name: str, *, is_older_only: bool = False) -> None:
        record, file = self._record(name), credentials_file(self.folder, name)
        kept = set()
        if is_older_only and file.exists():
            kept = {KeyPair.read(_parsed(file, _read(file)).seed).public}
        account = self.folder / "accounts" / record.account
        if record.account and account.is_dir():
            revoked = _read_json(account / _REVOKED, dict[str, int], {})
            revoked |= {public: self._now for public in record.keys if public not in kept}
            self._write(account / _REVOKED, f"{json.dumps(revoked, sort_keys=True)}\n")
        keys = {public: until for public, until in record.keys.items() if public in kept}
        if not is_older_only:
            file.unlink(missing_ok=True)
        self._note(name, _Record(account=record.account, keys=keys, is_revoked=not is_older_only))

    def _gone(self) -> list[str]:
        """Name the users that have credentials and are not described any more."""
        return sorted(file.parent.name for file in self.folder.glob(f"users/*/{CREDENTIALS_FILE}") if file.parent.name not in self._users)

    def _record(self, name: str) -> _Record:
        record: _Record = _read_json(self.folder / "users" / name / _ISSUED, _Record, _Record(account="", keys={}))
        return record

    def _note(self, name: str, record: _Record) -> None:
        make_folder(self.folder / "users" / name, self._is_for_group)
        self._write(self.folder / "users" / name / _ISSUED, f"{msgspec.json.encode(record).decode()}\n")

    def _key(self, folder: Path, kind: KeyKind) -> KeyPair:
        """Read the key of a folder, or make it."""
        file = folder / _SEED
        make_folder(folder, False)  # noqa: FBT003 - seeds are read by no group
        if not os.path.lexists(file):
            write_whole(file, f"{KeyPair.new(kind).seed}\n")
        try:
            key = KeyPair.read(_read(file).strip())
        except ContractError as err:
            raise ConfigError(
                f"{file}: {err}", next_step="put the seed back from a copy: all that it signed counts for nothing without it"
            ) from err
        if key.kind is not kind:
            raise ConfigError(f"{file} holds a key for {key.kind.name.lower()}, wanted one for {kind.name.lower()}")
        return key

    def _token(self, file: Path, sign: Callable[[int], str]) -> str:
        """Give the token that is there when the same would be signed again, else a new one."""
        if file.exists():
            present = _read(file).strip()
            try:
                if sign(int(read_claims(present)["iat"])) == present:
                    return present
            except (ContractError, KeyError, TypeError, ValueError):
                # Whatever it is, it is replaced.
                pass
        made = sign(self._now)
        self._write(file, f"{made}\n")
        return made

    def _write(self, file: Path, text: str) -> None:
        if not file.exists() or _read(file) != text:
            write_whole(file, text, is_for_group=self._is_for_group)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_folder(self.folder, self._is_for_group, is_shared=True)
        for part in ("operator", "accounts", "users"):
            make_folder(self.folder / part, self._is_for_group and part == "users", is_shared=part == "users")
        with locked(self.folder):
            for folder in (self.folder, *self.folder.glob("*"), *self.folder.glob("*/*")):
                if folder.is_dir():
                    remove_unready(folder)
            yield


def _parsed(file: Path, text: str) -> Credentials:
    try:
        return parse_credentials(text)
    except ContractError as err:
        raise ConfigError(f"{file} holds no credentials: {err}", next_step="remove it: the next `make` makes another") from err


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read {file}: {err}", next_step="give this process the right to read it") from err


def _read_json(file: Path, kind: Any, default: Any) -> Any:
    if not file.exists():
        return default
    try:
        return msgspec.json.decode(_read(file), type=kind)
    except msgspec.DecodeError as err:
        raise ConfigError(f"{file} is not ours: {err}", next_step="put it back from a copy") from err
