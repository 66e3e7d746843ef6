"""Archive dead letters in a Delta table per topic, each exactly once and without Spark.

Each row is one dead letter, which is identified by its topic, partition and ID. The IDs in a
dead-letter stream only increase, so a table contains all dead letters up to its position that
existed during a run. After the commit, the position is reported to Redis, so that retention can
delete these dead letters.

The position in Redis may be older than the table's. Either a run was killed before it reported the
position, or a failover lost the newest dead letters. In the second case, new dead letters may get
IDs before the table's position. Each run therefore starts with the dead letters between the two
positions, and archives those that are not in the table yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from streamqd import config
from streamqd.model import RawEntry, TopicPartition
from streamqd.policy.fingerprint import dead_letter_fingerprint
from streamqd.spark import offsets, rows
from streamqd.spark.offsets import Id, Offsets, Position, StreamFacts
from streamqd.spark.options import DLQ, ReadOptions, of_settings, read_options
from streamqd.spark.pipelines import compact
from streamqd.spark.pipelines.kinds import DEAD
from streamqd.spark.pipelines.storage import Archive, ArchiveTable, opened_alone
from streamqd.spark.reader import EntryReader
from streamqd.spark.streams import Catalog

if TYPE_CHECKING:
    import pyarrow as pa

    from streamqd.spark.pipelines.parts import WrittenFile

FETCH_ROWS = 1_000  # dead letters in one page; fewer if large ones reach `fetchBytes` first
PORTION_ROWS = 200_000  # approximate number of dead letters in one commit
COLUMNS = rows.columns(dead=True, headers=True, fields=True)
STORED = tuple(column for column in COLUMNS if column.name not in ("topic", "partition"))


class _Range(NamedTuple):
    """The dead letters of a partition with IDs in `(start, end]`."""

    place: TopicPartition
    start: Id
    end: Id


class DeadLetterArchiver:
    """Archives the dead letters of one topic. The caller holds the lease on the topic."""

    def __init__(self, archive: Archive, settings: config.Settings, topic: str) -> None:
        self._archive = archive
        self._topic = topic
        given = of_settings(settings) | {
            "subscribe": topic + DLQ,
            "fetchSize": str(FETCH_ROWS),
        }
        self._options: ReadOptions = read_options(given, {})

    def run(
        self,
        *,
        check: Callable[[], None],
        reported: Callable[[ArchiveTable], Mapping[TopicPartition, Id]],
        advance: Callable[[Offsets], None],
    ) -> int:
        """Archive all dead letters that exist now, and return how many were archived.

        - `check` must raise an error if the lease was lost.
        - `reported` must return the positions that were already reported to Redis, and raise an
          error if files after these positions are damaged.
        - `advance` must report positions to Redis.

        Raises ArchiveError, RequestRefusedError, RedisUnavailableError, RedisResponseError or
        OSError. Dead letters whose positions were already reported remain archived.
        """
        facts = self._facts()
        table = self._archive.derived_table(self._topic, DEAD)
        if table is None and not any(each.length for each in facts.values()):
            return 0
        table = table or self._archive.derived_table(self._topic, DEAD, DEAD.columns())
        assert table is not None
        ends = {place: end.id for place, end in table.positions.items() if place in facts}
        known = reported(table)
        earlier = [
            _Range(place, known.get(place, offsets.ZERO), min(end, facts[place].last))
            for place, end in ends.items()
        ]
        later = [
            _Range(place, ends.get(place, offsets.ZERO), each.last)
            for place, each in facts.items()
            if each.length
        ]
        total = commits = 0
        for files, _ in self._portions(table, earlier, check, new=False):
            if files:
                table.append(files, {})
                total, commits = total + sum(each.rows for each in files), commits + 1
        check()
        advance({each.place: Position(each.end) for each in earlier if each.end > each.start})
        for files, reached in self._portions(table, later, check, new=True):
            table.append(files, reached)
            check()
            advance(reached)
            total, commits = total + sum(each.rows for each in files), commits + 1
        if commits:
            compact.merge_small_files(table, commits)
        return total

    def _facts(self) -> dict[TopicPartition, StreamFacts]:
        """Return the facts about the dead letters of each partition."""
        catalog = Catalog(self._options)
        found = catalog.facts(catalog.places(strict=False))
        return {(self._topic, number): each for (_, number), each in found.items()}

    def _portions(
        self,
        table: ArchiveTable,
        ranges: Sequence[_Range],
        check: Callable[[], None],
        *,
        new: bool,
    ) -> Iterator[tuple[list[WrittenFile], Offsets]]:
        """Write about PORTION_ROWS dead letters at a time.

        Yield their files and the positions reached.

        If `new` is False, the table may already contain some of the dead letters, so only the
        missing ones are written. If an error occurs, the files that were not yielded yet are
        removed.
        """
        from streamqd.spark.pipelines.parts import PartWriter

        with ExitStack() as unfinished:
            files: list[WrittenFile] = []
            reached: Offsets = {}
            count = 0
            for each in ranges:
                writer, at = PartWriter(table.folder, each.place[1]), each.start
                unfinished.callback(writer.discard)
                for entries in self._read(each):
                    batch = self._batch(each.place, entries)
                    batch = batch if new else _missing(table, each.place[1], batch)
                    writer.write(batch)
                    count += batch.num_rows
                    at = offsets.read_id(entries[-1][0])
                    reached[each.place] = Position(at)
                    if count >= PORTION_ROWS:
                        files += writer.finish()
                        check()
                        # From here on, the files are kept after an error, because the table may
                        # already contain the caller's commit.
                        unfinished.pop_all()
                        yield files, reached
                        files, reached, count = [], {}, 0
                        writer = PartWriter(table.folder, each.place[1])
                        unfinished.callback(writer.discard)
                files += writer.finish()
                if at < each.end:
                    reached[each.place] = Position(each.end)
            if reached:
                check()
                unfinished.pop_all()
                yield files, reached

    def _read(self, wanted: _Range) -> Iterator[list[RawEntry]]:
        source = (self._topic + DLQ, wanted.place[1])
        start, end = Position(wanted.start), Position(wanted.end)
        span = offsets.span(source, start, end, StreamFacts(exact=False))
        return iter(()) if span is None else EntryReader(self._options, span).batches()

    def _batch(self, place: TopicPartition, entries: list[RawEntry]) -> pa.RecordBatch:
        made = rows.Table(STORED, COLUMNS, (self._topic + DLQ, place[1]))
        return _add_fingerprints(made.batch(entries), entries)


def _missing(table: ArchiveTable, partition: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows of a batch whose IDs are not in the table."""
    import pyarrow as pa
    from pyarrow import compute, parquet

    low, high = batch["id_ms"][0].as_py(), batch["id_ms"][-1].as_py()
    known = []
    for file in table.files(partition):
        if file.first[0] <= high and file.last[0] >= low:
            with opened_alone(table.folder, file.path) as raw:
                wanted = [("id_ms", ">=", low), ("id_ms", "<=", high)]
                found = parquet.read_table(raw, columns=["id"], filters=wanted)
            known += found["id"].cast(pa.string()).chunks
    archived = compute.is_in(batch["id"], value_set=pa.chunked_array(known, pa.string()))
    return batch.filter(compute.invert(archived))


def _add_fingerprints(batch: pa.RecordBatch, entries: list[RawEntry]) -> pa.RecordBatch:
    """Add a fingerprint to each dead letter that lacks one, as `dlq stats` computes it."""
    import pyarrow as pa

    at = batch.schema.get_field_index("fingerprint")
    found = batch.column(at)
    if not found.null_count and "" not in found.to_pylist():
        return batch
    made = pa.array([dead_letter_fingerprint(each) for each in _fields(entries)], found.type)
    return batch.set_column(at, batch.schema.field(at), made)


def _fields(entries: list[RawEntry]) -> Iterator[dict[bytes, bytes]]:
    for _, body in entries:
        yield dict(zip(body[::2], body[1::2], strict=False))
