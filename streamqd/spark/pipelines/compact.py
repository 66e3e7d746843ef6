"""Many small files into few: a new generation of manifests takes the place of the old.

Readers of the manifests see either the old files or the new. A reader that goes by the folders
alone may for an instant miss what is being put in place; it never sees a row twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.errors import Refused
from streamqd.spark import offsets
from streamqd.spark.cold import ColdFile, ColdSpan
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines import tables
from streamqd.spark.pipelines.archive import context_of, lease_name
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.manifest import File, Manifest
from streamqd.spark.pipelines.parts import files_of
from streamqd.spark.pipelines.storage import Archive
from streamqd.store.keys import Keys

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from streamqd.spark.pipelines.writer import FilePart

GRACE = 3600.0  # seconds that replaced files stay for those who have begun to read them
TARGET = 256 << 20  # bytes of files that are written into one


@dataclass
class Compacted:
    """What a run did with one topic."""

    topic: str
    rows: int = 0
    files_before: int = 0
    files_after: int = 0
    purged: int = 0  # batches whose files were replaced earlier and are deleted now
    seconds: float = 0.0


def compact(
    settings: config.Settings,
    folder: Path,
    spark: Callable[[], SparkSession | SparkContext],
    wanted: Sequence[str] = (),
    *,
    target: int = TARGET,
    grace: float = GRACE,
) -> list[Compacted]:
    """Compact topics, or all that are archived. Raises Refused, ManifestError."""
    archive = Archive(folder)
    known = archive.topics()
    missing = [name for name in wanted if name not in known]
    if missing:
        raise Refused(f"nothing of {missing[0]} is in {folder}")
    keys = Keys(settings.keys.control, settings.keys.streams)
    done = []
    for topic in wanted or known:
        began = time.monotonic()
        result = Compacted(topic)
        with PipelineLease(
            lambda: tables.connect(settings), keys, topic, lease_name(archive)
        ) as lease:
            archive.recover(topic)
            result.purged = archive.purge(topic, grace)
            for run in manifests.runs_to_compact(archive.current(topic), target):
                new = _rewrite(archive, context_of(spark()), run, lease)
                result.rows += new.rows
                result.files_before += sum(len(each.files) for each in run)
                result.files_after += len(new.files)
        result.seconds = round(time.monotonic() - began, 3)
        done.append(result)
    return done


def _rewrite(
    archive: Archive, context: SparkContext, run: Sequence[Manifest], lease: PipelineLease
) -> Manifest:
    from streamqd.spark.pipelines.writer import write_parts

    generation = max(each.generation for each in run) + 1
    staged = archive.stage(run[0].topic, run[-1].last, generation)
    receipts = write_parts(
        context, _parts(archive, run, generation), staged / "tasks" / secrets.token_hex(4)
    )
    files = [file for each in receipts for file in each.files]
    ready = archive.gather(staged, [(Path(each["source"]), each["path"]) for each in files])
    new = manifests.merged(run, files_of(files), round(time.time() * 1000))
    lease.check()
    archive.replace(ready, new)
    return new


def _parts(archive: Archive, run: Sequence[Manifest], generation: int) -> list[FilePart]:
    """A task for each folder of files, which are of one date and one partition."""
    from streamqd.spark.pipelines.writer import FilePart

    folders: dict[str, list[tuple[File, ColdFile]]] = {}
    for holder in run:
        for file in holder.files:
            path = str(archive.locate(holder, file))
            cold = ColdFile((path,), file.rows, file.size, file.first, file.last)
            folders.setdefault(file.path.rpartition("/")[0], []).append((file, cold))
    parts = []
    for _, listed in sorted(folders.items()):
        # Batches follow one another, and files of a batch do: their rows are in order.
        ordered = sorted((cold for _, cold in listed), key=lambda each: each.first)
        place = (run[0].topic, listed[0][0].partition)
        last = max(each.last for each in ordered)
        parts.append(FilePart(ColdSpan(place, offsets.ZERO, last, tuple(ordered)), generation))
    return parts
