"""Deleting dead letters for good."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.admin.dead_choice import DeadLetterFilter, pages
from streamqd.admin.dead_run import Pass, Progress, ReplayPace, Stop, never, silent
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store import dead
from streamqd.store.client import Connection
from streamqd.store.keys import Keys


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge did.

    `gone` letters had been replayed or purged by somebody else. `unknown` letters were under way
    when the connection was lost. `ended` is done, stopped or failed, then `error` says why.
    `first_id` and `last_id` are the ends of what was chosen. `audited` is false when the audit
    trail could not be written.
    """

    topic: str
    purged: int
    gone: int
    unknown: int
    ended: str
    error: str
    first_id: str
    last_id: str
    audited: bool


def purge(
    link: Connection,
    keys: Keys,
    topic: str,
    choice: DeadLetterFilter,
    *,
    stop: Stop = never,
    progress: Progress = silent,
) -> Purged:
    """Delete letters for good. Losing Redis ends it; it does not raise.

    Raises TopicMissing; Refused when a letter that is named does not exist or is not chosen;
    RedisUnavailable when nothing was begun.
    """
    found = pages(link, keys, topic, choice)
    done = Pass(stop, progress)
    for piece in done.pieces(found, ReplayPace(None)):
        ids = [str(entry.id) for entry in piece]
        try:
            reply = link.run(dead.purge(keys, topic, piece[0].partition, ids))
        except (RedisUnavailable, RedisRefused) as error:
            done.fail(error, len(piece))
            continue
        removed = int(reply.rest[0])
        done.counts["purged"] += removed
        done.counts["gone"] += len(piece) - removed
        for entry in (piece[0], piece[-1]):
            done.touched(entry)
    return Purged(
        topic=topic,
        purged=done.counts["purged"],
        gone=done.counts["gone"],
        unknown=done.unknown,
        ended=done.ended,
        error=done.error,
        first_id=done.first,
        last_id=done.last,
        audited=done.record(link, keys, topic, "dlq purge", choice.stated()),
    )
