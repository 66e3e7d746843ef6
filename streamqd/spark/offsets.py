"""Compute the positions of a query, its ranges and splits, and the number of lost entries.

A position is exclusive: all entries up to and including its ID were read. A range is `(start,
end]`. IDs have gaps, so an ID alone does not show whether trimming has removed entries that a
reader had not read yet. A position therefore also contains the number of entries that the stream
had issued up to its ID. The number of lost entries is the number of removed entries minus the
number that the reader has passed, and the backlog is the number of issued entries minus that
number.

This module does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from streamqd.model import TopicPartition

Id = tuple[int, int]  # milliseconds and sequence number

PART_MAX = (1 << 64) - 1  # largest value of each half of an ID
ZERO: Id = (0, 0)  # the position before every entry
COUNTS = "#"  # key of the counts in an offset's JSON, which cannot be a topic name
LAG = "#lag"  # key of the lag in a query's progress

_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")


# --- ids ------------------------------------------------------------------------------------------


def read_id(text: str | bytes) -> Id:
    """Parse an ID that is written as `ms-seq`. Raises ValueError for any other text."""
    found = _ID.fullmatch(text.decode("ascii", "replace") if isinstance(text, bytes) else text)
    if found is None or int(found[1]) > PART_MAX or int(found[2]) > PART_MAX:
        raise ValueError(f"{text!r} is not an entry id, such as 1763640000000-0")
    return int(found[1]), int(found[2])


def write_id(entry_id: Id) -> str:
    """Return an ID as a string, `ms-seq`."""
    return f"{entry_id[0]}-{entry_id[1]}"


def successor(entry_id: Id) -> Id:
    """Return the next possible ID. The largest ID is its own successor."""
    return _from_number(min(_number(entry_id) + 1, _number((PART_MAX, PART_MAX))))


def predecessor(entry_id: Id) -> Id:
    """Return the previous possible ID. 0-0 is its own predecessor."""
    return _from_number(max(_number(entry_id) - 1, 0))


def before_time(unix_ms: int) -> Id:
    """Return the position before all entries that were added at or after this time."""
    return predecessor((min(unix_ms, PART_MAX), 0))


def _number(entry_id: Id) -> int:
    return entry_id[0] << 64 | entry_id[1]


def _from_number(number: int) -> Id:
    return number >> 64, number & PART_MAX


# --- positions ------------------------------------------------------------------------------------


class Position(NamedTuple):
    """A position between entries.

    `passed` is the number of entries that the stream had issued up to this position, or None if it
    is unknown.
    """

    id: Id
    passed: int | None = None


Offsets = dict[TopicPartition, Position]


class StreamFacts(NamedTuple):
    """The state of a stream at one point in time.

    `added` is the number of entries ever issued. `counted` is False if the server does not keep
    this number. In that case, `added` excludes entries that other clients removed.

    `exact` is False for dead letters, because these are also removed from the middle of the stream.
    The number of entries before a position is then unknown, so no loss is reported.
    """

    length: int = 0
    added: int = 0
    first: Id | None = None
    last: Id = ZERO
    exact: bool = True
    counted: bool = True

    @property
    def removed(self) -> int:
        """The number of entries that were issued and later removed."""
        return self.added - self.length

    @property
    def earliest(self) -> Position:
        """The position before the oldest entry that still exists."""
        count = self.removed if self.exact else None
        if count == 0:
            return Position(ZERO, 0)
        return Position(self.last if self.first is None else predecessor(self.first), count)

    @property
    def latest(self) -> Position:
        """The position after the newest entry."""
        return Position(self.last, self.added if self.exact else None)


def to_json(offsets: Mapping[TopicPartition, Position]) -> dict[str, dict[str, Any]]:
    """Return the offset for Spark: `{"access": {"0": "17-3"}, "#": {"access": {"0": 4711}}}`.

    The keys are always in the same order, because Spark compares offsets as strings.
    """
    ids: dict[str, dict[str, Any]] = {}
    counts: dict[str, dict[str, Any]] = {}
    for (name, partition), position in sorted(offsets.items()):
        ids.setdefault(name, {})[str(partition)] = write_id(position.id)
        if position.passed is not None:
            counts.setdefault(name, {})[str(partition)] = position.passed
    return {**ids, COUNTS: counts} if counts else ids


def from_json(document: Mapping[str, Mapping[str, Any]]) -> Offsets:
    """Parse a document that `to_json` returned. Raises ValueError for an invalid ID."""
    counts = document.get(COUNTS, {})
    offsets: Offsets = {}
    for name, partitions in document.items():
        if name in (COUNTS, LAG):
            continue
        for number, text in partitions.items():
            count = counts.get(name, {}).get(number)
            offsets[name, int(number)] = Position(read_id(text), count)
    return offsets


# --- bounds of a read ---------------------------------------------------------------------------


class Bound(NamedTuple):
    """A start or an end of a read, as the user gave it in the options.

    `kind` is archive, earliest, latest, group, id, position or time. For the last four, `value` is
    the group's name, an Id, a Position or a time in Unix milliseconds.
    """

    kind: str
    value: Any = None


EARLIEST = Bound("earliest")
LATEST = Bound("latest")
ARCHIVE = Bound("archive")  # the start of an archive


def resolve(
    bound: Bound, facts: StreamFacts, group_at: Id | None = None, *, archived: bool = False
) -> Position:
    """Return the position in a stream to which a bound refers.

    If the bound is a group, `group_at` is the group's position. Set `archived` if an archive may
    contain entries that were removed from the stream.
    """
    match bound.kind:
        case "archive":
            return Position(ZERO, 0)
        case "earliest":
            return facts.earliest
        case "latest":
            return facts.latest
        case "time" | "group":
            # If the time is before the oldest entry, the read starts at the oldest entry, and this
            # is not reported as a loss. The same applies to a group's position, because the group
            # had handled all entries before it when they were trimmed.
            wanted = before_time(bound.value) if group_at is None else group_at
            too_early = facts.earliest.id > wanted and not archived
            return facts.earliest if too_early else make_position(wanted, facts)
        case "position":
            position: Position = bound.value
            return position
    return make_position(bound.value, facts)


def make_position(entry_id: Id, facts: StreamFacts) -> Position:
    """Return the position of an ID. It has a count only if the exact count is known."""
    for known in (facts.earliest, facts.latest):
        if known.id == entry_id:
            return known
    nothing_before = facts.exact and facts.removed == 0
    if nothing_before and (facts.first is None or entry_id < facts.first) and entry_id < facts.last:
        return Position(entry_id, 0)
    return Position(entry_id)


# --- lost entries -------------------------------------------------------------------------------


class Loss(NamedTuple):
    """Entries that can no longer be read.

    `kind` is trimmed, replaced (another stream was created under the same name) or vanished (the
    stream no longer exists). `entries` is the number of lost entries, or None if it is unknown. If
    the stream was replaced or has vanished, more entries than this may be lost.
    """

    kind: str
    entries: int | None


def is_replaced(position: Position, facts: StreamFacts) -> bool:
    """Return True if a position belongs to an earlier stream with the same name.

    In the stream to which the position belongs, each entry before the position either still exists
    or was counted as removed. If this is not true of the current stream, it is a new one.
    """
    if not facts.exact or position.passed is None:
        return False
    if facts.last < position.id:
        return True  # the last ID of a stream never decreases, even if entries are removed
    if facts.counted and facts.added < position.passed:
        return True
    # If the server does not keep counts, an equal last ID shows that the stream is still the same.
    nothing_left = facts.first is None or facts.first > position.id
    same = not facts.counted and facts.last == position.id
    return nothing_left and not same and facts.removed < position.passed


def reachable_positions(archived: Offsets, facts: Mapping[TopicPartition, StreamFacts]) -> Offsets:
    """Return the archived positions from which a query can continue in the current streams.

    A stream must have issued entries up to the position, and must not have been recreated since
    then.
    """
    return {
        place: end
        for place, end in archived.items()
        if place in facts and facts[place].last >= end.id and not is_replaced(end, facts[place])
    }


def count_unread(start: Position, seen: int | None) -> int | None:
    """Return the number of entries known to be unread after a position, or None if it is unknown.

    `seen` is the number of entries that the stream had issued at the last check. More entries may
    have been added since then.
    """
    if seen is None or start.passed is None or seen <= start.passed:
        return None
    return seen - start.passed


def find_loss(start: Position, facts: StreamFacts, seen: int | None = None) -> Loss | None:
    """Return the loss if entries after the start were removed before they were read, or None.

    `seen` is the number of entries that the stream had issued at the last check. It is used only
    for a stream that was replaced, whose own count is no longer available.
    """
    if not facts.exact:
        return None
    if is_replaced(start, facts):
        return Loss("replaced", count_unread(start, seen))
    if start.id >= facts.last or (facts.first is not None and facts.first <= successor(start.id)):
        return None
    if start.passed is None:
        return Loss("trimmed", None) if facts.removed else None
    gone = facts.removed - start.passed
    return Loss("trimmed", gone) if gone > 0 else None


def after_loss(start: Position, facts: StreamFacts) -> Position:
    """Return the position at which to continue after a loss.

    This is the later of `start` and the oldest remaining entry. If it is `start`, the number of
    entries before it is no longer reliable, so the position has no count.
    """
    return facts.earliest if facts.earliest.id > start.id else Position(start.id)


def resume_position(start: Position, facts: StreamFacts) -> Position:
    """Return the position at which to continue reading.

    This is `start` if nothing was lost. If the stream was recreated, it is the position before its
    first entry.
    """
    if is_replaced(start, facts):
        return facts.earliest
    return start if find_loss(start, facts) is None else after_loss(start, facts)


def lag(end: Offsets, latest: Offsets) -> dict[str, float]:
    """Return the entries left after a batch: the total, and the maximum and mean of partitions.

    In a new partition, all entries are left. Partitions without counts are ignored, and the result
    is empty if no partition has counts.
    """
    start = Position(ZERO, 0)
    behind = [
        max(0, newest.passed - read)
        for place, newest in (latest.items() if end else ())
        if newest.passed is not None and (read := end.get(place, start).passed) is not None
    ]
    if not behind:
        return {}
    return {"total": sum(behind), "max": max(behind), "avg": round(sum(behind) / len(behind), 1)}


# --- size of a batch -----------------------------------------------------------------------------


def backlog(start: Position, facts: StreamFacts) -> int:
    """Return the number of entries after a position.

    If exact counts are missing, it is estimated.
    """
    if start.id >= facts.last or not facts.length:
        return 0
    if start.passed is not None and facts.exact:
        return min(facts.length, max(1, facts.added - start.passed))
    first = _number(facts.earliest.id)
    whole = _number(facts.last) - first
    ahead = _number(facts.last) - max(first, _number(start.id))
    return max(1, -(-facts.length * ahead // whole))


def shares(
    waiting: Mapping[TopicPartition, int], most: int, oldest: Sequence[TopicPartition]
) -> dict[TopicPartition, int]:
    """Divide a limited number of entries (`most`) in proportion to the waiting entries.

    Each partition with waiting entries gets at least one entry. If the limit is too low for that,
    only the first partitions in `oldest` get one entry each. The shares add up to the limit, or to
    the total of all waiting entries if that is lower.
    """
    hungry = [place for place in oldest if waiting[place] > 0]
    total = sum(waiting[place] for place in hungry)
    if total <= most:
        return {place: waiting[place] for place in hungry}
    if most <= len(hungry):
        return dict.fromkeys(hungry[:most], 1)
    # Each partition gets one entry, plus a share of the remaining limit in proportion to its other
    # entries. The entries that are left over after rounding go to the partitions with the largest
    # remainders.
    rest, left = most - len(hungry), total - len(hungry)
    given = {place: 1 + rest * (waiting[place] - 1) // left for place in hungry}
    spare = most - sum(given.values())
    by_remainder = sorted(hungry, key=lambda place: -(rest * (waiting[place] - 1) % left))
    for place in by_remainder[:spare]:
        given[place] += 1
    return given


# --- the part of a task -------------------------------------------------------------------------


class Span(NamedTuple):
    """The entries of one stream in `(start, end]`.

    `rows` is the number of entries in the span, or None if unknown. `removed` is the number of
    entries that had already been removed from the stream when the span was planned, or None if
    losses are not checked. `upto` is the end of the range from which this span was cut. Its count
    is compared with the stream to find out whether the stream was recreated.
    """

    place: TopicPartition
    start: Id
    end: Id
    rows: int | None = None
    removed: int | None = None
    upto: Position | None = None


def span(place: TopicPartition, start: Position, end: Position, facts: StreamFacts) -> Span | None:
    """Return the span between two positions, or None if it is empty."""
    if end.id <= start.id:
        return None
    # The check above compares only IDs, because the count of either position may be unknown.
    rows = count_unread(start, end.passed)
    return Span(place, start.id, end.id, rows, facts.removed if facts.exact else None, end)


def split(whole: Span, pieces: int, first: Id | None = None) -> list[Span]:
    """Cut a span into pieces that cover periods of about the same length.

    If the oldest existing entry (`first`) is known, the time before it is ignored. Entries are not
    counted, so the pieces have different sizes if entries were written in bursts.
    """
    low = _number(whole.start if first is None else max(whole.start, predecessor(first)))
    high = _number(whole.end)
    cuts = {low + (high - low) * number // pieces for number in range(1, pieces)}
    inner = sorted(cut for cut in cuts if _number(whole.start) < cut < high)
    return cut_at(whole, [_from_number(cut) for cut in inner], None)


def cut_at(whole: Span, ends: Sequence[Id], rows: int | None) -> list[Span]:
    """Cut a span after each of these IDs, which must be inside the span and in order.

    `rows` is the number of entries in each piece except the last, or None if unknown.
    """
    if not ends:
        return [whole]
    starts = [whole.start, *ends]
    counts: list[int | None] = [rows] * len(ends)
    known = rows is not None and whole.rows is not None
    counts.append(whole.rows - rows * len(ends) if known else None)  # type: ignore[operator]
    return [
        whole._replace(start=start, end=end, rows=count)
        for start, end, count in zip(starts, [*ends, whole.end], counts, strict=True)
    ]


def density(piece: Span, reached: Id, passed: int, *, more: bool) -> float:
    """Estimate the number of entries in a piece from its first entries.

    The first `passed` entries were counted, and the last of these has the ID `reached`. `more` is
    False if no entries follow them. The number is then exact.
    """
    if not more or reached >= piece.end:
        return passed
    low = _number(piece.start)
    return passed * (_number(piece.end) - low) / (_number(reached) - low)


def even_cuts(parts: Sequence[Span], weights: Sequence[float], count: int) -> list[Id]:
    """Return the IDs at which to cut adjacent parts into `count` pieces of equal weight.

    The entries of each part are assumed to be spread evenly over its time. Fewer IDs are returned
    if some pieces would be empty.
    """
    share = sum(weights) / count
    low, end = _number(parts[0].start), _number(parts[-1].end)
    cuts: list[int] = []
    before = 0.0
    for part, weight in zip(parts, weights, strict=True):
        start, width = _number(part.start), _number(part.end) - _number(part.start)
        while len(cuts) < count - 1 and weight and before + weight >= share * (len(cuts) + 1):
            inside = (share * (len(cuts) + 1) - before) / weight
            cuts.append(min(end, start + int(width * min(1.0, max(0.0, inside)))))
        before += weight
    return [_from_number(cut) for cut in sorted(set(cuts)) if low < cut < end]


def cut_at_marks(whole: Span, marks: Sequence[Position], count: int) -> list[Span]:
    """Cut a span at some of the marks, into at most `count` pieces of about the same size.

    A mark is a position in the span. Its count is the number of entries from the start of the span.
    """
    total = (marks[-1].passed or 0) if marks else 0
    chosen: list[Position] = []
    for mark in marks:
        due = -(-total * (len(chosen) + 1) // count)
        if len(chosen) < count - 1 and due <= (mark.passed or 0) < total:
            chosen.append(mark)
    parts = cut_at(whole, [each.id for each in chosen], None)
    if total != whole.rows:
        return parts
    passed = [0, *(each.passed or 0 for each in chosen), total]
    return [
        part._replace(rows=upto - before)
        for part, before, upto in zip(parts, passed[:-1], passed[1:], strict=True)
    ]


def pieces(weights: Mapping[TopicPartition, int], wanted: int) -> dict[TopicPartition, int]:
    """Return the number of pieces to cut each span into, in proportion to its weight.

    The numbers add up to `wanted`, and each span gets at least one piece.
    """
    empty = sum(not weight for weight in weights.values())
    # The weights are scaled so that small spans also get pieces.
    scaled = {place: weight * wanted for place, weight in weights.items()}
    return dict.fromkeys(weights, 1) | shares(scaled, wanted - empty, sorted(weights))


def narrow(spans: Iterable[Span], low: Id, high: Id) -> list[Span]:
    """Return the parts of the spans within `(low, high]`.

    The number of entries in a span becomes unknown if only a part of the span is returned.
    """
    found = []
    for each in spans:
        start, end = max(each.start, low), min(each.end, high)
        if start >= end:
            continue
        whole = (start, end) == (each.start, each.end)
        found.append(each if whole else each._replace(start=start, end=end, rows=None))
    return found
