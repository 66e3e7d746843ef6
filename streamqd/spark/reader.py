"""Reading one range of a stream in pieces of bounded size, noticing when trimming overtakes it."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.spark import offsets
from streamqd.spark.offsets import Facts, Loss, Span
from streamqd.spark.options import ReadOptions
from streamqd.spark.rows import Entry
from streamqd.spark.streams import Catalog, keys_for, link_for, persist, stream_key, tell_loss

BATCH_ROWS = 10_000  # of one Arrow batch at most
PROGRESS_TTL = 86_400  # seconds

_FIRST_FETCH = 32  # entries; nothing is known of their size yet
_GROWTH = 8  # times as many entries as in the fetch before at most
_SAMPLE = 8  # every so many-th entry is measured


class Reader:
    """Reads one span in pieces of bounded size, and notices when trimming overtakes it."""

    def __init__(self, options: ReadOptions, span: Span) -> None:
        self._options = options
        self._span = span
        self._keys = keys_for(options.connection)
        self._key = stream_key(self._keys, span.place)
        self._size = min(_FIRST_FETCH, options.fetch_size)
        self._mean = 0.0  # bytes of an entry, of the last fetch
        self._unreported = 0
        self._rows = 0
        self._broken = False

    def batches(self) -> Iterator[list[Entry]]:
        """The entries, in lists of about `fetch_bytes`. At the end DataLossError, if at all."""
        held: list[Entry] = []
        weight = 0.0
        for page in self._pages():
            held += page
            weight += self._mean * len(page)
            if len(held) >= BATCH_ROWS or weight >= self._options.fetch_bytes:
                yield held
                held, weight = [], 0.0
        if held:
            yield held
        self._report(0)
        self._settle()

    def _pages(self) -> Iterator[list[Entry]]:
        span = self._span
        end = offsets.write_id(span.end)
        cursor = "(" + offsets.write_id(span.start)
        last: bytes | None = None
        while True:
            # From the second page on the last entry is read once more: while it is there, nothing
            # behind it can have been trimmed.
            asked = self._size + (last is not None)
            page = self._fetch(cursor, end, asked)
            full = len(page) == asked
            if last is not None:
                if page and page[0][0] == last:
                    del page[0]
                else:
                    self._broken = True
            elif span.removed is not None and span.rows is None:
                self._broken = self._overtaken()
            if page:
                self._measure(page)
                self._rows += len(page)
                self._unreported += len(page)
                last = page[-1][0]
                cursor = last.decode()
                yield page
            if not full:
                return

    def _fetch(self, cursor: str, end: str, count: int) -> list[Entry]:
        command = ("XRANGE", self._key, cursor, end, "COUNT", count)
        if self._unreported:
            self._report(BATCH_ROWS)
        reply: list[Entry] = persist(self._options.connection, lambda link: link.execute(*command))
        return reply

    def _measure(self, page: list[Entry]) -> None:
        """Ask for as many entries next time as fit into `fetch_bytes`, by the size of these."""
        sample = page[::_SAMPLE]
        self._mean = sum(sum(map(len, entry[1])) + 64 for entry in sample) / len(sample)
        fitting = int(self._options.fetch_bytes / self._mean)
        grown = min(fitting, self._options.fetch_size, _GROWTH * self._size)
        self._size = max(1, grown)

    def _report(self, least: int) -> None:
        """Add to the progress that a command line shows; approximate, tasks may run twice."""
        key, place = self._options.progress_key, self._span.place
        if not key or self._unreported <= least:
            return
        commands = [
            ("HINCRBY", key, f"{place[0]}/{place[1]}", self._unreported),
            ("EXPIRE", key, PROGRESS_TTL),
        ]
        self._unreported = 0
        link_for(self._options.connection).pipeline(commands)

    def _overtaken(self) -> bool:
        """Whether trimming has come into the span since it was planned."""
        facts = self._facts()
        removed = self._span.removed
        reached = facts.first is None or facts.first > self._span.start
        return removed is not None and facts.removed > removed and reached

    def _settle(self) -> None:
        """See at the end whether all was there."""
        span = self._span
        if span.removed is None:
            return
        if span.rows is None:
            loss = Loss("trimmed", None) if self._broken else None
        else:
            missing = span.rows - self._rows
            loss = Loss("trimmed", missing) if missing > 0 and self._overtaken() else None
        if loss is not None:
            tell_loss(span.place, span.start, loss, fail=self._options.fail_on_data_loss)

    def _facts(self) -> Facts:
        return Catalog(self._options).facts([self._span.place])[self._span.place]
