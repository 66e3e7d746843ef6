"""The position of a worker's long poll, in shared memory.

While a worker waits for messages, it may receive nothing for seconds, so it cannot tell whether its
connection is dead. It therefore records the last entries that it has received. The housekeeper uses
its own connection to check if there is a later entry, which the worker should have received. The
position is stored in words (integers) of the assignment's slot in the scoreboard. The housekeeper
writes the last word, and the worker writes the others.
"""

from __future__ import annotations

from typing import NamedTuple

_SINCE_NS, _RETRY_MS, _RETRY_SEQ, _MAIN_MS, _MAIN_SEQ, _MISSED = range(6)
_WORD_MAX = (1 << 64) - 1


class Poll(NamedTuple):
    """One long poll, in which a worker waits for entries after the IDs `retry` and `main`.

    `since_ns` is its start (`now_ns` clock), which identifies it among those of the assignment.
    """

    since_ns: int
    retry: bytes
    main: bytes


class PollWords:
    """The words of one assignment that describe its long poll."""

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words

    def begin(self, since_ns: int, retry: bytes, main: bytes) -> None:
        """Record that the worker is waiting for entries after these IDs, which it has received."""
        words = self._words
        words[_SINCE_NS] = 0  # the IDs must not be used until all words are written
        words[_RETRY_MS], words[_RETRY_SEQ] = _parts(retry)
        words[_MAIN_MS], words[_MAIN_SEQ] = _parts(main)
        words[_SINCE_NS] = since_ns

    def end(self) -> None:
        """Record that the worker has received a reply or is no longer waiting."""
        self._words[_SINCE_NS] = 0

    def read(self) -> Poll | None:
        """Return the worker's current long poll, or None if it is not waiting."""
        since, *ids = self._words[_SINCE_NS:_MISSED].tolist()
        if not since or since != self._words[_SINCE_NS]:
            return None
        return Poll(since, b"%d-%d" % (ids[0], ids[1]), b"%d-%d" % (ids[2], ids[3]))

    def miss(self, poll: Poll) -> None:
        """Record that there is a later entry, which this long poll should have returned."""
        self._words[_MISSED] = poll.since_ns

    @property
    def missed(self) -> int:
        """The start of the last long poll that missed an entry, or 0 if there is none."""
        return self._words[_MISSED]

    @property
    def is_missed(self) -> bool:
        """True if the current long poll has missed an entry."""
        since = self._words[_SINCE_NS]
        return since > 0 and since == self._words[_MISSED]


def _parts(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition(b"-")
    return min(int(milliseconds), _WORD_MAX), min(int(sequence or 0), _WORD_MAX)
