"""Script calls that lease an outbox to a relay, fence partitions, and publish each row once.

`streamqd.outbox.relay` uses these calls. Views read the state that a relay publishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamqd.errors import ContractError, InvalidValueError, RedisResponseError
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.publishing import FIELDS_MAX
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

UID_DIGITS, ID_DIGITS = 32, 16  # number of hex digits of the uid and the ID of a row in a record
_ROW_DIGITS = UID_DIGITS + ID_DIGITS
_ID_RANGE = 1 << 4 * ID_DIGITS
ROWS_MAX = 4096  # maximum number of rows in one call
OUTBOXES_MAX = 1000  # maximum number of outboxes that `find_conflict` reads
# The fields that a relay publishes with its lease.
FIGURES = (
    *("rows", "more", "oldest_ms", "sent", "dead"),
    *("error", "cause", "topic", "failing_ms", "table"),
)
# The kinds of obstacle that keep rows from being published. In this order: the database is
# unavailable, the database returned an error, Redis is unavailable, another outbox uses the same
# table, a topic cannot be written, a partition cannot be written, or a partition has no room.
CAUSES = ("database", "refused", "redis", "shared", "topic", "partition", "backlog")


class RecordedRow(NamedTuple):
    """A row that the record of a partition lists as published.

    `id` is the 64-bit ID of the row in its table.
    """

    id: int
    uid: str


class OutgoingRow(NamedTuple):
    """A row to publish. `fields` is a flat list of alternating names and values.

    `due_unix_ms` is None for a message that is not delayed.
    """

    id: int
    uid: str
    due_unix_ms: int | None
    fields: Sequence[bytes]


def acquire(
    keys: Keys, name: str, token: str, ttl: float, owner: str, above: int, dead: str
) -> Call:
    """Acquire the lease of an outbox for `ttl` seconds, with a new epoch greater than `above`.

    If the process of an earlier relay has exited, pass its token as `dead`, so that its lease can
    be taken over before it expires. Otherwise, pass ''.
    """
    return scripts.get("outbox_acquire").call(
        _lease_keys(keys, name), token=token, ttl_ms=_ms(ttl), owner=owner, above=above, dead=dead
    )


def renew(keys: Keys, name: str, token: str, ttl: float, figures: Mapping[str, Any]) -> Call:
    """Extend the lease to `ttl` seconds from now, and publish figures for views.

    The keys of `figures` must be names in FIGURES.
    """
    if not {*figures} <= {*FIGURES}:
        raise ContractError(f"outbox_renew: figures {sorted(figures)}")
    flat = [str(part) for pair in figures.items() for part in pair]
    return scripts.get("outbox_renew").call(
        _lease_keys(keys, name), token=token, ttl_ms=_ms(ttl), figures=flat
    )


def release(keys: Keys, name: str, token: str) -> Call:
    """Release the lease of an outbox. Do not use its token once this call has been sent."""
    return scripts.get("outbox_release").call(_lease_keys(keys, name), token=token)


def fence(
    keys: Keys, name: str, topic: str, partition: int, epoch: int, partitions: int, meta: str | None
) -> Call:
    """Prevent relays with an earlier epoch from publishing to a partition.

    If the topic does not have `partitions` partitions, the call is refused. `meta` is the topic's
    meta key, which contains the count. It is None on a cluster, where the count cannot be compared.
    """
    named = {"record": keys.outbox_record(topic, partition, name)}
    if meta is not None:
        named["meta"] = meta
    return scripts.get("outbox_fence").call(named, epoch=epoch, partitions=partitions)


def publish(
    keys: Keys,
    name: str,
    topic: str,
    partition: int,
    rows: Sequence[OutgoingRow],
    epoch: int,
    partitions: int,
    meta: str | None,
    max_backlog: int | None = None,
) -> Call:
    """Write up to ROWS_MAX rows to a partition in order, and record them.

    Rows that the partition's record lists as published are skipped. If the topic does not have
    `partitions` partitions, the call is refused. See `fence` for `meta`. If `max_backlog` is given,
    rows are written only while the partition's backlog is smaller than this.
    """
    if not 1 <= len(rows) <= ROWS_MAX:
        raise ContractError(f"outbox_publish: {len(rows)} rows")
    named = {
        "stream": keys.stream(topic, partition),
        "record": keys.outbox_record(topic, partition, name),
    }
    if meta is not None:
        named["meta"] = meta
    if any(row.due_unix_ms is not None for row in rows):
        named["scheduled"] = keys.delayed_sends(topic, partition)
        named["items"] = keys.delayed_send_items(topic, partition)
    flat: list[Any] = []
    for row in rows:
        if len(row.fields) % 2 or not 0 < len(row.fields) <= FIELDS_MAX:
            raise ContractError(f"a row of {len(row.fields)} names and values")
        flat += (
            _pack_row(row.id, row.uid),
            "" if row.due_unix_ms is None else row.due_unix_ms,
            len(row.fields),
        )
        flat += row.fields
    return scripts.get("outbox_publish").call(
        named,
        epoch=epoch,
        partitions=partitions,
        max_backlog=-1 if max_backlog is None else max_backlog,
        rows=flat,
    )


class Published(NamedTuple):
    """The result of publishing rows to one partition."""

    settled: int
    """Number of rows, counted from the first one, that are now in the topic."""
    written: int
    """Number of rows that this call wrote."""
    refusal: Exception | None
    """The error if the server rejected the next row, or None."""
    full: bool
    """True if the limit on the backlog left no room for the next row."""

    @classmethod
    def parse(cls, reply: Reply) -> Published:
        """Parse an OK or FULL reply."""
        if reply.word == "FULL":
            return cls(0, 0, None, full=True)
        settled, written, rest = reply.values
        refusal = rest if isinstance(rest, Exception) else None
        return cls(settled, written, refusal, full=refusal is None and rest != b"")


def parse_rows(raw: bytes, key: str) -> list[RecordedRow]:
    """Parse the rows in the record of a partition. Raises InvalidValueError if one is invalid."""
    found = untrusted.label(raw)
    if len(found) % _ROW_DIGITS or found.strip("0123456789abcdef"):
        raise InvalidValueError(key, "rows", untrusted.format_value(raw), "rows of 48 hex digits")
    packed = [found[at : at + _ROW_DIGITS] for at in range(0, len(found), _ROW_DIGITS)]
    return [RecordedRow(_parse_signed(each[UID_DIGITS:]), each[:UID_DIGITS]) for each in packed]


def _pack_row(number: int, uid: str) -> str:
    return f"{uid}{number % _ID_RANGE:0{ID_DIGITS}x}"


def _parse_signed(digits: str) -> int:
    number = int(digits, 16)
    return number - _ID_RANGE if number >= _ID_RANGE >> 1 else number


# --- views ----------------------------------------------------------------------------------------


class OutboxView(NamedTuple):
    """The state that the relay of an outbox published. It is used only for views."""

    name: str
    epoch: int
    """Epoch of the current or last relay, or 0 if the outbox never had one."""
    owner: str
    """Host and process of the relay, or '' if no relay owns the outbox."""
    since_unix_ms: int
    ttl: float | None
    """Seconds until the lease expires, or None if there is no lease."""
    at_unix_ms: int
    """Time at which the figures were published, or 0 if they never were."""
    rows: int
    """Number of rows in the table when the figures were published."""
    more: bool
    """True if the table has more rows than `rows`."""
    oldest_seconds: float
    """Age of the oldest row when the figures were published, or 0 if there were no rows."""
    sent: int
    """Number of rows that this relay has published since it started."""
    dead: int
    """Number of rows that this relay has moved to the dead table since it started."""
    error: str
    """Description of the obstacle that keeps rows from being published, or ''."""
    cause: str
    """Kind of the obstacle, one of CAUSES. It is '' if there is none or another release set it."""
    topic: str
    """Topic whose rows are waiting because of the obstacle, or '' if all rows are waiting."""
    failing_seconds: float
    """How long the obstacle had existed when the figures were published."""
    table: str
    """Identity of the table, the same for all outboxes that use it, or '' if it is unknown."""

    @property
    def relayed(self) -> bool:
        """True if a relay owns the outbox."""
        return self.ttl is not None

    def oldest_age(self, now_unix_ms: int) -> float:
        """Return the age of the oldest row in seconds, or 0 if there are no rows.

        If no relay owns the outbox, the result includes the time since the figures were published,
        because the rows have been waiting during that time.
        """
        if self.relayed or not self.rows or not self.at_unix_ms:
            return self.oldest_seconds
        return self.oldest_seconds + max(0, now_unix_ms - self.at_unix_ms) / 1000

    @classmethod
    def parse(cls, name: str, found: Sequence[bytes | None], ttl_ms: int, key: str) -> OutboxView:
        """Parse the replies to the commands of `view_commands`. Raises InvalidValueError."""

        def number(at: int) -> int:
            return untrusted.integer(found[at], key, _FIELDS[at], default=0)

        return cls(
            name,
            epoch=number(0),
            owner=untrusted.label(found[1] or b""),
            since_unix_ms=number(2),
            ttl=ttl_ms / 1000 if ttl_ms >= 0 else None,
            at_unix_ms=number(3),
            rows=number(4),
            more=number(5) > 0,
            oldest_seconds=number(6) / 1000,
            sent=number(7),
            dead=number(8),
            error=untrusted.label(found[9] or b""),
            cause=untrusted.label(found[10] or b""),
            topic=untrusted.label(found[11] or b""),
            failing_seconds=number(12) / 1000,
            table=untrusted.label(found[13] or b""),
        )


_FIELDS = ("epoch", "owner", "since", "at", *FIGURES)


def view_commands(keys: Keys, name: str) -> list[tuple[Any, ...]]:
    """Return the two commands whose replies `OutboxView.parse` parses."""
    return [("HMGET", keys.outbox(name), *_FIELDS), ("PTTL", keys.outbox_lease(name))]


def read_views(
    store: Store, names: Sequence[str]
) -> list[OutboxView | InvalidValueError | RedisResponseError]:
    """Return the state of each outbox, in the same order, in one round trip.

    The element is an error if the state of an outbox cannot be read.
    """
    replies = store.pipeline(
        [command for name in names for command in view_commands(store.keys, name)]
    )
    found: list[OutboxView | InvalidValueError | RedisResponseError] = []
    for name, fields, ttl_ms in zip(names, replies[::2], replies[1::2], strict=True):
        refused = [each for each in (fields, ttl_ms) if isinstance(each, RedisResponseError)]
        try:
            key = store.keys.outbox(name)
            found += refused[:1] or [OutboxView.parse(name, fields, ttl_ms, key)]
        except InvalidValueError as error:
            found.append(error)
    return found


def read_view(store: Store, name: str) -> OutboxView:
    """Return the state of an outbox.

    Raises InvalidValueError if a field is invalid, and RedisResponseError if Redis rejects the
    command, for example because the key has the wrong type.
    """
    [found] = read_views(store, [name])
    if isinstance(found, Exception):
        raise found
    return found


def register(store: Store, name: str) -> None:
    """Add a name to the set of all outboxes. Every relay does this when it starts."""
    store.execute("SADD", store.keys.outboxes(), name)


def registry(store: Store) -> tuple[list[str], list[InvalidValueError]]:
    """Return the sorted names of all outboxes, and an error for each invalid name.

    Raises RedisResponseError.
    """
    key, names, invalid = store.keys.outboxes(), list[str](), list[InvalidValueError]()
    for raw in sorted(store.execute("SMEMBERS", key)):
        try:
            names.append(untrusted.name(raw, key))
        except InvalidValueError as error:
            invalid.append(error)
    return names, invalid


def find_conflict(store: Store, name: str, table: str) -> OutboxView | None:
    """Return another outbox whose relay currently uses the same table, or None.

    Outboxes whose state cannot be read are skipped. If `table` is '', the result is None.
    """
    if not table:
        return None
    others = [each for each in registry(store)[0][:OUTBOXES_MAX] if each != name]
    for found in read_views(store, others):
        if isinstance(found, OutboxView) and found.relayed and found.table == table:
            return found
    return None


def _lease_keys(keys: Keys, name: str) -> dict[str, str]:
    return {"outbox": keys.outbox(name), "lease": keys.outbox_lease(name)}


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
