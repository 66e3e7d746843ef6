"""Script calls that list, settle and promote the messages of an assignment.

To settle a message means to acknowledge it, to store it for a retry, or to dead-letter it. A worker
lists and settles its messages, and its token proves that it owns the assignment. The housekeeper
promotes due messages, which means that it moves them to the stream in which they can be read. This
does not require a token. See `store.fetch` for the calls that fetch messages, and
`store.retention` for those that trim streams.
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
from streamqd.store.statistics import parse_due_time

PLACES_MAX = 512  # maximum number of places in one call
ITEMS_MAX = 256  # maximum number of entries that one call moves
COUNT_MAX = 1_000_000_000  # largest valid number of crashes or failures of one entry
WAIT_MS_MAX = 366 * 86_400_000  # a delay that is longer than any that can be configured
ATTEMPTS = "the counters of a group on a partition"  # label for errors if the caller passes no key

Cursor = tuple[bytes, bytes]  # a position in `reclaim`: another client's consumer, and an entry ID
BEGIN: Cursor = (b"", b"")


# --- reading ---------------------------------------------------------------------------------


def ensure_group(keys: Keys, assignment: Assignment, start: str) -> Call:
    """Create the group on the partition and on its retry stream if it does not exist.

    If `start` is "0", a new group starts at the first message. If it is "$", the group receives
    only later messages.
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
    """Create a group again after another client has destroyed it while its owner was running.

    The owner passes the state of the group, which it still knows. `after_main` and `after_retry`
    are the IDs of the entries last delivered from the two streams, and `places` holds the delivered
    entries that are not settled yet. The reply contains the IDs after which the group continues in
    the partition stream and in the retry stream. Each is b'' if the group still existed there.
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
    """List one page of the owner's pending entries, with their bodies and counters.

    `session` is a random name for the current connection. For the first page, pass `open=True`, so
    that the session is recorded and Redis rejects fetches from earlier connections that arrive
    late. `after_main` and `after_retry` are empty for the first page, and the last IDs of the
    previous page for any other one.
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


def entry_place(entry_id: bytes, *, retried: bool) -> bytes:
    """Return the place of an entry, which identifies it by its stream and its ID.

    The ID alone is not enough, because the partition stream and the retry stream may each have an
    entry with this ID.
    """
    return (b"r:" if retried else b"m:") + entry_id


class PendingEntry(NamedTuple):
    """A pending entry with its counters.

    `fields` is a flat list of alternating names and values. It is None for a missing entry, whose
    body was trimmed or deleted.
    """

    retried: bool  # True if the entry is in the retry stream, False if it is in the partition
    id: bytes
    fields: list[bytes] | None
    crashes: int = 0  # number of crashes charged since the last delivery
    context: bytes = b""  # JSON that describes the last charged crash, or b''
    failures: int = 0  # number of failures in place, for a handler that keeps the order
    wait_ms: int = 0  # milliseconds until its next run in place is due

    @property
    def place(self) -> bytes:
        """The place of the entry, which identifies it by its stream and its ID."""
        return entry_place(self.id, retried=self.retried)

    @property
    def size(self) -> int:
        """The total size of its names and values in bytes."""
        return sum(map(len, self.fields or ()))

    @classmethod
    def parse(
        cls, entry: Sequence[Any], key: str, *, retried: bool
    ) -> tuple[PendingEntry, list[InvalidValueError]]:
        """Parse an entry of a reply to `recover`.

        An invalid counter is read as 0, and the error is returned together with the entry. `key` is
        the Redis key of the counters, for error messages.
        """
        id_, fields, crashes, failures, context, wait_ms = entry
        place = untrusted.label(entry_place(id_, retried=retried))
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
    """A page of pending entries from the partition and the retry stream, each oldest first.

    If `more_main` is True, the next page may contain further entries of the partition. `more_retry`
    means the same for the retry stream. `last_main` and `last_retry` are the IDs of the entries
    last delivered to the group. The long poll waits for entries after these.
    """

    quarantine: bool
    last_main: bytes
    last_retry: bytes
    main: list[PendingEntry]
    retry: list[PendingEntry]
    more_main: bool = False
    more_retry: bool = False
    accused: frozenset[bytes] = frozenset()  # places of entries that ran when a host was lost
    bad: list[InvalidValueError] = []  # noqa: RUF012 - counters that cannot be read; never changed in place

    @classmethod
    def parse(cls, reply: Reply, key: str = ATTEMPTS) -> Recovered:
        """Parse an OK reply. `key` is the Redis key of the counters, for error messages."""
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
        """Return the entries of both lists, oldest first, and True if both lists are complete.

        If a list continues on the next page, entries that are newer than its last one are left out,
        because they must not run before the rest of that list. The next page contains them again.
        """
        entries = sorted(self.main + self.retry, key=lambda entry: _order(entry.id))
        lists = ((self.main, self.more_main), (self.retry, self.more_retry))
        ends = [_order(found[-1].id) for found, more in lists if more]
        if not ends:
            return entries, True
        return [entry for entry in entries if _order(entry.id) <= min(ends)], False


