"""Trimming a topic by hand, never below what groups and the archive still need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamqd import config
from streamqd.admin import topics, topics_settings
from streamqd.admin.pages import Id, measure, read_id, server_unix_ms
from streamqd.admin.unreadable import BadValues, Unreadable, measure_each
from streamqd.errors import Refused
from streamqd.store import retention, spark
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.retention import Stand, Trimmed
from streamqd.store.scripts import Reply

PAGE = 4_000  # entries removed by one script, at most
COUNT_MAX = 100_000  # entries counted one by one in a partition
ARCHIVE = "@archive"  # stands for the archive where a group is named


@dataclass(frozen=True, slots=True)
class TrimRow:
    """One partition after a trim, or before one with `--dry-run`.

    `removed` is how many entries went, or would go at most (whole nodes go, of 100 entries by the
    server's defaults); null: more than 100,000. `messages` and `bytes` (about, null when the Redis
    user may not ask) are what is there now. `holder` is who still needs the oldest entry that must
    stay, a group or @archive, '' for nobody; `held_since_unix_ms` when that was written.
    """

    partition: int
    removed: int | None
    messages: int
    bytes: int | None
    holder: str
    held_since_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class TrimReport:
    """What `trim` did. `removed` is the sum of what is known.

    `unreadable` are values in Redis that cannot be read: their partitions were left alone.
    """

    topic: str
    dry_run: bool
    now_unix_ms: int
    removed: int
    partitions: list[TrimRow]
    unreadable: list[Unreadable]


def settings(
    link: Connection, keys: Keys, topic: str, configured: config.Topic | None
) -> tuple[config.Topic, int]:
    """The settings of a topic that hold, and its partition count. Raises TopicMissing."""
    count = topics.partition_count(link, keys, topic)
    bad, key = BadValues(), keys.meta(topic)
    stored = topics_settings.readable(link.execute("HGET", key, "settings"), key, bad)
    if bad.rows:  # what is retained is never guessed
        raise Refused(f"{bad.rows[0]}: `streamqd doctor --only values` says how to put it right")
    return config.effective(configured or config.Topic(), stored), count


def trim(
    link: Connection,
    keys: Keys,
    topic: str,
    wanted: config.Topic,
    partitions: Sequence[int],
    expected: Sequence[str],
    *,
    dry_run: bool,
) -> TrimReport:
    """Trim partitions to what `wanted` retains. `expected` are groups that must exist.

    Refused when no group reads the topic or an expected one is missing: then nothing says what may
    go.
    """
    now = server_unix_ms(link)
    rows, bad = [], BadValues()
    for number in partitions:
        if _known(link, keys, topic, number, bad) is None:
            continue
        removed: int | None = None
        if dry_run:
            _check_groups(topic, number, _stand(link, keys, topic, number), wanted, expected)
        else:
            removed = _trim_one(link, keys, topic, number, wanted, now, expected)
        stand = _stand(link, keys, topic, number)
        if dry_run:
            removed = _removable(link, keys, topic, number, wanted, stand, now)
        holder, entry = floor_of(stand, wanted.archive == "required")
        rows.append(
            TrimRow(
                partition=number,
                removed=removed,
                messages=stand.length,
                bytes=stand.bytes,
                holder=holder,
                held_since_unix_ms=entry.ms if entry else None,
            )
        )
    total = sum(row.removed or 0 for row in rows)
    return TrimReport(topic, dry_run, now, total, rows, bad.rows)


def floor_of(stand: Stand, archive: bool) -> tuple[str, Id | None]:
    """Who needs the oldest entry that must stay, and that entry; '' and None for nobody."""
    needs = [(read_id(group.needs), group.name) for group in stand.groups if group.needs]
    if archive and stand.unarchived:
        needs.append((read_id(stand.unarchived), ARCHIVE))
    if not needs:
        return "", None
    entry, holder = min(needs)
    return holder, entry


def count_between(
    link: Connection, keys: Keys, topic: str, partition: int, first: Id | None, before: Id | None
) -> int | None:
    """How many entries there are from `first` on and before `before`; None: more than COUNT_MAX."""
    after = "0-0" if first is None else str(_before(first))
    upto = "+" if before is None else str(_before(before))
    stream, total = keys.stream(topic, partition), 0
    while total <= COUNT_MAX:
        (reply,) = measure(link, [spark.step(stream, after, upto, spark.STEP_MAX)])
        gone, last, more = reply.rest
        total, after = total + int(gone), last.decode()
        if not more:
            return total
    return None


def _before(entry: Id) -> Id:
    """The greatest id before this one."""
    if entry.seq:
        return Id(entry.ms, entry.seq - 1)
    return Id(entry.ms - 1, (1 << 64) - 1) if entry.ms else entry


def known_stand(
    reply: Reply | None, keys: Keys, topic: str, partition: int, bad: BadValues
) -> Stand | None:
    """Read the answer to `retention.measure`; None when it cannot be read.

    A group whose name is not UTF-8 is shown with its bytes escaped, and kept as bad.
    """
    if reply is None:
        return None
    for row in reply.rest[6]:
        bad.text(row[0], keys.stream(topic, partition), "group")
    return bad.read(Stand.parse, reply, keys.trim(topic, partition))


def _known(
    link: Connection, keys: Keys, topic: str, partition: int, bad: BadValues
) -> Stand | None:
    (reply,) = measure_each(link, [retention.measure(keys, topic, partition)], bad)
    return known_stand(reply, keys, topic, partition, bad)


def _stand(link: Connection, keys: Keys, topic: str, partition: int) -> Stand:
    (reply,) = measure(link, [retention.measure(keys, topic, partition)])
    return Stand.parse(reply)


def _trim_one(
    link: Connection,
    keys: Keys,
    topic: str,
    partition: int,
    wanted: config.Topic,
    now: int,
    expected: Sequence[str],
) -> int:
    bounds, removed = wanted.retention, 0
    while True:
        reply = link.run(
            retention.trim(
                keys,
                topic,
                partition,
                keep_from=_keep_from(bounds, now),
                max_length=bounds.max_length,
                max_bytes=bounds.max_bytes,
                shrink_every=bounds.shrink_every,
                archive=wanted.archive == "required",
                without_groups=bounds.without_groups,
                limit=PAGE,
                expected=expected,
            )
        )
        if reply.word == "NO_GROUPS":
            stand = _stand(link, keys, topic, partition)
            _check_groups(topic, partition, stand, wanted, ())
            return removed  # there is nothing at all
        if reply.word == "MISSING_GROUP":
            raise _missing(topic, partition, reply.rest[0].decode())
        trimmed = Trimmed.parse(reply)
        removed += trimmed.removed
        if not trimmed.more:
            return removed


def _keep_from(bounds: config.Retention, now: int) -> str:
    if bounds.ack_policy == "delete":
        return ""
    if bounds.max_age is None:
        return "0-0"
    return f"{max(0, now - round(bounds.max_age * 1000))}-0"


def _check_groups(
    topic: str, partition: int, stand: Stand, wanted: config.Topic, expected: Sequence[str]
) -> None:
    present = {group.name for group in stand.groups}
    if not present and stand.length and not wanted.retention.without_groups:
        raise Refused(
            f"no group reads partition {partition} of {topic}, so nothing says what may go:"
            " start a consumer, or set retention.without_groups = true for the topic"
        )
    for name in expected:
        if stand.length and name not in present:
            raise _missing(topic, partition, name)


def _missing(topic: str, partition: int, group: str) -> Refused:
    return Refused(
        f"the group {group} of the configuration does not exist on partition {partition} of"
        f" {topic} and would read what is trimmed now: start its consumer, or take it out of the"
        " configuration"
    )


def _removable(
    link: Connection,
    keys: Keys,
    topic: str,
    partition: int,
    wanted: config.Topic,
    stand: Stand,
    now: int,
) -> int | None:
    """How many entries a trim would remove at most; None: more than can be counted."""
    bounds = wanted.retention
    _, floor = floor_of(stand, wanted.archive == "required")
    free = stand.length
    if floor is not None:
        counted = count_between(link, keys, topic, partition, None, floor)
        if counted is None:
            return None
        free = counted
    beyond = 0
    if bounds.max_length is not None:
        beyond = stand.length - bounds.max_length
    if bounds.max_bytes is not None and stand.bytes:
        fitting = int(stand.length * min(1, bounds.max_bytes / stand.bytes))
        beyond = max(beyond, stand.length - fitting)
    keep_from = _keep_from(bounds, now)
    if keep_from == "":
        return free
    keep = read_id(keep_from)
    if bounds.shrink_every is not None and stand.shrink_from:
        keep = max(keep, read_id(stand.shrink_from))
    if keep > Id(0, 0) and beyond < free:
        oldest = keep if floor is None else min(keep, floor)
        aged = count_between(link, keys, topic, partition, None, oldest)
        if aged is None:
            return None
        beyond = max(beyond, aged)
    return max(0, min(beyond, free))
