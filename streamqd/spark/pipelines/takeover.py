"""Archives of format 1, whose manifests named their files, become Delta tables. No row is copied.

    <archive>/topic=<t>/batch=<n>/dt=<date>/partition=<p>/part-….parquet   what a manifest names
    <archive>/_staging/<t>/batch=<n>.g<g>/batch/…                          of a broken compaction
    <archive>/_manifest/<t>/<first>-<last>.g<generation>.json              what counts

Each file gets a second name in its table, one commit adds them all, and what was there goes. Killed
at any moment, it is begun again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamqd.config.setting import NAME
from streamqd.errors import Refused
from streamqd.paths import below, remove_below
from streamqd.spark.offsets import ZERO, Id, Offsets, Position, read_id
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.parts import WrittenFile, file_folder
from streamqd.spark.pipelines.storage import EARLIER, Archive, ArchiveError, ArchiveTable
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

_PATH = re.compile(
    r"dt=([0-9]{4}-[0-9]{2}-[0-9]{2})/partition=([0-9]{1,4})/(part-[\w.-]+\.parquet)"
)
_FOLDERS = ("_staging", "_retired")
_MANIFEST = re.compile(r"[0-9]{10}-[0-9]{10}\.g[0-9]+\.json")


@dataclass
class TakenOver:
    """What of a topic is in its table now."""

    topic: str
    rows: int = 0
    files: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Manifest:
    """Batches `first` to `last`; a later generation replaces what its batches were."""

    first: int
    last: int
    generation: int
    ranges: dict[int, tuple[Id, Position]]  # partition -> from where, up to where
    files: tuple[WrittenFile, ...]


def take_over(
    archive: Archive, connect: Callable[[], Connection], keys: Keys, wanted: Sequence[str] = ()
) -> list[TakenOver]:
    """Take these topics over, or all. Raises Refused, ArchiveError; then nothing is lost."""
    folder = archive.root / EARLIER
    there = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    missing = [name for name in wanted if name not in there]
    if missing:
        raise Refused(f"{archive.root} has no manifests of {missing[0]}")
    done = []
    for topic in wanted or [name for name in there if NAME.fullmatch(name)]:
        began = time.monotonic()
        with PipelineLease(connect, keys, topic, archive.lease_name) as lease:
            result = _take_over(archive, topic, lease)
        result.seconds = round(time.monotonic() - began, 3)
        done.append(result)
    return done


def _take_over(archive: Archive, topic: str, lease: PipelineLease) -> TakenOver:
    manifests = _current(archive, topic)
    ends = _ends(topic, manifests)
    files = [file for each in manifests for file in _linked(archive, topic, each)]
    table = archive.made(topic)
    if table.note.batch == 0:
        lease.check()
        table.append(files, ends)
    _demand(table, files, ends)
    for old in (f"topic={topic}", *(f"{name}/{topic}" for name in _FOLDERS), f"{EARLIER}/{topic}"):
        remove_below(archive.root, old)
    return TakenOver(topic, sum(each.rows for each in files), len(files))


def _demand(table: ArchiveTable, files: Sequence[WrittenFile], ends: Offsets) -> None:
    """Refuse to remove what is not in the table. Files may have been replaced by a compaction."""
    zero = Position(ZERO)
    short = [place for place, end in ends.items() if table.positions.get(place, zero).id < end.id]
    absent = {each.path for each in files} - table.held()
    if short or absent:
        lacks = f"ends before them in partition {short[0][1]}" if short else f"lacks {min(absent)}"
        raise Refused(
            f"{table.folder} {lacks}: it was not made of these manifests, or rows were deleted"
            " since, and all was kept; move the table away and take the manifests over again, or"
            " move away the manifests"
        )


def _linked(archive: Archive, topic: str, holder: _Manifest) -> Iterator[WrittenFile]:
    """The files of a manifest under their names in the table."""
    folder = archive.folder(topic)
    staged = f"_staging/{topic}/batch={holder.last}.g{holder.generation}/batch"
    for file in holder.files:
        name = f"{holder.last:010d}.g{holder.generation}-{file.path.rpartition('/')[2]}"
        path = f"{file_folder(file.date, file.partition)}/{name}"
        new = below(folder, path)
        new.parent.mkdir(parents=True, exist_ok=True)
        old = [below(archive.root, f"topic={topic}/batch={holder.last}", file.path)]
        old.append(below(archive.root, staged, file.path))
        source = next((each for each in old if each.exists()), None)
        try:
            if source is not None and not new.exists():
                os.link(source, new)
            size = new.stat().st_size
        except FileNotFoundError:
            raise ArchiveError(f"{old[0]} is missing") from None
        except OSError as error:
            raise ArchiveError(f"{source} cannot get a second name: {error.strerror}") from error
        yield file._replace(path=path, size=size)


def _ends(topic: str, manifests: Sequence[_Manifest]) -> Offsets:
    """Up to where each partition is archived. Raises ArchiveError for a gap."""
    found: dict[int, Position] = {}
    for each in manifests:
        for partition, (start, end) in each.ranges.items():
            if start > found.get(partition, Position(ZERO)).id and partition in found:
                raise ArchiveError(f"batch {each.last} of {topic}: a gap in partition {partition}")
            found[partition] = end
    return {(topic, partition): end for partition, end in found.items()}


def _current(archive: Archive, topic: str) -> list[_Manifest]:
    """The manifests that count, by batch: of two of the same batches the later generation."""
    folder = below(archive.root, EARLIER, topic)
    listed = [_read(path, topic) for path in folder.iterdir() if _MANIFEST.fullmatch(path.name)]
    chosen: dict[int, _Manifest] = {}
    for each in sorted(listed, key=lambda each: each.generation):
        chosen |= dict.fromkeys(range(each.first, each.last + 1), each)
    if sorted(chosen) != list(range(len(chosen))):
        raise ArchiveError(f"{folder}: no manifest holds some of the batches up to {max(chosen)}")
    found = list({each.last: each for _, each in sorted(chosen.items())}.values())
    for each in found:
        if any(chosen[number] is not each for number in range(each.first, each.last + 1)):
            raise ArchiveError(f"{folder}: the manifest of batch {each.last} counts only in part")
    return found


def _read(path: Path, topic: str) -> _Manifest:
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != 1 or found["topic"] != topic:
            raise ValueError(f"it is of {found['topic']!r}, format {found['format']}")
        return _Manifest(
            _whole(found["first"]),
            _whole(found["last"]),
            _whole(found["generation"]),
            {int(name): _range(each) for name, each in found["partitions"].items()},
            tuple(_file(each) for each in found["files"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArchiveError(f"{path} cannot be read: {error}") from error


def _range(found: Any) -> tuple[Id, Position]:
    passed = found["passed"]
    end = Position(read_id(found["end"]), None if passed is None else _whole(passed))
    return read_id(found["start"]), end


def _file(found: Any) -> WrittenFile:
    parts = _PATH.fullmatch(found["path"])
    if parts is None:
        raise ValueError(f"the path {found['path']!r} is not one of a file in its batch")
    bounds = (read_id(found["first"]), read_id(found["last"]))
    return WrittenFile(found["path"], parts[1], int(parts[2]), _whole(found["rows"]), 0, *bounds)


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a whole number from 0")
    return number
