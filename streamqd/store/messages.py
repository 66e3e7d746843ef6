"""Script calls for the messages of an assignment: list pending entries, settle, promote.

The worker lists and settles, fenced by its token. The housekeeper promotes, which any process may
do. Fetching is in `store.fetch`, and trimming in `store.retention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from streamqd.errors import ContractError, InvalidValueError
from streamqd.model import Assignment, Lease
from streamqd.store import scripts, untrusted
from streamqd.store.items import Fields, flatten_items
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.statistics import due_of

PLACES_MAX = 512  # places in one call
ITEMS_MAX = 256  # entries moved by one call
COUNT_MAX = 1_000_000_000  # crashes, or failures, of one entry
WAIT_MS_MAX = 366 * 86_400_000  # longer than any delay that can be configured
ATTEMPTS = "the counters of a group on a partition"  # label in errors if the caller passes no key

Cursor = tuple[bytes, bytes]  # another client's consumer, and one of its entries
BEGIN: Cursor = (b"", b"")


# --- reading ---------------------------------------------------------------------------------


def ensure_group(keys: Keys, assignment: Assignment, start: str) -> Call:
    """Ensure that the group exists.

    `start` is 0 for the first message, or $ for later ones only.
    """
    if start not in ("0", "$"):
        raise ContractError(f"group_ensure: start {start!r}")
    return scripts.build_call("group_ensure", keys, assignment, start=start)


def restore_group(
    keys: Keys,
    lease: Lease,
    after_main: bytes,
    after_retry: bytes,
    places: Sequence[bytes],
) -> Call:
    """Create the group again after another client destroyed it, in the state that its owner knows.

    `after_*` are the last delivered IDs, and `places` the delivered entries that are not settled.
    The call returns the IDs after which the group continues, or b'' if the group existed.
    """
    return _fenced_call(
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
    """List a page of pending entries. `open`: this is the first page on a new connection.

    `after_*` are the last IDs of the previous page, empty for the first page.
    """
    return _fenced_call(
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
    """Return the unambiguous name of a pending entry: its stream and ID."""
    return (b"r:" if retried else b"m:") + entry_id


class PendingEntry(NamedTuple):
    """A pending entry. `fields` is a flat list (name, value, …), or None if the body is gone."""

    retried: bool  # True for the retry stream, False for the partition
    id: bytes
    fields: list[bytes] | None
    crashes: int = 0  # crashes charged since the last delivery
    context: bytes = b""  # JSON of the last charged crash, b'' for none
    failures: int = 0  # failures in place, for a handler that keeps the order
    wait_ms: int = 0  # milliseconds until its next run in place is due

    @property
    def place(self) -> bytes:
        """The unambiguous name of the entry."""
        return place_of(self.id, retried=self.retried)

    @property
    def size(self) -> int:
        """The total bytes of its names and values."""
        return sum(map(len, self.fields or ()))

    @classmethod
    def parse(
        cls, entry: Sequence[Any], key: str, *, retried: bool
    ) -> tuple[PendingEntry, list[InvalidValueError]]:
        """Parse an entry of `message_recover`.

        Invalid counters count as 0, and are returned as errors.

        `key` is the key of the counters.
        """
        id_, fields, crashes, failures, context, wait_ms = entry
        place = untrusted.label(place_of(id_, retried=retried))
        bad: list[InvalidValueError] = []

        def read_count(value: int, field: str, most: int, wanted: str) -> int:
            if 0 <= value <= most:
                return value
            found = "no such number" if value < 0 else str(value)
            bad.append(InvalidValueError(key, f"{place}:{field}", found, wanted))
            return 0

        return cls(
            retried,
            id_,
            fields,
            read_count(crashes, "c", COUNT_MAX, "a count"),
            context,
            read_count(failures, "f", COUNT_MAX, "a count"),
            read_count(wait_ms, "due", WAIT_MS_MAX, "a time within a year"),
        ), bad


class Recovered(NamedTuple):
    """A page of pending entries, each list oldest first.

    `more_*`: the list may continue on the next page. `last_*` are the IDs last delivered to the
    group, after which the long poll starts.
    """

    quarantine: bool
    last_main: bytes
    last_retry: bytes
    main: list[PendingEntry]
    retry: list[PendingEntry]
    more_main: bool = False
    more_retry: bool = False
    accused: frozenset[bytes] = frozenset()  # places of a round in which a host was lost
    bad: list[InvalidValueError] = []  # noqa: RUF012 - counters that cannot be read; never changed in place

    @classmethod
    def parse(cls, reply: Reply, key: str = ATTEMPTS) -> Recovered:
        """Parse the reply OK. `key` is the key of the counters."""
        quarantine, last_main, last_retry, main, retry, more_main, more_retry, accused = (
            reply.values
        )
        mains = [PendingEntry.parse(entry, key, retried=False) for entry in main]
        retries = [PendingEntry.parse(entry, key, retried=True) for entry in retry]
        return cls(
            bool(quarantine),
            last_main,
            last_retry,
            [entry for entry, _ in mains],
            [entry for entry, _ in retries],
            bool(more_main),
            bool(more_retry),
            frozenset(accused.split()),
            [one for _, found in mains + retries for one in found],
        )

    def entries_in_order(self) -> tuple[list[PendingEntry], bool]:
        """Merge both lists, oldest first. Also return True if both lists are complete.

        Entries beyond the last one of an incomplete list stay for the next page, because they must
        not run before the rest of that list.
        """
        entries = sorted(self.main + self.retry, key=lambda entry: _order(entry.id))
        lists = ((self.main, self.more_main), (self.retry, self.more_retry))
        ends = [_order(found[-1].id) for found, more in lists if more]
        if not ends:
            return entries, True
        return [entry for entry in entries if _order(entry.id) <= min(ends)], False


def fetch(keys: Keys, lease: Lease, session: str, count: int) -> Call:
    """Read at most `count` entries per stream while memory is full. See `store.fetch` otherwise."""
    return _fenced_call("message_fetch", keys, lease, session=session, count=_page(count))


def reclaim(
    keys: Keys,
    lease: Lease,
    session: str,
    source: str,
    idle: float,
    count: int,
    page: Cursor = BEGIN,
) -> Call:
    """Take over entries that other clients' consumers left pending for `idle` seconds.

    `source` is m for the partition stream and r for the retry stream. One call examines one `page`
    of their entries, and the reply contains the start of the next page.
    """
    stream = keys.source if source == "m" else keys.retry_stream
    return scripts.get("message_reclaim").call(
        {
            "fence": keys.fence(*lease.assignment),
            "source": stream(*lease.assignment),
        },
        token=lease.token,
        session=session,
        group=lease.assignment.group,
        idle_ms=_ms(idle),
        count=_page(count),
        at_name=page[0],
        after=page[1],
    )


class Reclaimed(NamedTuple):
    """The entries taken over, each (ID, flat fields), and the number of missing entries.

    `next` starts the next page, or is None after the last one.
    """

    entries: list[tuple[bytes, list[bytes]]]
    missing_entries: int
    next: Cursor | None

    @classmethod
    def parse(cls, reply: Reply) -> Reclaimed:
        """Parse the reply OK."""
        entries, missing_entries, after = reply.values
        return cls(
            [(entry[0], entry[1]) for entry in entries],
            missing_entries,
            (after[0], after[1]) if after else None,
        )


# --- settling --------------------------------------------------------------------------------


def ack(keys: Keys, lease: Lease, places: Sequence[bytes], charged: Sequence[bytes] = ()) -> Call:
    """Acknowledge `places` and `charged`, and remove the counters of the entries in `charged`.

    An entry in both lists is treated as charged.
    """
    every = [*charged, *(place for place in places if place not in charged)]
    if len(every) > PLACES_MAX:
        raise ContractError(f"settle_ack: {len(every)} places, at most {PLACES_MAX} are allowed")
    counters = ("attempts",) if charged else ()
    return _fenced_call(
        "settle_ack", keys, lease, optional=counters, charged_count=len(charged), places=every
    )


def retry(
    keys: Keys,
    lease: Lease,
    items: Sequence[tuple[bytes, float, Fields]],
    *,
    adjacent: bool = False,
) -> Call:
    """Turn failed entries, each (place, delay in seconds, changed fields), into waiting retries.

    If the reply for an entry is MISSING, repeat the call with all its fields, including `payload`.
    With `adjacent`, the entries of a stream are consecutive, so one range command finds all.
    """
    _check_count("settle_retry", len(items))
    return _fenced_call(
        "settle_retry",
        keys,
        lease,
        adjacent=adjacent,
        entries=flatten_items([((place, _ms(delay)), fields) for place, delay, fields in items]),
    )


def dead(
    keys: Keys,
    lease: Lease,
    items: Sequence[tuple[bytes, Fields]],
    *,
    adjacent: bool = False,
) -> Call:
    """Dead-letter entries, each (place, changed fields). Fields and `adjacent` are as in `retry`.

    Do not call this for a group that reads dead letters, because it would read its own dead letters
    forever.
    """
    _check_count("settle_dead", len(items))
    if lease.assignment.reads_dead_letters:
        raise ContractError(f"settle_dead: {lease.assignment} reads dead letters")
    return _fenced_call(
        "settle_dead",
        keys,
        lease,
        adjacent=adjacent,
        entries=flatten_items([((place,), fields) for place, fields in items]),
    )


def note(keys: Keys, lease: Lease, notes: Sequence[tuple[bytes, int, float]]) -> Call:
    """Record the failures of entries that wait in their place, and when the entries run again.

    A note is (place, failures, seconds until the next run).
    """
    _check_count("settle_note", len(notes))
    return _fenced_call(
        "settle_note",
        keys,
        lease,
        notes=[part for place, failures, delay in notes for part in (place, failures, _ms(delay))],
    )


class SettledReply(NamedTuple):
    """A word for each item (MOVED, GONE or MISSING), in order.

    After `retry`, `next_due_unix_ms` is the earliest due time of the group's waiting retries. After
    `dead`, `dead_letters` contains the ID of each item's dead letter, or b'' if the item was not
    moved.
    """

    words: list[str]
    next_due_unix_ms: int | None
    dead_letters: list[bytes]

    @classmethod
    def parse(cls, reply: Reply) -> SettledReply:
        """Parse the reply OK of `retry` or `dead`."""
        words = [untrusted.label(word) for word in reply.values[0]]
        tail = reply.values[1]
        if isinstance(tail, list):
            return cls(words, None, tail)
        return cls(words, due_of(tail), [])


def quarantine_mark(
    keys: Keys, lease: Lease, session: str, places: bytes, acked: Sequence[bytes]
) -> Call:
    """Mark the next inherited entries, and acknowledge the previous ones.

    `places` are separated by spaces, and b'' if no inherited entry is left.

    Use `ack` to acknowledge entries with counters.
    """
    return _fenced_call("quarantine_mark", keys, lease, session=session, places=places, acked=acked)


# --- housekeeping ----------------------------------------------------------------------------


def promote_retries(keys: Keys, assignment: Assignment, count: int) -> Call:
    """Move due retries into the group's retry stream."""
    return scripts.build_call("message_promote", keys, assignment, count=_page(count))