def fetch(keys: Keys, lease: Lease, session: str, count: int) -> Call:
    """Read at most `count` entries per stream while the server's memory is full.

    Most servers reject the transaction of `store.fetch.Fetcher` while their memory is full, but
    they do run this script. At any other time, a worker uses the `Fetcher`, which is faster.
    """
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
    """Take over entries that other clients have left pending for at least `idle` seconds.

    `source` is "m" for the partition stream or "r" for the retry stream. Each call examines a
    single page of the other clients' pending entries, starting at `page`. The reply contains the
    start of the next page, so that the caller can continue.
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
    """The entries that were taken over, each as its ID and a flat list of fields.

    `missing_entries` is the number of entries that were acknowledged because their bodies no longer
    exist. `next` is the start of the next page, or None after the last one.
    """

    entries: list[tuple[bytes, list[bytes]]]
    missing_entries: int
    next: Cursor | None

    @classmethod
    def parse(cls, reply: Reply) -> Reclaimed:
        """Parse an OK reply."""
        entries, missing_entries, after = reply.values
        return cls(
            [(entry[0], entry[1]) for entry in entries],
            missing_entries,
            (after[0], after[1]) if after else None,
        )


# --- settling --------------------------------------------------------------------------------


def ack(keys: Keys, lease: Lease, places: Sequence[bytes], charged: Sequence[bytes] = ()) -> Call:
    """Acknowledge finished entries.

    `charged` lists the entries for which Redis stores counts of crashes or failures, so that the
    call removes these counts. All other entries belong in `places`. An entry in both lists is
    treated as charged.
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
    """Move failed entries to the waiting retries.

    Each item is a tuple of the entry's place, the delay in seconds, and the fields to change. If
    the reply contains MISSING for an entry, the script could not read its body, for example because
    it was trimmed. Repeat the call for this entry with all its fields, including `payload`. Pass
    `adjacent=True` if the entries are consecutive in their streams. The script then reads all
    entries of a stream with one command.
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
    """Dead-letter entries.

    Each item is a pair of the entry's place and the fields to change. See `retry` for `adjacent`
    and for entries whose bodies are missing. Raises ContractError for a group that reads dead
    letters, because it would read its own dead letters again and again.
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
    """Record the failures of entries that stay pending until they run again.

    Each note is a tuple of the entry's place, its total number of failures, and the seconds until
    its next run.
    """
    _check_count("settle_note", len(notes))
    return _fenced_call(
        "settle_note",
        keys,
        lease,
        notes=[part for place, failures, delay in notes for part in (place, failures, _ms(delay))],
    )


class SettledReply(NamedTuple):
    """The reply to `retry` or `dead`, with a word for each item, in the same order.

    The word is MOVED, GONE if the entry was no longer pending, or MISSING if the script could not
    read its body. After `retry`, `next_due_unix_ms` is the earliest due time of the group's waiting
    retries. After `dead`, `dead_letters` contains the ID of each item's dead letter, or b'' if the
    item was not moved.
    """

    words: list[str]
    next_due_unix_ms: int | None
    dead_letters: list[bytes]

    @classmethod
    def parse(cls, reply: Reply) -> SettledReply:
        """Parse an OK reply to `retry` or `dead`."""
        words = [untrusted.label(word) for word in reply.values[0]]
        tail = reply.values[1]
        if isinstance(tail, list):
            return cls(words, None, tail)
        return cls(words, parse_due_time(tail), [])


def quarantine_mark(
    keys: Keys, lease: Lease, session: str, places: bytes, acked: Sequence[bytes]
) -> Call:
    """Record which inherited entries are about to run, and acknowledge entries of the last round.

    If one of these entries takes down the host, the next owner can see which ones were running.
    `places` contains their places, separated by spaces. To end the quarantine when no inherited
    entry is left, pass b''. `acked` may contain only entries without counts of crashes or failures.
    Use `ack` for all others.
    """
    return _fenced_call("quarantine_mark", keys, lease, session=session, places=places, acked=acked)


# --- housekeeping ----------------------------------------------------------------------------


def promote_retries(keys: Keys, assignment: Assignment, count: int) -> Call:
    """Move up to `count` due retries to the group's retry stream."""
    return scripts.build_call("message_promote", keys, assignment, count=_page(count))


def promote_delayed(keys: Keys, topic: str, partition: int, count: int) -> Call:
    """Move up to `count` due delayed sends to the partition."""
    return scripts.build_call("message_promote", keys, (topic, partition), count=_page(count))


class Promoted(NamedTuple):
    """The result of a promotion.

    `moved` is the number of messages that were moved. `orphans` is the number of due times that
    were removed because no message was stored for them. `next_due_unix_ms` is the due time of the
    next message. `unreadable` is the number of messages that were postponed because their stored
    format is invalid. If `more` is True, more messages are due, but the call had reached its limit.
    """

    moved: int
    orphans: int
    next_due_unix_ms: int | None
    unreadable: int
    more: bool

    @classmethod
    def parse(cls, reply: Reply) -> Promoted:
        """Parse an OK reply."""
        moved, orphans, due, unreadable, more = reply.values
        return cls(moved, orphans, parse_due_time(due), unreadable, bool(more))


def snapshot(keys: Keys, assignment: Assignment, limit: int = 500) -> Call:
    """Count the messages of a group on a partition by their state, in one atomic step.

    The call counts no more than `limit` unread entries in each stream.
    """
    return scripts.build_call("partition_snapshot", keys, assignment, limit=limit)


class Snapshot(NamedTuple):
    """The counts that `snapshot` returns.

    `unread` and `retry_unread` are -1 if there are more unread entries than the call may count.
    """

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
        """Parse an OK reply. Return None if the group does not exist."""
        return cls(*reply.values) if reply.word == "OK" else None


# --- arguments -------------------------------------------------------------------------------


def _fenced_call(script: str, keys: Keys, lease: Lease, **given: Any) -> Call:
    """Build the call of a script that acts for the owner of an assignment."""
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
