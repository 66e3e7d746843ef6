"""The producers: encode a message, choose its partition and write it. Never read messages.

Used by applications and by `streamqd produce`. Plain sends are XADDs in a transaction that the
server refuses when the topic has grown meanwhile, so a producer needs no right to run scripts;
`delay`, `at`, `dedup_id`, `max_backlog` and the creation of a topic do. Nothing is repeated unless
that is certain to write the message once.

A message on its way: `encoding` (in the thread that sends), `send_buffer` (of the buffered and the
asynchronous producer: a buffer and the one thread that writes), then `sender`, which routes it by
`routing` and writes it by `store.publishing`.
"""

from __future__ import annotations

from streamqd.errors import ChunkRefused, ChunkUnknown
from streamqd.producer.encoding import Outgoing
from streamqd.producer.producer import Producer

__all__ = ["ChunkRefused", "ChunkUnknown", "Outgoing", "Producer"]
