"""Read from Redis for views: in bounded pages, from several partitions, and despite invalid values.

The size of a reply never depends on the amount of data, because a pipeline has at most BATCH
commands and a page has at most PAGE_MAX entries with payloads. Each view reads through one
`ViewReader`. It treats invalid values as missing and records them in its `rows`, which the view
then shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

from streamqd.errors import (
    ContractError,
    InvalidRequestError,
    InvalidValueError,
    RedisResponseError,
    RefusalKind,
    RequestRefusedError,
)
from streamqd.model import Assignment
from streamqd.store import leases, tracing, untrusted
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.leases import LeaseView
from streamqd.store.replies import check_valid, require_all
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

SEQ_MAX = (1 << 64) - 1  # largest second part of an ID
LAST_ID = b"%d-%d" % (SEQ_MAX, SEQ_MAX)  # highest possible ID, which any client may write
PAGE_MAX = 64  # entries with bodies in one reply
BATCH = 256  # commands in one pipeline
_STREAMQD_FORMAT = "a value in the format of streamqd"
# If the server refuses a command for one of these reasons, it would refuse any other command too.
_SERVER_REFUSALS = (RefusalKind.NOT_READY, RefusalKind.BUSY, RefusalKind.FULL, RefusalKind.LOGIN)


class Id(NamedTuple):
    """An entry ID. IDs compare in the order of the stream."""

    ms: int
    seq: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"

    def before(self) -> Id:
        """Return the greatest ID before this one, or 0-0 for 0-0.

        The position of a group is the last ID that it has read. To make a group read an entry next,
        set its position to the ID before that entry.
        """
        if self.seq:
            return Id(self.ms, self.seq - 1)
        return Id(self.ms - 1, SEQ_MAX) if self.ms else self


class Place(NamedTuple):
    """The place of an entry in a topic, written `PARTITION:ms-seq`."""

    partition: int
    id: Id

    def __str__(self) -> str:
        return f"{self.partition}:{self.id}"


class Entry(NamedTuple):
    """A stream entry as it was read."""

    partition: int
    id: Id
    fields: dict[bytes, bytes]

    @property
    def place(self) -> Place:
        """The partition and the ID."""
        return Place(self.partition, self.id)

    @property
    def headers(self) -> dict[str, str] | None:
        """The headers, or None if they are not a JSON object."""
        return parse_headers(self.fields)


def parse_headers(fields: Mapping[bytes, bytes]) -> dict[str, str] | None:
    """Return the headers of a message, or None if they are not a JSON object."""
    try:
        found: Any = json.loads(fields.get(b"headers", b"{}"))
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None


def read_id(raw: bytes | str) -> Id:
    """Parse `ms-seq`. Raises ValueError for any other string."""
    text = raw.decode() if isinstance(raw, bytes) else raw
    ms, dash, seq = text.partition("-")
    if not (dash and ms.isascii() and ms.isdigit() and seq.isascii() and seq.isdigit()):
        raise ValueError(f"{text!r} is not an id such as 1700000000000-0")
    found = Id(int(ms), int(seq))
    if max(found) > SEQ_MAX:
        raise ValueError(f"{text!r} is not an id, because its numbers are too large")
    return found


def read_place(text: str, partitions: int | None = None) -> Place:
    """Parse `PARTITION:ms-seq`.

    Raises InvalidRequestError for any other string, and RequestRefusedError if the partition does
    not exist.
    """
    number, colon, rest = text.partition(":")
    try:
        if not (colon and number.isascii() and number.isdigit()):
            raise ValueError(f"{text!r} is not an id such as 3:1700000000000-0")
        place = Place(int(number), read_id(rest))
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    if partitions is not None and place.partition >= partitions:
        raise RequestRefusedError(
            f"partition {place.partition} not found (partitions are numbered 0 to {partitions - 1})"
        )
    return place


def pairs(flat: Sequence[bytes] | None) -> dict[bytes, Any]:
    """Return alternating names and values as a dict, or {} if the reply is missing."""
    return dict(zip(flat[::2], flat[1::2], strict=True)) if flat else {}


def last_id(info: Sequence[Any] | None) -> str:
    """Return the last ID of a stream from XINFO STREAM, or 0-0 if the stream does not exist."""
    found: bytes = pairs(info).get(b"last-generated-id", b"0-0")
    return found.decode()


def server_unix_ms(link: Connection) -> int:
    """Return the time on the server's clock, in Unix milliseconds."""
    seconds, micros = link.execute("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def _raise_error(error: RedisResponseError, command: Sequence[Any]) -> None:
    if error.code == "WRONGTYPE":
        raise _mistyped_error(command_key(command)) from error
    raise error


def ask(
    store: Store,
    commands: Sequence[Sequence[Any]],
    *,
    batch: int = BATCH,
    refused: Callable[[RedisResponseError, Sequence[Any]], None] = _raise_error,
) -> list[Any]:
    """Run read commands in pipelines of `batch` commands. The result for a missing key is None.

    If the server refuses a command, `refused` is called with the error and the command. If
    `refused` raises nothing, the result of the command is None. By default, InvalidValueError is
    raised for a key of the wrong type, and RedisResponseError for any other error.
    """
    replies: list[Any] = []
    for start in range(0, len(commands), batch):
        some = commands[start : start + batch]
        for command, reply in zip(some, store.pipeline(some), strict=True):
            if isinstance(reply, RedisResponseError):
                if "no such key" not in str(reply) and reply.kind is not RefusalKind.NO_GROUP:
                    refused(reply, command)
                reply = None
            replies.append(reply)
    return replies


def command_key(command: Sequence[Any]) -> str:
    """Return the key of a read command."""
    at = 2 if str(command[0]) in ("XINFO", "MEMORY") else 1
    return str(command[at]) if len(command) > at else str(command[0])


def _command_name(command: Sequence[Any]) -> str:
    """Return the name of a command, with its subcommand if it has one."""
    name = str(command[0])
    return f"{name} {command[1]}" if name in ("CONFIG", "SLOWLOG", "XINFO") else name


def _mistyped_error(key: str) -> InvalidValueError:
    return InvalidValueError(key, "", "of another type", _STREAMQD_FORMAT)


def read_backwards(
    store: Store, partition: int, stream: str, *, upper: str = "+", lower: str = "-", size: int
) -> Iterator[Entry]:
    """Yield the entries of a stream from `upper` to `lower`, newest first, `size` at a time."""
    more = True
    while more:
        page, more = _page(store, stream, upper, lower, size, newest=True)
        for raw_id, raw_fields in page:
            yield Entry(partition, read_id(raw_id), pairs(raw_fields))
            upper = f"({raw_id.decode()}"


def read_forwards(
    store: Store, stream: str, *, after: Id | None = None, until: Id | None = None, size: int
) -> Iterator[list[tuple[Id, dict[bytes, bytes]]]]:
    """Yield the entries that follow `after`, up to and including `until`, in pages, oldest first.

    A page has at most `size` entries. It ends earlier after the entry with which it reaches 512
    KiB.
    """
    lower = "-" if after is None else range_after(str(after).encode())
    upper = "+" if until is None else str(until)
    more = bool(lower)
    while more:
        page, more = _page(store, stream, lower, upper, size, newest=False)
        if page:
            lower = f"({page[-1][0].decode()}"
            yield [(read_id(raw_id), pairs(fields)) for raw_id, fields in page]


def range_after(raw_id: bytes) -> str:
    """Return the start of a range that follows an ID, or '' if there is no higher ID."""
    return "" if raw_id == LAST_ID else f"({raw_id.decode()}"


def _page(
    store: Store, stream: str, first: str, last: str, size: int, *, newest: bool
) -> tuple[list[Any], bool]:
    """Return the entries of a page, and True if there may be more after it."""
    try:
        entries, more = store.run(tracing.page(stream, first, last, size, newest=newest)).values
    except RedisResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        raise _mistyped_error(stream) from error
    return entries, bool(more)


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value in Redis that is not valid for its key and field.

    `field` is '' if the whole key is invalid. `found` is the value in printable form, or the
    server's error. `wanted` describes a valid value.
    """

    key: str
    field: str
    found: str
    wanted: str

    def __str__(self) -> str:
        where = f"{self.field} of {self.key}" if self.field else self.key
        return f"{where} cannot be read: it is {self.found} and not {self.wanted}"


class ViewReader:
    """Reads from Redis for one view, and records each invalid value once.

    An invalid value is treated as missing. A tolerant reader also continues if the server rejects a
    command. `forbidden` contains the commands that the Redis user may not run.
    """

    def __init__(self, store: Store, *, tolerant: bool = False) -> None:
        self.store = store
        self.forbidden: set[str] = set()
        self._rows: dict[tuple[str, str, str], Unreadable] = {}
        self._tolerant = tolerant

    @property
    def keys(self) -> Keys:
        """The names of the keys."""
        return self.store.keys

    @property
    def rows(self) -> list[Unreadable]:
        """The invalid values that were found, sorted by key and field."""
        return [self._rows[each] for each in sorted(self._rows)]

    def for_store(self, store: Store) -> ViewReader:
        """Return a reader for another store that records invalid values in this reader."""
        other = copy(self)
        other.store = store
        return other

    def ask(self, commands: Sequence[Sequence[Any]], *, batch: int = BATCH) -> list[Any]:
        """Run read commands in pipelines of `batch` commands.

        The result of a command is None if its key is missing or invalid.
        """
        return ask(self.store, commands, batch=batch, refused=self._refused_command)

    def measure(self, calls: Sequence[Call]) -> list[Reply | None]:
        """Run read scripts in bounded pipelines.

        A result is None if a key or the reply is invalid.
        """
        replies: list[Reply | None] = []
        for call, reply in _run_in_batches(self.store, calls):
            if isinstance(reply, Reply):
                replies.append(reply)
                continue
            replies.append(None)
            if isinstance(reply, ContractError):
                self.add_row(_invalid(call.key, reply))
            elif reply.code != "WRONGTYPE" or not self._mistyped_keys(call):
                self.add_error(reply, call.key, "EVALSHA")
        return replies

    def figures(self, parse: Callable[[Reply, str], T], reply: Reply | None, key: str) -> T | None:
        """Parse a reply from `measure`. Return None if the reply is None or invalid.

        An invalid reply is recorded as an invalid value at `key`.
        """
        try:
            return None if reply is None else self.read(parse, reply, key)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # A script's contract defines only the words of a reply, so its values can still be
            # invalid.
            self.add_row(_invalid(key, error))
            return None

    def read(self, parse: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """Call a parser and return its result.

        If it raises InvalidValueError, record the invalid value and return None.
        """
        try:
            return parse(*args, **named)
        except InvalidValueError as error:
            self.add(error)
            return None

    def text(self, raw: bytes, key: str, field: str) -> str | None:
        """Decode text that another client wrote, such as a group name.

        Return None if it is not UTF-8.
        """
        return self.read(untrusted.text, raw, key, field)

    def add(self, error: InvalidValueError | None) -> None:
        """Record an invalid value. None is ignored."""
        if error is not None:
            self.add_row(Unreadable(error.key, error.field, error.found, error.wanted))

    def add_row(self, row: Unreadable) -> None:
        """Record an invalid value that was found elsewhere."""
        self._rows.setdefault((row.key, row.field, row.found), row)

    def add_error(self, error: RedisResponseError, key: str, command: str) -> None:
        """Record an error that the server returned for a key.

        If the error may affect other keys as well, raise it instead. A tolerant reader raises it
        only if the server would refuse any other command too.
        """
        if error.code == "WRONGTYPE":
            self.add(_mistyped_error(key))
        elif error.kind is RefusalKind.BAD_KEY_OR_COMMAND:
            self.add(InvalidValueError(key, "", str(error)[:120], _STREAMQD_FORMAT))
        elif not self._tolerant or error.kind in _SERVER_REFUSALS:
            raise error
        elif error.kind is RefusalKind.FORBIDDEN:
            self.forbidden.add(command)

    def _refused_command(self, error: RedisResponseError, command: Sequence[Any]) -> None:
        self.add_error(error, command_key(command), _command_name(command))

    def wrong_types(self, wanted: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """Return the keys that have the wrong type, with their actual types.

        Each item of `wanted` maps keys to the types that they should have. The result contains one
        mapping for each item.
        """
        replies = iter(self.ask([("TYPE", key) for some in wanted for key in some]))
        found = []
        for some in wanted:
            types = {key: next(replies) for key in some}
            found.append(
                {
                    key: raw.decode()
                    for key, raw in types.items()
                    if raw is not None and raw.decode() not in ("none", some[key])
                }
            )
        return found

    def keep_mistyped(self, wanted: Mapping[str, str]) -> bool:
        """Record the keys that have the wrong type. Return True if there are any.

        If the user may not run TYPE, nothing is recorded, and the result is False.
        """
        try:
            found = self.wrong_types([wanted])[0]
        except RedisResponseError:
            return False
        for key, kind in found.items():
            self.add_row(Unreadable(key, "", f"a {kind}", f"a {wanted[key]}"))
        return bool(found)

    def _mistyped_keys(self, call: Call) -> bool:
        """Record the keys of a call that have the wrong type. Return True if there are any."""
        return self.keep_mistyped(
            {
                str(key): spec.type.lower()
                for spec, key in zip(call.script.keys, call.argv, strict=False)
                if not (spec.optional and key == call.key)
            }
        )


def measure(store: Store, calls: Sequence[Call]) -> list[Reply]:
    """Run read scripts in bounded round trips. Raises RedisResponseError and ContractError."""
    return [_check_reply(reply) for _, reply in _run_in_batches(store, calls)]


def _run_in_batches(
    store: Store, calls: Sequence[Call]
) -> Iterator[tuple[Call, Reply | RedisResponseError | ContractError]]:
    for start in range(0, len(calls), BATCH):
        some = calls[start : start + BATCH]
        replies: list[Reply | RedisResponseError | ContractError] = require_all(
            store.run_each(some)
        )
        yield from zip(some, replies, strict=True)


def _check_reply(reply: Reply | RedisResponseError | ContractError) -> Reply:
    if isinstance(reply, RedisResponseError):
        raise reply
    return check_valid(reply)


def _invalid(key: str, error: Exception) -> Unreadable:
    return Unreadable(key, "", f"measured with an invalid reply ({error})", "with figures")


def measure_memory(store: Store, streams: Sequence[str], samples: int) -> list[int | None]:
    """Return the approximate size of each stream in bytes.

    The size is 0 if the stream does not exist, and None if the user may not read the size. The
    server estimates it from `samples` nodes of the stream.
    """
    sizes: list[int | None] = []
    for start in range(0, len(streams), BATCH):
        some = streams[start : start + BATCH]
        replies = store.pipeline([("MEMORY", "USAGE", each, "SAMPLES", samples) for each in some])
        sizes += [
            None if isinstance(each, RedisResponseError) else int(each or 0) for each in replies
        ]
    return sizes


def lease_views(reader: ViewReader, assignments: Sequence[Assignment]) -> list[LeaseView]:
    """Return the fence and the lease of each assignment. Invalid numbers are replaced by 0."""
    replies = reader.ask(
        [
            command
            for assignment in assignments
            for command in leases.view_commands(reader.keys, assignment)
        ]
    )
    return [
        lease_view(reader, assignment, *both)
        for assignment, *both in zip(assignments, replies[::2], replies[1::2], strict=True)
    ]


def lease_view(
    reader: ViewReader,
    assignment: Assignment,
    fence: Sequence[bytes | None] | None,
    ttl_ms: int | None,
) -> LeaseView:
    """Parse the replies to `leases.view_commands`. A reply is None if the command was refused."""
    token, epoch, owner, since, quarantine = fence or (None,) * 5
    ttl = -2 if ttl_ms is None else ttl_ms
    numbers = {"epoch": epoch, "since": since}
    while True:
        reply = (token, numbers["epoch"], owner, numbers["since"], quarantine)
        try:
            return LeaseView.parse(reply, ttl, reader.keys.fence(*assignment))
        except InvalidValueError as error:
            reader.add(error)
            numbers[error.field] = None


def group_names(
    reader: ViewReader, reply: Sequence[Any] | None, stream: str
) -> list[dict[str, Any]]:
    """Parse a reply to XINFO GROUPS into dictionaries, in which `name` is a string.

    Groups whose names are not UTF-8 are recorded and left out.
    """
    found = []
    for flat in reply or ():
        info = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        info["name"] = reader.text(info["name"], stream, "group")
        if info["name"] is not None:
            found.append(info)
    return found
