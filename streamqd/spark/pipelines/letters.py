"""Dead letters into a Delta table of each topic, each exactly once. Needs no Spark.

A row is a dead letter, identified by its topic, its partition and its ID. The IDs of a dead-letter
stream only grow, so a table has all dead letters up to its position that existed at the time of a
run. Redis gets the position after the commit, and retention then deletes them. A run that is killed
in between reports the position of the table first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.model import RawEntry, TopicPartition
from streamqd.policy.fingerprint import of_dead_letter
from streamqd.spark import offsets, rows
from streamqd.spark.offsets import Offsets, Position, StreamFacts
from streamqd.spark.options import DLQ, ReadOptions, of_settings, read_options
from streamqd.spark.pipelines import compact
from streamqd.spark.pipelines.kinds import DEAD
from streamqd.spark.pipelines.storage import Archive, ArchiveTable
from streamqd.spark.reader import EntryReader
from streamqd.spark.streams import Catalog

if TYPE_CHECKING:
    import pyarrow as pa

    from streamqd.spark.pipelines.parts import WrittenFile

FETCH_ROWS = 1_000  # dead letters of one page. `fetchBytes` is the limit if they are large.
COLUMNS = rows.columns(dead=True, headers=True, fields=True)
STORED = tuple(column for column in COLUMNS if column.name not in ("topic", "partition"))


class LetterArchiver:
    """Archives the dead letters of one topic. The caller holds the lease on the topic."""

    def __init__(self, archive: Archive, settings: config.Settings, topic: str) -> None:
        self._archive = archive
        self._topic = topic
        given = of_settings(settings) | {"subscribe": topic + DLQ, "fetchSize": str(FETCH_ROWS)}
        self._options: ReadOptions = read_options(given, {})

    def run(
        self,
        *,
        check: Callable[[], None],
        verify: Callable[[ArchiveTable], None],
        advance: Callable[[Offsets], None],
    ) -> int:
        """Archive all dead letters present now. Return their number.

        `check` raises an error if the lease is lost, and `verify` if files that Redis does not know
        of are damaged. `advance` reports positions to Redis. Raises ArchiveError, Refused,
        RedisUnavailable, RedisRefused, OSError.
        """
        facts = self._facts()
        table = self._archive.derived(self._topic, DEAD)
        if table is None and not any(each.length for each in facts.values()):
            return 0
        table = table or self._archive.derived(self._topic, DEAD, DEAD.columns())
        assert table is not None
        verify(table)
        advance(offsets.of_same_streams(table.positions, facts))
        starts = {place: table.positions.get(place, Position(offsets.ZERO)) for place in facts}
        ends = {
            place: Position(each.last)
            for place, each in facts.items()
            if each.length and each.last > starts[place].id
        }
        if not ends:
            return 0
        with ExitStack() as unfinished:
            files = [
                file
                for place, end in ends.items()
                for file in self._written(table, place, starts[place], end, unfinished)
            ]
            check()
            unfinished.pop_all()  # an error of the commit does not show that it is not in the table
        table.append(files, ends)
        check()
        advance(ends)
        compact.tidy(table, 1)
        return sum(each.rows for each in files)

    def _facts(self) -> dict[TopicPartition, StreamFacts]:
        """Return the facts about the dead letters of each partition, by topic and partition."""
        catalog = Catalog(self._options)
        found = catalog.facts(catalog.places(strict=False))
        return {(self._topic, number): each for (_, number), each in found.items()}

    def _written(
        self,
        table: ArchiveTable,
        place: TopicPartition,
        start: Position,
        end: Position,
        unfinished: ExitStack,
    ) -> list[WrittenFile]:
        """Write the dead letters of a partition into files, which `unfinished` removes."""
        from streamqd.spark.pipelines.parts import PartWriter

        source = (self._topic + DLQ, place[1])
        span = offsets.span(source, start, end, StreamFacts(exact=False))
        assert span is not None
        writer = PartWriter(table.folder, place[1])
        unfinished.callback(writer.discard)
        made = rows.Table(STORED, COLUMNS, source)
        for entries in EntryReader(self._options, span).batches():
            writer.write(_named(made.batch(entries), entries))
        return writer.finish()


def _named(batch: pa.RecordBatch, entries: list[RawEntry]) -> pa.RecordBatch:
    """Return a batch in which each dead letter has a fingerprint, as `dlq stats` shows it."""
    import pyarrow as pa

    at = batch.schema.get_field_index("fingerprint")
    found = batch.column(at)
    if not found.null_count and "" not in found.to_pylist():
        return batch
    made = pa.array([of_dead_letter(each) for each in _fields(entries)], found.type)
    return batch.set_column(at, batch.schema.field(at), made)


def _fields(entries: list[RawEntry]) -> Iterator[dict[bytes, bytes]]:
    for _, body in entries:
        yield dict(zip(body[::2], body[1::2], strict=False))
