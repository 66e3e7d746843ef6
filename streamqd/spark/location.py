"""Access the directories of archives and reports, on a disk or in an object store.

Object stores are accessed only with the client in deltalake, so that tables and all other files
share the same options, credentials and retries. In an object store, an object exists either
completely or not at all, and is durable once its writer is closed, so only files on disks need to
be flushed.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote

from streamqd.config.archive_store import is_secret
from streamqd.config.secrets import mask_passwords
from streamqd.errors import InvalidRequestError, RequestRefusedError, SparkError, StreamqdError
from streamqd.paths import join_parts, local_folder, store_url

if TYPE_CHECKING:
    from pyarrow.fs import PyFileSystem

LOG = "_delta_log"
# A commit creates an object, and must fail if the object already exists. S3 supports this through a
# conditional PUT.
_SAFE = {"aws_conditional_put": "etag", "aws_s3_allow_unsafe_rename": "false"}
# If the endpoint is not Amazon's, deltalake reads a credentials profile only when this option is
# set. The option has a cost: each client then also tries Amazon's metadata service, and on other
# hosts it takes time until this attempt fails.
_PROFILES = {"aws_force_credential_load": "true"}
_KEYS = {"aws_access_key_id", "access_key_id"}
_REGIONS = {"aws_region", "region", "aws_default_region", "default_region"}
_ENDPOINTS = {
    "aws_endpoint_url",
    "aws_endpoint_url_s3",
    "aws_endpoint",
    "endpoint_url",
    "endpoint",
}
_ENDPOINT = re.compile(r"https?://[^/?#\s]", re.IGNORECASE)
_CODE = re.compile(r"<?Code>(\w+)</Code>")
_SECRET_MIN = 6  # minimum characters of a masked value, as shorter ones occur in ordinary text
_ARROW = re.compile(r"\x1b\[[0-9;]*m|↳")
_BACKTRACE = re.compile(r"[0-9]+: ")


def one_line(error: Exception) -> str:
    """Return an error message of deltalake as one line, without its arrows and backtrace."""
    lines = [_ARROW.sub("", each).strip() for each in str(error).strip().splitlines()]
    said = itertools.takewhile(lambda each: not _BACKTRACE.match(each), lines)
    return ": ".join(each for each in said if each) or type(error).__name__


class Location(Protocol):
    """A directory of an archive or a report. Instances can be pickled, and hold no open files.

    Names are relative to the directory, as in `date=2026-11-21/partition=3/X.parquet`. All methods
    may raise OSError. They raise RequestRefusedError for a name that leads out of the directory.
    """

    @property
    def address(self) -> str:
        """The path or URL of the directory, as deltalake expects it."""

    @property
    def options(self) -> Mapping[str, str]:
        """The options for deltalake's client, which may contain credentials."""

    @property
    def repeats(self) -> bool:
        """True if the client sends a write again after a lost reply, so it may be applied twice."""

    def subfolder(self, *parts: str) -> Location:
        """Return a directory inside this one."""

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError if it does not exist."""

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file atomically and durably."""

    def remove(self, name: str) -> bool:
        """Remove a file. Return False if the name does not refer to a regular file."""

    def names(self) -> list[str]:
        """Return the names of all files and directories inside.

        The list is empty if the directory does not exist.
        """

    def tables(self) -> list[str]:
        """Return the names of the directories inside that contain a Delta table."""

    def has_table(self) -> bool:
        """Return True if the directory is a Delta table.

        A directory with an empty log is not one.
        """

    def make(self) -> None:
        """Create the directory if it does not exist."""

    def open_input(self, name: str) -> Any:
        """Open a file for pyarrow to read. The caller closes it."""

    def open_output(self, name: str) -> UnfinishedFile:
        """Create a file that pyarrow writes to."""

    def settle(self, names: Iterable[str]) -> None:
        """Flush these files and their directory entries to the disk.

        This does nothing in an object store, where written objects are already durable.
        """

    def settle_commit(self, number: int) -> None:
        """Flush a commit of this directory's table, and the commit's checkpoint if it has one."""

    def settle_new(self) -> None:
        """Flush this new directory and the two directories above it to the disk."""

    def describe_error(self, error: Exception) -> str:
        """Return the text of an error on one line, with any credentials removed."""

    def cause(self, error: Exception) -> Exception | None:
        """Return the error if its text can safely be shown as another error's cause, or None."""


class UnfinishedFile(Protocol):
    """A file that is being written."""

    @property
    def target(self) -> Any:
        """The path or the file object that pyarrow writes to."""

    def close(self) -> int:
        """Make the file durable after pyarrow has written it. Return its size in bytes."""


