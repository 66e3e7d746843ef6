"""An archive: a directory of Delta tables, with the entries of each topic and derived tables.

    <archive>/_archive.json                                      names the archive
    <archive>/tables/<topic>/_delta_log/                         the files that count, the position
    <archive>/tables/<topic>/date=<d>/partition=<p>/….parquet    entries
    <archive>/parsed/<topic>/                                    payloads of the entries as columns
    <archive>/quarantine/<topic>/                                payloads that do not fit the schema
    <archive>/dead_letters/<topic>/                              dead letters
    <archive>/history/<fleet>/                                   figures of each minute
    <archive>/results/<name>/                                    rows of standing queries

A commit adds the files of a batch and a note with the archived position of each partition. The next
batch starts at the newest note. A file that no commit lists is not part of the archive.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from streamqd.config.setting import NAME
from streamqd.errors import RequestRefusedError, SparkError
from streamqd.spark import need, offsets, rows
from streamqd.spark.location import LOG, Location, leads_out, location, unusable_error
from streamqd.spark.offsets import Offsets
from streamqd.spark.pipelines.parts import WrittenFile

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable
    from deltalake.transaction import AddAction

FORMAT = 2
NOTE = "streamqd"  # key of the note in a commit's metadata
# Key that marks a compaction of streamqd, unlike commits of other programs.
MARK = "streamqd.compaction"
COMMIT = "streamqd.commit"  # key of a random string with which a writer recognizes its own commit
_SIGN = "_archive.json"  # file that marks the directory as an archive and contains its ID
_APP = "streamqd"  # ID of the application transaction, whose version is the batch number
_CHECKPOINT = 50  # commits between two checkpoints of the log
_CONFIGURATION = {
    "delta.checkpointInterval": str(_CHECKPOINT),
    # Disable automatic cleanup. Only a commit with a note cleans the log, so the newest note always
    # stays.
    "delta.enableExpiredLogCleanup": "false",
    "delta.logRetentionDuration": "interval 7 days",
}
_MAPPING = "delta.columnMapping.mode"
_LONG_MAX = (1 << 63) - 1
# Features that do not change the files.
_HARMLESS = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
_AMBIGUOUS = re.compile(r"[%#?*\[\]{}\\]")  # characters with a meaning in URLs or name patterns


class ArchiveError(SparkError):
    """The archive does not match its tables, or cannot be written.

    The message contains the path.
    """


class ArchiveDamagedError(ArchiveError):
    """Rows that the archive has reported as stored are missing."""


class UnparsedFiles(NamedTuple):
    """Files that must be committed to a second table, whose last batch was `derived_batch`.

    If the files replace those of the table, all its other files are removed.
    """

    derived_batch: int
    files: tuple[WrittenFile, ...]
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class BatchNote:
    """The archived position of each partition, after `batch` commits of entries."""

    batch: int
    positions: Offsets
    owed: UnparsedFiles | None = None

    def text(self, topic: str) -> str:
        """Return the note as it is stored in a commit."""
        note = {"format": FORMAT, "topic": topic, "batch": self.batch}
        note |= {"to": offsets.to_json(self.positions)}
        return json.dumps(note if self.owed is None else note | {"owed": self.owed})


NOTHING = BatchNote(0, {})


class TableKind(NamedTuple):
    """The properties of a kind of tables."""

    # Must not contain `=`, because Polars reads every `NAME=VALUE` in a path as a column.
    folder: str
    partitioned: tuple[str, ...]  # partition columns: none, a date, or a date and a partition
    columns: Callable[[], pa.Schema]  # columns that each table has at least
    stats: str  # columns with bounds that let readers skip files, "" for the first columns

    @property
    def has_ids(self) -> bool:
        """True if the rows are entries or dead letters, with the IDs of a stream."""
        return "id_ms" in self.stats

    def properties(self) -> dict[str, str]:
        """Return the properties of its tables."""
        return {"delta.dataSkippingStatsColumns": self.stats} if self.stats else {}


def arrow_schema(*, dead: bool = False) -> pa.Schema:
    """Return the Arrow schema of a table of entries, or of dead letters."""
    import pyarrow as pa

    columns = rows.columns(dead=dead, headers=True, fields=True)
    stored = rows.arrow_schema([each for each in columns if each.name != "topic"])
    own = [each for each in stored if each.name != "partition"]
    return pa.schema([*own, pa.field("date", pa.date32()), stored.field("partition")])


@contextmanager
def opened_alone(folder: Location, path: str) -> Iterator[Any]:
    """Open a file of a table alone, so that the names of its directories add no columns.

    Converts errors inside to one sentence without credentials.
    """
    import pyarrow as pa

    try:
        with folder.open_input(path) as raw:
            yield raw
    except (OSError, pa.ArrowException) as error:
        raise ArchiveError(
            f"{folder}/{path} cannot be read: {folder.describe_error(error)}"
        ) from folder.cause(error)


RAW = TableKind("tables", ("date", "partition"), arrow_schema, "id_ms,timestamp")


class Archive:
    """An archive directory. A writer to one of its topics must hold the lease on that topic.

    Every write goes through `paths.below`, which raises RequestRefusedError if a topic's name would
    lead out of the directory.
    """

    def __init__(
        self,
        root: str | Path | Location,
        *,
        create: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Open the directory.

        Raises RequestRefusedError if it is not an archive and may not be created, and
        InvalidRequestError. Raises SparkError if an object store rejects a request.

        `options` are those of `[archive]`, for object stores.
        """
        need("deltalake", "msgspec", "pyarrow")
        self.root = location(root, options)
        odd = _AMBIGUOUS.search(str(self.root))
        if odd:
            raise RequestRefusedError(
                f"the path {self.root} contains {odd[0]}, which has a special meaning in Spark or"
                " Delta"
            )
        try:
            self.id = self._read_or_create_id(create=create)
        except FileNotFoundError:
            raise RequestRefusedError(
                f"{self.root} is not an archive; create it with `streamqd pipeline archive`"
            ) from None
        except OSError as error:
            raise unusable_error(
                self.root, f"{self.root} cannot be an archive: {self.root.describe_error(error)}"
            ) from self.root.cause(error)

    def _read_or_create_id(self, *, create: bool) -> str:
        """Return the ID of the archive, created if there is none.

        Raises RequestRefusedError, OSError.
        """
        try:
            content = self.root.read(_SIGN)
        except FileNotFoundError:
            if not create:
                raise
            _make_folder(self.root)
            if _holds_more_than(self.root, f"{_SIGN}.tmp"):
                raise RequestRefusedError(f"{self.root} is neither empty nor an archive") from None
            sign = json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}) + "\n"
            self.root.write(_SIGN, sign.encode())
            # Read the file again, because another run may have replaced it. If that run replaces it
            # later, the two runs have different leases, and the first commit of one of them is
            # refused.
            content = self.root.read(_SIGN)
        try:
            return str(json.loads(content)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise RequestRefusedError(f"{self.root}/{_SIGN} cannot be read: {error}") from error

    @property
    def lease_name(self) -> str:
        """The name of the lease for writing to one of its topics."""
        return f"archive:{self.id[:12]}"

    def topics(self) -> list[str]:
        """Return the topics with archived entries."""
        return self.names(RAW)

    def names(self, kind: TableKind) -> list[str]:
        """Return the names of the tables of a kind, which are usually names of topics."""
        with _translate_errors(self.root, "read"):
            found = self.root.subfolder(kind.folder).tables()
        return sorted(each for each in found if NAME.fullmatch(each))

    def folder(self, topic: str, kind: TableKind = RAW) -> Location:
        """Return the directory of a topic's table.

        Raises RequestRefusedError for an invalid name.
        """
        if not NAME.fullmatch(topic):
            raise RequestRefusedError(
                f"{topic!r} is not a valid name of a topic or table; use letters, digits, '_', '-'"
                " and '.'"
            )
        return self.root.subfolder(kind.folder, topic)

    def table(self, topic: str, *, create: bool = False) -> ArchiveTable | None:
        """Return the table of a topic, None when there is none.

        Raises RequestRefusedError, ArchiveError.
        """
        folder = self.folder(topic)
        if not create:
            return ArchiveTable(folder, topic) if _is_made(folder) else None
        _check_free(folder)
        if not _is_made(folder):
            with _translate_errors(folder, "written"):
                _create_table(folder, topic, RAW, arrow_schema())
        return ArchiveTable(folder, topic)

    def derived_table(
        self, name: str, kind: TableKind, columns: pa.Schema | None = None
    ) -> ArchiveTable | None:
        """Return a derived table, None if it does not exist. With `columns`, create a missing one.

        Raises RequestRefusedError, ArchiveError.
        """
        folder = self.folder(name, kind)
        if columns is not None and not _is_made(folder):
            _check_free(folder)
            with _translate_errors(folder, "written"):
                _create_table(folder, name, kind, columns)
        return ArchiveTable(folder, name, kind) if _is_made(folder) else None


class ArchiveTable:
    """The Delta table of a topic, in the version that was opened or last written.

    `append` protects against concurrent runs: if two start at the same version, one is refused.
    """

    def __init__(self, folder: Location, topic: str, kind: TableKind = RAW) -> None:
        """Open the table. Raises ArchiveError if it is damaged or does not belong to an archive."""
        from deltalake import DeltaTable

        self.folder = folder
        self.topic = topic
        self.kind = kind
        with _translate_errors(folder, "read"):
            self.delta: DeltaTable = DeltaTable(folder.address, storage_options=_options(folder))
            fields = _columns(self.delta.schema())
            metadata = self.delta.metadata()
            features = set(self.delta.protocol().reader_features or ()) - _HARMLESS
        # The property of older protocol versions.
        if metadata.configuration.get(_MAPPING, "none") != "none":
            features.add("columnMapping")
        if features:
            raise ArchiveError(
                f"another program added {', '.join(sorted(features))} to {folder}, which archives"
                " do not support; restore an earlier version, or move the table away"
            )
        partitioned = tuple(metadata.partition_columns)
        demanded = _columns(_delta_schema(kind.columns()))
        if not demanded <= fields or partitioned != kind.partitioned:
            raise ArchiveError(f"{folder} contains a table with other columns; move it away")
        self.note = self._newest_note()

    @property
    def positions(self) -> Offsets:
        """The position up to which each partition is archived."""
        return self.note.positions

    @property
    def version(self) -> int:
        """The opened version of the table."""
        return self.delta.version()

    def files(self, partition: int | None = None) -> list[WrittenFile]:
        """Return the files of the table, with bounds of the IDs of entries and dead letters.

        Only the first halves of the IDs are known. Raises ArchiveError, for example for a file
        outside the layout.
        """
        import pyarrow as pa

        with _translate_errors(self.folder, "read"):
            actions = pa.table(self.delta.get_add_actions(flatten=True))
        found: list[dict[str, Any]] = actions.to_pylist()
        files = []
        for each in found:
            if leads_out(each["path"]):
                raise ArchiveError(
                    f"{self.folder} lists the file {each['path'][:200]!r}, which is not in its"
                    " directory; restore an earlier version"
                )
            least = most = None
            if self.kind.has_ids:  # in other tables, it is a column of the schema or the query
                least, most = each.get("min.id_ms"), each.get("max.id_ms")
            files.append(
                WrittenFile(
                    each["path"],
                    *self.parse_partition(
                        {name: each[f"partition.{name}"] for name in self.partitioned}
                    ),
                    each["num_records"] or 0,
                    each["size_bytes"],
                    (least or 0, 0),
                    (_LONG_MAX if most is None else most, offsets.PART_MAX),
                )
            )
        return [each for each in files if partition is None or each.partition == partition]

    @property
    def partitioned(self) -> tuple[str, ...]:
        """The partition columns."""
        return self.kind.partitioned

    def parse_partition(self, values: Mapping[str, Any]) -> tuple[str, int]:
        """Return the date and partition of a file with these values, "" and 0 if it has none."""
        date, partition = (*(values[name] for name in self.partitioned), "", 0)[:2]
        return str(date), int(partition or 0)

    def values(self, date: str, partition: int) -> dict[str, str]:
        """Return the values of a file of this date and partition, for `parse_partition`."""
        return dict(zip(self.partitioned, (date, str(partition)), strict=False))

    def locate(self, file: WrittenFile) -> str:
        """Return the path or the URL of a file."""
        return f"{self.folder}/{file.path}"

    def verify(self, files: Iterable[WrittenFile]) -> None:
        """Check that every file exists with its rows. Raises ArchiveDamagedError."""
        import pyarrow as pa
        from pyarrow import parquet

        for file in files:
            path = self.locate(file)
            try:
                with self.folder.open_input(file.path) as opened:
                    found = parquet.read_metadata(opened).num_rows
            except FileNotFoundError:
                raise ArchiveDamagedError(f"{path} is missing") from None
            except (OSError, pa.ArrowException) as error:
                raise ArchiveDamagedError(
                    f"{path} cannot be read: {self.folder.describe_error(error)}"
                ) from self.folder.cause(error)
            if found != file.rows:
                raise ArchiveDamagedError(f"{path} has {found} rows, not {file.rows}")

    def settle(self, files: Iterable[WrittenFile]) -> None:
        """Verify files, and flush them to the disk."""
        listed = list(files)
        self.verify(listed)
        self.folder.settle(each.path for each in listed)

    def find_unnamed(self, grace: float) -> list[str]:
        """Return the names of all files that no version of the last `grace` seconds uses."""
        self.reload()
        with _translate_errors(self.folder, "read"):
            return self.delta.vacuum(
                retention_hours=math.ceil(grace / 3600),
                dry_run=True,
                enforce_retention_duration=False,
                full=True,
            )

    def commits(self, first: int = 0) -> Iterator[list[dict[str, Any]]]:
        """Yield the actions of each commit from version `first` on that is still in the log."""
        for number in range(first, self.version + 1):
            name = f"{LOG}/{number:020d}.json"
            try:
                lines = self.folder.read(name).decode().splitlines()
                yield [json.loads(each) for each in lines if each]
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise ArchiveError(
                    f"{self.folder}/{name} cannot be read: {self.folder.describe_error(error)}"
                ) from self.folder.cause(error)

    # --- writing ---

    def append(
        self,
        files: Sequence[WrittenFile],
        positions: Offsets,
        *,
        owed: UnparsedFiles | None = None,
        batch: int | None = None,
        of: tuple[str, int] | None = None,
        replace: bool = False,
        columns: pa.Schema | None = None,
    ) -> None:
        """Commit a batch: add these files, and set the archived positions.

        `owed` are files that must be committed to the second table next. `batch` is the number, by
        default one more than the last. `of` is a query and its batch number, for `last_batch_of`.
        With `replace`, all other files are removed from the table. With `columns`, the table is
        reset to these columns, without other files and positions. When this function returns, the
        commit has reached the disk. Raises RequestRefusedError if another run has committed a batch
        since the table was opened, ArchiveError.
        """
        from deltalake import PostCommitHookProperties

        self.settle(files)
        number = batch or self.next_batch
        known = self.positions if columns is None else {}
        new = BatchNote(number, known | positions, owed)
        mark = uuid.uuid4().hex
        cleans = number % _CHECKPOINT == 0
        with self._ignore_lost_reply(mark), self.changing():
            self.delta.create_write_transaction(
                [_action(file, self.values(file.date, file.partition)) for file in files],
                "append" if columns is None and not replace else "overwrite",
                self.delta.schema() if columns is None else _delta_schema(columns),
                list(self.partitioned),
                commit_properties=self._commit_properties(
                    new, mark, (_APP, number), *(() if of is None else (of,))
                ),
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=cleans),
            )
        if self.note != new:
            raise RequestRefusedError(
                f"another run wrote to {self.folder} at the same time; run the command again"
            )

    @contextmanager
    def _ignore_lost_reply(self, mark: str) -> Iterator[None]:
        """Ignore an error if the commit is in the table, which can happen with an object store.

        If the reply is lost, the client sends the commit again, and finds that the version exists.
        """
        try:
            yield
        except (RequestRefusedError, ArchiveError):
            if not (self.folder.repeats and self._has_commit(mark)):
                raise

    def _has_commit(self, mark: str) -> bool:
        with suppress(RequestRefusedError, ArchiveError):
            self.reload()
            with _translate_errors(self.folder, "read"):
                return any(each.get(COMMIT) == mark for each in self.delta.history(10))
        return False

    @property
    def next_batch(self) -> int:
        """The number of the next batch. No earlier batch had it, not even one that was undone."""
        return max(self.note.batch, self.last_batch_of(_APP)) + 1

    def last_batch_of(self, query: str) -> int:
        """Return the number of a query's last batch in the table, -1 for none."""
        with _translate_errors(self.folder, "read"):
            found = self.delta.transaction_version(query)
        return -1 if found is None else found

    def has_columns(self, columns: pa.Schema) -> bool:
        """Return True if the table has exactly these columns, in any order."""
        return _columns(self.delta.schema()) == _columns(_delta_schema(columns))

    def grow(self, columns: pa.Schema) -> None:
        """Add the columns that the table lacks, and set new comments.

        Raises RequestRefusedError for a column of another type.
        """
        from deltalake import Schema

        have = {each.name.lower(): each for each in self.delta.schema().fields}
        wanted = Schema.from_arrow(columns).fields
        for each in wanted:
            found = have.get(each.name.lower(), each)
            if found.name != each.name or found.type != each.type:
                raise RequestRefusedError(
                    f"{self.folder} has the column {found.name} as {_format_type(found)}, not"
                    f" {each.name} as {_format_type(each)}; columns can be added, but not changed,"
                    " so declare it as it was"
                )
        missing = [each for each in wanted if each.name.lower() not in have]
        if missing:
            with self.changing():
                self.delta.alter.add_columns(missing)
        for each in wanted:
            comment, found = each.metadata.get("comment"), have.get(each.name.lower(), each)
            if comment and found.metadata.get("comment") != comment:
                with self.changing():
                    self.delta.alter.set_column_metadata(each.name, {"comment": comment})

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Commit within this block. At its end, the commit is flushed to the disk and checked."""
        before = self.version
        with _translate_errors(self.folder, "written"):
            yield
        self.reload()
        with _translate_errors(self.folder, "written"):
            for number in range(before + 1, self.version + 1):
                self.folder.settle_commit(number)

    def reload(self) -> None:
        """Read the current version of the table."""
        with _translate_errors(self.folder, "read"):
            self.delta.update_incremental()
        self.note = self._newest_note()

    def _commit_properties(
        self, note: BatchNote, mark: str, *transactions: tuple[str, int]
    ) -> CommitProperties:
        from deltalake import CommitProperties, Transaction

        return CommitProperties(
            custom_metadata={NOTE: note.text(self.topic), COMMIT: mark},
            app_transactions=[Transaction(*each) for each in transactions],
        )

    def _newest_note(self) -> BatchNote:
        """Return the valid note. After a restore, that is the note of the restored version."""
        with _translate_errors(self.folder, "read"):
            for commit in self._effective_commits():
                if NOTE in commit:
                    return _note(commit[NOTE], self.topic)
        raise ArchiveError(
            f"{self.folder} contains a table that no archive of {self.topic} wrote; move it away"
        )

    def _effective_commits(self) -> Iterator[dict[str, Any]]:
        """Yield the commits that are in effect, newest first."""
        version, before_ms = self.delta.version(), _LONG_MAX
        for most in (4, 100, None):  # usually, only compactions follow the newest note
            for commit in self.delta.history(most):
                if commit["version"] > version or (commit.get("timestamp") or 0) > before_ms:
                    continue
                version = commit["version"] - 1
                if commit.get("operation") == "RESTORE":
                    low, low_ms = _parse_restore(commit)
                    version, before_ms = min(version, low), min(before_ms, low_ms)
                else:
                    yield commit


def _parse_restore(commit: dict[str, Any]) -> tuple[int, int]:
    """Return the version and the time (unix ms) up to which commits are in effect after a restore.

    delta-rs writes a `version` or a `datetime` (unix ms). Spark writes a `version` or a `timestamp`
    (a string), and null for the other. Raises ArchiveError for anything else.
    """
    try:
        given = commit["operationParameters"]
        named = {name: str(each).strip('"') for name, each in given.items() if each is not None}
        match {name: each for name, each in named.items() if each != "null"}:
            case {"version": text}:
                return int(text), _LONG_MAX
            case {"datetime": text}:
                return _LONG_MAX, int(text)
            case {"timestamp": text}:
                moment = dt.datetime.fromisoformat(text)
                if moment.tzinfo is not None:
                    return _LONG_MAX, int(moment.timestamp() * 1000)
        raise ValueError(f"it has neither a version nor a time with a time zone: {given}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ArchiveError(
            f"the restore in version {commit['version']} of the table cannot be read: {error};"
            " restore that version by its number, as in DESCRIBE HISTORY"
        ) from error


def _check_free(folder: Location) -> None:
    """Raise RequestRefusedError for a directory in which a table cannot be created."""
    with _translate_errors(folder, "read"):
        free = folder.has_table() or not _holds_more_than(folder, LOG)
    if not free:
        raise RequestRefusedError(f"{folder} is neither empty nor a table; move it away")


def _create_table(folder: Location, topic: str, kind: TableKind, columns: pa.Schema) -> None:
    from deltalake import CommitProperties, DeltaTable
    from deltalake.exceptions import DeltaError

    folder.make()
    try:
        DeltaTable.create(
            folder.address,
            _delta_schema(columns),
            partition_by=list(kind.partitioned),
            name=topic,
            configuration=_CONFIGURATION | kind.properties(),
            storage_options=_options(folder),
            # The later of two creations must fail. Otherwise, its note without positions would be
            # the newest.
            commit_properties=CommitProperties(
                max_commit_retries=0, custom_metadata={NOTE: NOTHING.text(topic)}
            ),
        )
    except DeltaError:
        if not folder.has_table():  # no other run created it meanwhile
            raise
    folder.settle_commit(0)
    folder.settle_new()


def _make_folder(folder: Location) -> None:
    try:
        folder.make()
    except FileNotFoundError as error:  # for example below /proc
        raise RequestRefusedError(f"{folder} cannot be created: {error.strerror}") from error


def _is_made(folder: Location) -> bool:
    """Return True if there is a table. A run killed while creating one leaves an empty log."""
    with _translate_errors(folder, "read"):
        return folder.has_table()


def _holds_more_than(folder: Location, name: str) -> bool:
    return any(each != name for each in folder.names())


def _options(folder: Location) -> dict[str, str] | None:
    return dict(folder.options) or None


def _format_type(field: Any) -> str:
    """Return the type of a column in words."""
    return str(field.type.to_json()).strip('"')


def _columns(schema: Any) -> set[str]:
    """Return the names and types as strings, for comparison."""
    return {f"{each.name} {each.type.to_json()}" for each in schema.fields}


def _delta_schema(columns: pa.Schema) -> Any:
    from deltalake import Schema

    return Schema.from_arrow(columns)


def _action(file: WrittenFile, values: Mapping[str, str]) -> AddAction:
    from deltalake.transaction import AddAction

    stats: dict[str, Any] = {"numRecords": file.rows}
    if file.bounds:
        stats |= json.loads(file.bounds)
    if file.last != offsets.ZERO:
        bounds = [min(each[0], _LONG_MAX) for each in (file.first, file.last)]
        low, high = ({"id_ms": each} for each in bounds)
        stats |= {"minValues": low, "maxValues": high, "nullCount": {"id_ms": 0}}
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values=values,
        modification_time=round(time.time() * 1000),
        data_change=True,
        stats=json.dumps(stats),
    )


def _note(text: Any, topic: str) -> BatchNote:
    """Parse a note. Raises ArchiveError if it is not a note of this topic."""
    try:
        found = json.loads(text)
        if found["format"] != FORMAT or found["topic"] != topic:
            raise ValueError(f"its topic is {found['topic']!r}, its format {found['format']}")
        positions = offsets.from_json(found["to"])
        if any(name != topic for name, _ in positions):
            raise ValueError("it lists several topics")
        return BatchNote(int(found["batch"]), positions, _parse_owed(found.get("owed")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArchiveError(
            f"the record of the last batch of {topic} cannot be read: {error}"
        ) from error


def _parse_owed(found: Any) -> UnparsedFiles | None:
    if found is None:
        return None
    behind, listed, *more = found
    files = []
    for path, date, partition, count, size, *_ in listed:
        files.append(
            WrittenFile(path, date, partition, int(count), int(size), offsets.ZERO, offsets.ZERO)
        )
    return UnparsedFiles(int(behind), tuple(files), replaces=more == [True])


@contextmanager
def _translate_errors(folder: Location, verb: str) -> Iterator[None]:
    """Convert exceptions of deltalake to one sentence, without credentials."""
    from deltalake.exceptions import CommitFailedError, DeltaError

    try:
        yield
    except CommitFailedError as error:
        text = f"another run wrote to {folder} at the same time; run the command again"
        raise RequestRefusedError(text) from folder.cause(error)
    except (DeltaError, OSError) as error:
        text = folder.describe_error(error)
        raise ArchiveError(f"{folder} cannot be {verb}: {text}") from folder.cause(error)
