"""The error tree.

The docstring of an error says what happened and what to do; the message of an instance says it
with the particulars. Nothing here imports the rest of the package.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class StreamqdError(Exception):
    """Root of everything that streamqd raises on purpose."""


class ConfigError(StreamqdError):
    """The configuration cannot be used. Carries every problem found, not only the first.

    `salvaged` holds the settings that could be read, with defaults for the rest, if any could be.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.salvaged: Any = None


class HandlerLoadError(StreamqdError):
    """A handler module cannot be imported or does not hold what the configuration names."""


class RedisUnavailable(StreamqdError):
    """Redis did not answer. Wait and try again.

    `sent` tells what is known of the command: False means that it never left this process (nothing
    happened), True means that it may have been executed (the outcome is unknown).
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class SilentConnection(RedisUnavailable):
    """A connection gave no answer while the server answered a new one: it is dead. Try again."""


class UnknownOutcome(RedisUnavailable):
    """The message may or may not have been written. With a `dedup_id` sending again is safe."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=True)


class RefusalKind(Enum):
    """What an error reply says, by its first word: the only place that sorts these words."""

    AWAY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")  # serves nothing yet
    BUSY = ("BUSY",)  # a script runs for too long
    REPLICA = ("READONLY",)  # the node is not a master, or no longer
    MOVED = ("MOVED", "ASK")  # another node of the cluster serves the key
    NO_REPLICAS = ("NOREPLICAS",)  # takes no writes until its replicas are back
    FULL = ("OOM", "MISCONF")  # takes no writes: its memory or its disk is full
    LOGIN = ("NOAUTH", "WRONGPASS")  # we are not logged in
    FORBIDDEN = ("NOPERM",)  # our user may not do that
    NO_GROUP = ("NOGROUP",)  # the stream has no such group
    NO_SCRIPT = ("NOSCRIPT",)  # the server does not know the script
    OF_A_KEY = ("ERR", "WRONGTYPE", "BADVALUE")  # about one key or command, not about the server
    OTHER = ("",)  # any other word; Python 3.11.2 cannot keep an empty tuple as a value


_KINDS = {word: kind for kind in RefusalKind for word in kind.value}


def kind_of(code: str) -> RefusalKind:
    """Return what an error reply says by its first word."""
    return _KINDS.get(code, RefusalKind.OTHER)


_TRANSIENT = (
    RefusalKind.AWAY,
    RefusalKind.BUSY,
    RefusalKind.REPLICA,
    RefusalKind.MOVED,
    RefusalKind.NO_REPLICAS,
)


class RedisRefused(StreamqdError):
    """Redis answered with an error; nothing was done. `code` is its first word, as `OOM`.

    `kind` sorts these words (`streamqd.errors.RefusalKind`).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind_of(code)

    @property
    def transient(self) -> bool:
        """Whether the same command may work a moment later, with nothing changed."""
        return self.kind in _TRANSIENT


class ChunkUnknown(UnknownOutcome):
    """The connection was lost in the middle of `send_many`.

    `ids` follow the order of the items, from the first one on: what Redis has confirmed (None
    stands for a message that it refused). The `unknown` messages behind them may or may not have
    been written. Items behind those were not sent.
    """

    def __init__(self, message: str, ids: list[str | None], unknown: int) -> None:
        super().__init__(message)
        self.ids = ids
        self.unknown = unknown


class ChunkRefused(RedisRefused):
    """Redis refused messages of `send_many`, as when its memory is full.

    `ids` follow the order of the items, from the first one on; None stands for a message that was
    refused and not written. Items behind them were not sent.
    """

    def __init__(self, code: str, message: str, ids: list[str | None]) -> None:
        super().__init__(code, message)
        self.ids = ids


class ContractError(StreamqdError):
    """A script answered what its contract does not allow: a bug in streamqd, please report it."""


class BadValue(StreamqdError):
    """A value in Redis is not what its key and field hold: another client wrote it.

    `key` and `field` ('' for a key without fields) say where, `found` shows the value as one can
    print it, `wanted` says what belongs there.
    """

    def __init__(self, key: str, field: str, found: str, wanted: str) -> None:
        where = f"{field} of {key}" if field else key
        super().__init__(f"{where} in Redis is {found} and not {wanted}")
        self.key = key
        self.field = field
        self.found = found
        self.wanted = wanted


class Refused(StreamqdError):
    """What was asked for does not exist or is not allowed in the present state."""


class Malformed(Refused):
    """What was asked for cannot be read, whatever is there: write it as the sentence says."""


class TopicMissing(Refused):
    """The topic is not registered. Create it with `streamqd topic create`."""


class MessageTooLarge(StreamqdError):
    """The message exceeds `max_message_bytes`. Store the body elsewhere, send a reference."""


class BacklogFull(StreamqdError):
    """Too many messages wait in the partition (`max_backlog`); consume first, or send later.

    Of `send_many`, `ids` follow the order of the items, from the first one on; None stands for a
    message that was refused. Items behind them were not sent.
    """

    def __init__(self, message: str, ids: list[str | None] | None = None) -> None:
        super().__init__(message)
        self.ids: list[str | None] = [] if ids is None else ids


class BufferFull(StreamqdError):
    """The buffer of the producer is full; this message was not taken. Send it again later."""


class SparkError(StreamqdError):
    """Spark's side of streamqd lacks something, or cannot go on. The message says what helps."""


class StartRefused(StreamqdError):
    """The daemon cannot start. `code` is the exit code, `problems` one sentence each."""

    def __init__(self, code: int, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.code = code
        self.problems = problems
