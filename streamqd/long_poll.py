"""What a worker waits for in a long poll, in memory that processes share.

A worker that waits for messages hears nothing for seconds, whether its connection lives or not. So
it says behind which entries it waits, and the housekeeper, which has a connection of its own, looks
whether there is one that it should have heard of. These are words of a unit's slot in the
scoreboard; the housekeeper writes the last one, the worker the others.
"""

from __future__ import annotations

from typing import NamedTuple

_SINCE_NS, _RETRY_MS, _RETRY_SEQ, _MAIN_MS, _MAIN_SEQ, _MISSED = range(6)
_WORD_MAX = (1 << 64) - 1


class Poll(NamedTuple):
    """One long poll: since when (`now_ns` clock, no other is like it), and behind which entries."""

    since_ns: int
    retry: bytes
    main: bytes


class PollWords:
    """The words of one unit."""

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words

    def begin(self, since_ns: int, retry: bytes, main: bytes) -> None:
        """Say that the worker waits for entries behind these ids, of which it has heard."""
        words = self._words
        words[_SINCE_NS] = 0  # nobody may take the ids before they are whole
        words[_RETRY_MS], words[_RETRY_SEQ] = _parts(retry)
        words[_MAIN_MS], words[_MAIN_SEQ] = _parts(main)
        words[_SINCE_NS] = since_ns

    def end(self) -> None:
        """Say that the worker has been answered, or does not wait any more."""
        self._words[_SINCE_NS] = 0

    def waiting(self) -> Poll | None:
        """Return what the worker waits for now."""
        since, *ids = self._words[_SINCE_NS:_MISSED].tolist()
        if not since or since != self._words[_SINCE_NS]:
            return None
        return Poll(since, b"%d-%d" % (ids[0], ids[1]), b"%d-%d" % (ids[2], ids[3]))

    def miss(self, poll: Poll) -> None:
        """Say that there is an entry of which this wait should have told the worker."""
        self._words[_MISSED] = poll.since_ns

    @property
    def missed(self) -> int:
        """The wait that was found out last, by its beginning; 0 = none was."""
        return self._words[_MISSED]

    @property
    def is_missed(self) -> bool:
        """Whether the present wait was found out."""
        since = self._words[_SINCE_NS]
        return since > 0 and since == self._words[_MISSED]


def _parts(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition(b"-")
    return min(int(milliseconds), _WORD_MAX), min(int(sequence or 0), _WORD_MAX)
