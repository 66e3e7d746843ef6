"""Read a range of a stream in pieces of bounded size, and detect if trimming overtakes the read."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Sequence
from functools import partial

from streamqd.errors import RedisUnavailableError
from streamqd.model import RawEntry
from streamqd.spark import offsets
from streamqd.spark.offsets import Id, Loss, Span
from streamqd.spark.options import ReadOptions
from streamqd.spark.streams import Catalog, keys_for, link_for, persist, report_loss, stream_key
from streamqd.store.client import Connection
from streamqd.store.transport import ReplyTooLargeError

BATCH_ROWS = 10_000  # rows after which an Arrow batch is passed on, at the end of a fetch
PROGRESS_TTL = 86_400  # seconds without new rows after which the progress of a run expires

_FIRST_FETCH = 32  # entries in the first fetch, when their size is still unknown
_GROWTH_MAX = 8  # maximum factor by which the number of entries may grow from fetch to fetch
_REPLY_MAX_FACTOR = 4  # multiple of `fetch_bytes` above which a reply is discarded unread
_FETCH_MIN = 2  # minimum entries in a fetch: the last entry again, and one new entry


class EntryReader:
    """Reads one span in pieces of bounded size, and detects if trimming overtakes it.

    If entries are missing, `loss` describes the loss, and `gaps` contains the ranges `(after,
    upto]` in which they may be missing, so that the caller can read them from elsewhere. If
    `report` is True, the loss is also raised as an error or logged, as the options request.

    If `limit` is set, the reader stops after that number of entries and stores its position in
    `end`. If trimming overtakes it, the reader ignores the limit and reads the whole span, because
    the number of lost entries can then be computed only for the whole span.
    """

    def __init__(
        self, options: ReadOptions, span: Span, limit: int | None = None, *, report: bool = True
    ) -> None:
        self._options = options
        self._report_loss = report
        self._span = span
        self._keys = keys_for(options.connection)
        self._key = stream_key(self._keys, span.place)
        self._limit = limit
        self._size = min(_FIRST_FETCH, options.fetch_size)
        self._mean = 0.0  # mean bytes of an entry in the last fetch
        self._unreported = 0
        # The number of entries in the span is unknown, so each page is checked for lost entries
        # instead.
        self._uncounted = span.removed is not None and span.rows is None
        self._broken = ""  # the reason why entries are missing: trimmed, replaced, or ''
        self.rows = 0
        self.end = span.end
        self.gaps: list[tuple[Id, Id]] = []
        self.loss: Loss | None = None

    def batches(self) -> Iterator[list[RawEntry]]:
        """Yield the entries in lists of about `fetch_bytes`.

        Raises DataLossError after the last list if entries are missing and losses are reported.
        """
        held: list[RawEntry] = []
        weight = 0.0
        with _collector_paused():
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

    def _pages(self) -> Iterator[list[RawEntry]]:
        span = self._span
        end = offsets.write_id(span.end)
        cursor = "(" + offsets.write_id(span.start)
        last: bytes | None = None
        while True:
            # Each page after the first starts with the last entry of the previous page. As long as
            # this entry exists, trimming cannot have removed any later entry.
            size = self._size if self._left is None else min(self._size, self._left)
            asked = size + (last is not None)
            page, asked = self._fetch(cursor, end, asked)
            full = len(page) == asked
            joined = last is not None and bool(page) and page[0][0] == last
            if joined:
                del page[0]
            elif last is not None:
                self._broken = self._loss_kind() or "trimmed"
            elif self._uncounted:
                self._broken = self._loss_kind()
            if self._broken and self._uncounted and self._options.fail_on_data_loss:
                self._note_gap(last, None)
                return  # `_settle` reports the loss
            if not joined:
                self._note_gap(last, page[0][0] if page else None)
            if page:
                self.rows += len(page)
                self._unreported += len(page)
                last = page[-1][0]
                cursor = last.decode()
                yield page
            if self._left == 0:
                assert last is not None
                self.end = offsets.read_id(last)
                return
            if not full:
                return

    def _note_gap(self, last: bytes | None, following: bytes | None) -> None:
        """Record that entries between two entries that were read may be missing.

        Pass None for `last` if the gap starts at the start of the span, and None for `following` if
        it reaches the end of the span.
        """
        after = self._span.start if last is None else offsets.read_id(last)
        upto = self._span.end
        if following is not None:
            upto = offsets.predecessor(offsets.read_id(following))
        if after < upto:
            self.gaps.append((after, upto))

    @property
    def _left(self) -> int | None:
        """The number of entries that may still be read, or None if there is no limit."""
        return None if self._limit is None or self._broken else max(0, self._limit - self.rows)

    def _fetch(self, cursor: str, end: str, count: int) -> tuple[list[RawEntry], int]:
        """Return the entries from the cursor on, and the number that the last request asked for.

        This number does not limit the size of a reply, because a thousand large entries may follow
        a thousand small ones. A reply that is too large is therefore discarded, and fewer entries
        are requested.
        """
        if self._unreported:
            self._report(BATCH_ROWS)
        allowed = _REPLY_MAX_FACTOR * self._options.fetch_bytes
        while True:
            command = ("XRANGE", self._key, cursor, end, "COUNT", count)
            most = allowed if count > _FETCH_MIN else math.inf
            work = partial(_execute_limited, command=command, bytes_max=most)
            try:
                page, received = persist(self._options.connection, work, key=self._key)
            except ReplyTooLargeError:
                count = max(_FETCH_MIN, count // _GROWTH_MAX)
                self._size = max(1, self._size // _GROWTH_MAX)
                continue
            self._measure(len(page), received)
            return page, count

    def _measure(self, count: int, received: int) -> None:
        """Adapt the size of the next request to `fetch_bytes`, based on this reply."""
        if count:
            self._mean = received / count
            fitting = int(self._options.fetch_bytes / self._mean)
            self._size = max(1, min(fitting, self._options.fetch_size, _GROWTH_MAX * self._size))

    def _report(self, least: int) -> None:
        """Add read rows to the progress that a command shows, if more than `least` are unreported.

        The progress is only approximate: a repeated task counts its rows again, and rows are left
        out if Redis does not answer. The task does not fail in that case.
        """
        key, place = self._options.progress_key, self._span.place
        if not key or self._unreported <= least:
            return
        commands = [
            ("HINCRBY", key, f"{place[0]}/{place[1]}", self._unreported),
            ("EXPIRE", key, PROGRESS_TTL),
        ]
        self._unreported = 0
        with contextlib.suppress(RedisUnavailableError):
            link_for(self._options.connection).pipeline(commands)

    def _loss_kind(self, missing: int = 0) -> str:
        """Return the reason why entries have gone missing since the read was planned.

        The reason is trimmed, replaced, or '' if the stream gives no reason for missing entries.
        """
        span = self._span
        facts = Catalog(self._options).facts([span.place])[span.place]
        if span.upto is not None and offsets.is_replaced(span.upto, facts):
            return "replaced"
        reached = facts.first is None or facts.first > span.start
        if span.removed is None or not reached:
            return ""
        if facts.removed > span.removed:
            return "trimmed"
        return "replaced" if missing or facts.removed < span.removed else ""

    def _settle(self) -> None:
        """Check at the end of the span whether entries were missing, and store the loss.

        Unless the caller handles losses itself, raises DataLossError, or logs the loss if the
        options allow it.
        """
        span = self._span
        if span.removed is None:
            return
        if span.rows is None:
            missing, kind = None, self._broken
        else:
            missing = span.rows - self.rows
            kind = self._loss_kind(missing) if missing > 0 else ""
        if not kind:
            return
        self.loss = loss = Loss(kind, missing)
        if self._report_loss:
            report_loss(span.place, span.start, loss, fail=self._options.fail_on_data_loss)


def _execute_limited(
    link: Connection, command: Sequence[str | int], bytes_max: float
) -> tuple[list[RawEntry], int]:
    return link.node.execute_limited(*command, bytes_max=bytes_max)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Disable the garbage collector, which would find no cycles but take a third of the time."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
