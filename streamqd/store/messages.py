"""The messages of a unit: reading what is pending, settling, promoting.

Called by the worker (reading and settling, fenced by its token) and by the housekeeper (promoting,
right whoever does it). The fetch itself is in `store.fetch`, trimming in `store.retention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from streamqd.errors import BadValue, ContractError
from streamqd.model import Lease, Unit
from streamqd.store import scripts, untrusted
from streamqd.store.items import Fields, listed
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.statistics import due_of

PLACES_MAX = 512  # places in one call at most
ITEMS_MAX = 256  # entries moved by one call at most
COUNT_MAX = 1_000_000_000  # crashes, or failures, of one entry
WAIT_MS_MAX = 366 * 86_400_000  # no delay that can be configured is as long
ATTEMPTS = "the counters of a group on a partition"  # where nobody has said which one it is

Cursor = tuple[bytes, bytes]  # a foreign consumer, and an entry that it holds
BEGIN: Cursor = (b"", b"")


# --- reading ---------------------------------------------------------------------------------


def ensure_group(keys: Keys, unit: Unit, start: str) -> Call:
    """Make sure that the group exists. `start`: 0 = with all messages kept, $ = with later ones."""
    if start not in ("0", "$"):
        raise ContractError(f"group_ensure: start {start!r}")
    return scripts.on("group_ensure", keys, unit, start=start)


def restore_group(
    keys: Keys,
    lease: Lease,
    after_main: bytes,
    after_retry: bytes,
    places: Sequence[bytes],
) -> Call:
    """Make the group again that somebody has destroyed, as its owner knows it.

    `after_*` are the last ids that were delivered, `places` what of them is not settled. Answers
    the ids after which the group goes on, b'' where it was there.
    """
    return _fenced(
        "group_restore",
        keys,
        lease,
        after_main=after_main,
        after_retry=after_retry,
        places=places,
    )


def recover(
    keys: Keys,
    lease: Lease,
    session: str,
    open: bool,  # noqa: A002 - the script's word
    after_main: str | bytes,
    after_retry: str | bytes,
    count: int,
) -> Call:
    """List a page of what is pending; `open` on the first page of a connection.

    `after_*` is the last id of the page before, empty for the first.
    """
    return _fenced(
        "message_recover",
        keys,
        lease,
        session=session,
        open=open,
        after_main=after_main,
        after_retry=after_retry,
        count=_page(count),
    )


def place_of(entry_id: bytes, *, retried: bool) -> bytes:
    """Return the one true name of a pending entry: its stream and id."""
    return (b"r:" if retried else b"m:") + entry_id


class PendingEntry(NamedTuple):
    """A pending entry. `fields` is flat (name, value, …); None for one whose body is gone."""

    retried: bool  # it is of the retry stream
    id: bytes
    fields: list[bytes] | None
    crashes: int = 0  # charged since it was last delivered
    context: bytes = b""  # JSON of the last charged crash, b'' for none
    failures: int = 0  # in place, of a handler that keeps the order
    wait_ms: int = 0  # until its next run in place is due

    @property
    def place(self) -> bytes:
        """The one true name of the entry."""
        return place_of(self.id, retried=self.retried)

    @property
    def size(self) -> int:
        """Bytes of its names and values."""
        return sum(map(len, self.fields or ()))

    @classmethod
    def parse(
        cls, entry: Sequence[Any], key: str, *, retried: bool
    ) -> tuple[PendingEntry, list[BadValue]]:
        """Read an entry of `message_recover`; what cannot be read of its counters counts as none.

        `key` is that of the counters.
        """
        id_, fields, crashes, failures, context, wait_ms = entry
        place = untrusted.label(place_of(id_, retried=retried))
        bad: list[BadValue] = []

        def counted(value: int, field: str, most: int, wanted: str) -> int:
            if 0 <= value <= most:
                return value
            found = "no such number" if value < 0 else str(value)
            bad.append(BadValue(key, f"{place}:{field}", found, wanted))
            return 0

        return cls(
            retried,
            id_,
            fields,
            counted(crashes, "c", COUNT_MAX, "a count"),
            context,
            counted(failures, "f", COUNT_MAX, "a count"),
            counted(wait_ms, "due", WAIT_MS_MAX, "a time within a year"),
        ), bad


class Recovered(NamedTuple):
    """A page of pending entries, each list oldest first.

    `more_*` tells of a list that it may go on. `last_*` are the ids last delivered to the group:
    the long poll starts there.
    """

    solo: bool
    last_main: bytes
    last_retry: bytes
    main: list[PendingEntry]
    retry: list[PendingEntry]
    more_main: bool = False
    more_retry: bool = False
    accused: frozenset[bytes] = frozenset()  # places of a round in which a host was lost
    bad: list[BadValue] = []  # noqa: RUF012 - counters that cannot be read; never changed in place

    @classmethod
    def parse(cls, reply: Reply, key: str = ATTEMPTS) -> Recovered:
        """Read OK; `key` is that of the counters."""
        solo, last_main, last_retry, main, retry, more_main, more_retry, accused = reply.rest
        mains = [PendingEntry.parse(entry, key, retried=False) for entry in main]
        retries = [PendingEntry.parse(entry, key, retried=True) for entry in retry]
        return cls(
            bool(solo),
            last_main,
            last_retry,
            [entry for entry, _ in mains],
            [entry for entry, _ in retries],
            bool(more_main),
            bool(more_retry),
            frozenset(accused.split()),
            [one for _, found in mains + retries for one in found],
        )

    def in_order(self) -> tuple[list[PendingEntry], bool]:
        """Merge both lists, oldest first; tell whether nothing comes after.

        What lies beyond the end of a list that may go on must not run before the rest of it, and is
        left for the next page.
        """
        entries = sorted(self.main + self.retry, key=lambda entry: _order(entry.id))
        lists = ((self.main, self.more_main), (self.retry, self.more_retry))
        ends = [_order(found[-1].id) for found, more in lists if more]
        if not ends:
            return entries, True
        return [entry for entry in entries if _order(entry.id) <= min(ends)], False


def fetch(keys: Keys, lease: Lease, session: str, count: int) -> Call:
    """Read at most `count` entries of each stream, while memory is full; else see `store.fetch`."""
    return _fenced("message_fetch", keys, lease, session=session, count=_page(count))


def reclaim(
    keys: Keys,
    lease: Lease,
    session: str,
    source: str,
    idle: float,
    count: int,
    page: Cursor = BEGIN,
) -> Call:
    """Take over entries that foreign consumers left pending for `idle` seconds.

    `source` is m for the partition stream, r for the retry stream. Looks at a `page` of what they
    hold; the answer says where the next one begins.
    """
    stream = keys.source if source == "m" else keys.retry_stream
    return scripts.get("message_reclaim").call(
        {
            "fence": keys.fence(*lease.unit),
            "source": stream(*lease.unit),
        },
        token=lease.token,
        session=session,
        group=lease.unit.group,
        idle_ms=_ms(idle),
        count=_page(count),
        at_name=page[0],
        after=page[1],
    )


class Reclaimed(NamedTuple):
    """Entries taken over, each (id, flat fields), and how many had no body and were settled.

    `next` is the next page, None when this was the last one.
    """

    entries: list[tuple[bytes, list[bytes]]]
    ghosts: int
    next: Cursor | None

    @classmethod
    def parse(cls, reply: Reply) -> Reclaimed:
        """Read OK."""
        entries, ghosts, after = reply.rest
        return cls(
            [(entry[0], entry[1]) for entry in entries],
            ghosts,
            (after[0], after[1]) if after else None,
        )


# --- settling --------------------------------------------------------------------------------


def ack(keys: Keys, lease: Lease, places: Sequence[bytes], charged: Sequence[bytes] = ()) -> Call:
    """Acknowledge `charged` places, whose counters go with them, and all other `places`.

    A place in both counts as charged.
    """
    every = [*charged, *(place for place in places if place not in charged)]
    if len(every) > PLACES_MAX:
        raise ContractError(f"settle_ack: {len(every)} places, at most {PLACES_MAX} are allowed")
    counters = ("attempts",) if charged else ()
    return _fenced(
        "settle_ack", keys, lease, optional=counters, charged_count=len(charged), places=every
    )


def retry(
    keys: Keys,
    lease: Lease,
    items: Sequence[tuple[bytes, float, Fields]],
    *,
    adjacent: bool = False,
) -> Call:
    """Set entries aside: (place, delay in seconds, changed fields) each.

    For an entry that answered GHOST the fields must be all of it, `payload` among them. `adjacent`:
    between those of a stream lies no other entry, so that they are found together.
    """
    _bounded("settle_retry", len(items))
    return _fenced(
        "settle_retry",
        keys,
        lease,
        adjacent=adjacent,
        entries=listed([((place, _ms(delay)), fields) for place, delay, fields in items]),
    )


def dead(
    keys: Keys,
    lease: Lease,
    items: Sequence[tuple[bytes, Fields]],
    *,
    adjacent: bool = False,
) -> Call:
    """Give entries up: (place, changed fields) each; the fields, and `adjacent`, as for `retry`.

    Not for a group that reads dead letters: it would read its own again, for ever.
    """
    _bounded("settle_dead", len(items))
    if lease.unit.reads_letters:
        raise ContractError(f"settle_dead: {lease.unit} reads dead letters")
    return _fenced(
        "settle_dead",
        keys,
        lease,
        adjacent=adjacent,
        entries=listed([((place,), fields) for place, fields in items]),
    )


def note(keys: Keys, lease: Lease, notes: Sequence[tuple[bytes, int, float]]) -> Call:
    """Write down how often entries have failed that stay in hand, and when they run again.

    A note is (place, failures, seconds until it is due).
    """
    _bounded("settle_note", len(notes))
    return _fenced(
        "settle_note",
        keys,
        lease,
        notes=[part for place, failures, delay in notes for part in (place, failures, _ms(delay))],
    )


class SettledReply(NamedTuple):
    """A word for each item (MOVED, GONE or GHOST), in their order.

    `next_due_unix_ms` after a retry: the earliest due time of all delayed entries of the group.
    `letters` after a death: the dead letter's id for each item, b'' where nothing was moved.
    """

    words: list[str]
    next_due_unix_ms: int | None
    letters: list[bytes]

    @classmethod
    def parse(cls, reply: Reply) -> SettledReply:
        """Read OK of `retry` or `dead`."""
        words = [untrusted.label(word) for word in reply.rest[0]]
        tail = reply.rest[1]
        if isinstance(tail, list):
            return cls(words, None, tail)
        return cls(words, due_of(tail), [])


def solo_mark(
    keys: Keys, lease: Lease, session: str, places: bytes, acked: Sequence[bytes]
) -> Call:
    """Mark the inherited entries that come next, and acknowledge those before; b'' = none is left.

    `places` has a space between two.

    Entries with counters are acknowledged by `ack`, not here.
    """
    return _fenced("solo_mark", keys, lease, session=session, places=places, acked=acked)


# --- housekeeping ----------------------------------------------------------------------------


def promote_retries(keys: Keys, unit: Unit, count: int) -> Call:
    """Move retries that are due into the group's retry stream."""
    return scripts.on("message_promote", keys, unit, count=_page(count))


