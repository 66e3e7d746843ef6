"""One pass over dead letters: its pace, counts and outcome. A purge and an export are passes.

A pass can be stopped and can lose Redis at any time. Each letter is handled in atomic, repeatable
steps. The counts of an interrupted pass are exact except for the letters without a reply, and the
same pass can be started again.

An export writes JSON lines, without loss. One line is one letter: its id, topic and partition, its
time, its fingerprint, and `fields`, every field in order as `{"name": …, "value": …}`. A
name or value that is not UTF-8 is `{"base64": …}` in place of the text. jq's `.fields |
from_entries` makes an object of the fields.
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
from streamqd.admin.dead_letters.selection import DeadLetterFields, Stop, never, origin_of, pages
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import PAGE_MAX, Entry
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.policy.fingerprint import of_dead_letter
from streamqd.store import dead
from streamqd.store.store import Store

DONE, LIMIT, STOPPED, FAILED = "done", "limit", "stopped", "failed"  # outcomes of a pass
_LOOK = 0.1  # seconds between two checks for a stop

Progress = Callable[[int], None]


def silent(_count: int) -> None:
    """Report nothing."""


class ReplayPace:
    """Spaces actions evenly in time. A delay is not made up for by a burst."""

    def __init__(
        self, per_second: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._clock = clock
        self._free_at = 0.0

    @property
    def batch(self) -> int:
        """The number of actions that the rate allows in a tenth of a second, at least one."""
        if self._per_second is None:
            return PAGE_MAX
        return max(1, min(PAGE_MAX, math.floor(self._per_second / 10)))

    def take(self, count: int) -> float:
        """Reserve room for `count` actions. Return the seconds to wait before they start."""
        if self._per_second is None:
            return 0.0
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._per_second
        return begin - now


class Pass:
    """Walks over dead letters, counts the outcomes, and stops when it must."""

    def __init__(
        self,
        store: Store,
        topic: str,
        choice: MessageFilter,
        stop: Stop = never,
        progress: Progress = silent,
        examining: Progress = silent,
    ) -> None:
        """Fix which dead letters there are. Raises TopicMissing, Refused."""
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
        """Yield the letters in batches at `rate` letters per second, until `stop` returns true.

        `room` returns how many dead letters the next batch may have, None without a limit. The last
        batch before a limit counts as progress. Letters that the filter leaves out are examined at
        full speed.
        """
        throttle = ReplayPace(rate)
        try:
            for page in self._pages:
                if self._stop():
                    self.result = STOPPED
                    return
                for start in range(0, len(page.letters), throttle.batch):
                    piece = page.letters[start : start + throttle.batch]
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
        except RedisUnavailable as error:
            self.fail(error)

    def touched(self, entry: Entry) -> None:
        """Record a dead letter as handled."""
        self.first = self.first or str(entry.place)
        self.last = str(entry.place)

    def fail(self, error: RedisUnavailable | RedisRefused, sent: int = 0) -> None:
        """Record the error that stopped the pass, and the number of letters without a reply."""
        self.result, self.error = FAILED, str(error)
        if isinstance(error, RedisUnavailable) and error.sent:
            self.unknown += sent

    def record(self, verb: str, note: str = "", **more: str) -> bool:
        """Write the pass to the audit log. Return True if that succeeded."""
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
                arguments=self._choice.stated() | more,
                counts=counts,
                first_id=self.first,
                last_id=self.last,
                note="; ".join(filter(None, (note, result))),
            )
        except (RedisUnavailable, RedisRefused):
            return False
        return True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK))


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of a purge.

    `unarchived` letters stay, because the topic requires an archive that does not have them yet.
    `missing` letters were replayed or purged by another client. `unknown` letters had no reply when
    the connection was lost. `result` is done, stopped or failed, and `error` the reason of a
    failure. `first_id` and `last_id` are the first and last of the chosen letters. `audited` is
    false when the audit log could not be written.
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
    stop: Stop = never,
    progress: Progress = silent,
    examining: Progress = silent,
) -> Purged:
    """Delete dead letters for good. A lost connection stops the purge and does not raise.

    If the topic requires an archive, letters that are not archived stay, unless `unarchived` is
    true. `configured` are the settings of the topic in the file, which override registered ones.
    The callbacks are those of `replay`.

    Raises TopicMissing, and Refused when a named dead letter does not exist or the filter does not
    choose it. Raises RedisUnavailable when nothing was deleted.
    """
    holds, _ = retention.settings(store, topic, configured)
    required = holds.archive == "required" and not unarchived
    done = Pass(store, topic, choice, stop, progress, examining)
    for piece in done.pieces():
        place, ids = (topic, piece[0].partition), [str(entry.id) for entry in piece]
        try:
            reply = store.run(dead.purge(store.keys, *place, ids, archived_only=required))
        except (RedisUnavailable, RedisRefused) as error:
            done.fail(error, len(piece))
            continue
        found = dead.PurgeReply.parse(reply)
        done.counts["purged"] += found.removed
        if found.unarchived:
            done.counts["unarchived"] += found.unarchived
        done.counts["missing"] += len(piece) - found.removed - found.unarchived
        for entry in (piece[0], piece[-1]):
            done.touched(entry)
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
    """The result of an export. `result` is done or stopped. `audited` as for a replay."""

    topic: str
    exported: int
    result: str
    first_id: str
    last_id: str
    audited: bool


class Export:
    """A running export: iterate over its lines, then ask for its result."""

    def __init__(
        self,
        store: Store,
        topic: str,
        choice: MessageFilter,
        *,
        stop: Stop = never,
        progress: Progress = silent,
    ) -> None:
        """Fix which dead letters there are. Raises TopicMissing, Refused."""
        self._done = Pass(store, topic, choice, stop, progress)

    def lines(self) -> Iterator[str]:
        """Yield one JSON document for each letter, without a line end. Raises RedisUnavailable."""
        for piece in self._done.pieces():
            for entry in piece:
                yield json.dumps(document(self._done.topic, entry), ensure_ascii=True)
                self._done.counts["exported"] += 1
                self._done.touched(entry)
        if self._done.result not in (DONE, STOPPED):
            raise RedisUnavailable(self._done.error, sent=False)

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
    """Return a dead letter as a JSON document."""
    letter = DeadLetterFields(entry.fields)
    *origin, original_id = origin_of(topic, entry)
    return {
        "id": str(entry.place),
        "topic": topic,
        "partition": entry.partition,
        "died_unix_ms": entry.id.ms,
        "group": letter.text(b"group"),
        "uid": "/".join((*origin, original_id)) if original_id else "",
        "fingerprint": of_dead_letter(entry.fields),
        "fields": [
            {"name": _text(name), "value": _text(value)} for name, value in entry.fields.items()
        ],
    }


def fields_of(document: dict[str, Any]) -> dict[bytes, bytes]:
    """Return the fields of a dead letter, given its document."""
    return {_raw(each["name"]): _raw(each["value"]) for each in document["fields"]}


def _text(raw: bytes) -> str | dict[str, str]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _raw(value: str | dict[str, str]) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])
