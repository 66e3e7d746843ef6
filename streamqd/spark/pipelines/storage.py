"""Read and write an archive, a directory of Delta tables with the entries of topics.

    <archive>/_archive.json                                      the ID of the archive
    <archive>/tables/<topic>/_delta_log/                         the list of files, the position
    <archive>/tables/<topic>/date=<d>/partition=<p>/….parquet    entries
    <archive>/parsed/<topic>/                                    payloads of the entries as columns
    <archive>/quarantine/<topic>/                                payloads that do not fit the schema
    <archive>/dead_letters/<topic>/                              dead letters
    <archive>/history/<fleet>/                                   figures for each minute
    <archive>/results/<name>/                                    rows of standing queries

A commit adds the files of a batch, and a note with the archived position of each partition. The
next batch starts at the position in the newest note. A file that no commit lists is not part of the
archive.
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
from streamqd.spark.location import LOG, Location, leads_outside, location, unusable_error
from streamqd.spark.offsets import Offsets
from streamqd.spark.pipelines.parts import WrittenFile

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable
    from deltalake.transaction import AddAction

FORMAT = 2
NOTE = "streamqd"  # key of the note in a commit's metadata
# Key that distinguishes compactions by streamqd from those of other programs.
MARK = "streamqd.compaction"
COMMIT = "streamqd.commit"  # key of a random string by which a writer recognizes its own commit
_SIGN = "_archive.json"  # name of the file that marks an archive and contains its ID
_APP = "streamqd"  # ID of the application transaction whose version is the batch number
_CHECKPOINT = 50  # commits between two checkpoints of the log
_CONFIGURATION = {
    "delta.checkpointInterval": str(_CHECKPOINT),
    # Automatic cleanup is disabled, so that only a commit with a note cleans the log. The newest
    # note is therefore never cleaned up.
    "delta.enableExpiredLogCleanup": "false",
    "delta.logRetentionDuration": "interval 7 days",
}
_MAPPING = "delta.columnMapping.mode"
_LONG_MAX = (1 << 63) - 1
# Table features that leave the data files unchanged, so that this package can still use the table.
_HARMLESS = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
_AMBIGUOUS = re.compile(r"[%#?*\[\]{}\\]")  # characters with a meaning in URLs or name patterns


class ArchiveError(SparkError):
    """The archive is inconsistent, or cannot be read or written.

    The message contains the path.
    """


class ArchiveDamagedError(ArchiveError):
    """Rows are missing that the archive has already reported as stored."""


class UnparsedFiles(NamedTuple):
    """Files that were written for a second table and still have to be committed to it.

    `derived_batch` is the last batch of the second table before these files are committed to it. If
    `replaces` is True, the commit also removes all other files from the second table.
    """

    derived_batch: int
    files: tuple[WrittenFile, ...]
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class BatchNote:
    """The note in a commit: the batch number, and the archived position of each partition.

    `owed` contains the files that must be committed to a second table next, or is None if there are
    none.
    """

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
    """The properties that all tables of one kind share."""

    # The name must not contain `=`, because Polars reads each `NAME=VALUE` in a path as a column.
    folder: str
    partitioned: tuple[str, ...]  # partition columns: none, a date, or a date and a partition
    columns: Callable[[], pa.Schema]  # columns that every table must have
    stats: str  # columns whose bounds readers use to skip files, or "" for the first columns

    @property
    def has_ids(self) -> bool:
        """True if the rows have stream IDs, which means that they are entries or dead letters."""
        return "id_ms" in self.stats

    def properties(self) -> dict[str, str]:
        """Return the Delta properties of tables of this kind."""
        return {"delta.dataSkippingStatsColumns": self.stats} if self.stats else {}


def arrow_schema(*, dead: bool = False) -> pa.Schema:
    """Return the Arrow schema of a table with entries, or with dead letters if `dead` is True."""
    import pyarrow as pa

    columns = rows.columns(dead=dead, headers=True, fields=True)
    stored = rows.arrow_schema([each for each in columns if each.name != "topic"])
    own = [each for each in stored if each.name != "partition"]
    return pa.schema([*own, pa.field("date", pa.date32()), stored.field("partition")])


@contextmanager
def opened_alone(folder: Location, path: str) -> Iterator[Any]:
    """Open a single file of a table.

    A file opened in this way has only its own columns, while a path would add columns named in its
    directories. Within the block, errors of pyarrow and of the file system become an ArchiveError,
    whose message is one sentence without credentials.
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
    """An archive directory.

    A run must hold the lease on a topic before it writes to the topic's tables.

    Each path of a table is checked: if a name would lead out of the directory, RequestRefusedError
    is raised.
    """

    def __init__(
        self,
        root: str | Path | Location,
        *,
        create: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Open the directory. If `create` is True and the directory is empty, make it an archive.

        For an object store, `options` contains the client options from `[archive]`.

        Raises RequestRefusedError if the directory is not an archive, InvalidRequestError if the
        options are invalid, and SparkError if an object store rejects a request.
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
        """Return the ID of the archive. If it has none, create one or raise FileNotFoundError.

        Raises RequestRefusedError or OSError if the ID cannot be read or created.
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
            # Another run may have replaced the file in the meantime, so it is read again. If that
            # run replaces it only after this read, the two runs use different IDs and therefore
            # different leases. The first commit of one of them is then refused.
            content = self.root.read(_SIGN)
        try:
            return str(json.loads(content)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise RequestRefusedError(f"{self.root}/{_SIGN} cannot be read: {error}") from error

    @property
    def lease_name(self) -> str:
        """The name of the lease that a run must hold while it writes to a topic in this archive."""
        return f"archive:{self.id[:12]}"

    def topics(self) -> list[str]:
        """Return the names of the topics that have a table of entries."""
        return self.names(RAW)

    def names(self, kind: TableKind) -> list[str]:
        """Return the names of all tables of one kind. Most tables are named after a topic."""
        with _translate_errors(self.root, "read"):
            found = self.root.subfolder(kind.folder).tables()
        return sorted(each for each in found if NAME.fullmatch(each))

    def folder(self, topic: str, kind: TableKind = RAW) -> Location:
        """Return the directory of a topic's table, which may not exist yet.

        Raises RequestRefusedError for an invalid name.
        """
        if not NAME.fullmatch(topic):
            raise RequestRefusedError(
                f"{topic!r} is not a valid name of a topic or table; use letters, digits, '_', '-'"
                " and '.'"
            )
        return self.root.subfolder(kind.folder, topic)

    def table(self, topic: str, *, create: bool = False) -> ArchiveTable | None:
        """Return the table with the entries of a topic, or None if there is none.

        If `create` is True, a missing table is created. Raises RequestRefusedError or ArchiveError
        if the table cannot be opened or created.
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
        """Return a derived table, or None if there is none.

        If `columns` is given, a missing table is created with these columns. Raises
        RequestRefusedError or ArchiveError if the table cannot be opened or created.
        """
        folder = self.folder(name, kind)
        if columns is not None and not _is_made(folder):
            _check_free(folder)
            with _translate_errors(folder, "written"):
                _create_table(folder, name, kind, columns)
        return ArchiveTable(folder, name, kind) if _is_made(folder) else None


class ArchiveTable:
    """The Delta table of a topic, in the version that this object opened or last wrote.

    Concurrent runs cannot overwrite each other's batches: if two runs start from the same version,
    `append` refuses the batch of the run that commits later.
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
        # In older protocol versions, column mapping is a table property and not a table feature.
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
        """The version of the table that this object has opened or written last."""
        return self.delta.version()

    def files(self, partition: int | None = None) -> list[WrittenFile]:
        """Return the files of the table.

        For entries and dead letters, each file's first and last ID are known only to the
        millisecond. Raises ArchiveError if the list cannot be used, for example if a file is
        outside the directory.
        """
        import pyarrow as pa

        with _translate_errors(self.folder, "read"):
            actions = pa.table(self.delta.get_add_actions(flatten=True))
        found: list[dict[str, Any]] = actions.to_pylist()
        files = []
        for each in found:
            if leads_outside(each["path"]):
                raise ArchiveError(
                    f"{self.folder} lists the file {each['path'][:200]!r}, which is not in its"
                    " directory; restore an earlier version"
                )
            least = most = None
            if self.kind.has_ids:  # elsewhere, `id_ms` may be a column of the user's own
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
        """The names of the partition columns."""
        return self.kind.partitioned

    def parse_partition(self, values: Mapping[str, Any]) -> tuple[str, int]:
        """Return the date and the partition from the partition values of a file.

        If the table has no such partition column, the date is "" and the partition is 0.
        """
        date, partition = (*(values[name] for name in self.partitioned), "", 0)[:2]
        return str(date), int(partition or 0)

    def values(self, date: str, partition: int) -> dict[str, str]:
        """Return the partition values of a file with this date and partition.

        This is the reverse of `parse_partition`.
        """
        return dict(zip(self.partitioned, (date, str(partition)), strict=False))

    def locate(self, file: WrittenFile) -> str:
        """Return the path or the URL of a file."""
        return f"{self.folder}/{file.path}"

    def verify(self, files: Iterable[WrittenFile]) -> None:
        """Raise ArchiveDamagedError unless each file exists and has as many rows as recorded."""
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
        """Verify these files and flush them to the disk.

        Raises ArchiveDamagedError if one is damaged.
        """
        listed = list(files)
        self.verify(listed)
        self.folder.settle(each.path for each in listed)

    def find_unnamed(self, grace: float) -> list[str]:
        """Return the names of all files that no version of the last `grace` seconds contains."""
        self.reload()
        with _translate_errors(self.folder, "read"):
            return self.delta.vacuum(
                retention_hours=math.ceil(grace / 3600),
                dry_run=True,
                enforce_retention_duration=False,
                full=True,
            )

    def commits(self, first: int = 0) -> Iterator[list[dict[str, Any]]]:
        """Yield the actions of each commit that is still in the log, from version `first` on.

        Raises ArchiveError if a commit cannot be read.
        """
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

        When this method returns, the commit has reached the disk.

        - `owed` contains files that must be committed to a second table next.
        - `batch` is the batch number. It defaults to the next number.
        - `of` contains the name of a query and the number of its batch, which `last_batch` then
          returns.
        - `replace` removes all other files from the table.
        - `columns` resets the table to these columns, and removes all other files and positions.

        Raises RequestRefusedError if another run has committed a batch since the table was opened,
        and ArchiveError if the table cannot be written.
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
        """Ignore an error in the block if the table contains the commit anyway.

        This can happen in an object store: if a reply is lost, the client sends the commit again,
        and then finds that this version already exists.
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
        """The number of the next batch.

        No batch has had it before, not even one that was undone.
        """
        return max(self.note.batch, self.last_batch(_APP)) + 1

    def last_batch(self, query: str) -> int:
        """Return the number of a query's last batch in the table, or -1 if there is none."""
        with _translate_errors(self.folder, "read"):
            found = self.delta.transaction_version(query)
        return -1 if found is None else found

    def has_columns(self, columns: pa.Schema) -> bool:
        """Return True if the table has exactly these columns, in any order."""
        return _columns(self.delta.schema()) == _columns(_delta_schema(columns))

    def grow(self, columns: pa.Schema) -> None:
        """Add the columns that the table lacks, and update the comments of columns.

        Raises RequestRefusedError if the table has a column with another type, or with a name that
        differs in case.
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
        """Use this as a `with` block around commits.

        At its end, reload the table and flush the commits.
        """
        before = self.version
        with _translate_errors(self.folder, "written"):
            yield
        self.reload()
        with _translate_errors(self.folder, "written"):
            for number in range(before + 1, self.version + 1):
                self.folder.settle_commit(number)

    def reload(self) -> None:
        """Switch to the current version of the table. Raises ArchiveError if it cannot be read."""
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
        """Return the note of the newest commit that is in effect.

        If the table was restored to an earlier version, this is the note of that version. Raises
        ArchiveError if no commit has a note.
        """
        with _translate_errors(self.folder, "read"):
            for commit in self._effective_commits():
                if NOTE in commit:
                    return _note(commit[NOTE], self.topic)
        raise ArchiveError(
            f"{self.folder} contains a table that no archive of {self.topic} wrote; move it away"
        )

    def _effective_commits(self) -> Iterator[dict[str, Any]]:
        """Yield the commits that no restore has undone, newest first."""
        version, before_ms = self.delta.version(), _LONG_MAX
        for most in (4, 100, None):  # usually, only compactions are newer than the newest note
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
    """Return the version and the time (Unix ms) up to which commits are in effect after a restore.

    A restore has one of these, and the other one is returned as the largest integer. delta-rs
    writes either a `version` or a `datetime` (Unix ms). Spark writes either a `version` or a
    `timestamp` (a string), and sets the other one to null. Raises ArchiveError for anything else.
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
    """Raise RequestRefusedError for a directory that is neither empty nor a table."""
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
            # If two runs create the table, the later creation must fail. Its note has no positions
            # and would otherwise replace the note of a batch that the other run has already
            # committed.
            commit_properties=CommitProperties(
                max_commit_retries=0, custom_metadata={NOTE: NOTHING.text(topic)}
            ),
        )
    except DeltaError:
        if not folder.has_table():  # no other run created it at the same time
            raise
    folder.settle_commit(0)
    folder.settle_new()