def promote_scheduled(keys: Keys, topic: str, partition: int, count: int) -> Call:
    """Move scheduled sends that are due into the partition."""
    return scripts.on("message_promote", keys, (topic, partition), count=_page(count))


class Promoted(NamedTuple):
    """How many were moved, how many had lost their item, and when the next one is due.

    `unreadable` is how many stay because their item is not what streamqd writes; `more` is whether
    others are due already, beyond what one call moves.
    """

    moved: int
    orphans: int
    next_due_unix_ms: int | None
    unreadable: int
    more: bool

    @classmethod
    def parse(cls, reply: Reply) -> Promoted:
        """Read OK."""
        moved, orphans, due, unreadable, more = reply.rest
        return cls(moved, orphans, due_of(due), unreadable, bool(more))


def snapshot(keys: Keys, unit: Unit, limit: int = 500) -> Call:
    """Count where the messages of a group on a partition are, at one instant."""
    return scripts.on("partition_snapshot", keys, unit, limit=limit)


class Snapshot(NamedTuple):
    """The counts of `snapshot`. Unread counts are -1 when there are more than its limit."""

    length: int
    unread: int
    pending: int
    delayed: int
    retry_unread: int
    retry_pending: int
    dead: int  # of all groups
    scheduled: int

    @classmethod
    def parse(cls, reply: Reply) -> Snapshot | None:
        """Read OK; None when the group does not exist."""
        return cls(*reply.rest) if reply.word == "OK" else None


# --- arguments -------------------------------------------------------------------------------


def _fenced(script: str, keys: Keys, lease: Lease, **given: Any) -> Call:
    """Call a script that acts for the owner of a unit."""
    return scripts.on(script, keys, lease.unit, token=lease.token, **given)


def _order(entry_id: bytes) -> tuple[int, int]:
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)


def _ms(seconds: float) -> int:
    if seconds < 0:
        raise ContractError(f"a wait of {seconds} s")
    return round(seconds * 1000)


def _page(count: int, of: int = ITEMS_MAX) -> int:
    if not 1 <= count <= of:
        raise ContractError(f"a page of {count}, not 1 to {of}")
    return count


def _bounded(name: str, count: int) -> None:
    if count > ITEMS_MAX:
        raise ContractError(f"{name}: {count} items, at most {ITEMS_MAX} are allowed")
