"""What an archive holds: its layout and the manifests that name its files. Pure, no I/O.

    <archive>/topic=<t>/batch=<n>/dt=<date>/partition=<p>/part-….parquet   data, for every reader
    <archive>/_manifest/<t>/<first>-<last>.g<generation>.json              what is current
    <archive>/_staging/<t>/…                                               being written
    <archive>/_retired/<t>/…                                               replaced, deleted later

A manifest of generation 0 is one batch of the archive pipeline; one of a later generation replaces
all that its batches were. What lies over or beside the current manifests is not part of the
archive. A range of ids is `(start, end]`.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from streamqd.config.setting import NAME
from streamqd.spark.offsets import Id, read_id, write_id

FORMAT = 1
STAGING = PurePosixPath("_staging")
RETIRED = PurePosixPath("_retired")
INSIDE = "_batch.json"  # the manifest inside the batch it belongs to: renamed along with it

_NAME = re.compile(r"([0-9]{10})-([0-9]{10})\.g([0-9]+)\.json")
# Relative, and no part begins with a dot: a path of a manifest stays in the folder of its batch.
_PATH = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9._=-]*/)*[A-Za-z0-9_=-][A-Za-z0-9._=-]*")


class ManifestError(Exception):
    """The archive is not what its manifests say. Says what is wrong and where."""


class Range(NamedTuple):
    """What a batch holds of one partition: entries after `start` up to `end`, `rows` of them."""

    start: Id
    end: Id
    rows: int
    passed: int | None = None  # entries that the stream had ever issued up to `end`


@dataclass(frozen=True, slots=True)
class File:
    """A data file. `path` is relative to the batch's folder, `rows` is what its footer says."""

    path: str
    partition: int
    rows: int
    size: int
    first: Id
    last: Id


@dataclass(frozen=True, slots=True)
class Manifest:
    """Batches `first` to `last` of a topic, in the folder of the last one."""

    topic: str
    first: int
    last: int
    generation: int
    ranges: Mapping[int, Range]
    files: tuple[File, ...]
    written_unix_ms: int = 0

    @property
    def folder(self) -> PurePosixPath:
        """Where its files are, in the archive."""
        return batch_folder(self.topic, self.last)

    @property
    def path(self) -> PurePosixPath:
        """Where it is itself, in the archive."""
        name = f"{self.first:010d}-{self.last:010d}.g{self.generation}.json"
        return manifest_folder(self.topic) / name

    @property
    def rows(self) -> int:
        """How many entries it holds."""
        return sum(each.rows for each in self.ranges.values())

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files)


# --- layout ---------------------------------------------------------------------------------------


def topic_folder(topic: str) -> PurePosixPath:
    """Folder of what every reader may read of a topic."""
    return PurePosixPath(f"topic={topic}")


def batch_folder(topic: str, number: int) -> PurePosixPath:
    """Folder of a batch that every reader may read."""
    return topic_folder(topic) / f"batch={number}"


def manifest_folder(topic: str) -> PurePosixPath:
    """Folder of a topic's manifests."""
    return PurePosixPath("_manifest") / topic


def staging_folder(topic: str, number: int, generation: int = 0) -> PurePosixPath:
    """Folder in which a batch is prepared; readers never look into it."""
    return STAGING / topic / f"batch={number}.g{generation}"


def retired_folder(manifest: Manifest) -> PurePosixPath:
    """Folder into which the files of a manifest go that is no longer current."""
    return RETIRED / manifest.topic / manifest.path.stem


def file_folder(entry_ms: int, partition: int) -> str:
    """Folder of a file in its batch: the date (UTC) of its entries, and their partition."""
    return f"dt={date_of(entry_ms)}/partition={partition}"


