"""The exceptions of streamqd.

The docstring of an exception describes the problem and the remedy, and an instance's message adds
the details. This module does not import the rest of the package.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class StreamqdError(Exception):
    """Base class of all exceptions that streamqd raises on purpose."""


class ConfigError(StreamqdError):
    """The configuration cannot be used. `problems` lists all problems, not only the first.

    `salvaged` contains the settings that could be read, and defaults for all others. It is None if
    no setting could be read.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.salvaged: Any = None


class HandlerLoadError(StreamqdError):
    """A handler module cannot be imported, or does not contain a handler of the configuration."""


class RedisUnavailableError(StreamqdError):
    """Redis did not answer. Try again later.

    If `sent` is False, the command was not sent, so nothing was changed. If `sent` is True, the
    outcome is unknown, because Redis may have run the command.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class SilentConnectionError(RedisUnavailableError):
    """A connection is broken: Redis did not answer on it, but answered on a new one.

    `sent` shows whether the command may have run, as for `RedisUnavailableError`.
    """


class OutcomeUnknownError(RedisUnavailableError):
    """The message may or may not have been written. With a `dedup_id`, you can safely resend it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=True)


class RefusalKind(Enum):
    """The kinds of error replies. The value of a kind lists the first words of its errors.

    Most callers test the kind instead of the word, because different words may mean the same.
    """

    NOT_READY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")
    BUSY = ("BUSY",)  # a script has been running for too long
    REPLICA = ("READONLY",)  # the node is not a master, or is no longer one
    MOVED = ("MOVED", "ASK")  # another node of the cluster serves the key
    NO_REPLICAS = ("NOREPLICAS",)  # the master rejects writes until its replicas are back
    FULL = ("OOM", "MISCONF")  # the server rejects writes because its memory or disk is full
    LOGIN = ("NOAUTH", "WRONGPASS")  # the connection is not authenticated
    FORBIDDEN = ("NOPERM",)  # the Redis user lacks the permission
    NO_GROUP = ("NOGROUP",)  # the stream does not have the group
    NO_SCRIPT = ("NOSCRIPT",)  # the script is not loaded on the server
    BAD_KEY_OR_COMMAND = ("ERR", "WRONGTYPE", "BADVALUE")  # the server itself works
    OTHER = ("",)  # any other word (Python 3.11.2 cannot keep an empty tuple as a value)


_KINDS = {word: kind for kind in RefusalKind for word in kind.value}


def refusal_kind_for_code(code: str) -> RefusalKind:
    """Return the kind of an error reply, given its first word."""
    return _KINDS.get(code, RefusalKind.OTHER)


_TRANSIENT = (
    RefusalKind.NOT_READY,
    RefusalKind.BUSY,
    RefusalKind.REPLICA,
    RefusalKind.MOVED,
    RefusalKind.NO_REPLICAS,
)


class RedisResponseError(StreamqdError):
    """Redis returned an error instead of executing the command.

    `code` is the first word of the error, such as `OOM`. `kind` classifies this word
    (`streamqd.errors.RefusalKind`).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.kind = refusal_kind_for_code(code)

    @property
    def transient(self) -> bool:
        """True if the same command may succeed shortly afterwards, without any other change."""
        return self.kind in _TRANSIENT


class BatchOutcomeUnknownError(OutcomeUnknownError):
    """The connection was lost in the middle of `send_many`.

    `ids` contains the uids of the confirmed messages, in the order of the items. An element is None
    if Redis rejected the message. `unknown` is the number of items that follow the confirmed
    ones and may or may not have been written. Items after those were not sent.
    """

    def __init__(self, message: str, ids: list[str | None], unknown: int) -> None:
        super().__init__(message)
        self.ids = ids
        self.unknown = unknown


class BatchRejectedError(RedisResponseError):
    """Redis rejected some messages of `send_many`, for example because its memory is full.

    `ids` contains the uids of the messages, in the order of the items. An element is None if Redis
    rejected the message. Items after these were not sent.
    """

    def __init__(self, code: str, message: str, ids: list[str | None]) -> None:
        super().__init__(code, message)
        self.ids = ids


class ContractError(StreamqdError):
    """A Lua script returned an invalid reply. This is a bug in streamqd. Please report it."""


class InvalidValueError(StreamqdError):
    """A value in Redis is not valid, because another client wrote it.

    `key` and `field` show where the value is stored. `field` is '' if the key has no fields.
    `found` is the value in printable form, and `wanted` describes a valid value.
    """

    def __init__(self, key: str, field: str, found: str, wanted: str) -> None:
        where = f"{field} of {key}" if field else key
        super().__init__(f"{where} in Redis is {found} and not {wanted}")
        self.key = key
        self.field = field
        self.found = found
        self.wanted = wanted


class RequestRefusedError(StreamqdError):
    """The target of the request does not exist, or the current state does not allow the request."""


class InvalidRequestError(RequestRefusedError):
    """The request is never valid. Correct it as the message describes."""


class TopicNotFoundError(RequestRefusedError):
    """The topic is not registered. Create it with `streamqd topic create`."""


class MessageTooLargeError(StreamqdError):
    """The message exceeds `max_message_bytes`. Store the body elsewhere and send a reference."""


class BacklogFullError(StreamqdError):
    """Too many messages wait in the partition (`max_backlog`). Send the message again later.

    After `send_many`, `ids` contains the uids of the messages, in the order of the items. An
    element is None if the message was rejected. Items after these were not sent.
    """

    def __init__(self, message: str, ids: list[str | None] | None = None) -> None:
        super().__init__(message)
        self.ids: list[str | None] = [] if ids is None else ids


class BufferFullError(StreamqdError):
    """The buffer of the producer is full, and the message was not accepted. Send it again later."""


class DatabaseUnavailableError(StreamqdError):
    """The database of an outbox did not answer. Try again later.

    A write may or may not have been committed.
    """


class DatabaseResponseError(DatabaseUnavailableError):
    """The database of an outbox returned an error, and nothing was done.

    The message contains the remedy.
    """


class SparkError(StreamqdError):
    """A Spark job cannot start or continue. The message contains the remedy."""


class StartupError(StreamqdError):
    """The daemon cannot start.

    `code` is the exit code, and `problems` contains one sentence for each problem.
    """

    def __init__(self, code: int, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.code = code
        self.problems = problems
