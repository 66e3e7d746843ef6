"""Find entries that a waiting worker should have received.

A worker in a long poll gets no answer while there is no new entry. So it cannot tell a quiet stream
from a dead connection. The listener looks for new entries on another connection, usually with a
single command for all waiting workers. If it finds an entry that a worker should have received, it
notifies the worker, which then opens a new connection. It checks twice before that, because a new
entry may still be on its way to the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from streamqd.housekeeper.batch import run_commands
from streamqd.isolate import Isolate, run_directly
from streamqd.long_poll import Poll
from streamqd.model import Assignment
from streamqd.scoreboard import WorkerSlot
from streamqd.store.store import Store

LISTENER_INTERVAL_SECONDS = 0.5  # seconds between two checks
RECHECK_SECONDS = 0.25  # time within which a worker should receive an entry
STREAMS_MAX = 128  # largest number of streams in one command, which takes about 1 µs for each

StreamPosition = tuple[str, bytes]  # a stream, and the ID after which a worker waits for entries


class Listener:
    """Finds waiting workers that have missed entries, and notifies them.

    The notification is a word in the worker's slot. `wake` must then wake the supervisor, which
    wakes the worker.
    """

    def __init__(
        self, store: Store, wake: Callable[[], None], isolate: Isolate[Assignment] = run_directly
    ) -> None:
        self._store = store
        self._isolate = isolate
        self._wake = wake
        self._overdue: dict[Assignment, Poll] = {}  # polls for which the last check found an entry

    def run(self, owned: Iterable[tuple[WorkerSlot, Assignment]]) -> float | None:
        """Check all waiting workers.

        If a worker seems to have missed an entry, return the number of seconds to wait before
        checking again to confirm it. Otherwise, return None.
        """
        waiting: dict[Assignment, Poll] = {}
        for slot, assignment in owned:
            poll = self._isolate(assignment, self._read_poll, assignment, slot)
            if poll is not None:
                waiting[assignment] = poll
        places: dict[StreamPosition, list[Assignment]] = {}
        for assignment, poll in waiting.items():
            places.setdefault((self._store.keys.retry_stream(*assignment), poll.retry), []).append(
                assignment
            )
            places.setdefault((self._store.keys.source(*assignment), poll.main), []).append(
                assignment
            )
        found = self._filter_with_entries(list(places))
        self._overdue = {
            assignment: waiting[assignment] for place in found for assignment in places[place]
        }
        return RECHECK_SECONDS if self._overdue else None

    def _read_poll(self, assignment: Assignment, slot: WorkerSlot) -> Poll | None:
        """Return the long poll in which a worker is waiting, or None if there is nothing to check.

        If the last check has already found an entry that this poll should have reported, notify the
        worker and return None.
        """
        words = slot.poll
        poll = words.read()
        if poll is None or poll.since_ns == words.missed:
            return None
        if self._overdue.get(assignment) == poll:
            words.miss(poll)
            self._wake()
            return None
        return poll

    def _filter_with_entries(self, places: Sequence[StreamPosition]) -> list[StreamPosition]:
        """Return those positions whose stream contains an entry after the position's ID."""
        by_stream: dict[str, list[bytes]] = {}
        for stream, after in sorted(places, key=_id_key):
            by_stream.setdefault(stream, []).append(after)
        parts = [
            streams[start : start + STREAMS_MAX]
            for streams in self._store.connection.group_by_node(list(by_stream))
            for start in range(0, len(streams), STREAMS_MAX)
        ]
        replies = run_commands(self._store, [_command(part, by_stream) for part in parts])
        found: list[StreamPosition] = []
        for part, reply in zip(parts, replies, strict=True):
            if isinstance(reply, Exception) and len(part) > 1:
                # The whole command fails if one key has the wrong type. So read each key alone.
                alone = run_commands(self._store, [_command([key], by_stream) for key in part])
                for key, one in zip(part, alone, strict=True):
                    found += _read(one, [key], by_stream)
            else:
                found += _read(reply, part, by_stream)
        return found


def _id_key(place: StreamPosition) -> tuple[str, int, int]:
    milliseconds, _, sequence = place[1].partition(b"-")
    return place[0], int(milliseconds), int(sequence)


def _command(streams: Sequence[str], ids: Mapping[str, Sequence[bytes]]) -> tuple[Any, ...]:
    keys = [stream for stream in streams for _ in ids[stream]]
    after = [each for stream in streams for each in ids[stream]]
    return ("XREAD", "COUNT", 1, "STREAMS", *keys, *after)


def _read(
    reply: Any, streams: Sequence[str], ids: Mapping[str, Sequence[bytes]]
) -> list[StreamPosition]:
    """Return the positions after which the reply to `_command` contains an entry.

    The command names a stream once for each of its positions, and the reply contains the stream
    once for each position that is followed by an entry. These are the positions with the lowest
    IDs, which come first in `ids`.
    """
    names = [name for name, _ in reply] if isinstance(reply, list) else []
    return [
        (stream, after)
        for stream in streams
        for after in ids[stream][: names.count(stream.encode())]
    ]
