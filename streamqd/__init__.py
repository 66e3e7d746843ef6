"""streamqd: a multiprocess supervisor daemon for message handlers on Redis Streams.

This is the public API. Everything else may change between releases.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamqd.dead_letter import DeadLetter
    from streamqd.errors import (
        BacklogFullError,
        BatchOutcomeUnknownError,
        BatchRejectedError,
        BufferFullError,
        ConfigError,
        MessageTooLargeError,
        OutcomeUnknownError,
        RedisResponseError,
        RedisUnavailableError,
        StreamqdError,
        TopicNotFoundError,
    )
    from streamqd.handlers import (
        Context,
        Dead,
        Failures,
        Release,
        Result,
        Retry,
        SoftTimeout,
        handler,
        schedule,
    )
    from streamqd.message import Message
    from streamqd.model import Backoff, RetryPolicy, Uid
    from streamqd.outbox.outbox import Outbox
    from streamqd.producer import Outgoing, Producer
    from streamqd.producer.asynchronous import AsyncProducer
    from streamqd.producer.buffered import BufferedProducer, Receipt
    from streamqd.version import __version__

__all__ = [
    "AsyncProducer",
    "BacklogFullError",
    "Backoff",
    "BatchOutcomeUnknownError",
    "BatchRejectedError",
    "BufferFullError",
    "BufferedProducer",
    "ConfigError",
    "Context",
    "Dead",
    "DeadLetter",
    "Failures",
    "Message",
    "MessageTooLargeError",
    "Outbox",
    "OutcomeUnknownError",
    "Outgoing",
    "Producer",
    "Receipt",
    "RedisResponseError",
    "RedisUnavailableError",
    "Release",
    "Result",
    "Retry",
    "RetryPolicy",
    "SoftTimeout",
    "StreamqdError",
    "TopicNotFoundError",
    "Uid",
    "__version__",
    "handler",
    "schedule",
]

# Each name is imported when it is first used. Otherwise, commands, workers and each of Spark's many
# Python processes would load a Redis client only to read the version.
_MODULES = {
    "streamqd.errors": (
        *(
            "BacklogFullError",
            "BufferFullError",
            "BatchRejectedError",
            "BatchOutcomeUnknownError",
            "ConfigError",
        ),
        *(
            "MessageTooLargeError",
            "RedisResponseError",
            "RedisUnavailableError",
            "StreamqdError",
            "TopicNotFoundError",
        ),
        "OutcomeUnknownError",
    ),
    "streamqd.handlers": (
        *("Context", "Dead", "Failures", "Release", "Result", "Retry", "SoftTimeout", "handler"),
        "schedule",
    ),
    "streamqd.dead_letter": ("DeadLetter",),
    "streamqd.message": ("Message",),
    "streamqd.model": ("Backoff", "RetryPolicy", "Uid"),
    "streamqd.outbox.outbox": ("Outbox",),
    "streamqd.producer": ("Outgoing", "Producer"),
    "streamqd.producer.asynchronous": ("AsyncProducer",),
    "streamqd.producer.buffered": ("BufferedProducer", "Receipt"),
    "streamqd.version": ("__version__",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
