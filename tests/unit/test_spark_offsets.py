"""Offsets of the Spark source: arithmetic, ranges, splits and losses, without Spark or Redis."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.model import TopicPartition
from streamqd.spark import offsets
from streamqd.spark.offsets import EARLIEST, LATEST, Bound, Loss, Position, Span, StreamFacts

HALVES = st.one_of(
    st.integers(0, 30), st.integers(offsets.PART_MAX - 3, offsets.PART_MAX), st.integers(0, 1 << 64)
).map(lambda number: min(number, offsets.PART_MAX))
IDS = st.tuples(HALVES, HALVES)
PLACE = ("access", 0)
NAMES = st.sampled_from(["access", "orders", "access:dlq"])
PLACES = st.tuples(NAMES, st.integers(0, 12))


class Stream:
    """A model of a stream, which has IDs in order. The oldest are trimmed."""

    def __init__(self, ids: list[offsets.Id], trimmed: int = 0) -> None:
        self.ids = sorted(set(ids))
        self.kept = self.ids[trimmed:]

    def facts(self) -> StreamFacts:
        return StreamFacts(
            length=len(self.kept),
            added=len(self.ids),
            first=self.kept[0] if self.kept else None,
            last=self.ids[-1] if self.ids else offsets.ZERO,
        )

    def behind(self, position: Position) -> list[offsets.Id]:
        return [entry_id for entry_id in self.kept if entry_id > position.id]

    def position(self, read: int) -> Position:
        """Return a reader's position after it has read this many entries from the start."""
        return Position(self.ids[read - 1] if read else offsets.ZERO, read)


STREAMS = st.lists(IDS.filter(lambda each: each > offsets.ZERO), min_size=1, max_size=12)


# --- ids ------------------------------------------------------------------------------------------


@given(IDS)
def test_entry_id_round_trips(entry_id: offsets.Id) -> None:
    text = offsets.write_id(entry_id)
    assert offsets.read_id(text) == offsets.read_id(text.encode()) == entry_id


@pytest.mark.parametrize(
    "text", ["", "5", "5-", "-1", "a-1", "1-1-1", "18446744073709551616-0", " 1-1", "\u0661-1"]
)
def test_invalid_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an entry id"):
        offsets.read_id(text)


@given(IDS, IDS)
def test_adjacent_ids_have_no_id_between_them(one: offsets.Id, other: offsets.Id) -> None:
    after = offsets.successor(one)
    assert one <= after
    assert not one < other < after
    if one < (offsets.PART_MAX, offsets.PART_MAX):
        assert offsets.predecessor(after) == one


def test_adjacent_ids_carry_between_their_halves() -> None:
    assert offsets.successor((5, offsets.PART_MAX)) == (6, 0)
    assert offsets.predecessor((6, 0)) == (5, offsets.PART_MAX)
    assert offsets.predecessor((0, 0)) == (0, 0)


def test_before_time_precedes_the_first_possible_entry() -> None:
    assert offsets.before_time(5) == (4, offsets.PART_MAX)
    assert offsets.before_time(0) == (0, 0)


# --- the JSON -------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        PLACES, st.builds(Position, IDS, st.none() | st.integers(0, 1 << 60)), max_size=8
    )
)
def test_offsets_round_trip_through_the_checkpoint(positions: offsets.Offsets) -> None:
    text = json.dumps(offsets.to_json(positions))
    assert offsets.from_json(json.loads(text)) == positions
    turned = dict(reversed(positions.items()))
    assert json.dumps(offsets.to_json(turned)) == text


def test_offset_json_matches_the_documentation() -> None:
    positions = {("access", 10): Position((17, 3), 4711), ("access", 2): Position((16, 0))}
    assert offsets.to_json(positions) == {
        "access": {"2": "16-0", "10": "17-3"},
        "#": {"access": {"10": 4711}},
    }


# --- bounds ---------------------------------------------------------------------------------------


@given(STREAMS, st.integers(0, 12))
def test_earliest_to_latest_covers_every_entry(ids: list[offsets.Id], trimmed: int) -> None:
    stream = Stream(ids, trimmed)
    facts = stream.facts()
    earliest = offsets.resolve(EARLIEST, facts)
    latest = offsets.resolve(LATEST, facts)
    assert stream.behind(earliest) == stream.kept
    assert stream.behind(latest) == []
    assert latest.passed == len(stream.ids)
    assert earliest.passed == len(stream.ids) - len(stream.kept)
    assert offsets.find_loss(earliest, facts) is None
    assert offsets.backlog(earliest, facts) == len(stream.kept)