def date_of(unix_ms: int) -> str:
    """The date (UTC) of an entry; ids beyond the calendar belong to its last day."""
    last = 253_402_300_799
    return dt.datetime.fromtimestamp(min(unix_ms // 1000, last), dt.UTC).strftime("%Y-%m-%d")


def file_name(task: int, number: int, generation: int = 0) -> str:
    """Name of a file: the same again when its batch is written again."""
    return f"part-g{generation}-{task:05d}-{number:05d}.zstd.parquet"


# --- as text --------------------------------------------------------------------------------------


def dumps(manifest: Manifest) -> str:
    """The manifest as JSON, the same text for the same manifest."""
    document = {
        "format": FORMAT,
        "topic": manifest.topic,
        "first": manifest.first,
        "last": manifest.last,
        "generation": manifest.generation,
        "written_unix_ms": manifest.written_unix_ms,
        "rows": manifest.rows,
        "size": manifest.size,
        "folder": str(manifest.folder),
        "partitions": {
            str(partition): {
                "start": write_id(each.start),
                "end": write_id(each.end),
                "rows": each.rows,
                "passed": each.passed,
            }
            for partition, each in sorted(manifest.ranges.items())
        },
        "files": [
            {
                "path": file.path,
                "partition": file.partition,
                "rows": file.rows,
                "size": file.size,
                "first": write_id(file.first),
                "last": write_id(file.last),
            }
            for file in sorted(manifest.files, key=lambda file: file.path)
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def loads(text: str | bytes, source: str = "a manifest") -> Manifest:
    """Read what `dumps` wrote. Raises ManifestError, which names `source`."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ManifestError(f"{source} is of format {document['format']}, ours is {FORMAT}")
        return Manifest(
            topic=_topic(document["topic"]),
            first=_whole(document["first"]),
            last=_whole(document["last"]),
            generation=_whole(document["generation"]),
            written_unix_ms=document["written_unix_ms"],
            ranges={
                int(number): Range(
                    read_id(each["start"]), read_id(each["end"]), each["rows"], each["passed"]
                )
                for number, each in document["partitions"].items()
            },
            files=tuple(_file(each) for each in document["files"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{source} cannot be read: {error}") from error


def _topic(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"the topic {name!r} cannot be")
    return name


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a whole number from 0")
    return number


def _file(each: Mapping[str, Any]) -> File:
    if not _PATH.fullmatch(each["path"]):
        raise ValueError(f"the path {each['path']!r} is not one of a file in its batch")
    return File(
        path=each["path"],
        partition=each["partition"],
        rows=each["rows"],
        size=each["size"],
        first=read_id(each["first"]),
        last=read_id(each["last"]),
    )


def is_manifest(name: str) -> bool:
    """Whether a file of this name in the manifest folder is a manifest."""
    return _NAME.fullmatch(name) is not None


# --- what follows from manifests ------------------------------------------------------------------


def check(manifest: Manifest) -> None:
    """Demand that files and ranges agree. Raises ManifestError."""
    place = f"batch {manifest.last} of {manifest.topic}"
    for partition, each in manifest.ranges.items():
        files = [file for file in manifest.files if file.partition == partition]
        rows = sum(file.rows for file in files)
        if rows != each.rows:
            raise ManifestError(f"{place}: {rows} rows of partition {partition}, not {each.rows}")
        if any(file.first <= each.start or file.last > each.end for file in files):
            raise ManifestError(f"{place}: rows of partition {partition} outside of its range")
    strange = {file.partition for file in manifest.files} - manifest.ranges.keys()
    if strange:
        raise ManifestError(f"{place}: files of partitions {sorted(strange)}, which have no range")


def current(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Those that count, by batch. Of two that hold the same batches the later generation does.

    Raises ManifestError when batches are missing, or held twice by the same generation.
    """
    chosen: dict[int, Manifest] = {}
    for manifest in sorted(manifests, key=lambda each: each.generation):
        covered = range(manifest.first, manifest.last + 1)
        for number in covered:
            held = chosen.get(number)
            if held is not None and held.generation == manifest.generation:
                raise ManifestError(
                    f"batch {number} of {manifest.topic} is in two manifests,"
                    f" {held.path.name} and {manifest.path.name}"
                )
        chosen |= dict.fromkeys(covered, manifest)
    missing = [number for number in range(max(chosen, default=-1)) if number not in chosen]
    if missing:
        raise ManifestError(f"no manifest holds batch {missing[0]}")
    found = list({each.path: each for _, each in sorted(chosen.items())}.values())
    for manifest in found:
        partly = [n for n in range(manifest.first, manifest.last) if chosen[n] is not manifest]
        if partly:
            raise ManifestError(f"{manifest.path.name} counts only in part")
    return found


def superseded(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Those that no longer count."""
    listed = list(manifests)
    kept = {manifest.path for manifest in current(listed)}
    return [manifest for manifest in listed if manifest.path not in kept]


def ends(manifests: Sequence[Manifest]) -> dict[int, Range]:
    """Up to where each partition is archived without a gap: the last range that follows on all.

    Takes current manifests, in order.
    """
    reached: dict[int, Range] = {}
    broken: set[int] = set()
    for manifest in manifests:
        for partition, each in manifest.ranges.items():
            before = reached.get(partition)
            if before is not None and each.start > before.end:
                broken.add(partition)
            if partition not in broken:
                reached[partition] = each
    return reached


def merged(manifests: Sequence[Manifest], files: Sequence[File], written_unix_ms: int) -> Manifest:
    """The manifest that replaces neighbours, with their entries in other files.

    Raises ManifestError when they are no neighbours.
    """
    ranges: dict[int, Range] = {}
    for before, after in itertools.pairwise(manifests):
        if after.first != before.last + 1:
            raise ManifestError(f"{before.path.name} and {after.path.name} are no neighbours")
    for manifest in manifests:
        for partition, each in manifest.ranges.items():
            held = ranges.get(partition)
            if held is not None and held.end != each.start:
                raise ManifestError(f"{manifest.path.name}: a gap in partition {partition}")
            start, rows = (held.start, held.rows) if held else (each.start, 0)
            ranges[partition] = Range(start, each.end, rows + each.rows, each.passed)
    return Manifest(
        topic=manifests[0].topic,
        first=manifests[0].first,
        last=manifests[-1].last,
        generation=max(manifest.generation for manifest in manifests) + 1,
        ranges=ranges,
        files=tuple(files),
        written_unix_ms=written_unix_ms,
    )


def runs_to_compact(
    manifests: Sequence[Manifest], target: int, least: int = 2
) -> list[list[Manifest]]:
    """Neighbours worth writing into one: each run below `target` bytes, or one over it in all."""
    runs: list[list[Manifest]] = []
    run: list[Manifest] = []
    held = 0
    for manifest in manifests:
        if run and held + manifest.size > target:
            runs.append(run)
            run, held = [], 0
        run.append(manifest)
        held += manifest.size
    runs.append(run)
    return [each for each in runs if len(each) >= least]
