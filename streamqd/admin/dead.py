"""Bringing dead letters back, and deleting them.

Each letter moves or vanishes in one step of its own, so nothing happens to it twice, whoever else
is at work on the same letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from streamqd.admin.letters import Fields, find, is_of, streams_of
from streamqd.admin.pages import PAGE_MAX, SEQ_MAX, Entry, Id, ask, forwards, read_id
from streamqd.errors import RedisRefused, Refused
from streamqd.store import dead
from streamqd.store.client import Link
from streamqd.store.keys import Keys

_FRESH = {b"retryCount": b"0", b"crashCount": b"0"}  # what a replayed letter starts with

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What `dlq replay` did.

    `gone` letters had been replayed or purged by somebody else. `refused` maps the reason to the
    number of letters that stayed because of it.
    """

    topic: str
    replayed: int
    gone: int
    refused: dict[str, int]


@dataclass(frozen=True, slots=True)
class Purged:
    """What `dlq purge` did."""

    topic: str
    purged: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Which letters: those named, else all that exist now; of one group or all.

    `before_unix_ms` leaves out what died later.
    """

    letter_ids: tuple[str, ...] = ()
    group: str | None = None
    before_unix_ms: int | None = None


def count(link: Link, keys: Keys, topic: str, choice: Choice) -> int:
    """How many letters are chosen. Raises TopicMissing, Refused."""
    return sum(len(page) for _, page in _chosen(link, keys, topic, choice))


def replay(
    link: Link,
    keys: Keys,
    topic: str,
    choice: Choice,
    progress: Progress = lambda _done: None,
) -> Replayed:
    """Put letters back into the retry streams of the groups that they failed in.

    Letters that die again meanwhile are not replayed again. `progress` is told how many were dealt
    with, page by page. Raises TopicMissing; Refused when a letter that is named does not exist or
    is another group's.
    """
    replayed = gone = 0
    refused: Counter[str] = Counter()
    for partition, page in _chosen(link, keys, topic, choice):
        calls = []
        for entry_id, fields in page:
            told = Fields(fields)
            owner = told.text(b"group")
            if not owner:
                refused["the letter names no group"] += 1
                continue
            replays = (told.number(b"replayCount") or 0) + 1
            changed = {**_FRESH, b"replayCount": b"%d" % replays}
            calls.append(dead.replay(keys, topic, partition, str(entry_id), owner, changed))
        for reply in link.run_many(calls):
            if isinstance(reply, RedisRefused):
                raise reply
            if reply.word == "OK":
                replayed += 1
            elif reply.word == "GONE":
                gone += 1
            else:
                refused["its group does not exist any more"] += 1
        progress(len(page))
    return Replayed(topic, replayed, gone, dict(refused))


def purge(
    link: Link,
    keys: Keys,
    topic: str,
    choice: Choice,
    progress: Progress = lambda _done: None,
) -> Purged:
    """Delete letters for good. Raises TopicMissing, Refused."""
    purged = 0
    for partition, page in _chosen(link, keys, topic, choice):
        ids = [str(entry_id) for entry_id, _ in page]
        purged += int(link.run(dead.purge(keys, topic, partition, ids)).rest[0])
        progress(len(page))
    return Purged(topic, purged)


Page = list[tuple[Id, dict[bytes, bytes]]]


def _chosen(link: Link, keys: Keys, topic: str, choice: Choice) -> Iterable[tuple[int, Page]]:
    streams = streams_of(link, keys, topic)
    if choice.letter_ids:
        return _named(link, streams, choice)
    return _pages(link, streams, choice)


def _pages(link: Link, streams: dict[int, str], choice: Choice) -> Iterator[tuple[int, Page]]:
    """The letters that exist now, partition by partition, the oldest first, in bounded pages."""
    ends = ask(link, [("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in streams.values()])
    for (partition, stream), newest in zip(streams.items(), ends, strict=True):
        if not newest:
            continue
        until = read_id(newest[0][0])
        if choice.before_unix_ms is not None:
            until = min(until, Id(choice.before_unix_ms - 1, SEQ_MAX))
        for page in forwards(link, stream, until=until, size=PAGE_MAX):
            kept = [each for each in page if is_of(Entry(partition, *each), choice.group)]
            if kept:
                yield partition, kept


def _named(link: Link, streams: dict[int, str], choice: Choice) -> list[tuple[int, Page]]:
    """The letters named, all found before any is touched."""
    found = [find(link, streams, letter_id) for letter_id in dict.fromkeys(choice.letter_ids)]
    for entry in found:
        if not is_of(entry, choice.group):
            owner = Fields(entry.fields).text(b"group")
            raise Refused(
                f"the dead letter {entry.place} is one of the group {owner}, not {choice.group}"
            )
    return [(entry.partition, [(entry.id, entry.fields)]) for entry in found]
