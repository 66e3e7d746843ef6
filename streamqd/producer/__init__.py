"""The producers: encode a message, choose its partition and write it. Never read messages.

Used by applications and by `streamqd produce`. Every message is written by a script that compares
the topic's partition count with the one by which the message was routed. So a producer needs the
right to run scripts (EVALSHA), and EVAL unless a daemon loads them. Nothing is repeated unless that
is certain to write the message once.

A message on its way: `encoding` (in the thread that sends), `send_buffer` (of the buffered and the
asynchronous producer: a buffer and the one thread that writes), then `sender`, which routes it by
`routing` and writes it by `store.publishing`.
"""

from __future__ import annotations

from streamqd.errors import ChunkRefused, ChunkUnknown
from streamqd.producer.encoding import Outgoing
from streamqd.producer.producer import Producer

__all__ = ["ChunkRefused", "ChunkUnknown", "Outgoing", "Producer"]