@given(STREAMS, st.integers(0, 12), st.integers(0, 40))
def test_start_time_resolves_to_its_first_remaining_entry(
    ids: list[offsets.Id], trimmed: int, unix_ms: int
) -> None:
    stream = Stream(ids, trimmed)
    position = offsets.resolve(Bound("time", unix_ms), stream.facts())
    assert stream.behind(position) == [each for each in stream.kept if each[0] >= unix_ms]
    assert offsets.find_loss(position, stream.facts()) is None


def test_group_start_follows_its_settled_entries() -> None:
    facts = Stream([(1, 0), (2, 0), (3, 0)]).facts()
    assert offsets.resolve(Bound("group", "hits"), facts, (2, 0)) == Position((2, 0))
    assert offsets.resolve(Bound("group", "hits"), facts, (3, 0)) == Position((3, 0), 3)
    trimmed = Stream([(1, 0), (2, 0), (9, 0)], trimmed=2).facts()
    found = offsets.resolve(Bound("group", "hits"), trimmed, (2, 0))
    assert offsets.find_loss(found, trimmed) is None, "the group had settled the removed entries"


def test_start_id_has_a_count_if_it_is_certain() -> None:
    facts = Stream([(5, 0), (6, 0)]).facts()
    assert offsets.make_position((4, 7), facts) == Position((4, 7), 0)
    assert offsets.make_position((6, 0), facts) == Position((6, 0), 2)
    assert offsets.make_position((5, 0), facts) == Position((5, 0))
    assert offsets.make_position((9, 0), facts) == Position((9, 0))


# --- losses ---------------------------------------------------------------------------------------


@given(STREAMS, st.integers(0, 12), st.integers(0, 12))
def test_lost_entries_are_counted_exactly(ids: list[offsets.Id], trimmed: int, read: int) -> None:
    stream = Stream(ids, trimmed)
    gone = len(stream.ids) - len(stream.kept)
    read = min(read, len(stream.ids))
    loss = offsets.find_loss(stream.position(read), stream.facts())
    assert loss == (Loss("trimmed", gone - read) if gone > read else None)


@given(STREAMS, st.integers(0, 12), st.integers(0, 12))
def test_remaining_entries_are_read_once_after_a_loss(
    ids: list[offsets.Id], trimmed: int, read: int
) -> None:
    stream = Stream(ids, trimmed)
    start = stream.position(min(read, len(stream.ids)))
    onward = offsets.after_loss(start, stream.facts())
    assert stream.behind(onward) == stream.behind(start)
    assert onward.id >= start.id


def test_trim_up_to_the_reader_is_not_a_loss() -> None:
    """A trim up to the reader's position is not a loss.

    The last entry that was read is gone, so IDs alone could not show this.
    """
    stream = Stream([(1, 0), (5, 0), (9, 0)], trimmed=2)
    assert offsets.find_loss(Position((5, 0), 2), stream.facts()) is None
    assert offsets.find_loss(Position((1, 0), 1), stream.facts()) == Loss("trimmed", 1)
    assert offsets.find_loss(Position((1, 0)), stream.facts()) == Loss("trimmed", None)
    just_before = Position(offsets.predecessor((9, 0)))
    assert offsets.find_loss(just_before, stream.facts()) is None


def test_restarted_stream_is_detected() -> None:
    new = Stream([(90, 0), (91, 0)]).facts()
    assert offsets.find_loss(Position((50, 0), 4711), new) == Loss("replaced", None)
    assert offsets.after_loss(Position((50, 0), 4711), new).id == (50, 0)
    assert offsets.resume_position(Position((50, 0), 4711), new) == new.earliest