def promote_delayed(keys: Keys, topic: str, partition: int, count: int) -> Call:
    """Move due delayed sends into the partition."""
    return scripts.build_call("message_promote", keys, (topic, partition), count=_page(count))


class Promoted(NamedTuple):
    """The result of a promotion: moved items, members removed without an item, next due time.

    `unreadable` is the number of items that stay, because their format is invalid. `more`: further
    items are due, beyond the limit of one call.
    """

    moved: int
    orphans: int
    next_due_unix_ms: int | None
    unreadable: int
    more: bool

    @classmethod
    def parse(cls, reply: Reply) -> Promoted:
        """Parse the reply OK."""
        moved, orphans, due, unreadable, more = reply.values
        return cls(moved, orphans, due_of(due), unreadable, bool(more))


def snapshot(keys: Keys, assignment: Assignment, limit: int = 500) -> Call:
    """Count the messages of a group on a partition by state, in one atomic step."""
    return scripts.build_call("partition_snapshot", keys, assignment, limit=limit)


class Snapshot(NamedTuple):
    """The counts that `snapshot` returns. An unread count above the limit is -1."""

    length: int
    unread: int
    pending: int
    waiting_retries: int
    retry_unread: int
    retry_pending: int
    dead: int  # dead letters of all groups
    delayed_sends: int

    @classmethod
    def parse(cls, reply: Reply) -> Snapshot | None:
        """Parse the reply OK. Return None if the group does not exist."""
        return cls(*reply.values) if reply.word == "OK" else None


# --- arguments -------------------------------------------------------------------------------


def _fenced_call(script: str, keys: Keys, lease: Lease, **given: Any) -> Call:
    """Call a script that acts for the owner of an assignment."""
    return scripts.build_call(script, keys, lease.assignment, token=lease.token, **given)


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


def _check_count(name: str, count: int) -> None:
    if count > ITEMS_MAX:
        raise ContractError(f"{name}: {count} items, at most {ITEMS_MAX} are allowed")
