"""What a dead letter says, field by field, and where it is."""

from __future__ import annotations

import contextlib

from streamqd.admin import topics
from streamqd.admin.pages import Entry, ask, read_fields, read_place
from streamqd.errors import Refused
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

# Replays that leave the retry streams are counted here: a counter among the fields of an entry is
# believed in a retry stream only.
REPLAYS_HEADER = "x-replays"

# Fields that only a dead letter has; `lua/dead_replay.lua` leaves the same ones behind.
DEAD_ONLY = frozenset(
    b"originalTopic originalPartition timestamp group instance handler attempts crashes reason"
    b" errorClass errorMessage traceback fingerprint signal exitCode rss pid failedAt".split()
)
KNOWN = DEAD_ONLY | frozenset(
    b"payload key headers originalId retryCount crashCount replayCount forgivenAt lastError"
    b" lastErrorPlace".split()
)


class Fields:
    """A letter's fields as text and numbers; what cannot be read as that counts as missing."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self._fields = fields

    def text(self, name: bytes) -> str:
        return self._fields.get(name, b"").decode("utf-8", "replace")

    def number(self, name: bytes) -> int | None:
        try:
            return int(self._fields[name])
        except (KeyError, ValueError):
            return None


def replays_of(entry: Entry) -> int:
    """How often a letter has been replayed, by whatever way."""
    found = max(0, Fields(entry.fields).number(b"replayCount") or 0)
    with contextlib.suppress(ValueError):
        found = max(found, int((entry.headers or {}).get(REPLAYS_HEADER, "0")))
    return found


def origin_of(topic: str, entry: Entry) -> tuple[str, str, str]:
    """Topic, partition and id of the first write; the id is '' when the letter does not tell it."""
    told = Fields(entry.fields)
    return (
        told.text(b"originalTopic") or topic,
        told.text(b"originalPartition") or str(entry.partition),
        told.text(b"originalId"),
    )


def find(link: Connection, streams: dict[int, str], letter_id: str) -> Entry:
    """One letter by its name. Raises Refused."""
    place = read_place(letter_id, len(streams))
    page = link.execute("XRANGE", streams[place.partition], str(place.id), str(place.id))
    if not page:
        raise Refused(f"there is no dead letter {letter_id}: it was replayed, purged or never was")
    return Entry(place.partition, place.id, read_fields(page[0][1]))


def streams_of(link: Connection, keys: Keys, topic: str) -> dict[int, str]:
    """The streams of a topic's letters by partition. Raises TopicMissing."""
    count = topics.partition_count(link, keys, topic)
    return {number: keys.dlq(topic, number) for number in range(count)}


def total(link: Connection, keys: Keys, topic: str) -> int:
    """How many letters a topic has. Raises TopicMissing."""
    streams = streams_of(link, keys, topic)
    return sum(ask(link, [("XLEN", stream) for stream in streams.values()]))
