"""Purge and export the dead letters of a topic in passes, which have a rate, counts and a result.

An operator can stop a pass, and Redis can fail during one. Each step is atomic and can be repeated,
so the same pass can simply be started again. The counts of a pass are exact. Dead letters whose
calls got no reply are counted separately, as `unknown`.

An export writes one JSON document per line for each dead letter, with its ID, topic, partition,
time and fingerprint. `fields` is a list of all fields in order, each as `{"name": …, "value": …}`.
A name or value that is not UTF-8 is written as `{"base64": …}`. To get the fields as an object, use
`.fields | from_entries` in jq.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from streamqd import config
from streamqd.admin import audit, retention
from streamqd.admin.dead_letters.selection import (
    DeadLetterFields,
    Stop,
    find_origin,
    never_stop,
    pages,
)
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import PAGE_MAX, Entry
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.policy.fingerprint import dead_letter_fingerprint
from streamqd.store import dead
from streamqd.store.store import Store

DONE, LIMIT, STOPPED, FAILED = "done", "limit", "stopped", "failed"  # outcomes of a pass
_STOP_CHECK = 0.1  # seconds between two checks of `stop`

Progress = Callable[[int], None]


def ignore_progress(_count: int) -> None:
    """Do nothing. This is the default for functions that report progress."""


class ReplayPace:
    """Spaces actions evenly in time. It does not catch up with a burst of actions after a delay."""

    def __init__(
        self, per_second: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._clock = clock
        self._free_at = 0.0

    @property
    def batch(self) -> int:
        """The number of actions in 0.1 s at this rate (1 to `PAGE_MAX`)."""
        if self._per_second is None:
            return PAGE_MAX
        return max(1, min(PAGE_MAX, math.floor(self._per_second / 10)))

    def take(self, count: int) -> float:
        """Reserve time for a number of actions. Return the seconds to wait before the first one."""
        if self._per_second is None:
            return 0.0
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._per_second
        return begin - now


class Pass:
    """One pass over the dead letters of a topic, which counts the outcomes.

    It stops early if a limit is reached, if `stop` returns True, or if Redis returns an error or is
    unavailable.
    """

    def __init__(
        self,
        store: Store,
        topic: str,
        choice: MessageFilter,
        stop: Stop = never_stop,
        progress: Progress = ignore_progress,
        examining: Progress = ignore_progress,
    ) -> None:
        """Select the dead letters that exist now.

        Raises TopicNotFoundError and RequestRefusedError.
        """
        self.topic = topic
        self._store, self._choice = store, choice
        self._pages = pages(store, topic, choice)
        self._stop, self._progress, self._examining = stop, progress, examining
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.unknown = 0
        self.result = DONE
        self.error = ""
        self.first = self.last = ""

    def pieces(
        self, rate: float | None = None, room: Callable[[], int | None] = lambda: None
    ) -> Iterator[list[Entry]]:
        """Yield the matching dead letters in batches, at `rate` dead letters per second.

        `room` returns the maximum size of the next batch, or None if there is no limit. The rate
        applies only to matching dead letters. All others are skipped at full speed.
        """
        throttle = ReplayPace(rate)
        try:
            for page in self._pages:
                if self._stop():
                    self.result = STOPPED
                    return
                for start in range(0, len(page.dead_letters), throttle.batch):
                    piece = page.dead_letters[start : start + throttle.batch]
                    self._wait(throttle.take(len(piece)))
                    if self._stop():
                        self.result = STOPPED
                        return
                    piece = piece[: room()]
                    yield piece
                    if self.result in (DONE, LIMIT):
                        self._progress(len(piece))
                    if self.result != DONE:
                        return
                self._examining(page.examined)
        except RedisUnavailableError as error:
            self.fail(error)

    def mark_handled(self, entry: Entry) -> None:
        """Record that this dead letter was purged, exported or replayed."""
        self.first = self.first or str(entry.place)
        self.last = str(entry.place)

    def fail(self, error: RedisUnavailableError | RedisResponseError, sent: int = 0) -> None:
        """Record the error that stops the pass.

        `sent` is the number of dead letters whose calls were sent but got no reply, so that their
        outcome is unknown.
        """
        self.result, self.error = FAILED, str(error)
        if isinstance(error, RedisUnavailableError) and error.sent:
            self.unknown += sent

    def record(self, verb: str, note: str = "", **more: str) -> bool:
        """Write the pass to the audit log. Return True if this succeeds."""
        counts = dict(self.counts)
        if self.refused:
            counts["refused"] = self.refused.total()
        if self.unknown:
            counts["unknown"] = self.unknown
        result = "" if self.result in (DONE, LIMIT) else f"{self.result}: {self.error}".rstrip(": ")
        try:
            audit.record(
                self._store,
                self.topic,
                verb,
                arguments=self._choice.audit_arguments() | more,
                counts=counts,
                first_id=self.first,
                last_id=self.last,
                note="; ".join(filter(None, (note, result))),
            )
        except (RedisUnavailableError, RedisResponseError):
            return False
        return True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _STOP_CHECK))


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of a purge.

    `purged` is the number of deleted dead letters. `unarchived` counts the dead letters that stay
    because the topic requires an archive, which does not contain them yet. `missing` counts those
    that another client replayed or purged first. `unknown` counts those whose calls got no reply,
    because the connection was lost. `result` is done, stopped or failed, and `error` is the reason
    for a failure. `first_id` and `last_id` identify the first and the last dead letter of the calls
    that got a reply. `audited` is False if the audit log could not be written.
    """

    topic: str
    purged: int
    unarchived: int
    missing: int
    unknown: int
    result: str
    error: str
    first_id: str
    last_id: str
    audited: bool