@given(STREAMS, STREAMS, st.data())
def test_recreated_stream_is_detected(
    old: list[offsets.Id], new: list[offsets.Id], data: st.DataObject
) -> None:
    """Any position in the old stream, and any number of entries in the new one, are checked.

    There are two exceptions: the new stream has lost exactly as many entries as were read, or both
    streams contain the position.
    """
    before = Stream(old)
    position = before.position(data.draw(st.integers(1, len(before.ids))))
    trimmed = data.draw(st.integers(0, len(set(new))))
    after = Stream(new, trimmed)
    assert not offsets.is_replaced(position, before.facts())
    found = offsets.find_loss(position, after.facts())
    if offsets.is_replaced(position, after.facts()):
        assert found == Loss("replaced", None)
        assert offsets.resume_position(position, after.facts()) == after.facts().earliest
    elif after.kept and after.kept[0] > position.id:
        assert position.passed is not None
        assert trimmed >= position.passed
        # No entry can be lost between an ID and the next possible one.
        apart = after.kept[0] > offsets.successor(position.id)
        gone = trimmed - position.passed
        assert found == (Loss("trimmed", gone) if gone and apart else None)


@given(STREAMS, st.data())
def test_trimmed_stream_is_not_a_replacement(ids: list[offsets.Id], data: st.DataObject) -> None:
    """Trimming never looks like a replacement, for any position of the reader."""
    count = len(set(ids))
    stream = Stream(ids, data.draw(st.integers(0, count)))
    assert not offsets.is_replaced(
        stream.position(data.draw(st.integers(0, count))), stream.facts()
    )


def test_known_number_of_lost_entries_is_reported() -> None:
    """If the number of lost entries is known, it is reported."""
    new = StreamFacts(length=3, added=3, first=(100, 0), last=(102, 0))
    assert offsets.find_loss(Position((50, 0), 20), new, 520) == Loss("replaced", 500)
    assert offsets.find_loss(Position((50, 0), 20), new, 20) == Loss("replaced", None)
    assert offsets.count_unread(Position((50, 0)), 520) is None


@pytest.mark.parametrize("added", [3, 5, 7])
def test_unchanged_counts_skip_no_entries(added: int) -> None:
    """No entry is skipped if counts do not change.

    Before Redis 7.0, an XDEL or XADD MAXLEN of other clients can lower them.
    """
    read = Position((9, 0), 5)
    facts = StreamFacts(min(added, 5), added, first=(8, 0), last=(12, 0))
    assert 1 <= offsets.backlog(read, facts) <= facts.length
    planned = offsets.span(PLACE, read, facts.latest, facts)
    rows = 2 if added == 7 else None
    assert planned == Span(PLACE, (9, 0), (12, 0), rows, facts.removed, facts.latest)


def test_stream_with_smaller_ids_is_a_replacement() -> None:
    """A stream with smaller IDs is a replacement, for any number of entries.

    A position without a count may be in the future.
    """
    new = StreamFacts(length=200, added=200, first=(1, 0), last=(90, 0))
    assert offsets.find_loss(Position((100, 0), 100), new) == Loss("replaced", None)
    assert offsets.resume_position(Position((100, 0), 100), new) == new.earliest
    assert offsets.find_loss(Position((100, 0)), new) is None


def test_dead_letters_are_never_lost() -> None:
    facts = StreamFacts(length=1, added=1, first=(9, 0), last=(9, 0), exact=False)
    assert offsets.find_loss(Position((1, 0)), facts) is None
    assert offsets.resolve(EARLIEST, facts).passed is None


# --- how much -------------------------------------------------------------------------------------


@given(STREAMS, st.integers(0, 12), st.integers(0, 12))
def test_backlog_counts_the_remaining_entries(
    ids: list[offsets.Id], trimmed: int, read: int
) -> None:
    stream = Stream(ids, trimmed)
    start = stream.position(min(read, len(stream.ids)))
    assert offsets.backlog(start, stream.facts()) == len(stream.behind(start))


@given(STREAMS, st.integers(0, 12), IDS)
def test_backlog_estimate_is_zero_only_without_backlog(
    ids: list[offsets.Id], trimmed: int, entry_id: offsets.Id
) -> None:
    stream = Stream(ids, trimmed)
    estimate = offsets.backlog(Position(entry_id), stream.facts())
    assert (estimate == 0) == (not stream.behind(Position(entry_id)))
    assert estimate <= len(stream.kept)