def location(named: str | Path | Location, options: Mapping[str, str] | None = None) -> Location:
    """Return the directory for a path or a URL, without accessing it.

    The options apply only to object stores. Raises InvalidRequestError for a URL or an endpoint
    that cannot be used.
    """
    if isinstance(named, DiskFolder | BucketFolder):
        return named
    url = store_url(str(named))
    if url is None:
        return DiskFolder(local_folder(str(named)).absolute())
    if not url.startswith("s3:"):
        return BucketFolder(url, dict(options or {}))
    given = {name.lower(): value for name, value in (options or {}).items()}
    around = {name.lower(): value for name, value in os.environ.items()}
    _check_endpoint(given if _ENDPOINTS & given.keys() else around)
    names = {*given, *around}
    profiles = {} if _KEYS & names and _REGIONS & names else _PROFILES
    return BucketFolder(url, {**profiles, **(options or {}), **_SAFE})


def _check_endpoint(named: Mapping[str, str]) -> None:
    """Raise InvalidRequestError for an endpoint that is not a URL.

    Otherwise, the client would fail with a Rust panic.
    """
    for name in sorted(_ENDPOINTS & named.keys()):
        if not _ENDPOINT.match(named[name]):
            raise InvalidRequestError(
                f"the option or variable {name} is not a URL; write it as in"
                " http://minio.internal:9000"
            )


def unusable_error(folder: Location, text: str) -> StreamqdError:
    """Return the error to raise for a directory that cannot be read or written.

    A wrong path is a mistake of the caller, so the request is refused. If an object store rejects a
    request, the command can be repeated, for example once expired credentials are renewed.
    """
    return SparkError(text) if isinstance(folder, BucketFolder) else RequestRefusedError(text)


_numbers = itertools.count(1)


def source_name(kind: str, folder: Location) -> str:
    """Return the name of the Spark data source for a directory.

    Within a process, the same arguments always return the same name.
    """
    return _source_name(kind, folder.address, tuple(sorted(folder.options.items())))


@functools.cache
def _source_name(kind: str, address: str, options: tuple[tuple[str, str], ...]) -> str:  # noqa: ARG001
    return f"{kind}_{next(_numbers)}"


