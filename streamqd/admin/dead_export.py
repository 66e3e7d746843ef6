"""Dead letters as JSON lines, without loss.

One line is one letter: its id, topic and partition, when it died, its fingerprint, and `fields`,
every field of it in its order as `{"name": …, "value": …}`. A name or value that is not UTF-8 is
`{"base64": …}` in place of the text. jq's `.fields | from_entries` makes an object of them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from streamqd.admin.dead_choice import DeadLetterFilter, pages
from streamqd.admin.dead_letters_reading import Fields, origin_of
from streamqd.admin.dead_run import DONE, STOPPED, Pass, Progress, ReplayPace, Stop, never, silent
from streamqd.admin.pages import Entry
from streamqd.errors import RedisUnavailable
from streamqd.policy.fingerprint import of_letter
from streamqd.store.client import Connection
from streamqd.store.keys import Keys


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote. `ended` is done or stopped; `audited` as with a replay."""

    topic: str
    exported: int
    ended: str
    first_id: str
    last_id: str
    audited: bool


class Export:
    """An export under way: iterate over its lines, then ask for its result."""

    def __init__(
        self,
        link: Connection,
        keys: Keys,
        topic: str,
        choice: DeadLetterFilter,
        *,
        stop: Stop = never,
        progress: Progress = silent,
    ) -> None:
        """Fix which letters there are. Raises TopicMissing, Refused."""
        self._link, self._keys, self._topic, self._choice = link, keys, topic, choice
        self._found = pages(link, keys, topic, choice)
        self._done = Pass(stop, progress)

    def lines(self) -> Iterator[str]:
        """Yield one JSON document for each letter, without a line end. Raises RedisUnavailable."""
        for piece in self._done.pieces(self._found, ReplayPace(None)):
            for entry in piece:
                yield json.dumps(document(self._topic, entry), ensure_ascii=True)
                self._done.counts["exported"] += 1
                self._done.touched(entry)
        if self._done.ended not in (DONE, STOPPED):
            raise RedisUnavailable(self._done.error, sent=False)

    def finish(self, note: str = "") -> Exported:
        """Write the audit trail and return what was done."""
        done = self._done
        what = self._choice.stated()
        return Exported(
            topic=self._topic,
            exported=done.counts["exported"],
            ended=done.ended,
            first_id=done.first,
            last_id=done.last,
            audited=done.record(self._link, self._keys, self._topic, "dlq export", what, note),
        )


def document(topic: str, entry: Entry) -> dict[str, Any]:
    """A letter as a JSON document."""
    told = Fields(entry.fields)
    *origin, original_id = origin_of(topic, entry)
    return {
        "id": str(entry.place),
        "topic": topic,
        "partition": entry.partition,
        "died_unix_ms": entry.id.ms,
        "group": told.text(b"group"),
        "uid": "/".join((*origin, original_id)) if original_id else "",
        "fingerprint": of_letter(entry.fields),
        "fields": [
            {"name": _text(name), "value": _text(value)} for name, value in entry.fields.items()
        ],
    }


def fields_of(document: dict[str, Any]) -> dict[bytes, bytes]:
    """The fields of a letter back from its document."""
    return {_raw(each["name"]): _raw(each["value"]) for each in document["fields"]}


def _text(raw: bytes) -> str | dict[str, str]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _raw(told: str | dict[str, str]) -> bytes:
    return told.encode() if isinstance(told, str) else base64.b64decode(told["base64"])
