"""Provisioning: every stream and bucket of the catalogue, made when absent, compared when present.

Idempotent, and safe when eight services do it at once. A difference is never repaired in silence: ConfigError names stream, field, got, wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topobus.contracts import catalogue
from topobus.contracts.catalogue import Event, State
from topobus.domain.errors import ConfigError
from topobus.runtime.failures import JetStreamError
from topobus.runtime.jetstream import JetStream

__all__ = ["bucket_config", "bucket_stream", "bucket_subject", "inspect", "provision", "stream_config"]

# Header bytes that the server counts into a message's size, on top of the value.
_HEADER_ALLOWANCE = 4096
# Server 2.15 refuses consumer 1001 of a stream that does not say its own limit.
_MAX_CONSUMERS = 16_384
_TWO_MINUTES_NS = 120 * 1_000_000_000


def bucket_stream(state: State[Any]) -> str:
    """Name the stream behind a bucket, as every NATS client does."""
    return f"KV_{state.bucket}"


def bucket_subject(state: State[Any], key: str) -> str:
    """Build the subject that a key of a bucket is stored under."""
    return f"$KV.{state.bucket}.{key}"


def bucket_config(state: State[Any], replicas: int) -> dict[str, Any]:
    """Say how a bucket's stream must be.

    No rollup and no purge: one header could otherwise empty the whole bucket. A delete is a marker, which needs neither.
    """
    return {
        **_common(bucket_stream(state), bucket_subject(state, ">"), state.description, replicas),
        "max_msgs_per_subject": state.history,
        "max_msg_size": state.max_value_bytes + _HEADER_ALLOWANCE,
        "max_bytes": -1,
        "discard": "new",
        "allow_direct": True,
        "deny_purge": True,
    }


def stream_config(event: Event[Any], replicas: int) -> dict[str, Any]:
    """Say how an event's stream must be: no age limit, since the newest event of a subject is the present state."""
    return {
        **_common(event.stream, event.pattern().partition("*")[0] + ">", event.description, replicas),
        "max_msgs_per_subject": event.max_per_subject,
        "max_msg_size": -1,
        "max_bytes": event.max_stream_bytes,
        "discard": "old",
        "allow_direct": True,
        "deny_purge": True,
    }


def _common(name: str, subject: str, description: str, replicas: int) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "subjects": [subject],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "max_age": 0,
        "max_msgs": -1,
        "max_consumers": _MAX_CONSUMERS,
        "duplicate_window": _TWO_MINUTES_NS,
        "allow_rollup_hdrs": False,
        "deny_delete": True,
    }


async def provision(jetstream: JetStream, replicas: int) -> None:
    """Make what is absent; refuse what differs.

    Errors: ConfigError for drift, for replicas that this server cannot keep consistent, for limits too small; PeerUnavailable when there is no JetStream.
    """
    version = jetstream.connection.server_version
    if replicas > 1 and version < (2, 10, 0):
        raise ConfigError(
            f"nats.replicas is {replicas} and the server is {'.'.join(map(str, version))}: before 2.10 a replicated compare-and-set lets several writers win",
            next_step="use nats-server 2.10 or later, or replicas = 1",
        )
    for config in _catalogue_configs(replicas):
        await _provision_one(jetstream, config)


async def inspect(jetstream: JetStream, replicas: int) -> dict[str, str]:
    """Compare without making anything: each stream of the catalogue with what is wrong with it, empty when it is as it should be."""
    found: dict[str, str] = {}
    for config in _catalogue_configs(replicas):
        info = await jetstream.stream_info(config["name"])
        found[config["name"]] = "it does not exist" if info is None else next(_differences(info.config, config), ("", ""))[1]
    return found


def _catalogue_configs(replicas: int) -> list[dict[str, Any]]:
    return [bucket_config(state, replicas) for state in catalogue.STATES] + [stream_config(event, replicas) for event in catalogue.EVENTS]


def _differences(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name each field that differs, with what was found and what is wanted."""
    for field, want in wanted.items():
        value = got.get(field, _absent(want))
        # Other words for people are no other stream: an upgrade that mends a sentence must not stop every service.
        if value != want and field != "description":
            yield field, f"{field} is {value!r}, wanted {want!r}"


async def _provision_one(jetstream: JetStream, config: dict[str, Any]) -> None:
    name = config["name"]
    info = await jetstream.stream_info(name)
    if info is None:
        try:
            await jetstream.call(f"STREAM.CREATE.{name}", config)
        except JetStreamError as err:
            if err.is_temporary:
                raise
            if err.err_code != JetStreamError.STREAM_NAME_IN_USE:
                raise ConfigError(
                    f"the NATS server refuses stream {name}: {err}", next_step="check the server's JetStream limits (max_file_store)"
                ) from err
        else:
            return
        # Somebody made it between our look and our making: it is compared like any other.
        info = await jetstream.stream_info(name)
        if info is None:
            raise ConfigError(
                f"stream {name} is in use and cannot be seen", next_step="check this user's permissions on $JS.API.STREAM.INFO"
            )
    for field, difference in _differences(info.config, config):
        raise ConfigError(
            f"stream {name} differs from the catalogue: {difference}",
            next_step=f"edit it (nats stream edit {name}) or remove it, if its content may go",
            stream=name,
            field=field,
        )


def _absent(want: object) -> object:
    """Give what an absent field means: servers leave out false, zero and empty ones."""
    return {bool: False, int: 0, str: "", list: []}.get(type(want))
