"""Parse the archived entries of a topic again after its schema was changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.errors import RequestRefusedError
from streamqd.spark.location import Location, location
from streamqd.spark.offsets import ZERO, Id
from streamqd.spark.pipelines import derived, lookup, parsed, tables
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.parts import WrittenFile
from streamqd.spark.pipelines.storage import Archive, ArchiveTable, TableKind
from streamqd.store.keys import Keys

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class Reparsed:
    """The result of a run: how many rows now fit the schema, how many do not, and the duration."""

    topic: str
    parsed: int = 0
    quarantined: int = 0
    seconds: float = 0.0


def reparse(
    settings: config.Settings,
    folder: str | Path | Location,
    topic: str,
    spark: Callable[[], SparkSession],
    *,
    quarantine_only: bool = False,
    allow_loss: bool = False,
) -> Reparsed:
    """Parse all archived entries of a topic again, or only those in its quarantine.

    A run that was killed can simply be repeated. If archived entries are missing, their parsed rows
    would be deleted, so the run is refused unless `allow_loss` is True.

    Raises RequestRefusedError, InvalidRequestError, ArchiveError or PipelineError.
    """
    began = time.monotonic()
    archive = Archive(location(folder, settings.archive.pairs))
    pipeline = settings.pipelines.get(topic, config.Pipeline())
    if not pipeline.schema:
        raise RequestRefusedError(
            f"pipelines.{topic}.schema is not set; set it to the columns of the payloads"
        )
    keys = Keys(settings.keys.control, settings.keys.streams)
    with PipelineLease(lambda: tables.connect(settings), keys, topic, archive.lease_name) as lease:
        raw = archive.table(topic)
        if raw is None:
            raise RequestRefusedError(
                f"topic {topic} is not in {folder}; pass a topic that is archived there"
            )
        if quarantine_only:
            done = parsed.parse_quarantine(archive, topic, pipeline, spark, lease.check)
        else:
            if not allow_loss:
                _check_no_loss(archive, raw)
            done = parsed.parse_again(archive, raw, pipeline, spark, lease.check)
    seconds = round(time.monotonic() - began, 3)
    return Reparsed(topic, done.rows, done.quarantined, seconds)


def _check_no_loss(archive: Archive, raw: ArchiveTable) -> None:
    """Raise RequestRefusedError if the derived tables have rows whose raw entries are missing."""
    kinds: tuple[TableKind, ...] = (derived.QUARANTINE, derived.PARSED)
    made = [
        table for kind in kinds if (table := archive.derived_table(raw.topic, kind)) is not None
    ]
    rows = sum(each.rows for table in made for each in table.files())
    # Entries that were not parsed yet are not counted, because they must not make up for missing
    # ones.
    ends = {place[1]: at.id for table in made for place, at in table.positions.items()}
    archived = sum(_rows_up_to(raw, each, ends.get(each.partition, ZERO)) for each in raw.files())
    if rows > archived:
        raise RequestRefusedError(
            f"{rows - archived} parsed rows of {raw.topic} have no archived entry any longer, so"
            " nothing was changed; pass --quarantine-only to keep them, or --allow-loss to delete"
            " them"
        )


def _rows_up_to(raw: ArchiveTable, file: WrittenFile, end: Id) -> int:
    """Return the number of rows in a raw file with IDs up to `end`.

    Raises ArchiveError if the file cannot be read.
    """
    if file.last <= end:
        return file.rows
    return lookup.rows_up_to(raw, file, end) if file.first <= end else 0