@given(st.dictionaries(PLACES, st.integers(0, 10_000), min_size=1), st.integers(1, 20_000))
def test_shares_add_up_and_include_every_partition(
    waiting: dict[TopicPartition, int], most: int
) -> None:
    given_out = offsets.shares(waiting, most, sorted(waiting))
    hungry = [place for place, count in waiting.items() if count]
    assert sum(given_out.values()) == min(most, sum(waiting.values()))
    assert all(0 < given_out[place] <= waiting[place] for place in given_out)
    if most >= len(hungry):
        assert set(given_out) == set(hungry)


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=6), st.integers(10, 5_000))
def test_shares_are_in_proportion(counts: list[int], most: int) -> None:
    waiting = {("access", number): count for number, count in enumerate(counts)}
    given_out = offsets.shares(waiting, most, sorted(waiting))
    total = sum(counts)
    if total > most:
        for place, count in waiting.items():
            assert abs(given_out[place] - most * count / total) <= len(counts)


def test_small_limit_goes_to_the_oldest_partitions() -> None:
    places = [("access", number) for number in range(4)]
    waiting = dict.fromkeys(places, 100)
    assert offsets.shares(waiting, 2, places[::-1]) == {places[3]: 1, places[2]: 1}


# --- spans ----------------------------------------------------------------------------------------


def covered_entries(parts: list[Span], stream: Stream) -> list[offsets.Id]:
    """Return the entries that tasks would read, in the order of their parts."""
    return [each for part in parts for each in stream.kept if part.start < each <= part.end]


@given(STREAMS, st.integers(0, 12), st.integers(1, 9), st.data())
def test_pieces_cover_the_span_once(
    ids: list[offsets.Id], trimmed: int, pieces: int, data: st.DataObject
) -> None:
    stream = Stream(ids, trimmed)
    start = data.draw(IDS)
    end = data.draw(IDS.filter(lambda each: each > start) if start < stream.ids[-1] else IDS)
    if end <= start:
        return
    whole = Span(PLACE, start, end)
    parts = offsets.split(whole, pieces, data.draw(st.sampled_from([None, stream.ids[0]])))
    assert 1 <= len(parts) <= pieces
    assert parts[0].start == start
    assert parts[-1].end == end
    assert all(part.start < part.end for part in parts)
    assert all(one.end == other.start for one, other in pairwise(parts))
    assert covered_entries(parts, stream) == covered_entries([whole], stream)


def test_split_is_even_in_time() -> None:
    whole = Span(PLACE, offsets.ZERO, (1400, 0), 400, 0)
    parts = offsets.split(whole, 4, (1001, 0))
    assert [part.end[0] for part in parts] == [1100, 1200, 1300, 1400]
    assert [part.rows for part in parts] == [None] * 4


def test_density_is_measured_at_the_first_entries() -> None:
    piece = Span(PLACE, (1000, 0), (2000, 0))
    assert offsets.density(piece, (1100, 0), 50, more=True) == 500
    assert offsets.density(piece, (1100, 0), 50, more=False) == 50
    assert offsets.density(piece, (2000, 0), 50, more=True) == 50


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_cuts_are_even_by_weight(weights: list[int], count: int) -> None:
    """Each piece has an equal share if the weight of each slice is spread evenly over it."""
    width = 1000
    slices = [Span(PLACE, (at * width, 0), ((at + 1) * width, 0)) for at in range(len(weights))]
    cuts = offsets.even_cuts(slices, weights, count)
    assert len(cuts) < count
    assert cuts == sorted(set(cuts))
    total, at = sum(weights), 0.0
    if total < 4 * count:
        return
    assert len(cuts) == count - 1
    for cut in (*cuts, (len(weights) * width, 0)):
        below = sum(
            weight * min(1.0, max(0.0, (cut[0] - at_slice * width) / width))
            for at_slice, weight in enumerate(weights)
        )
        assert abs(below - at - total / count) < 3 + total / width
        at = below


def test_cut_at_marks_splits_by_count() -> None:
    whole = Span(PLACE, (0, 0), (90, 0), 9, 0)
    marks = [Position((10 * number, 0), number) for number in range(1, 10)]
    parts = offsets.cut_at_marks(whole, marks, 3)
    assert [(part.end[0], part.rows) for part in parts] == [(30, 3), (60, 3), (90, 3)]
    unsure = offsets.cut_at_marks(whole._replace(rows=12), marks, 3)
    assert [(part.end[0], part.rows) for part in unsure] == [(30, None), (60, None), (90, None)]
    assert offsets.cut_at_marks(whole, [], 3) == [whole]


