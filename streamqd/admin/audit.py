"""The audit log of a topic, a bounded stream that records its changes and who made them.

Commands that replay, cancel, reset, delete, export or forget something, or that change a schedule,
write one entry when they finish. `topic grow` writes its entry when it starts. Commands on dead
letters write one even if they are interrupted. The web console writes one for each change.

The log keeps about the last 10,000 entries, and is not part of any partition. Deleting the topic
deletes the log, and then writes one new entry that records the deletion.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from streamqd.admin.reading import pairs, read_id
from streamqd.errors import InvalidRequestError
from streamqd.store.store import Store

ENTRIES_MAX = 10_000
_person: ContextVar[str] = ContextVar("person", default="")  # '' for the user of this process
# Maximum number of characters of a value, as a filter may list a thousand dead letters.
_VALUE_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry of the audit log.

    `id` is its entry ID in the stream of the log, so IDs are ordered by time. `at_unix_ms` is the
    time on the server's clock. `who` is user@host, or the person who used the web console.
    `arguments` contains the arguments of the command, and `counts` the number of items for each
    outcome. `first_id` and `last_id` are the first and the last ID that the command changed, or ''
    if it does not work on IDs. `note` is free text.
    """

    id: str
    at_unix_ms: int
    who: str
    command: str
    arguments: dict[str, Any]
    counts: dict[str, int]
    first_id: str
    last_id: str
    note: str


@dataclass(frozen=True, slots=True)
class AuditLog:
    """A page of the log, newest entries first.

    Pass `cursor` to get the next page. It is '' on the last page.
    """

    topic: str
    entries: list[AuditEntry]
    cursor: str


def record(
    store: Store,
    topic: str,
    command: str,
    *,
    arguments: Mapping[str, Any] | None = None,
    counts: Mapping[str, int] | None = None,
    first_id: str = "",
    last_id: str = "",
    note: str = "",
) -> str:
    """Write one entry and return its ID. Raises RedisUnavailableError and RedisResponseError.

    `command` is the command without `streamqd`, such as "dlq replay". The topic does not need to
    exist.
    """
    fields = {
        "who": acting_person(),
        "command": command,
        "arguments": _json(arguments),
        "counts": _json(counts),
        "first": first_id,
        "last": last_id,
        "note": note[:_VALUE_CHARS],
    }
    flat = [part for pair in fields.items() if pair[1] for part in pair]
    raw = store.execute("XADD", store.keys.audit(topic), "MAXLEN", "~", ENTRIES_MAX, "*", *flat)
    return str(raw.decode())


def page(store: Store, topic: str, *, limit: int = 20, cursor: str = "") -> AuditLog:
    """Return a page of the log. It is empty if the log or the topic does not exist.

    Raises InvalidRequestError if the cursor is invalid.
    """
    upper = "+"
    if cursor:
        try:
            upper = f"({read_id(cursor)}"
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
    found = store.execute("XREVRANGE", store.keys.audit(topic), upper, "-", "COUNT", limit + 1)
    entries = [_entry(raw_id, pairs(fields)) for raw_id, fields in found[:limit]]
    return AuditLog(topic, entries, entries[-1].id if len(found) > limit else "")


@contextlib.contextmanager
def acting_as(person: str) -> Iterator[None]:
    """Name this person, instead of the process's user, in audit entries written within a block.

    This applies only to the current thread or task.
    """
    token = _person.set(person)
    try:
        yield
    finally:
        _person.reset(token)


def acting_person() -> str:
    """Return the person set by `acting_as`, or else the user of this process as `user@host`.

    If the system has no name for the user, the user ID is used instead.
    """
    if person := _person.get():
        return person
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user ID may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _json(value: Mapping[str, Any] | None) -> str:
    text = json.dumps(value or {}, separators=(",", ":"), default=str)
    if len(text) > _VALUE_CHARS:
        text = json.dumps({"cut": text[: _VALUE_CHARS // 2]})
    return "" if text == "{}" else text


def _entry(raw_id: bytes, fields: dict[bytes, bytes]) -> AuditEntry:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    def table(name: bytes) -> dict[str, Any]:
        # An entry may have been written by hand or by a later version. If a value is invalid, it is
        # shown unchanged.
        try:
            found = json.loads(text(name) or "{}")
        except (ValueError, RecursionError):
            return {"text": text(name)}
        return found if isinstance(found, dict) else {"text": text(name)}

    counts = {name: count for name, count in table(b"counts").items() if isinstance(count, int)}
    return AuditEntry(
        id=raw_id.decode(),
        at_unix_ms=read_id(raw_id).ms,
        who=text(b"who"),
        command=text(b"command"),
        arguments=table(b"arguments"),
        counts=counts,
        first_id=text(b"first"),
        last_id=text(b"last"),
        note=text(b"note"),
    )