def purge(
    store: Store,
    topic: str,
    choice: MessageFilter,
    *,
    configured: config.Topic | None = None,
    unarchived: bool = False,
    stop: Stop = never_stop,
    progress: Progress = ignore_progress,
    examining: Progress = ignore_progress,
) -> Purged:
    """Delete dead letters permanently.

    If the topic requires an archive, dead letters that are not archived yet stay, unless
    `unarchived` is True. `configured` contains the topic's settings in the configuration file,
    which override the registered ones. See `replay` for `stop`, `progress` and `examining`.

    Raises TopicNotFoundError. Raises RequestRefusedError if a named dead letter does not exist or
    does not match. Raises RedisUnavailableError if the connection is lost before anything is
    deleted. If it is lost later, the purge stops with the result failed.
    """
    holds, _ = retention.settings(store, topic, configured)
    required = holds.archive == "required" and not unarchived
    done = Pass(store, topic, choice, stop, progress, examining)
    for piece in done.pieces():
        place, ids = (topic, piece[0].partition), [str(entry.id) for entry in piece]
        try:
            reply = store.run(dead.purge(store.keys, *place, ids, archived_only=required))
        except (RedisUnavailableError, RedisResponseError) as error:
            done.fail(error, len(piece))
            continue
        found = dead.PurgeReply.parse(reply)
        done.counts["purged"] += found.removed
        if found.unarchived:
            done.counts["unarchived"] += found.unarchived
        done.counts["missing"] += len(piece) - found.removed - found.unarchived
        for entry in (piece[0], piece[-1]):
            done.mark_handled(entry)
    return Purged(
        topic=topic,
        purged=done.counts["purged"],
        unarchived=done.counts["unarchived"],
        missing=done.counts["missing"],
        unknown=done.unknown,
        result=done.result,
        error=done.error,
        first_id=done.first,
        last_id=done.last,
        audited=done.record("dlq purge"),
    )


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    `result` is done or stopped. `audited` is False if the audit log could not be written.
    """

    topic: str
    exported: int
    result: str
    first_id: str
    last_id: str
    audited: bool


class Export:
    """A running export. Iterate over `lines`, and then call `finish` to get the result."""

    def __init__(
        self,
        store: Store,
        topic: str,
        choice: MessageFilter,
        *,
        stop: Stop = never_stop,
        progress: Progress = ignore_progress,
    ) -> None:
        """Select the dead letters that exist now.

        Raises TopicNotFoundError and RequestRefusedError.
        """
        self._done = Pass(store, topic, choice, stop, progress)

    def lines(self) -> Iterator[str]:
        """Yield one JSON document for each dead letter, without a newline.

        Raises RedisUnavailableError.
        """
        for piece in self._done.pieces():
            for entry in piece:
                yield json.dumps(document(self._done.topic, entry), ensure_ascii=True)
                self._done.counts["exported"] += 1
                self._done.mark_handled(entry)
        if self._done.result not in (DONE, STOPPED):
            raise RedisUnavailableError(self._done.error, sent=False)

    def finish(self, note: str = "") -> Exported:
        """Write the audit log and return the result."""
        done = self._done
        return Exported(
            topic=done.topic,
            exported=done.counts["exported"],
            result=done.result,
            first_id=done.first,
            last_id=done.last,
            audited=done.record("dlq export", note),
        )


def document(topic: str, entry: Entry) -> dict[str, Any]:
    """Return a dead letter as a JSON document, in the format that the module describes."""
    dead_letter = DeadLetterFields(entry.fields)
    *origin, original_id = find_origin(topic, entry)
    return {
        "id": str(entry.place),
        "topic": topic,
        "partition": entry.partition,
        "died_unix_ms": entry.id.ms,
        "group": dead_letter.text(b"group"),
        "uid": "/".join((*origin, original_id)) if original_id else "",
        "fingerprint": dead_letter_fingerprint(entry.fields),
        "fields": [
            {"name": _text(name), "value": _text(value)} for name, value in entry.fields.items()
        ],
    }


def parse_exported_fields(document: dict[str, Any]) -> dict[bytes, bytes]:
    """Return the fields of an exported dead letter from its document."""
    return {_raw(each["name"]): _raw(each["value"]) for each in document["fields"]}


def _text(raw: bytes) -> str | dict[str, str]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _raw(value: str | dict[str, str]) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])
