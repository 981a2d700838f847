"""Creates every stream and bucket of the catalogue that is absent, and compares those that exist.

It is idempotent, and eight services may run it at once. A difference is not repaired:
ConfigError names stream, field, got, wanted. A process without the right to create
streams waits for one that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

from topobus.bus.failures import JetStreamError
from topobus.bus.server_config.streams import DifferenceKind, bucket_stream, differences, stream_names, wanted_streams
from topobus.bus.streams.jetstream import JetStream, StreamInfo
from topobus.formats.messages.catalogue import BUCKETS, PROVISIONER
from topobus.formats.messages.nouns import State, from_token
from topobus.process.logging import get_logger
from topobus.values.errors import ConfigError, PeerUnavailable

__all__ = ["bucket_stream", "bucket_subject", "find_missing", "inspect", "provision"]

_MIB = 1024 * 1024


def bucket_subject(state: State[Any], key: str) -> str:
    """Build the subject that a key of a bucket is stored under."""
    return f"$KV.{state.bucket}.{key}"


async def provision(
    jetstream: JetStream,
    replicas: int,
    *,
    may_create: bool = True,
    store_bytes: int = 0,
    provisioner: str = PROVISIONER,
    only: Container[str] | None = None,
) -> None:
    """Make what is absent, and refuse what differs. `provisioner` names the process that others
    wait for.

    Shapes: only — the streams to look at, where others cannot be seen; None: all.
    Errors: ConfigError for drift, for replicas that this server cannot keep consistent, for limits
    that are too small; PeerUnavailable when there is no JetStream, or a stream is absent that we
    may not make.
    """
    version = jetstream.connection.server_version
    if replicas > 1 and version < (2, 10, 0):
        raise ConfigError(
            f"nats.replicas is {replicas} and the server is {'.'.join(map(str, version))}: before 2.10 a "
            "replicated compare-and-set lets several writers win",
            next_step="use nats-server 2.10 or later, or replicas = 1",
        )
    # One after the other: a cluster of three servers that got all requests at once sometimes did
    # not finish (2.10, set-up of tests/integration/bus/test_bus_cluster.py).
    failures: list[ConfigError | JetStreamError | _NotMadeYet] = []
    for config in wanted_streams(replicas, store_bytes=store_bytes):
        if only is not None and config["name"] not in only:
            continue
        try:
            await _provision_one(jetstream, config, may_create=may_create, provisioner=provisioner)
        except (ConfigError, JetStreamError, _NotMadeYet) as err:
            # Of this stream alone: the others are made all the same.
            failures.append(err)
    if failures:
        raise failures[0]


async def inspect(jetstream: JetStream, replicas: int, *, store_bytes: int = 0) -> dict[str, str]:
    """Compare without making anything: return each stream of the catalogue with what is wrong,
    empty when nothing is.
    """
    drift: dict[str, str] = {}
    for config in wanted_streams(replicas, store_bytes=store_bytes):
        info = await jetstream.stream_info(config["name"])
        if info is None:
            drift[config["name"]] = "it does not exist"
            continue
        wrong = [
            difference.text
            for difference in differences(info.config, config)
            if difference.kind is not DifferenceKind.HARMLESS
        ]
        drift[config["name"]] = (
            "; ".join(wrong) or next(iter(_exhausted(info)), "") or await _crowded(jetstream, config["name"], info)
        )
    return drift


async def _crowded(jetstream: JetStream, name: str, info: StreamInfo) -> str:
    """Name the heaviest writers of a bucket that drops its oldest values to take new ones.

    Empty when it has room, or is an event's, which drops old ones as it should.
    """
    state = next((state for state in BUCKETS if bucket_stream(state) == name and state.is_rewritten), None)
    bound = int(info.config.get("max_bytes", -1))
    # A full stream is a little below its bound: what is dropped for a large value leaves more room
    # than a small one takes.
    if state is None or not 0 < bound <= info.size_bytes + int(info.config.get("max_msg_size", 0)):
        return ""
    counts = await jetstream.subject_counts(name)
    text = f"it is full ({bound // _MIB} MiB) and drops its oldest values, which their writers publish again"
    for place, part in enumerate(state.parts):
        by_token = Counter[str]()
        for subject, count in counts.items():
            by_token[subject.split(".")[2 + place]] += count
        token, most = by_token.most_common(1)[0] if by_token else ("", 0)
        text += f"; {most} of {by_token.total()} are of {part} {from_token(token)!r}"
    return text


async def find_missing(jetstream: JetStream) -> list[str]:
    """Name the catalogue's streams that do not exist."""
    there = await jetstream.stream_names()
    return [name for name in stream_names() if name not in there]