def test_whole_span_keeps_its_row_count() -> None:
    whole = Span(PLACE, (1, 0), (9, 0), 7, 0)
    assert offsets.split(whole, 1) == [whole]
    assert offsets.narrow([whole], offsets.ZERO, (20, 0)) == [whole]


def test_counted_pieces_have_their_row_counts() -> None:
    whole = Span(PLACE, (0, 0), (9, 0), 9, 0)
    parts = offsets.cut_at(whole, [(4, 0), (8, 0)], 4)
    assert [part.rows for part in parts] == [4, 4, 1]


@given(STREAMS, IDS, IDS)
def test_narrowing_keeps_the_entries_inside(
    ids: list[offsets.Id], low: offsets.Id, high: offsets.Id
) -> None:
    stream = Stream(ids)
    whole = Span(PLACE, offsets.ZERO, stream.ids[-1], len(ids))
    inside = [each for each in stream.ids if low < each <= high]
    assert covered_entries(offsets.narrow([whole], low, high), stream) == inside


@given(st.dictionaries(PLACES, st.integers(0, 10_000), min_size=1), st.integers(0, 64))
def test_pieces_match_the_requested_number(weights: dict[TopicPartition, int], wanted: int) -> None:
    counts = offsets.pieces(weights, wanted)
    assert all(count >= 1 for count in counts.values())
    if any(weights.values()):
        assert sum(counts.values()) == max(wanted, len(weights))


def test_empty_span_is_not_planned() -> None:
    facts = Stream([(1, 0), (2, 0)]).facts()

    def planned(start: Position, end: Position) -> Span | None:
        return offsets.span(PLACE, start, end, facts)

    one, two, three = Position((1, 0), 1), Position((2, 0), 2), Position((3, 0), 2)
    assert planned(two, two) is None
    assert planned(two, one) is None
    assert planned(two, three) == Span(PLACE, (2, 0), (3, 0), None, 0, three)
    assert planned(Position((0, 0), 0), two) == Span(PLACE, (0, 0), (2, 0), 2, 0, two)
    assert planned(Position((0, 0)), two) == Span(PLACE, (0, 0), (2, 0), None, 0, two)


@pytest.mark.parametrize(
    ("first", "last", "other"),
    [((9, 0), (120, 0), False), ((100, 0), (120, 0), False), ((101, 0), (120, 0), True)],
)
def test_ids_identify_a_stream_without_a_server_count(
    first: offsets.Id, last: offsets.Id, other: bool
) -> None:
    """On Redis 6.2, another client may remove entries without a count.

    The IDs still show a new stream, which contains none of the old IDs.
    """
    read = Position((100, 0), 100)
    facts = StreamFacts(length=8, added=8, first=first, last=last, counted=False)
    assert offsets.is_replaced(read, facts) is other
    assert offsets.is_replaced(read, facts._replace(counted=True))
    assert offsets.resume_position(read, facts) == (facts.earliest if other else read)


def test_emptied_stream_is_not_a_replacement() -> None:
    """On Redis 6.2, the last ID shows that a stream was emptied and not replaced by a new one."""
    facts = StreamFacts(last=(100, 0), counted=False)
    assert not offsets.is_replaced(Position((100, 0), 100), facts)
    assert offsets.is_replaced(Position((90, 0), 90), facts)


def test_lag_counts_entries_after_the_batch() -> None:
    """The lag includes all entries of a new partition, but no partition without a count."""
    places = [("access", number) for number in range(4)]
    end = {
        places[0]: Position((5, 0), 5),
        places[1]: Position((9, 0), 9),
        places[3]: Position((1, 0)),
    }
    latest = {place: Position((40, 0), 30) for place in places[:3]} | {places[3]: Position((9, 0))}
    assert offsets.lag(end, latest) == {"total": 76, "max": 30, "avg": 25.3}
    assert offsets.lag({}, latest) == offsets.lag(end, {places[3]: Position((9, 0))}) == {}
    reported = offsets.to_json(latest) | {offsets.LAG: offsets.lag(end, latest)}
    assert offsets.from_json(reported) == latest