def _make_folder(folder: Location) -> None:
    try:
        folder.make()
    except FileNotFoundError as error:  # for example below /proc
        raise RequestRefusedError(f"{folder} cannot be created: {error.strerror}") from error


def _is_made(folder: Location) -> bool:
    """Return True if the directory contains a table.

    A run that is killed while it creates a table leaves an empty log, which does not count as a
    table.
    """
    with _translate_errors(folder, "read"):
        return folder.has_table()


def _holds_more_than(folder: Location, name: str) -> bool:
    return any(each != name for each in folder.names())


def _options(folder: Location) -> dict[str, str] | None:
    return dict(folder.options) or None


def _format_type(field: Any) -> str:
    """Return the type of a column as it is shown in error messages."""
    return str(field.type.to_json()).strip('"')


def _columns(schema: Any) -> set[str]:
    """Return the names and types of columns as strings that can be compared."""
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
    """Convert exceptions of deltalake to ArchiveError or RequestRefusedError.

    The message of the new error is one sentence without credentials.
    """
    from deltalake.exceptions import CommitFailedError, DeltaError

    try:
        yield
    except CommitFailedError as error:
        text = f"another run wrote to {folder} at the same time; run the command again"
        raise RequestRefusedError(text) from folder.cause(error)
    except (DeltaError, OSError) as error:
        text = folder.describe_error(error)
        raise ArchiveError(f"{folder} cannot be {verb}: {text}") from folder.cause(error)
