"""streamqd: a multiprocess supervisor daemon for message handlers on Redis Streams.

This is the public API. Everything else may change between releases.
"""

from __future__ import annotations

from streamqd.errors import (
    BacklogFull,
    ConfigError,
    MessageTooLarge,
    RedisRefused,
    RedisUnavailable,
    StreamqdError,
    UnknownOutcome,
)
from streamqd.handlers import Context, Dead, Retry, SoftTimeout, handler
from streamqd.message import Message
from streamqd.producer import Producer
from streamqd.version import __version__

__all__ = [
    "BacklogFull",
    "ConfigError",
    "Context",
    "Dead",
    "Message",
    "MessageTooLarge",
    "Producer",
    "RedisRefused",
    "RedisUnavailable",
    "Retry",
    "SoftTimeout",
    "StreamqdError",
    "UnknownOutcome",
    "__version__",
    "handler",
]