# --- on a disk ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """A directory in a local file system or on NFS. `paths.join_parts` checks the names."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def address(self) -> str:
        return str(self.path)

    @property
    def options(self) -> Mapping[str, str]:
        return {}

    @property
    def repeats(self) -> bool:
        return False

    def subfolder(self, *parts: str) -> DiskFolder:
        return DiskFolder(join_parts(self.path, *parts))

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        new = self.path / f"{name}.tmp"
        try:
            with new.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path / name)
        finally:
            new.unlink(missing_ok=True)
        _flush(self.path)

    def remove(self, name: str) -> bool:
        try:
            path = join_parts(self.path, name)
            if not stat.S_ISREG(path.lstat().st_mode):
                return False
        # The path contains a link, or the file was already deleted.
        except (RequestRefusedError, FileNotFoundError):
            return False
        path.unlink(missing_ok=True)
        return True

    def names(self) -> list[str]:
        if not self.path.exists():
            return []
        return [each.name for each in self.path.iterdir()]

    def tables(self) -> list[str]:
        folders = [each.parent for each in self.path.glob(f"*/{LOG}")]
        return [each.name for each in folders if DiskFolder(each).has_table()]

    def has_table(self) -> bool:
        log = self.path / LOG
        return log.is_dir() and any(_is_version(each.name) for each in log.iterdir())

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def open_input(self, name: str) -> Any:
        return join_parts(self.path, name).open("rb")

    def open_output(self, name: str) -> DiskFile:
        path = join_parts(self.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return DiskFile(path)

    def settle(self, names: Iterable[str]) -> None:
        paths = [join_parts(self.path, each) for each in names]
        above = {each for path in paths for each in path.parents}
        for path in (*paths, *(each for each in above if each.is_relative_to(self.path))):
            _flush(path)

    def settle_commit(self, number: int) -> None:
        log = self.path / LOG
        _flush(log / f"{number:020d}.json")
        for name in (f"{number:020d}.checkpoint.parquet", "_last_checkpoint"):
            with suppress(FileNotFoundError):
                _flush(log / name)
        _flush(log)

    def settle_new(self) -> None:
        for each in (self.path, *self.path.parents[:2]):
            _flush(each)

    def describe_error(self, error: Exception) -> str:
        return getattr(error, "strerror", None) or one_line(error)

    def cause(self, error: Exception) -> Exception | None:
        return error


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A file on a disk that is being written."""

    target: Path

    def close(self) -> int:
        with self.target.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size


def _is_version(name: str) -> bool:
    """Return True if a file in a table's log shows that the table has a version."""
    number, dot, _ = name.partition(".")
    return name == "_last_checkpoint" or (bool(dot) and len(number) == 20 and number.isdecimal())


def _flush(path: Path) -> None:
    """Flush a file or a directory to the disk, because deltalake does not do so."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# --- in an object store ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """A directory in an object store: all objects whose names start with the path of the URL."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def address(self) -> str:
        return self.url

    @property
    def repeats(self) -> bool:
        return True

    def subfolder(self, *parts: str) -> BucketFolder:
        return BucketFolder(f"{self.url}/{_check_name(*parts)}", self.options)

    def read(self, name: str) -> bytes:
        with self.masked_errors(), self.system.open_input_file(_check_name(name)) as file:
            return bytes(file.read())

    def write(self, name: str, content: bytes) -> None:
        sink = self.open_output(name)
        sink.write(content)
        sink.close()

    def remove(self, name: str) -> bool:
        try:
            checked = _check_name(name)
        except RequestRefusedError:
            return False
        with self.masked_errors():
            [found] = self.system.get_file_info([checked])
            if not found.is_file:  # the store would report no error for a missing object
                return False
            self.system.delete_file(checked)
            return True

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector

        with self.masked_errors():
            found = self.system.get_file_info(FileSelector("", allow_not_found=True))
        names = [PurePosixPath(each.path).name for each in found]
        # Web consoles of object stores create a directory as an empty object. Its name is empty
        # here, so it is left out.
        return [each for each in names if each]

    def tables(self) -> list[str]:
        return [each for each in self.names() if self.subfolder(each).has_table()]

    def has_table(self) -> bool:
        from deltalake import DeltaTable

        with self.masked_errors():
            return DeltaTable.is_deltatable(self.url, dict(self.options))

    def make(self) -> None:
        pass

    def open_input(self, name: str) -> Any:
        with self.masked_errors():
            return self.system.open_input_file(_check_name(name))

    def open_output(self, name: str) -> BucketFile:
        with self.masked_errors():
            return BucketFile(self, self._client.create(_check_name(name)))

    def settle(self, names: Iterable[str]) -> None:
        pass

    def settle_commit(self, number: int) -> None:
        pass

    def settle_new(self) -> None:
        pass

    def describe_error(self, error: Exception) -> str:
        # The store's reply is dropped, because it can contain the key ID or the whole token.
        text, opening, answer = one_line(error).partition("<")
        if opening and (code := _CODE.search(answer)):
            text += code[1]
        named = {**os.environ, **self.options}
        values = {each for name, each in named.items() if is_secret(name) or "key" in name.lower()}
        for value in sorted(values, key=len, reverse=True):
            if len(value) >= _SECRET_MIN:
                text = text.replace(value, "***")
        return mask_passwords(text)  # passwords in the address of an endpoint or a proxy

    def cause(self, error: Exception) -> Exception | None:  # noqa: ARG002
        return None  # Spark writes the texts of all causes to its logs

    @contextmanager
    def masked_errors(self) -> Iterator[None]:
        """Replace errors of the client in a `with` block by one line without credentials."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(self.describe_error(error)) from None
        except OSError as error:
            raise OSError(self.describe_error(error)) from None

    @property
    def system(self) -> PyFileSystem:
        """A pyarrow file system for reading from the URL."""
        return self._client.system

    @property
    def _client(self) -> StoreClient:
        return _client(os.getpid(), self.url, tuple(sorted(self.options.items())))


class BucketFile:
    """An object that is being written. It does not exist until `close` is called."""

    closed = False

    def __init__(self, folder: BucketFolder, stream: Any) -> None:
        self._folder = folder
        self._stream = stream
        self._size = 0

    @property
    def target(self) -> BucketFile:
        """The file object that pyarrow writes to.

        This is not deltalake's own file object, because that one rejects pyarrow's buffers.
        """
        return self

    def write(self, content: Any) -> int:
        """Append bytes or a pyarrow buffer, and return the number of bytes."""
        written = memoryview(content).nbytes
        with self._folder.masked_errors():
            self._stream.write(bytes(content))
        self._size += written
        return written

    def flush(self) -> None:
        """Do nothing, because the client sends each part as soon as it is full."""

    def close(self) -> int:
        """Complete the object. Return its size in bytes."""
        if not self.closed:
            self.closed = True
            with self._folder.masked_errors():
                self._stream.close()
        return self._size


class StoreClient(NamedTuple):
    """deltalake's client for one URL: a pyarrow file system, and a function to write objects."""

    system: PyFileSystem
    create: Callable[[str], Any]  # function that opens the object with a name for writing


@functools.lru_cache(maxsize=64)
def _client(process: int, url: str, options: tuple[tuple[str, str], ...]) -> StoreClient:  # noqa: ARG001
    """Return the client for a URL.

    The process ID is part of the cache key, because a forked process must not use the client of its
    parent.
    """
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    class BucketHandler(DeltaStorageHandler):
        """A handler that bypasses deltalake's own file object, which rejects pyarrow's buffers."""

        def create(self, name: str) -> Any:
            return self._handler.open_output_stream(name)

    handler = BucketHandler(url, dict(options))
    return StoreClient(PyFileSystem(handler), handler.create)


def _check_name(*parts: str) -> str:
    joined = PurePosixPath(*parts)
    if not joined.parts or leads_outside(str(joined)):
        raise RequestRefusedError(f"{str(joined)!r} is not a name in an archive")
    return str(joined)


def leads_outside(name: str) -> bool:
    """Return True if a name leads out of its directory, possibly after `%2F` in it is decoded."""
    while True:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            return True
        name, before = unquote(name), name
        if name == before:
            return False