def _exhausted(info: StreamInfo) -> list[str]:
    """Name what of a stream is used up: room, where a full stream refuses, and readers."""
    bound, readers = int(info.config.get("max_bytes", -1)), int(info.config.get("max_consumers", -1))
    largest = int(info.config.get("max_msg_size", 0))
    warnings = []
    if info.config.get("discard") == "new" and 0 < bound <= info.size_bytes + largest:
        warnings.append(f"it is full: {info.size_bytes // _MIB} of {bound // _MIB} MiB, and refuses what is written")
    if 0 < readers <= info.consumer_count:
        warnings.append(f"it has {info.consumer_count} readers, all that it may have: more cannot follow it")
    return warnings


class _NotMadeYet(PeerUnavailable):
    """Raised inside for a stream that another service has to make."""


async def _provision_one(
    jetstream: JetStream, config: dict[str, Any], *, may_create: bool, provisioner: str, is_again: bool = False
) -> None:
    name = config["name"]
    info = await jetstream.stream_info(name)
    if info is None:
        if not may_create:
            raise _NotMadeYet(
                f"stream {name} does not exist", next_step=f"start topobus-{provisioner}: it makes what is missing"
            )
        try:
            await jetstream.call(f"STREAM.CREATE.{name}", config)
        except JetStreamError as err:
            if err.is_temporary:
                raise
            if err.err_code == JetStreamError.NO_STORE and not is_again:
                # When two controllers start at once, the second one gets this error. Where the
                # folder cannot be written, the retry gets it again.
                await _provision_one(jetstream, config, may_create=may_create, provisioner=provisioner, is_again=True)
                return
            if err.err_code not in (JetStreamError.STREAM_NAME_IN_USE, JetStreamError.SUBJECTS_OVERLAP):
                raise _refused(name, config, err) from err
            # Another process made it between our look and our request: it is compared like any
            # other.
            info = await jetstream.stream_info(name)
            if info is None:
                raise _unseen(name, config, err) from err
        else:
            get_logger().info("stream.made", stream=name, max_bytes=config["max_bytes"])
            return
    _compare(info, config)


def _compare(info: StreamInfo, config: dict[str, Any]) -> None:
    name = config["name"]
    found_differences = differences(info.config, config)
    wrong = [difference for difference in found_differences if difference.kind is DifferenceKind.DRIFT]
    if wrong:
        # All of them: a sealed stream, for example, also differs by what the server sets with it.
        raise ConfigError(
            f"stream {name} differs from the catalogue: {'; '.join(difference.text for difference in wrong)}",
            next_step=f"edit it (nats stream edit {name}) or remove it, if its content may go",
            stream=name,
            field=wrong[0].field,
        )
    named = [
        difference.text
        for difference in found_differences
        if difference.kind is DifferenceKind.HARMLESS and difference.field != "metadata"
    ]
    if named:
        get_logger().info("stream.differs", stream=name, differences=named, effect="none: it is used as it is")


def _unseen(name: str, config: dict[str, Any], err: JetStreamError) -> ConfigError:
    """Make the error for a stream that does not exist and cannot be made."""
    if err.err_code == JetStreamError.STREAM_NAME_IN_USE:
        return ConfigError(
            f"stream {name} is in use and cannot be seen",
            next_step="check this user's permissions on $JS.API.STREAM.INFO",
        )
    return ConfigError(
        f"the NATS server refuses stream {name}: another stream takes what is published to "
        f"{' or '.join(config['subjects'])}",
        next_step="find it (nats stream ls --subject) and remove it or take the subject out of it, if it is not "
        "Topobus's",
        stream=name,
    )


def _refused(name: str, config: dict[str, Any], err: JetStreamError) -> ConfigError:
    if err.err_code != JetStreamError.NO_ROOM_FOR_STREAM:
        return ConfigError(
            f"the NATS server refuses stream {name}: {err}",
            next_step="check the server's JetStream limits (max_file_store)",
        )
    return ConfigError(
        f"the NATS server has no room for stream {name}, which may take {config['max_bytes'] // _MIB} MiB: {err}",
        next_step="give it more disk or a larger max_file_store (without one it takes 75 % of what is free), or lower "
        "nats.store_mib everywhere",
        stream=name,
    )
