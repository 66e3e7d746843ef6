"""The producer: encodes a message, chooses its partition and writes it. Never reads messages.

Used by applications and by `streamqd produce`. Plain sends are plain XADDs, so a producer needs no
right to run scripts; `delay`, `dedup_id` and the creation of a topic do. Nothing is repeated
unless that is certain to write the message once.
"""

from __future__ import annotations

from streamqd.producer.encoding import Outgoing
from streamqd.producer.sender import ChunkRefused, ChunkUnknown, Producer

__all__ = ["ChunkRefused", "ChunkUnknown", "Outgoing", "Producer"]
