"""The producers, which encode a message, choose its partition and write it.

They never read messages. Applications and `streamqd produce` use them. Each message is written by a
script, which first compares the topic's partition count with the count that was used for routing. A
producer therefore needs permission for EVALSHA, and also for EVAL unless a daemon loads the
scripts. A write is repeated only if this cannot write the message twice.

A message passes through `encoding` (in the calling thread), `send_buffer` (for the buffered and the
asynchronous producer: a buffer and one writing thread) and `sender`, which routes it with `routing`
and writes it with `store.publishing`.
"""

from __future__ import annotations

from streamqd.errors import BatchOutcomeUnknownError, BatchRejectedError
from streamqd.producer.encoding import Outgoing
from streamqd.producer.producer import Producer

__all__ = ["BatchOutcomeUnknownError", "BatchRejectedError", "Outgoing", "Producer"]
