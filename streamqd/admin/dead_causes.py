"""What dead letters died of: the same failure counted once, by fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.admin.dead_choice import EVERY_LETTER, DeadLetterFilter
from streamqd.admin.dead_letters import newest
from streamqd.admin.dead_letters_reading import Fields, replays_of, streams_of, total
from streamqd.admin.pages import Entry
from streamqd.policy.fingerprint import frame_of, of_letter
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

CAUSES_MAX = 1_000
INSTANCES_MAX = 8  # named of each cause
_EVERY = 1 << 62


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Letters of one group that died alike.

    `fingerprint` is the same for the same exception class, frame of user code and handler. `frame`
    is `file:function`, '' when the letters do not tell it. `first_unix_ms` and `last_unix_ms` are
    the deaths of the oldest and the newest, `example` is the newest. `instances` are up to 8 of
    those that they died on. `replayed` counts letters that had been replayed before, `replays` is
    the most often.
    """

    fingerprint: str
    group: str
    reason: str
    error_class: str
    error_message: str
    frame: str
    handler: str
    count: int
    first_unix_ms: int
    last_unix_ms: int
    example: str
    instances: list[str]
    replayed: int
    replays: int


@dataclass(frozen=True, slots=True)
class Causes:
    """The letters chosen, by cause, the most frequent first.

    `total` counts all letters of the topic, `looked_at` those that were chosen and counted.
    `complete` is false when only the newest were counted. `others` are letters of further causes,
    beyond the first 1,000.
    """

    topic: str
    total: int
    looked_at: int
    complete: bool
    others: int
    causes: list[FailureCause]


class FailureTally:
    """Counts letters by cause; its size is bounded, however many letters there are."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], _Alike] = {}
        self.count = 0
        self.others = 0

    def add(self, entry: Entry) -> None:
        """Count one letter."""
        told = Fields(entry.fields)
        name = (of_letter(entry.fields), told.text(b"group"))
        self.count += 1
        alike = self._found.get(name)
        if alike is None:
            if len(self._found) >= CAUSES_MAX:
                self.others += 1
                return
            alike = self._found[name] = _Alike(entry)
        alike.add(entry, told)

    def causes(self) -> list[FailureCause]:
        """What was counted, the most frequent first."""
        rows = [alike.cause(*name) for name, alike in self._found.items()]
        return sorted(rows, key=lambda each: (-each.count, -each.last_unix_ms, each.fingerprint))


class _Alike:
    """The letters of one cause, as far as they are remembered."""

    def __init__(self, entry: Entry) -> None:
        self.count = self.replayed = self.replays = 0
        self.first = self.newest = entry.place
        self.fields = entry.fields
        self.instances: dict[str, None] = {}

    def add(self, entry: Entry, told: Fields) -> None:
        self.count += 1
        if entry.id < self.first.id:
            self.first = entry.place
        if entry.id > self.newest.id:
            self.newest, self.fields = entry.place, entry.fields
        if len(self.instances) < INSTANCES_MAX and told.text(b"instance"):
            self.instances[told.text(b"instance")] = None
        replays = replays_of(entry)
        self.replayed += replays > 0
        self.replays = max(self.replays, replays)

    def cause(self, fingerprint: str, group: str) -> FailureCause:
        told = Fields(self.fields)
        return FailureCause(
            fingerprint=fingerprint,
            group=group,
            reason=told.text(b"reason"),
            error_class=told.text(b"errorClass"),
            error_message=told.text(b"errorMessage"),
            frame=frame_of(told.text(b"traceback")),
            handler=told.text(b"handler"),
            count=self.count,
            first_unix_ms=self.first.id.ms,
            last_unix_ms=self.newest.id.ms,
            example=str(self.newest),
            instances=sorted(self.instances),
            replayed=self.replayed,
            replays=self.replays,
        )


def causes(
    link: Connection,
    keys: Keys,
    topic: str,
    choice: DeadLetterFilter = EVERY_LETTER,
    *,
    last: int | None = None,
) -> Causes:
    """Count the letters chosen by what killed them; with `last` only the newest so many.

    Raises TopicMissing.
    """
    streams = streams_of(link, keys, topic)
    tally = FailureTally()
    complete = True
    limit = _EVERY if last is None else last + 1
    for entry in newest(link, streams, choice, limit):
        if tally.count == last:
            complete = False
            break
        tally.add(entry)
    return Causes(
        topic=topic,
        total=total(link, keys, topic),
        looked_at=tally.count,
        complete=complete,
        others=tally.others,
        causes=tally.causes(),
    )
